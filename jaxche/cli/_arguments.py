"""Types of arguments: each says what to write instead."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any


def given(arguments: Callable[[argparse.ArgumentParser], object], args: argparse.Namespace) -> dict[str, Any]:
    """The options whose values are not their defaults.

    Args:
      arguments: adds the options to a parser.
      args: what was parsed.

    Example:
      >>> given(lambda p: p.add_argument("--rows", default=3), argparse.Namespace(rows=4, words=[]))
      {'rows': 4}
    """
    parser = argparse.ArgumentParser()
    arguments(parser)
    defaults = vars(parser.parse_args([]))
    return {name: getattr(args, name) for name, default in defaults.items() if getattr(args, name) != default}


def flag(name: str) -> str:
    """An option as it is written.

    Example:
      >>> flag("batch_size"), flag("processes")
      ('--batch-size', '-n')
    """
    return "-n" if name == "processes" else "--" + name.replace("_", "-")


def folder(text: str) -> str:
    """The path of a folder, as it is; a shell completes folders here."""
    return text


def file(text: str) -> str:
    """The path of a file, as it is; a shell completes files here."""
    return text


def whole(example: str, least: int = 1, most: float = math.inf) -> Callable[[str], int]:
    """A whole number.

    Args:
      example: what to write, for the message.
      least: the smallest accepted.
      most: the largest.

    Example:
      >>> whole("--epochs 3")("5")
      5
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {_range(least, most)}; write {example}")
        return value

    return parse


def number(example: str, least: float = 0.0, most: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """A finite number.

    Args:
      example: what to write, for the message.
      least: the smallest accepted.
      most: the largest.
      above: whether ``least`` itself is refused.
    """
    limit = f"above {least:g}" if above else _range(least, most)

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most) or (above and value == least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {limit}; write {example}")
        return value

    return parse


def numbers(example: str) -> Callable[[str], tuple[float, ...]]:
    """Numbers above 0 with commas between them.

    Example:
      >>> numbers("--ratios 1,2.5")("1,2.5")
      (1.0, 2.5)
    """
    one = number(example, above=True)
    return lambda text: tuple(one(word) for word in text.split(","))


def _range(least: float, most: float) -> str:
    return f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
