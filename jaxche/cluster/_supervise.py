"""Starts a group of processes again when it fails, from its last checkpoint, and goes on with fewer where it must."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxche.cluster._group import Ended, Group, Surroundings
from jaxche.cluster._heartbeat import Heartbeats
from jaxche.cluster._placement import Place, rank_environment
from jaxche.distributed import HEARTBEAT, RESTART

# Silence of one rank that means it hangs, where nothing else was said: more than the step of a large model takes to
# compile anew, for the last batch of an epoch.
_ALONE_S = 120.0

# Bad input is refused in the same words every time.
_REFUSED = 2


@dataclasses.dataclass(frozen=True)
class Berth:
    """The place of one rank and the pace of its steps, which it keeps through restarts."""

    place: Place
    pace_ms: float | None = None


def supervise(
    command: Sequence[str],
    berths: Sequence[Berth],
    base: Mapping[str, str],
    around: Surroundings,
    max_restarts: int,
    survivors: bool,
    hang_timeout_s: float | None,
) -> int:
    """Runs a command once a berth until all ranks end well or the restarts are used up.

    Args:
      command: the program and its arguments.
      berths: one a rank.
      base: variables to start from.
      around: what the groups share.
      max_restarts: how often to start again after a failure, a single rank that is replaced included.
      survivors: whether a berth whose rank is the first to fail twice in a row is given up.
      hang_timeout_s: the silence of all heartbeats that is a failure, or None. In an elastic run also that of a single
        rank while others are heard; there None means two minutes of it.

    Returns:
      The exit code of the last group.
    """
    berths, blamed, restart = list(berths), None, 0
    while True:
        group = Group(around, restart, max_restarts - restart if around.elastic else 0)
        ended = _run(group, command, berths, {**base, RESTART: str(restart)}, around, hang_timeout_s)
        restart += group.replaced
        if ended.code in (0, _REFUSED) or ended.told_to or restart == max_restarts:
            around.log.write("end", restart=restart, code=ended.code)
            return ended.code
        restart += 1
        berths, blamed = next_berths(berths, ended.rank, blamed, survivors)
        around.say(f"restart {restart} of {max_restarts} with {len(berths)} process(es)")
        around.log.write("restart", restart=restart, processes=len(berths), rank=ended.rank, code=ended.code)


def next_berths(
    berths: Sequence[Berth], failed: int | None, blamed: Berth | None, survivors: bool
) -> tuple[list[Berth], Berth | None]:
    """Decides who starts again.

    Args:
      berths: of the group that ended.
      failed: the rank that failed first, or None where none is known (a hang).
      blamed: the berth whose rank failed first the time before, or None.
      survivors: whether a berth may be given up.

    Returns:
      The berths of the next group, and the one to blame if it fails again.

    Example:
      >>> one, two = Berth(Place(core=0)), Berth(Place(core=1))
      >>> next_berths([one, two], 1, None, True) == ([one, two], two)
      True
      >>> next_berths([one, two], 1, two, True) == ([one], None)
      True
    """
    if failed is None:
        return list(berths), None
    culprit = berths[failed]
    if survivors and culprit is blamed and len(berths) > 1:
        return [berth for berth in berths if berth is not culprit], None
    return list(berths), culprit


def _run(
    group: Group,
    command: Sequence[str],
    berths: Sequence[Berth],
    base: Mapping[str, str],
    around: Surroundings,
    hang_timeout_s: float | None,
) -> Ended:
    # A port of its own each time: the last one may linger, and a rank that would not die must not join.
    coordinator = f"127.0.0.1:{_free_port()}"
    with contextlib.ExitStack() as stack:
        beats = None
        if hang_timeout_s is not None or around.elastic:
            beats = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxche-heartbeat-")))
        # After the folder: the ranks are gone before it is.
        stack.callback(group.end)
        around.say(f"{len(berths)} process(es) on {', '.join(str(berth.place) for berth in berths)}")
        for rank, berth in enumerate(berths):
            env = rank_environment(base, rank, len(berths), coordinator, berth.place, berth.pace_ms)
            if beats is not None:
                env[HEARTBEAT] = str(beats / str(rank))
            group.start(command, env, berth.place)
        watch = None
        if beats is not None:
            alone_s = (hang_timeout_s or _ALONE_S) if around.elastic else None
            watch = Heartbeats([beats / str(rank) for rank in range(len(berths))], hang_timeout_s or math.inf, alone_s)
        return group.wait(watch)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
