"""Heartbeats, the hang timeout and SIGTERM: between a process and whatever watches over it."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Set by ``jaxche launch``: a file to touch after every round, one to tell of every round, how often it started anew.
HEARTBEAT, EVENTS, RESTART = "JAXCHE_HEARTBEAT", "JAXCHE_EVENTS", "JAXCHE_RESTART"
# Set where nobody watches heartbeats: seconds for a round.
HANG_TIMEOUT = "JAXCHE_HANG_TIMEOUT"

# As of a process that SIGTERM ended: 128 and the number of the signal.
PREEMPTED_CODE = 143

_warned: set[str] = set()


# Whether this process has come to the end of a round.
_moved = False


def beat() -> None:
    """Show that this process has come to the end of a round."""
    global _moved
    _moved = True
    if HEARTBEAT in os.environ:
        with unless_full(f"{HEARTBEAT}={os.environ[HEARTBEAT]}"):
            Path(os.environ[HEARTBEAT]).touch()


def beat_again() -> None:
    """Show that this process still moves, if it has before: until their first round some compile for far longer."""
    if _moved:
        beat()


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """End the process, with the stacks of its threads, where this lasts for the seconds in ``JAXCHE_HANG_TIMEOUT``.

    A scheduler that hears no heartbeats sees an exit code. Not even a program that never gives the interpreter back
    can hold this up.

    Raises:
      ValueError: if the variable holds no such number.
    """
    text = os.environ.get(HANG_TIMEOUT, "")
    if not text:
        yield
        return
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{HANG_TIMEOUT}={text!r} must be positive seconds; write {HANG_TIMEOUT}=600")
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # standard error, whatever stands for it in Python
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def unless_full(name: str) -> Iterator[None]:
    """What is only told must not end a run: a file that cannot be written is one line, once.

    Args:
      name: of the file, as it was given.

    Returns:
      A context in which the file is written.

    Example:
      >>> with unless_full("events='/dev/full'"):
      ...     pass  # what an OSError here says goes to standard error
    """
    try:
        yield
    except OSError as error:
        if name not in _warned:
            _warned.add(name)
            sys.stderr.write(f"{name}: {error.strerror}; the run goes on without it\n")
            sys.stderr.flush()


@contextlib.contextmanager
def on_sigterm(action: Callable[[], None]) -> Iterator[None]:
    """Call ``action`` on SIGTERM instead of dying; elsewhere than in the main thread there is no such choice.

    Where no exception came of it in the end, it is raised again for whoever heeded it before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = False

    def hear(*_: Any) -> None:
        nonlocal heard
        heard = True
        action()

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
    if heard:
        signal.raise_signal(signal.SIGTERM)
