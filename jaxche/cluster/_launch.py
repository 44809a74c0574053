"""Starts one process a replica on this machine, and ends them all together."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from jaxche.cluster._output import LinePrinter, Reader
from jaxche.cluster._placement import Place, pinned, places, rank_environment

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
) -> int:
    """Runs a command once a replica on this machine, and waits; one rank that fails ends them all.

    With GPUs each process gets one of its own. Without, or with ``JAX_PLATFORMS=cpu``, each is pinned to one
    core with one thread, so that their speeds do not mix. The script calls ``jaxche.initialize()``, which
    finds the others.

    Args:
      command: the program and its arguments.
      processes: how many to start.
      pace_ms: one wall time in ms a process, to which the trainer pads each local step: devices of different
        speeds on a machine that has none.
      env: variables for the processes on top of this one's.
      prefix: whether each line of output starts with its rank, ``[0] ...``.
      only_rank0: whether only rank 0's standard output is shown; standard error always is.
      grace_s: seconds between SIGTERM and SIGKILL where processes have to be ended. JAX can ignore the first.
      pin: whether processes without a GPU are pinned to a core each. That keeps their speeds apart, but a collective
        between pinned processes takes milliseconds: gloo polls on the core that the computation wants.

    Returns:
      0 if all processes ended well; else the exit code of the first that failed, 128 + signal if a signal
      ended it, or if one ended the launch (130 for Ctrl-C).

    Raises:
      ValueError: if an argument makes no sense, the program is not there, or there are fewer GPUs than processes.

    Example:
      >>> import sys
      >>> launch([sys.executable, "-c", "print('hello')"], 2, env={"JAX_PLATFORMS": "cpu"}, only_rank0=True)
      [0] hello
      0
    """
    _check(command, processes, pace_ms, grace_s)
    base = {**os.environ, **(env or {})}
    where = places(processes, base)
    if not pin:
        where = [dataclasses.replace(place, core=None) for place in where]
    coordinator = f"127.0.0.1:{_free_port()}"
    group = _Group(LinePrinter(prefix), only_rank0, grace_s)
    with _passing_signals_on(group):
        try:
            group.say(f"{processes} process(es) on {', '.join(map(str, where))}")
            for rank, place in enumerate(where):
                pace = pace_ms[rank] if pace_ms is not None else None
                group.start(command, rank_environment(base, rank, processes, coordinator, place, pace), place)
            return group.wait()
        finally:
            group.end()


class _Group:
    """The ranks of one launch; each leads a process group, so that its own children end with it."""

    def __init__(self, printer: LinePrinter, only_rank0: bool, grace_s: float) -> None:
        self._printer, self._only_rank0, self._grace_s = printer, only_rank0, grace_s
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._readers: list[tuple[Reader, Reader]] = []
        # A rank that ended and its code, or None and a signal to pass on: in the order they happened.
        self.events: queue.SimpleQueue[tuple[int | None, int]] = queue.SimpleQueue()

    def start(self, command: Sequence[str], env: Mapping[str, str], place: Place) -> None:
        rank = len(self._ranks)
        try:
            with pinned(place.core):
                child = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
        except (FileNotFoundError, PermissionError) as error:
            raise ValueError(
                f"command={list(command)!r} cannot be run: {error.strerror}. For a script write: "
                f'launch([sys.executable, "train.py"], processes=...)'
            ) from None
        self._ranks.append(child)
        assert child.stdout is not None
        assert child.stderr is not None
        out = None if self._only_rank0 and rank else sys.stdout
        self._readers.append(
            (
                Reader(child.stdout, rank, self._printer, out),
                Reader(child.stderr, rank, self._printer, sys.stderr),
            )
        )
        threading.Thread(target=lambda: self.events.put((rank, child.wait())), daemon=True).start()

    def wait(self) -> int:
        running = len(self._ranks)
        while running:
            rank, code = self._next_event()
            if rank is None:
                name = signal.Signals(code).name
                self.say(f"{name}: stopping {running} process(es)")
                self._stop(code)
                return 128 + code
            if code != 0:
                self.say(f"rank {rank} {_describe(code)}; stopping the others")
                self._stop(signal.SIGTERM)
                self._report(rank, code)
                return 128 - code if code < 0 else code
            running -= 1
        return 0

    def end(self) -> None:
        """Kills what is left, the ranks' own children included, and reads their output to the end."""
        for child in self._ranks:
            _signal_group(child, signal.SIGKILL)
        for child in self._ranks:
            # A process in an uninterruptible wait dies when the kernel lets go of it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=5.0)
        for reader in (one for pair in self._readers for one in pair):
            reader.join(timeout=2.0)

    def _next_event(self) -> tuple[int | None, int]:
        while True:
            # Time-out: a signal that lands in another thread does not wake this one, which runs its handler.
            with contextlib.suppress(queue.Empty):
                return self.events.get(timeout=0.1)

    def _stop(self, number: int) -> None:
        for child in self._ranks:
            _signal_group(child, number)
        deadline = time.monotonic() + self._grace_s
        while any(child.poll() is None for child in self._ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
            with contextlib.suppress(queue.Empty):
                # A second Ctrl-C does not wait for the grace.
                if self.events.get_nowait()[0] is None:
                    break
        stubborn = [str(rank) for rank, child in enumerate(self._ranks) if child.poll() is None]
        if stubborn:
            self.say(f"rank {', '.join(stubborn)} still runs: SIGKILL")
        self.end()

    def _report(self, rank: int, code: int) -> None:
        self.say(f"rank {rank} {_describe(code)}. Its last lines on standard error:")
        for line in self._readers[rank][1].last or ["(none)"]:
            self._printer.print(sys.stderr, None, f"    {line}")

    def say(self, text: str) -> None:
        """Prints a line of the launcher's own."""
        self._printer.print(sys.stderr, None, f"jaxche launch: {text}")


@contextlib.contextmanager
def _passing_signals_on(group: _Group) -> Iterator[None]:
    # Python runs handlers in the main thread only. Elsewhere (a notebook's worker, a test) the `finally` of
    # launch() has to do.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in _STOPPING if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    # `nohup` starts us with SIGHUP ignored: leave that.
    caught = [number for number in numbers if before[number] is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, lambda number, frame: group.events.put((None, number)))
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    # The group outlives its leader where the rank left children of its own behind.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _describe(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _check(command: Sequence[str], processes: int, pace_ms: Sequence[float] | None, grace_s: float) -> None:
    if isinstance(command, str) or not command:
        raise ValueError(f'command={command!r} must be a list of words. Write: [sys.executable, "train.py"]')
    if not isinstance(processes, int) or processes < 1:
        raise ValueError(f"processes={processes!r} must be a whole number of at least 1. Write: processes=2")
    if not grace_s >= 0:
        raise ValueError(f"grace_s={grace_s!r} must be seconds, 0 or more. Write: grace_s=5")
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
