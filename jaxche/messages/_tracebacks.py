"""Tracebacks that end in the user's line, without the frames of this package."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# "full" keeps all frames.
_TRACEBACK = "JAXCHE_TRACEBACK"

_PACKAGE = __name__.partition(".")[0]
_OWN = str(Path(__file__).resolve().parent.parent) + os.sep
# Those of short_traceback, and of the context managers that decorate functions.
_CALLS = {__file__, contextlib.__file__}
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def short_traceback(call: Callable[P, R]) -> Callable[P, R]:
    """A public call without frames of this package in its errors, except in unexpected ones."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            if os.environ.get(_TRACEBACK) != "full":
                _shorten(error)
            raise

    return wrapped


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it, each once: an error may be its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _shorten(error: BaseException) -> None:
    for one in causes(error):
        if _is_expected(one):
            one.__traceback__ = users_part(one.__traceback__)


def without_library(trace: TracebackType | None) -> TracebackType | None:
    """The traceback as far as the last function of the user."""
    entries = _entries(trace)
    while entries and _kind(entries[-1]) != "user":
        entries.pop()
    return _chain(entries)


def interruption(error: KeyboardInterrupt) -> str:
    """A Ctrl-C as one line, with the user's line that was interrupted; empty where all frames are wanted."""
    if os.environ.get(_TRACEBACK) == "full":
        return ""
    found = [entry for entry in _entries(error.__traceback__) if _kind(entry) == "user"]
    place = f" in {found[-1].tb_frame.f_code.co_filename}, line {found[-1].tb_lineno}" if found else ""
    return f"KeyboardInterrupt{place}; {_TRACEBACK}=full shows all frames"


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """The entries of the user's functions, and of what they call outside of this package; None without any."""
    # Before the first function of the user are those of JAX, of threads and of context managers.
    entries = itertools.dropwhile(lambda entry: _kind(entry) != "user", _entries(trace))
    return _chain(entry for entry in entries if _kind(entry) != "own")


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _chain(entries: Iterable[TracebackType]) -> TracebackType | None:
    rest = None
    for entry in reversed(list(entries)):
        rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


def _is_expected(error: BaseException) -> bool:
    """Whether the user's functions raised the error, or this package raised it about an argument."""
    entries = _entries(error.__traceback__)
    if isinstance(error, TypeError) and {entry.tb_frame.f_code.co_filename for entry in entries} <= _CALLS:
        return True  # arguments of another name or number than those of the function
    if isinstance(error, KeyboardInterrupt):
        return True
    kinds = list(map(_kind, entries))
    if kinds and kinds[-1] == "own":
        return isinstance(error, ValueError | ImportError) or type(error).__module__.startswith(f"{_PACKAGE}.")
    return "user" in kinds


def _kind(entry: TracebackType) -> str:
    path, module = entry.tb_frame.f_code.co_filename, str(entry.tb_frame.f_globals.get("__name__"))
    # The initializer of a dataclass has no file.
    if path.startswith(_OWN) or module.startswith(f"{_PACKAGE}."):
        return "own"
    # Code without a file, as of a notebook or of exec, is the user's; frozen modules are not.
    return "library" if path.startswith(_LIBRARIES) or path.startswith("<frozen") else "user"
