"""The ranks of one start of a launch."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from jaxche.cluster._heartbeat import Heartbeats
from jaxche.cluster._output import EventLog, LinePrinter, OutputReader
from jaxche.cluster._placement import Placement, pinned
from jaxche.cluster._reaper import Reaper
from jaxche.distributed import PREEMPTED_CODE, RESTART, Coordinator

# Seconds for the other ranks to print their errors after a failure.
_ERROR_OUTPUT_S = 1.0

# Errors of a command, not of the system.
_COMMAND_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)

# Exit code for bad input, which a restart does not change.
BAD_INPUT = 2
# Exit code of coreutils' `timeout`.
HUNG = 124


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """The exit code of a group, the rank that failed first, and whether a signal to the launcher stopped it."""

    code: int
    rank: int | None = None
    by_signal: bool = False


@dataclasses.dataclass(frozen=True)
class LaunchContext:
    """The command, output, logs and timeouts that all starts of a launch share."""

    command: Sequence[str]
    printer: LinePrinter
    log: EventLog
    reaper: Reaper
    # Signals that the launcher received.
    signals: queue.SimpleQueue[int]
    grace_s: float
    term_grace_s: float
    hang_timeout_s: float | None
    only_rank0: bool
    elastic: bool

    def print(self, text: str) -> None:
        """Print a line of the launcher."""
        self.printer.print(sys.stderr, None, f"jaxche launch: {text}")


@dataclasses.dataclass(frozen=True)
class _Rank:
    """A rank: its environment and device, also for its replacement, its process, and the readers of its output."""

    env: Mapping[str, str]
    placement: Placement
    child: subprocess.Popen[bytes]
    out: OutputReader
    err: OutputReader


class WorkerGroup:
    """The ranks of one start. Each leads a process group that includes its children."""

    def __init__(
        self,
        context: LaunchContext,
        restart: int,
        replacements: int,
        coordinator: Coordinator | None,
        heartbeats: Heartbeats,
    ) -> None:
        # The number of earlier starts, and how many dead ranks may be replaced while the others continue.
        self._context, self._restart, self._replacements = context, restart, replacements
        self._heartbeats = heartbeats
        self._ranks: list[_Rank] = []
        self._running: set[int] = set()
        # Process groups that may have processes.
        self._groups: set[int] = set()
        # That of an elastic run. It gets the signals to the ranks, and ignores all but SIGKILL.
        self._coordinator = coordinator
        if coordinator is not None:
            self._watch(coordinator.process.pid)
        # Ranks that were replaced or hung: their failure is ignored once no other rank runs.
        self._expendable: set[int] = set()
        # Ranks that were killed because they had no heartbeat.
        self._hung: set[int] = set()
        # The first failure after a rank of an elastic run has succeeded, while others still run.
        self._late_failure: GroupResult | None = None
        self.replaced = 0
        # The time to stop the ranks that still run after one of an elastic run has succeeded.
        self._end_deadline = math.inf
        # The last signal to the launcher while it stops the ranks.
        self._stop_signal: int | None = None
        self._exits: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def start(self, env: Mapping[str, str], placement: Placement) -> None:
        """Start the next rank."""
        rank = len(self._ranks)
        self._ranks.append(self._spawn(rank, self._restart, env, placement))
        self._running.add(rank)

    def _spawn(self, rank: int, restart: int, env: Mapping[str, str], placement: Placement) -> _Rank:
        command = self._context.command
        try:
            with pinned(placement.core):
                child = subprocess.Popen(
                    command,
                    env={**env, RESTART: str(restart)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError as error:
            if error.errno not in _COMMAND_ERRORS:
                raise
            raise ValueError(
                f"command={list(command)!r} cannot be run: {error.strerror}. For a script write: "
                f'launch([sys.executable, "train.py"], processes=...)'
            ) from None
        self._watch(child.pid)
        self._context.log.write("start", restart=restart, rank=rank, pid=child.pid, place=str(placement))
        assert child.stdout is not None
        assert child.stderr is not None
        shown = None if self._context.only_rank0 and rank else sys.stdout
        out = OutputReader(child.stdout, rank, self._context.printer, shown)
        err = OutputReader(child.stderr, rank, self._context.printer, sys.stderr)
        threading.Thread(target=lambda: self._exits.put((rank, child.wait())), daemon=True).start()
        return _Rank(env, placement, child, out, err)

    def _replace(self, rank: int) -> None:
        """Restart a dead rank while the others continue."""
        dead = self._ranks[rank]
        for reader in (dead.out, dead.err):
            reader.join(timeout=2.0)
        self._replacements, self.replaced = self._replacements - 1, self.replaced + 1
        self._expendable.add(rank)
        self._hung.discard(rank)
        self._context.log.write("replace", restart=self._restart + self.replaced, rank=rank)
        self._ranks[rank] = self._spawn(rank, self._restart + self.replaced, dead.env, dead.placement)
        self._running.add(rank)
        self._heartbeats.forget(rank)

    def wait(self) -> GroupResult:
        """Wait until all ranks succeed, one fails, all hang, or a signal stops the launcher."""
        while self._running and not self._is_over():
            self._kill_hung()
            if result := self._stop_all_if_needed() or self._next_exit():
                return result
        if self._running:
            self._stop(signal.SIGTERM, self._context.grace_s)
        return self._late_failure or GroupResult(0)

    @property
    def _has_ended(self) -> bool:
        """Whether a rank of an elastic run has succeeded."""
        return self._end_deadline < math.inf

    def _is_over(self) -> bool:
        """Whether all ranks that run are replacements that started after the end of the run, so that none can join."""
        if time.monotonic() <= self._end_deadline:
            return False
        joined = {rank for rank in self._running if self._heartbeats.has(rank)}
        return self._running <= self._expendable - joined

    def _stop_all_if_needed(self) -> GroupResult | None:
        """Stop all ranks on a signal, if the coordinator has ended, or if all hang; returns the result then."""
        context = self._context
        with contextlib.suppress(queue.Empty):
            number = context.signals.get_nowait()
            context.print(f"{signal.Signals(number).name}: stopping {len(self._running)} process(es)")
            self._stop(number, context.term_grace_s if number == signal.SIGTERM else context.grace_s)
            return GroupResult(128 + number, by_signal=True)
        if self._coordinator is not None and self._coordinator.process.poll() is not None:
            context.print("the coordinator of the run has ended; stopping all")
            self._stop(signal.SIGTERM, context.grace_s)
            return GroupResult(1)
        report = None if self._has_ended else self._heartbeats.hang_report()
        if report is not None:
            context.print(f"no heartbeat; the last ones: {report}; stopping all")
            context.log.write("hang", restart=self._restart, last_heartbeats=report)
            # A process that is stopped or blocked in a collective cannot handle SIGTERM.
            self._stop(signal.SIGKILL, 0.0)
            return GroupResult(HUNG)
        return None

    def _kill_hung(self) -> None:
        """Kill ranks without a heartbeat while others have one."""
        for rank in self._running.intersection(self._heartbeats.hung(run_over=self._has_ended)):
            self._context.print(f"rank {rank} has no heartbeat, while others have: SIGKILL")
            self._context.log.write("hang", restart=self._restart, rank=rank)
            self._heartbeats.forget(rank)
            self._expendable.add(rank)
            self._hung.add(rank)
            _signal_group(self._ranks[rank].child.pid, signal.SIGKILL)

    def _next_exit(self) -> GroupResult | None:
        """Wait a moment for the exit of a rank; the result of the group if that ends it."""
        try:
            # With a timeout, because a signal to another thread does not interrupt this wait.
            rank, code = self._exits.get(timeout=0.1)
        except queue.Empty:
            return None
        self._log_exit(rank, code)
        self._running.discard(rank)
        if code == 0:
            self._succeeded(rank)
            return None
        others_continue = self._running or (self._has_ended and rank in self._expendable)
        # After SIGTERM to one rank all save after the same round, and exit with the code of preemption.
        if self._context.elastic and code != PREEMPTED_CODE and others_continue:
            self._continue_without(rank, code)
            return None
        return self._stop_after(rank, code)

    def _succeeded(self, rank: int) -> None:
        group = self._ranks[rank].child.pid
        if not _signal_group(group, 0):  # it has left no children
            self._forget(group)
        if self._context.elastic and not self._has_ended:
            self._end_deadline = time.monotonic() + self._context.grace_s

    def _continue_without(self, rank: int, code: int) -> None:
        """Continue an elastic run after the failure of a rank, and replace it if replacements are left."""
        has_ended, group = self._has_ended, self._ranks[rank].child.pid
        self._context.print(f"{self._described(rank, code)}; the others continue")
        # Its children end now, because the system may reuse the number of the group before the others end.
        _signal_group(group, signal.SIGKILL)
        self._forget(group)
        if has_ended and rank not in self._expendable:  # those that run do not take over its work
            self._late_failure = self._late_failure or _failure(rank, code)
        if self._replacements and not has_ended and code != BAD_INPUT:
            self._replace(rank)

    def _stop_after(self, rank: int, code: int) -> GroupResult:
        """Stop the others after the failure of a rank."""
        context = self._context
        described = self._described(rank, code)
        context.print(f"{described}; stopping the others")
        is_preempted = code == PREEMPTED_CODE
        self._all_end(context.term_grace_s if is_preempted else min(_ERROR_OUTPUT_S, context.grace_s))
        self._stop(signal.SIGTERM, context.grace_s)
        context.print(f"{described}. Its last lines on standard error:")
        for line in self._ranks[rank].err.last or ["(none)"]:
            context.printer.print(sys.stderr, None, f"    {line}")
        if self._stop_signal is not None:
            return GroupResult(128 + self._stop_signal, by_signal=True)
        return _failure(rank, code)

    def _watch(self, group: int) -> None:
        """End a process group with this one, and with the launcher."""
        self._groups.add(group)
        self._context.reaper.add(group)

    def _forget(self, group: int) -> None:
        """Forget a process group that has ended, because the system may reuse its number."""
        self._groups.discard(group)
        self._context.reaper.remove(group)

    def end(self) -> None:
        """Kill the remaining processes with their children, and read their output to the end."""
        for group in self._groups:
            _signal_group(group, signal.SIGKILL)
        if self._coordinator is not None:
            with self._coordinator.process:  # waits for it, and closes its standard input
                pass
        for rank in self._ranks:
            # A process in an uninterruptible wait ends later.
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.child.wait(timeout=5.0)
        for reader in (one for rank in self._ranks for one in (rank.out, rank.err)):
            reader.join(timeout=2.0)
        for group in [*self._groups]:
            self._forget(group)

    def _stop(self, number: int, grace_s: float) -> None:
        for group in self._groups:
            _signal_group(group, number)
        self._all_end(grace_s)
        running = [str(number) for number, rank in enumerate(self._ranks) if rank.child.poll() is None]
        if running and number != signal.SIGKILL:
            self._context.print(f"rank {', '.join(running)} still runs: SIGKILL")
        self.end()
        with contextlib.suppress(queue.Empty):
            while True:
                self._log_exit(*self._exits.get(timeout=0.1))

    def _all_end(self, within_s: float) -> None:
        """Wait for all ranks to exit; Ctrl-C ends the wait, SIGTERM does not."""
        deadline = time.monotonic() + within_s
        while any(rank.child.poll() is None for rank in self._ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
            with contextlib.suppress(queue.Empty):
                self._stop_signal = self._context.signals.get_nowait()
                if self._stop_signal == signal.SIGINT:
                    break

    def _log_exit(self, rank: int, code: int) -> None:
        name = {"signal": _name(-code)} if code < 0 else {"code": code}
        self._context.log.write("exit", restart=self._restart, rank=rank, **name)

    def _described(self, rank: int, code: int) -> str:
        """The exit of a rank in words."""
        if code >= 0:
            return f"rank {rank} failed with exit code {code}"
        hint = " (out of memory?)" if -code == signal.SIGKILL and rank not in self._hung else ""
        return f"rank {rank} was ended by {_name(-code)}{hint}"


def _failure(rank: int, code: int) -> GroupResult:
    return GroupResult(128 - code if code < 0 else code, rank)


def _name(number: int) -> str:
    # Python has no names for most real-time signals.
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def _signal_group(group: int, number: int) -> bool:
    """Signal a process group, which exists as long as children of the rank run; returns whether it does."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False
