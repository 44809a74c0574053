"""Starts one process a replica on this machine, and ends them all together."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import queue
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence

from jaxche.cluster._connect import ELASTIC
from jaxche.cluster._events import event_log
from jaxche.cluster._group import Surroundings
from jaxche.cluster._orphans import orphanage
from jaxche.cluster._output import LinePrinter
from jaxche.cluster._placement import places
from jaxche.cluster._supervise import Berth, supervise
from jaxche.distributed import EVENTS

_STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")


def launch(
    command: Sequence[str],
    processes: int,
    pace_ms: Sequence[float] | None = None,
    env: Mapping[str, str] | None = None,
    prefix: bool = True,
    only_rank0: bool = False,
    grace_s: float = 5.0,
    pin: bool = True,
    *,
    on_cpu: int = 0,
    elastic: bool = False,
    max_restarts: int = 0,
    survivors: bool = False,
    hang_timeout_s: float | None = None,
    term_grace_s: float = 25.0,
    events: str | os.PathLike[str] | None = None,
) -> int:
    """Runs a command once a replica on this machine, and waits; one rank that fails ends them all.

    With GPUs each process gets one of its own; with ``CUDA_VISIBLE_DEVICES=0,0`` two share one. Without, or with
    ``JAX_PLATFORMS=cpu``, each is pinned to one core with one thread, so that their speeds do not mix. The script calls
    ``jaxche.initialize()``, which finds the others. Where the launcher itself is killed, its ranks are ended by a small
    process that watches it.

    Args:
      command: the program and its arguments.
      processes: how many to start.
      pace_ms: one wall time in ms a process, to which the trainer pads each local step: devices of different
        speeds on a machine that has none.
      env: variables for the processes on top of this one's.
      prefix: whether each line of output starts with its rank, ``[0] ...``.
      only_rank0: whether only rank 0's standard output is shown; standard error always is.
      grace_s: seconds between SIGTERM and SIGKILL where the others have to be ended. Before that they have as long, but
        no more than a second, to leave by themselves with their own words on what happened.
      pin: whether processes without a GPU are pinned to a core each. That keeps their speeds apart, but a collective
        between pinned processes takes milliseconds: gloo polls on the core that the computation wants.
      on_cpu: how many of the processes, the last ones, train on the CPU beside those on GPUs, with all its cores. Such
        a replica is far slower than a GPU, and its share of a round as small; it is worth a process only where a GPU is
        slow or a CPU large.
      elastic: whether the others go on where a rank other than 0 dies: ``Trainer.fit`` then trains with those that are
        left, from the last merged round. ``max_restarts`` then also counts replacements: the rank is started again,
        alone, and joins the others at the end of a round; with 0 nobody takes its place. Once process 0 has died, all
        are started again. Only where replicas merge on CPU devices.
      max_restarts: how often all ranks are started again, on a new port and with ``JAXCHE_RESTART`` counting up, after
        one of them failed. The script goes on from its checkpoint. Exit code 2, bad input, is not tried again.
      survivors: whether a rank that is the first to fail in two starts in a row is left out of the next, down to one
        process; the others are numbered anew.
      hang_timeout_s: seconds without any rank touching the file named in its ``JAXCHE_HEARTBEAT`` after which all
        are killed, as a failure of no rank in particular. It has to cover start, compilation and the longest round.
        With ``elastic`` a single rank is killed that after its first round is silent for so long while others are not
        (those that wait for it touch their files too); there 120 by default.
      term_grace_s: seconds for the ranks to write a checkpoint where SIGTERM to the launcher is passed on to them.
        Another SIGTERM does not shorten it; Ctrl-C does.
      events: file to which a line of JSON is appended for each start, exit, hang, restart and end, and by the
        trainer for each round of each rank: steps, times, bytes merged.

    Returns:
      0 if all processes ended well; else the exit code of the first that failed, 128 + signal if a signal
      ended it, or if one ended the launch (130 for Ctrl-C, 143 for SIGTERM); 124 if they hung.

    Raises:
      ValueError: if an argument makes no sense, the program is not there, or there are fewer GPUs than processes.

    Example:
      >>> import sys
      >>> launch([sys.executable, "-c", "print('hello')"], 2, env={"JAX_PLATFORMS": "cpu"}, only_rank0=True)
      [0] hello
      0
    """
    _check(command, processes, on_cpu, pace_ms, {"grace_s": grace_s, "term_grace_s": term_grace_s})
    _check_restarts(max_restarts, survivors, hang_timeout_s)
    base = {**os.environ, **(env or {})}
    if elastic:
        base[ELASTIC] = "1"
    if events is not None:
        base[EVENTS] = os.path.abspath(events)
    where = places(processes, base, on_cpu)
    if not pin:
        where = [dataclasses.replace(place, core=None) for place in where]
    paces = [None] * processes if pace_ms is None else list(pace_ms)
    berths = [Berth(place, pace) for place, pace in zip(where, paces, strict=True)]
    with event_log(events) as log, orphanage(term_grace_s) as orphans, _signals() as signals:
        around = Surroundings(LinePrinter(prefix), log, orphans, signals, grace_s, term_grace_s, only_rank0, elastic)
        return supervise(command, berths, base, around, max_restarts, survivors, hang_timeout_s)


@contextlib.contextmanager
def _signals() -> Iterator[queue.SimpleQueue[int]]:
    """Queues the signals that would end this process."""
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    # Python runs handlers in the main thread only. Elsewhere (a notebook's worker, a test) the end of the launch
    # has to do.
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = [getattr(signal, name) for name in _STOPPING if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    # `nohup` starts us with SIGHUP ignored: leave that.
    caught = [number for number in numbers if before[number] is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, lambda number, frame: received.put(number))
    try:
        yield received
    finally:
        for number in caught:
            signal.signal(number, before[number])


def _check(
    command: Sequence[str],
    processes: int,
    on_cpu: int,
    pace_ms: Sequence[float] | None,
    seconds: Mapping[str, float],
) -> None:
    if isinstance(command, str) or not command:
        raise ValueError(f'command={command!r} must be a list of words. Write: [sys.executable, "train.py"]')
    if not isinstance(processes, int) or processes < 1:
        raise ValueError(f"processes={processes!r} must be a whole number of at least 1. Write: processes=2")
    if not isinstance(on_cpu, int) or not 0 <= on_cpu < processes:
        raise ValueError(
            f"on_cpu={on_cpu!r} must leave one of processes={processes} for an accelerator. Write: on_cpu=1 with "
            "processes=2, or JAX_PLATFORMS=cpu for all of them"
        )
    for name, value in seconds.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r} must be seconds, 0 or more. Write: {name}=5")
    if pace_ms is None:
        return
    if len(pace_ms) != processes:
        raise ValueError(
            f"pace_ms={list(pace_ms)!r} has {len(pace_ms)} value(s) for processes={processes}: "
            "one a process. Write: pace_ms=[20, 50] with processes=2"
        )
    for pace in pace_ms:
        if not 0 < pace < math.inf:
            raise ValueError(f"pace_ms={list(pace_ms)!r}: {pace!r} must be positive milliseconds.")


def _check_restarts(max_restarts: int, survivors: bool, hang_timeout_s: float | None) -> None:
    if not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"max_restarts={max_restarts!r} must be a whole number, 0 or more. Write: max_restarts=3")
    if survivors and max_restarts < 2:
        raise ValueError(
            f"survivors=True with max_restarts={max_restarts}: a rank is left out after it failed twice in a row. "
            "Write: max_restarts=3"
        )
    if hang_timeout_s is not None and not 0 < hang_timeout_s < math.inf:
        raise ValueError(f"hang_timeout_s={hang_timeout_s!r} must be positive seconds. Write: hang_timeout_s=600")
