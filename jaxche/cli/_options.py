"""Options on the command line: how they are declared, their types and flags, and those that differ from defaults."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any


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


class Options:
    """Adds options to a parser, or to a titled group of it; errors show the example of an option of numbers."""

    def __init__(self, parser: argparse._ActionsContainer, title: str | None = None):
        self._group = parser if title is None else parser.add_argument_group(title)
        self.add = self._group.add_argument

    def exclusive(self) -> Options:
        """Options of which one may be given."""
        return Options(self._group.add_mutually_exclusive_group())

    def add_number(self, example: str, metavar: str, help: str, default: float | None = None, **limits: Any) -> None:
        """Add an option of a number within the ``limits`` of :func:`number`."""
        self.add(example.split()[0], type=number(example, **limits), metavar=metavar, default=default, help=help)

    def add_integer(
        self, example: str, help: str, default: int | None = None, metavar: str = "N", least: int = 1, **limits: Any
    ) -> None:
        """Add an option of a whole number within these limits."""
        self.add_number(example, metavar, help, default, least=least, kind=int, **limits)

    def add_numbers(self, example: str, metavar: str, help: str) -> None:
        """Add an option of positive numbers separated by commas."""
        self.add(example.split()[0], type=numbers(example), metavar=metavar, help=help)

    def add_processes(self, help: str) -> None:
        """Add ``-n`` and ``--processes``, the number of processes."""
        self.add("-n", "--processes", type=number("-n 2", 1, kind=int), metavar="N", help=help)

    def add_out(self, what: str, default: str | None = None, kind: Callable[[str], str] = file_path) -> None:
        """Add ``-o`` and ``--out``, the one option of all commands for the place where ``what`` is written."""
        metavar = "FOLDER" if kind is directory_path else "FILE"
        self.add("-o", "--out", type=kind, metavar=metavar, default=default, help=f"where to write: {what}")


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
