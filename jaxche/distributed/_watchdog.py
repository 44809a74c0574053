"""Heartbeats, events, the hang timeout and SIGTERM: between a process and the launcher or scheduler that watches it."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxche.distributed._environment import EVENTS, HANG_TIMEOUT, HEARTBEAT

_log = logging.getLogger("jaxche")

# The exit code of a process that SIGTERM ended: 128 and the number of the signal.
PREEMPTED_CODE = 143
# No clock can hold more seconds.
_MOST_S = 1e9


class Watchdog:
    """Writes the heartbeats and events of this process to the files that its launcher named."""

    def __init__(self) -> None:
        self._file_errors = FileErrors()
        self._has_started = False

    def heartbeat(self) -> None:
        """Report the end of a round."""
        self._has_started = True
        if HEARTBEAT in os.environ:
            with self._file_errors.reported_once(f"{HEARTBEAT}={os.environ[HEARTBEAT]}"):
                Path(os.environ[HEARTBEAT]).touch()

    def heartbeat_while_waiting(self) -> None:
        """Repeat the heartbeat, but not before the end of the first round, which may take far longer to compile."""
        if self._has_started:
            self.heartbeat()

    def write_events(self, lines: Iterable[str]) -> None:
        """Append lines to the file of events; the run continues without it if the disk is full."""
        if EVENTS not in os.environ:
            return
        path = os.environ[EVENTS]
        with self._file_errors.reported_once(f"{EVENTS}={path}"), open(path, "a", encoding="utf8") as file:
            # One write in append mode, so that processes of one machine do not mix their lines.
            file.write("".join(f"{line}\n" for line in lines))


class FileErrors:
    """Reports each file that cannot be written once on standard error, because reports must not end a run."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    @contextlib.contextmanager
    def reported_once(self, name: str) -> Iterator[None]:
        """A context that writes the file; ``name`` is for the message."""
        try:
            yield
        except OSError as error:
            if name not in self._reported:
                self._reported.add(name)
                sys.stderr.write(f"{name}: {error.strerror}; the run continues without it\n")
                sys.stderr.flush()


@contextlib.contextmanager
def hang_timeout() -> Iterator[None]:
    """End the process, with the stacks of its threads, after the seconds in ``JAXCHE_HANG_TIMEOUT``."""
    # For schedulers, which see exit codes and no heartbeats; also if a program never releases the GIL.
    text = os.environ.get(HANG_TIMEOUT, "")
    if not text:
        yield
        return
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < _MOST_S:
        raise ValueError(
            f"{HANG_TIMEOUT}={text!r} must be above 0 and below {_MOST_S:g} seconds; write {HANG_TIMEOUT}=600"
        )
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # file descriptor 2, even if sys.stderr is replaced
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def on_sigterm(action: Callable[[], None]) -> Iterator[None]:
    """Call ``action`` on SIGTERM, and raise it again after the context; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = threading.Event()

    def handle(*_: Any) -> None:
        received.set()
        action()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
    if received.is_set():
        signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def delayed_interrupt(line: str = "") -> Iterator[None]:
    """Delay the first Ctrl-C to the end of the context, and log ``line`` at it; only in the main thread."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    received = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if received.is_set():
            before(number, frame)
        elif line:
            _log.warning("%s", line)
        received.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received.is_set():
        signal.raise_signal(signal.SIGINT)
