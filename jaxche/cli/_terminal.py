"""Colours on a terminal, and the error line of every command."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_CODES = {"bad": "1;31", "good": "32", "strong": "1"}


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """Colours text for a terminal (``style``: "bad", "good" or "strong"); files, pipes and ``NO_COLOR`` get it plain.

    Example:
      >>> import io
      >>> paint("ok", "good", io.StringIO())
      'ok'
    """
    out = sys.stdout if stream is None else stream
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not out.isatty()
    return text if plain else f"\033[{_CODES[style]}m{text}\033[0m"


def print_error(command: str, error: object) -> None:
    """Prints ``jaxche COMMAND: error: ...`` on standard error."""
    sys.stderr.write(f"jaxche {command}: {paint('error', 'bad', sys.stderr)}: {error}\n")
    sys.stderr.flush()
