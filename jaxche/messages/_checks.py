"""Checks of arguments. Each error has the argument, its value and the line to write instead."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

from jaxche.messages._text import brief


def whole_number(name: str, value: Any, least: int, write: str, most: float = math.inf) -> int:
    """``value`` as a Python int; ValueError unless it is a whole number from ``least`` to ``most``."""
    try:
        # True is an int in Python, and a mistake as a count.
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name}={brief(value)} must be a whole number; write e.g. {write}")
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}; write e.g. {write}")
    if number > most:
        raise ValueError(f"{name}={number} must be at most {most}; write e.g. {write}")
    return number


def finite_number(name: str, value: Any, write: str, least: float = -math.inf) -> float:
    """``value`` as a Python float; ValueError unless it is finite and at least ``least``."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < least:
        floor = f" of at least {least:g}" if least > -math.inf else ""
        raise ValueError(f"{name}={brief(value)} must be a finite number{floor}; write e.g. {write}")
    return number


def positive(name: str, value: Any, write: str, whole: bool) -> float:
    """A number above 0, and a whole one if ``whole``; ValueError with the line to write for anything else."""
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf or (whole and number != int(number)):
        raise ValueError(
            f"{name}={brief(value)} must be {'a whole number' if whole else 'a number'} above 0; write {write}"
        )
    return int(value) if whole else number


def one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """Raise ValueError unless ``value`` is one of the strings ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={brief(value)} is unknown; write one of {', '.join(map(repr, allowed))}")
