"""The output of many ranks on one terminal: whole lines, each with its rank."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import threading
from collections.abc import Sequence
from typing import IO, TextIO

# What gloo prints on connecting, past every log level: nobody launched a run to read it.
_CHATTER = "[Gloo] Rank "
_END = re.compile(rb"\r\n|\n|\r")
_LISTED = 12


class LinePrinter:
    """Prints lines of several threads without tearing them.

    Args:
      prefix: whether each line starts with the number of its rank, as in ``[0] loss 0.3``.
    """

    def __init__(self, prefix: bool) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()

    def print(self, stream: TextIO, rank: int | None, line: str) -> None:
        """Prints one line, of a rank or (None) of the launcher."""
        text = f"[{rank}] {line}\n" if self._prefix and rank is not None else f"{line}\n"
        # A closed terminal (`| head`) must not stop the reader: the rank would block on a full pipe.
        with self._lock, contextlib.suppress(OSError, ValueError):
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode("ascii", "backslashreplace").decode())
            stream.flush()


class Reader(threading.Thread):
    """Reads one pipe of one rank to its end, line by line.

    Args:
      pipe: the pipe, in bytes.
      rank: whose it is.
      printer: prints the lines.
      stream: where to, or None to drop them.
      keep: how many of the last lines to remember.
    """

    def __init__(self, pipe: IO[bytes], rank: int, printer: LinePrinter, stream: TextIO | None, keep: int = 20) -> None:
        super().__init__(daemon=True)
        self.last: collections.deque[str] = collections.deque(maxlen=keep)
        self._pipe, self._rank, self._printer, self._stream = pipe, rank, printer, stream
        self.start()

    def run(self) -> None:
        rest = b""
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), 65536):
                rest = self._lines(rest + chunk)
        if rest.strip():
            self._line(rest)

    def _lines(self, text: bytes) -> bytes:
        start = 0
        for end in _END.finditer(text):
            if end[0] == b"\r":
                # The first half of a line end, perhaps: wait for what follows.
                if end.end() == len(text):
                    break
                # A progress bar goes back to the start of its line before it has written anything.
                if end.start() == start:
                    start = end.end()
                    continue
            self._line(text[start : end.start()])
            start = end.end()
        return text[start:]

    def _line(self, text: bytes) -> None:
        line = text.decode(errors="replace")
        if line.startswith(_CHATTER):
            return
        self.last.append(line)
        if self._stream is not None:
            self._printer.print(self._stream, self._rank, line)


def listed(ranks: Sequence[int]) -> str:
    """The first dozen of many numbers.

    Example:
      >>> listed(range(14))
      '0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more'
    """
    shown = ", ".join(map(str, ranks[:_LISTED]))
    return shown + (f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else "")
