"""The output of a launch: the lines of its ranks, each with its rank, and the event log as JSON lines."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import threading
import time
from typing import IO, Any, TextIO

from jaxche.distributed import FileErrors

# gloo prints these lines at every log level.
_GLOO = "[Gloo] Rank "


class LinePrinter:
    """Prints lines of several threads without mixing them; ``prefix`` adds the rank, as in ``[0] loss 0.3``."""

    def __init__(self, prefix: bool) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()

    def print(self, stream: TextIO, rank: int | None, line: str) -> None:
        """Print a line of a rank, or of the launcher (None)."""
        text = f"[{rank}] {line}\n" if self._prefix and rank is not None else f"{line}\n"
        # Continue if the terminal is closed (`| head`): otherwise the rank blocks on a full pipe.
        with self._lock, contextlib.suppress(OSError, ValueError):
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode("ascii", "backslashreplace").decode())
            stream.flush()


class OutputReader(threading.Thread):
    """A thread that reads the pipe of a rank, prints it to ``stream``, if any, and keeps the ``last`` 20 lines."""

    def __init__(self, pipe: IO[bytes], rank: int, printer: LinePrinter, stream: TextIO | None) -> None:
        super().__init__(daemon=True)
        self.last: collections.deque[str] = collections.deque(maxlen=20)
        self._pipe, self._rank, self._printer, self._stream = pipe, rank, printer, stream
        self.start()

    def run(self) -> None:
        # Lines with their ends: "\n", "\r\n", or "\r" of a progress bar.
        with io.TextIOWrapper(self._pipe, "utf8", "replace", newline="") as lines:
            for line in lines:
                # A progress bar returns to the start of an empty line.
                if line == "\r" or line.startswith(_GLOO):
                    continue
                self.last.append(line.rstrip("\r\n"))
                if self._stream is not None:
                    self._printer.print(self._stream, self._rank, self.last[-1])


class EventLog:
    """Appends events to a file, or writes none; drops events if the disk is full."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path, self._errors = path, FileErrors()
        if path is not None:
            try:
                open(path, "ab").close()
            except OSError as error:
                raise ValueError(f"events={os.fspath(path)!r} cannot be written: {error.strerror}") from None

    def write(self, event: str, **fields: Any) -> None:
        """Write ``{"time": <Unix seconds>, "event": event, ...}``."""
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n"
        with self._errors.reported_once(f"events={os.fspath(self._path)!r}"), open(self._path, "ab") as file:
            file.write(line.encode())
