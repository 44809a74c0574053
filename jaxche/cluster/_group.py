"""The ranks of one launch, from their start to the end of the last."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from jaxche.cluster._events import EventLog
from jaxche.cluster._heartbeat import Heartbeats
from jaxche.cluster._orphans import Orphanage
from jaxche.cluster._output import LinePrinter, Reader
from jaxche.cluster._placement import Place, pinned
from jaxche.distributed import RESTART

# For ranks that have been told of the failure of another, and say so.
_LAST_WORDS_S = 1.0

# As coreutils' `timeout` has it.
HUNG = 124


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a group ended: its exit code, the rank that failed first, and whether a signal to the launcher ended it."""

    code: int
    rank: int | None = None
    told_to: bool = False


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What all groups of a launch share."""

    printer: LinePrinter
    log: EventLog
    orphans: Orphanage
    # Signals that the launcher received.
    signals: queue.SimpleQueue[int]
    grace_s: float
    term_grace_s: float
    only_rank0: bool
    elastic: bool = False

    def say(self, text: str) -> None:
        """Prints a line of the launcher's own."""
        self.printer.print(sys.stderr, None, f"jaxche launch: {text}")


class Group:
    """The ranks of one start; each leads a process group, so that its own children end with it.

    Args:
      around: what it shares with other starts.
      restart: how often was started before.
      spares: how many ranks may be replaced by a process in the same place, where the others go on.
    """

    def __init__(self, around: Surroundings, restart: int, spares: int = 0) -> None:
        self._around, self._restart, self._spares = around, restart, spares
        self._starts: list[tuple[Sequence[str], Mapping[str, str], Place]] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        # Ranks that took the place of another or were hung, and how often one was replaced.
        self._late: set[int] = set()
        self.replaced = 0
        # The last signal to the launcher since the ranks are being stopped.
        self._told: int | None = None
        self._readers: list[tuple[Reader, Reader]] = []
        self._exits: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def start(self, command: Sequence[str], env: Mapping[str, str], place: Place) -> None:
        """Starts the next rank.

        Raises:
          ValueError: if the program is not there.
        """
        rank = len(self._ranks)
        self._starts.append((command, env, place))
        child, readers = self._spawn(rank, self._restart)
        self._ranks.append(child)
        self._readers.append(readers)

    def _spawn(self, rank: int, restart: int) -> tuple[subprocess.Popen[bytes], tuple[Reader, Reader]]:
        command, env, place = self._starts[rank]
        try:
            with pinned(place.core):
                child = subprocess.Popen(
                    command,
                    env={**env, RESTART: str(restart)},
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
        self._around.orphans.add(child.pid)
        self._around.log.write("start", restart=restart, rank=rank, pid=child.pid, place=str(place))
        assert child.stdout is not None
        assert child.stderr is not None
        out = None if self._around.only_rank0 and rank else sys.stdout
        readers = (
            Reader(child.stdout, rank, self._around.printer, out),
            Reader(child.stderr, rank, self._around.printer, sys.stderr),
        )
        threading.Thread(target=lambda: self._exits.put((rank, child.wait())), daemon=True).start()
        return child, readers

    def _replace(self, rank: int) -> None:
        """Starts a rank that died again, while the others go on."""
        _signal_group(self._ranks[rank], signal.SIGKILL)  # what it left behind
        for reader in self._readers[rank]:
            reader.join(timeout=2.0)
        self._spares, self.replaced = self._spares - 1, self.replaced + 1
        self._late.add(rank)
        self._around.log.write("replace", restart=self._restart + self.replaced, rank=rank)
        self._ranks[rank], self._readers[rank] = self._spawn(rank, self._restart + self.replaced)

    def wait(self, heartbeats: Heartbeats | None = None) -> Ended:
        """Waits until all ranks ended well, one failed, all fell silent, or the launcher is told to stop."""
        around, running = self._around, set(range(len(self._ranks)))
        # When the run has ended, and whose death is then no failure.
        over, excused = math.inf, self._late
        while running:
            if time.monotonic() > over and running <= excused:
                # They came when the run had ended, and have nobody to join.
                self._stop(signal.SIGTERM, around.grace_s)
                break
            with contextlib.suppress(queue.Empty):
                number = around.signals.get_nowait()
                around.say(f"{signal.Signals(number).name}: stopping {len(running)} process(es)")
                self._stop(number, around.term_grace_s if number == signal.SIGTERM else around.grace_s)
                return Ended(128 + number, told_to=True)
            silence = heartbeats.silence() if heartbeats is not None and over == math.inf else None
            if silence is not None:
                around.say(f"no heartbeat, last heard of {silence}; stopping all")
                around.log.write("hang", restart=self._restart, heard=silence)
                # A process that is stopped or stuck in a collective has no use for a grace.
                self._stop(signal.SIGKILL, 0.0)
                return Ended(HUNG)
            for rank in heartbeats.hung(over < math.inf) if heartbeats is not None else []:
                assert heartbeats is not None
                if rank not in running:
                    continue
                around.say(f"rank {rank} gives no heartbeat, while others do: SIGKILL")
                around.log.write("hang", restart=self._restart, rank=rank)
                heartbeats.forget(rank)
                excused.add(rank)
                _signal_group(self._ranks[rank], signal.SIGKILL)
            try:
                # Time-out: a signal that lands in another thread does not wake this one, which runs its handler.
                rank, code = self._exits.get(timeout=0.1)
            except queue.Empty:
                continue
            self._log_exit(rank, code)
            running.discard(rank)
            if rank == 0 and code == 0 and around.elastic:
                over = time.monotonic() + around.grace_s
            if code != 0 and around.elastic and rank != 0 and (running or rank in excused):
                around.say(f"rank {rank} {describe(code)}; the others go on")
                if self._spares and 0 in running:
                    self._replace(rank)
                    running.add(rank)
                    if heartbeats is not None:
                        heartbeats.forget(rank)
                continue
            if code != 0:
                around.say(f"rank {rank} {describe(code)}; stopping the others")
                self._all_end(min(_LAST_WORDS_S, around.grace_s))
                self._stop(signal.SIGTERM, around.grace_s)
                self._report(rank, code)
                if self._told is not None:
                    return Ended(128 + self._told, told_to=True)
                return Ended(128 - code if code < 0 else code, rank)
        return Ended(0)

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
        self._around.orphans.clear()

    def _stop(self, number: int, grace_s: float) -> None:
        for child in self._ranks:
            _signal_group(child, number)
        self._all_end(grace_s)
        stubborn = [str(rank) for rank, child in enumerate(self._ranks) if child.poll() is None]
        if stubborn and number != signal.SIGKILL:
            self._around.say(f"rank {', '.join(stubborn)} still runs: SIGKILL")
        self.end()
        with contextlib.suppress(queue.Empty):
            while True:
                self._log_exit(*self._exits.get(timeout=0.1))

    def _all_end(self, within_s: float) -> None:
        """Wait for all to end by themselves; Ctrl-C cuts that short, and SIGTERM, of which many may come, does not."""
        deadline = time.monotonic() + within_s
        while any(child.poll() is None for child in self._ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
            with contextlib.suppress(queue.Empty):
                self._told = self._around.signals.get_nowait()
                if self._told == signal.SIGINT:
                    break

    def _log_exit(self, rank: int, code: int) -> None:
        name = {"signal": signal.Signals(-code).name} if code < 0 else {"code": code}
        self._around.log.write("exit", restart=self._restart, rank=rank, **name)

    def _report(self, rank: int, code: int) -> None:
        self._around.say(f"rank {rank} {describe(code)}. Its last lines on standard error:")
        for line in self._readers[rank][1].last or ["(none)"]:
            self._around.printer.print(sys.stderr, None, f"    {line}")


def describe(code: int) -> str:
    """How a process with this return code ended."""
    if code >= 0:
        return f"failed with exit code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    # The group outlives its leader where the rank left children of its own behind.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
