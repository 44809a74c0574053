"""Types of arguments: each says what to write instead."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


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
