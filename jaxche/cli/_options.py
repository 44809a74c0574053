"""The types of options on the command line, the flag of an option, and those that differ from their defaults."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any


def integer(example: str, least: int = 1, most: float = math.inf) -> Callable[[str], int]:
    """A parser of integers from ``least`` to ``most``; errors show ``example``."""
    return number(example, least, most, kind=int)


def number(
    example: str, least: float = 0.0, most: float = math.inf, above: bool = False, kind: type = float
) -> Callable[[str], Any]:
    """A parser of finite numbers from ``least`` to ``most``; ``above`` excludes ``least``."""
    what = "a number" if kind is float else "a whole number"
    limit = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    limit = f"above {least:g}" if above else limit

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most and value < math.inf) or (above and value == least):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} {limit}; write {example}")
        return value

    return parse


def numbers(example: str) -> Callable[[str], tuple[float, ...]]:
    """A parser of positive numbers separated by commas."""
    one = number(example, above=True)
    return lambda text: tuple(one(word) for word in text.split(","))


def directory_path(text: str) -> str:
    """The path of a directory, unchanged; shell completion offers directories."""
    return _path(text, "a folder")


def file_path(text: str) -> str:
    """The path of a file, unchanged; shell completion offers files."""
    return _path(text, "a file")


def command_word(text: str) -> str:
    """A word of a command, unchanged; shell completion offers files."""
    return text


def _path(text: str, what: str) -> str:
    """The text; refuses an empty one."""
    if not text:
        raise argparse.ArgumentTypeError(f"'' is not the name of {what}; is a variable of the shell not set?")
    return text


def add_out(
    parser: argparse._ActionsContainer,
    what: str,
    default: str | None = None,
    kind: Callable[[str], str] = file_path,
    old: str | None = None,
) -> None:
    """Add ``-o`` and ``--out``, the one option of all commands for the place of their output.

    ``what`` is written there; ``kind`` is ``file_path`` or ``directory_path``, and ``old`` an earlier name.
    """
    metavar = "FOLDER" if kind is directory_path else "FILE"
    parser.add_argument("-o", "--out", type=kind, metavar=metavar, default=default, help=f"where to write: {what}")
    if old is not None:
        parser.add_argument(old, dest="out", type=kind, help=argparse.SUPPRESS)


def flag(name: str) -> str:
    """The flag of an option on the command line."""
    return "-n" if name == "processes" else "--" + name.replace("_", "-")


def non_default_options(
    add_arguments: Callable[[argparse.ArgumentParser], object], args: argparse.Namespace
) -> dict[str, Any]:
    """The options of ``add_arguments`` whose values in ``args`` differ from their defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    return {name: getattr(args, name) for name, default in defaults.items() if getattr(args, name) != default}
