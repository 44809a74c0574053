"""What happened to the processes of a launch, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any, TextIO


class EventLog:
    """Writes events as they happen; without a file it drops them."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def write(self, event: str, **fields: Any) -> None:
        """Writes ``{"time": <Unix seconds>, "event": event, ...}``."""
        if self._file is not None:
            self._file.write(json.dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n")


@contextlib.contextmanager
def event_log(path: str | os.PathLike[str] | None) -> Iterator[EventLog]:
    """Opens an event log, appending to what is there.

    Args:
      path: of the file, or None for no file.

    Raises:
      ValueError: if it cannot be written.
    """
    if path is None:
        yield EventLog(None)
        return
    with contextlib.ExitStack() as stack:
        try:
            # A line at a time: whoever reads along sees each event when it happens.
            file = stack.enter_context(open(path, "a", encoding="utf8", buffering=1))
        except OSError as error:
            raise ValueError(f"events={os.fspath(path)!r} cannot be written: {error.strerror}") from None
        yield EventLog(file)
