"""Colours, on terminals and nowhere else."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_CODES = {"bad": "1;31", "good": "32", "strong": "1"}


def paint(text: str, how: str, stream: TextIO | None = None) -> str:
    """Text in a colour if it goes to a terminal that shows colours; files, pipes and ``NO_COLOR`` get it plain.

    Args:
      text: what to paint.
      how: ``"bad"``, ``"good"`` or ``"strong"``.
      stream: where it will be written (default: standard output).

    Returns:
      The text, perhaps with codes around it.

    Example:
      >>> import io
      >>> paint("ok", "good", io.StringIO())
      'ok'
    """
    out = sys.stdout if stream is None else stream
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not out.isatty()
    return text if plain else f"\033[{_CODES[how]}m{text}\033[0m"


def complain(command: str, error: object) -> None:
    """One line on standard error, in the form of every command.

    Args:
      command: the command's name.
      error: what is wrong.
    """
    sys.stderr.write(f"jaxche {command}: {paint('error', 'bad', sys.stderr)}: {error}\n")
    sys.stderr.flush()
