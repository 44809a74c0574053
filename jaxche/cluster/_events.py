"""The event log of a launch: JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxche.distributed import FileErrors


class EventLog:
    """Writes events to an unbuffered file, or to none; drops events if the disk is full."""

    def __init__(self, file: BinaryIO | None) -> None:
        self._file, self._errors = file, FileErrors()

    def write(self, event: str, **fields: Any) -> None:
        """Writes ``{"time": <Unix seconds>, "event": event, ...}``."""
        if self._file is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n"
        with self._errors.reported_once(f"events={self._file.name!r}"):
            self._file.write(line.encode())


@contextlib.contextmanager
def event_log(path: str | os.PathLike[str] | None) -> Iterator[EventLog]:
    """Opens an event log for appending; None writes no file.

    Raises:
      ValueError: the file is not writable.
    """
    if path is None:
        yield EventLog(None)
        return
    with contextlib.ExitStack() as stack:
        try:
            # Unbuffered, so that readers see each event at once.
            file = stack.enter_context(open(path, "ab", buffering=0))
        except OSError as error:
            raise ValueError(f"events={os.fspath(path)!r} cannot be written: {error.strerror}") from None
        yield EventLog(file)
