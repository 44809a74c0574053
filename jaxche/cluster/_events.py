"""What happened to the processes of a launch, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxche.distributed import unless_full


class EventLog:
    """Writes events as they happen. Those that cannot be written, as on a full disk, are lost; without a file all are.

    Args:
      file: unbuffered, or None.
    """

    def __init__(self, file: BinaryIO | None) -> None:
        self._file = file

    def write(self, event: str, **fields: Any) -> None:
        """Writes ``{"time": <Unix seconds>, "event": event, ...}``."""
        if self._file is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n"
        with unless_full(f"events={self._file.name!r}"):
            self._file.write(line.encode())


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
            # Without a buffer: whoever reads along sees each event when it happens, and none fails twice.
            file = stack.enter_context(open(path, "ab", buffering=0))
        except OSError as error:
            raise ValueError(f"events={os.fspath(path)!r} cannot be written: {error.strerror}") from None
        yield EventLog(file)
