"""Checks of numbers, as far as they are concrete: inside ``jit`` they are tracers."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.core import Tracer


def is_concrete(value: Any) -> bool:
    """Whether a number is known now, and not a tracer."""
    return not isinstance(value, Tracer)


def check_positive(name: str, value: Any, example: str) -> None:
    """Raise ValueError unless every concrete entry of ``value`` is finite and above zero."""
    if not is_concrete(value):
        return
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} is not a number; write e.g. {example}") from None
    if not np.all(np.isfinite(numbers) & (numbers > 0)):
        raise ValueError(f"{name}={numbers.tolist()} must be finite and greater than 0; write e.g. {example}")
