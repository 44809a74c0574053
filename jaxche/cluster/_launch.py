"""Starts one process per replica on this machine, restarts failed runs, and stops all processes together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxche.cluster._heartbeat import Heartbeats
from jaxche.cluster._job import check_failures
from jaxche.cluster._output import EventLog, LinePrinter
from jaxche.cluster._placement import Placement, assign_placements, rank_environment
from jaxche.cluster._reaper import Reaper
from jaxche.cluster._worker_group import BAD_INPUT, GroupResult, LaunchContext, WorkerGroup
from jaxche.distributed import (
    ELASTIC,
    EVENTS,
    HEARTBEAT,
    HEARTBEAT_TIMEOUT,
    LEAST_TIMEOUT_S,
    LIVENESS,
    start_coordinator,
)
from jaxche.messages import brief, finite_number, whole_number

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Default seconds without a heartbeat of one rank in an elastic run; more than a large model takes to compile.
_RANK_TIMEOUT_S = 120.0


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
    heartbeat_timeout_s: float | None = None,
) -> int:
    """Run a command in one process per replica on this machine, and wait; if one fails, all are stopped.

    With GPUs each process gets its own; with ``CUDA_VISIBLE_DEVICES=0,0`` two share one. Without GPUs, or with
    ``JAX_PLATFORMS=cpu``, each is pinned to one core with one thread, so that they do not slow each other down. The
    script calls ``jaxche.initialize()`` to join the others. If the launcher itself is killed, a small process ends its
    ranks.

    Args:
      command: the program and its arguments.
      processes: number of processes.
      pace_ms: one wall time in ms a process, to which the trainer pads each local step: simulates devices of different
        speeds.
      env: variables for the processes, added to those of this process.
      prefix: whether each line of output starts with its rank, ``[0] ...``.
      only_rank0: whether to print standard output of rank 0 only; standard error is always printed.
      grace_s: seconds between SIGTERM and SIGKILL. After a failure the other ranks first have up to a second of this to
        exit with their own error messages.
      pin: whether to pin processes without a GPU to a core each. Pinned processes do not slow each other down, but
        collectives between them take milliseconds, because gloo polls on the core of the computation.
      on_cpu: how many of the processes, the last ones, train on the CPU with all its cores, next to those on GPUs. This
        is useful only if the GPUs are slow or the CPU is large: the share of a round of such a replica is small.
      elastic: whether the other ranks continue after the death of a rank: ``Trainer.fit`` then resumes with them from
        the last merged round. ``max_restarts`` then also counts replacements: the dead rank alone is restarted and
        joins the others at the end of a round; with 0 it is not replaced. All ranks meet at a coordinator, a small
        process beside them; its death restarts all. Requires replicas that merge on CPU devices.
      max_restarts: number of restarts of all ranks after a failure, on a new port and with ``JAXCHE_RESTART`` counting
        up. The script resumes from its checkpoint. Exit code 2, bad input, is not restarted.
      survivors: whether to remove a rank that fails first in two starts in a row, as long as one process is left; the
        others are renumbered.
      hang_timeout_s: seconds after which all ranks are killed if none of them has touched the file in its
        ``JAXCHE_HEARTBEAT``; this counts as a failure of no rank in particular. It must exceed start, compilation and
        the longest round. With ``elastic`` a single rank is killed that has no heartbeat for this time after its first
        round while others have (ranks that wait touch their files too); there the default is 120.
      term_grace_s: seconds for the ranks to write a checkpoint after SIGTERM to the launcher, which they receive too.
        Another SIGTERM does not shorten it; Ctrl-C does.
      events: file for one JSON line for each start, exit, hang, restart and end, and from the trainer for each round of
        each rank: steps, times, bytes merged.
      heartbeat_timeout_s: with ``elastic``, seconds without a heartbeat of a rank until the others continue without it,
        as when it is stopped or its machine is lost; the default is 15, or ``JAXCHE_HEARTBEAT_TIMEOUT``. The death of a
        rank is detected at once. With less, ranks that live can be lost where machines are overloaded.

    Returns:
      0 if all processes succeeded; else the exit code of the first that failed, or 128 + n if signal n ended it or the
      launch (130 for Ctrl-C, 143 for SIGTERM); 124 after a hang.

    Raises:
      ValueError: if an argument is invalid, the program does not exist, or there are fewer GPUs than processes.

    Example:
      >>> import sys
      >>> launch([sys.executable, "-c", "print('hello')"], 2, env={"JAX_PLATFORMS": "cpu"}, only_rank0=True)
      [0] hello
      0
    """
    processes = whole_number("processes", processes, 1, "processes=2")
    on_cpu = whole_number("on_cpu", on_cpu, 0, "on_cpu=1")
    max_restarts = check_failures(max_restarts, hang_timeout_s)
    _check_command(command, processes, on_cpu, env)
    paces = [None] * processes if pace_ms is None else _checked_paces(pace_ms, processes)
    grace_s = finite_number("grace_s", grace_s, "grace_s=5", 0.0)
    term_grace_s = finite_number("term_grace_s", term_grace_s, "term_grace_s=25", 0.0)
    if heartbeat_timeout_s is not None:
        if not elastic:
            raise ValueError(
                f"heartbeat_timeout_s={heartbeat_timeout_s!r} is for elastic runs. Write: elastic=True, or leave it out"
            )
        write = "heartbeat_timeout_s=5"
        heartbeat_timeout_s = finite_number("heartbeat_timeout_s", heartbeat_timeout_s, write, LEAST_TIMEOUT_S)
    if survivors and max_restarts < 2:
        raise ValueError(
            f"survivors=True with max_restarts={max_restarts}: a rank is removed after it failed first twice in a row. "
            "Write: max_restarts=3"
        )
    # This process may be a rank of another elastic run.
    base = {name: value for name, value in os.environ.items() if name not in (ELASTIC, LIVENESS)} | dict(env or {})
    if elastic:
        base[ELASTIC] = "1"
    if heartbeat_timeout_s is not None:
        base[HEARTBEAT_TIMEOUT] = f"{heartbeat_timeout_s:g}"
    if events is not None:
        base[EVENTS] = os.path.abspath(events)
    placements = [
        dataclasses.replace(placement, core=placement.core if pin else None, pace_ms=pace)
        for placement, pace in zip(assign_placements(processes, base, on_cpu), paces, strict=True)
    ]
    log = EventLog(events)
    with Reaper(term_grace_s) as reaper, _signals() as signals:
        context = LaunchContext(
            command=command,
            printer=LinePrinter(prefix),
            log=log,
            reaper=reaper,
            signals=signals,
            grace_s=grace_s,
            term_grace_s=term_grace_s,
            hang_timeout_s=hang_timeout_s,
            only_rank0=only_rank0,
            elastic=elastic,
        )
        return _supervise(context, placements, base, max_restarts, survivors)


def next_placements(
    placements: Sequence[Placement], failed: int | None, blamed: int | None, survivors: bool
) -> tuple[list[Placement], int | None]:
    """The ranks of the next start, without one that failed first twice if ``survivors``, and the one to blame."""
    if survivors and failed is not None and failed == blamed and len(placements) > 1:
        return [placement for rank, placement in enumerate(placements) if rank != failed], None
    return list(placements), failed


def _supervise(
    context: LaunchContext, placements: Sequence[Placement], base: Mapping[str, str], max_restarts: int, survivors: bool
) -> int:
    """Run groups until all ranks succeed or no restart is left; returns the exit code of the last group."""
    placements, blamed, restart = list(placements), None, 0
    while True:
        ended, replaced = _run_group(context, placements, base, restart, max_restarts - restart)
        restart += replaced
        if ended.code in (0, BAD_INPUT) or ended.by_signal or restart == max_restarts:
            context.log.write("end", restart=restart, code=ended.code)
            return ended.code
        restart += 1
        placements, blamed = next_placements(placements, ended.rank, blamed, survivors)
        context.print(f"restart {restart} of {max_restarts} with {len(placements)} process(es)")
        context.log.write("restart", restart=restart, processes=len(placements), rank=ended.rank, code=ended.code)


def _run_group(
    context: LaunchContext, placements: Sequence[Placement], base: Mapping[str, str], restart: int, restarts_left: int
) -> tuple[GroupResult, int]:
    """Run one start; returns how it ended and how many ranks were replaced."""
    # A new port each time: the last one may be in TIME_WAIT, and ranks of an earlier start must not join.
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    timeout_s, paths, coordinator = context.hang_timeout_s, [], None
    with contextlib.ExitStack() as stack:
        if timeout_s is not None or context.elastic:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxche-heartbeat-"))
            context.reaper.add_folder(folder)
            paths = [Path(folder, str(rank)) for rank in range(len(placements))]
        if context.elastic and len(placements) > 1:
            coordinator = start_coordinator(address, len(placements), is_launcher=True, env=base)
            base = {**base, LIVENESS: json.dumps(coordinator.liveness)}
        rank_timeout_s = (timeout_s or _RANK_TIMEOUT_S) if context.elastic else None
        heartbeats = Heartbeats(paths, timeout_s or math.inf, rank_timeout_s)
        group = WorkerGroup(context, restart, restarts_left, coordinator, heartbeats)
        # The ranks end before the directory is removed.
        stack.callback(group.end)
        context.print(f"{len(placements)} process(es) on {', '.join(map(str, placements))}")
        for rank, placement in enumerate(placements):
            env = rank_environment(base, rank, len(placements), address, placement)
            if paths:
                env[HEARTBEAT] = str(paths[rank])
            group.start(env, placement)
        return group.wait(), group.replaced


@contextlib.contextmanager
def _signals() -> Iterator[queue.SimpleQueue[int]]:
    """Queue the signals that would end this process."""
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    # Python runs signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    # Keep ignored signals ignored: `nohup` ignores SIGHUP.
    caught = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, lambda number, frame: received.put(number)) for number in caught]
    try:
        yield received
    finally:
        for number, handler in zip(caught, before, strict=True):
            signal.signal(number, handler)


def _check_command(command: Sequence[str], processes: int, on_cpu: int, env: Mapping[str, str] | None) -> None:
    if isinstance(command, str) or not command:
        raise ValueError(f'command={command!r} must be a list of words. Write: [sys.executable, "train.py"]')
    if on_cpu >= processes:
        raise ValueError(
            f"on_cpu={on_cpu!r} must leave one of processes={processes} for an accelerator. Write: on_cpu=1 with "
            "processes=2, or JAX_PLATFORMS=cpu for all of them"
        )
    for name, value in dict(env or {}).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise ValueError(f"env={{{name!r}: {value!r}}} must be text. Write: env={{{str(name)!r}: {str(value)!r}}}")


def _checked_paces(pace_ms: Sequence[float], processes: int) -> list[float]:
    write = "pace_ms=[20, 50] with processes=2"
    paces = [finite_number("pace_ms", pace, write, 0.0) for pace in np.atleast_1d(pace_ms).tolist()]
    if len(paces) != processes or not all(paces):
        raise ValueError(
            f"pace_ms={brief(pace_ms)} must be a positive number of ms for each of processes={processes}. "
            f"Write: {write}"
        )
    return paces
