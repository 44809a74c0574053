"""Refuse numbers that cannot work, as long as they are known: inside ``jit`` there is nothing to look at yet."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.core import Tracer


def known(value: Any) -> bool:
    """Whether a number can be looked at now."""
    return not isinstance(value, Tracer)


def refuse_unless_positive(name: str, value: Any, example: str) -> None:
    """Raise ValueError unless every known entry of ``value`` is finite and above zero.

    Args:
      name: the argument's name.
      value: a number or an array of them.
      example: the line to write instead.
    """
    if not known(value):
        return
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} is not a number; write e.g. {example}") from None
    if not np.all(np.isfinite(numbers) & (numbers > 0)):
        shown = numbers.tolist()
        raise ValueError(f"{name}={shown} must be finite and greater than 0; write e.g. {example}")
