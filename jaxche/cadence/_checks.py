"""Checks of arguments. Each error names the argument and its value, and says what to write instead."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np


def whole_number(name: str, value: Any, least: int, write: str) -> int:
    """``value`` as a Python int; ValueError unless it is a whole number of at least ``least``."""
    try:
        # True is an int in Python, and a mistake as a count.
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name}={value!r} must be a whole number; write e.g. {write}")
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}; write e.g. {write}")
    return number


def finite_number(name: str, value: Any, write: str, least: float = -math.inf) -> float:
    """``value`` as a Python float; ValueError unless it is finite and at least ``least``."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < least:
        floor = f" of at least {least:g}" if least > -math.inf else ""
        raise ValueError(f"{name}={value!r} must be a finite number{floor}; write e.g. {write}")
    return number


def checked_settings(
    world_size: int, anchor: int, overhead_target: float, max_anchor: int, max_batch_diff: int | None
) -> dict[str, Any]:
    """The settings of ElChe by name, as plain Python numbers; ValueError for one out of range."""
    target = finite_number("overhead_target", overhead_target, "overhead_target=0.10")
    if not 0.01 <= target <= 0.50:
        raise ValueError(f"overhead_target={target} lies outside [0.01, 0.50]; write e.g. overhead_target=0.10")
    if max_batch_diff is not None:
        write = "max_batch_diff=10, or None for no limit"
        max_batch_diff = whole_number("max_batch_diff", max_batch_diff, 0, write)
    return {
        "world_size": whole_number("world_size", world_size, 2, "ElChe(world_size=2); one replica needs no ElChe"),
        "anchor": whole_number("anchor", anchor, 1, "ElChe(anchor=10)"),
        "overhead_target": target,
        "max_anchor": whole_number("max_anchor", max_anchor, 1, "ElChe(max_anchor=200)"),
        "max_batch_diff": max_batch_diff,
    }


def timings(
    wall_ms: Sequence[float] | np.ndarray, actual_batches: Sequence[int] | np.ndarray, world_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """One round's measurements as float64 arrays [R]; ValueError names the first rank with an impossible number."""
    try:
        wall, batches = np.asarray(wall_ms, np.float64), np.asarray(actual_batches, np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"wall_ms={wall_ms!r} and actual_batches={actual_batches!r} must be plain lists of numbers; "
            "write e.g. report_timing([500.0, 1000.0], [10, 10], sync_ms=5.0)"
        ) from None
    for name, array in (("wall_ms", wall), ("actual_batches", batches)):
        if array.shape != (world_size,):
            raise ValueError(
                f"{name} has shape {array.shape} but world_size={world_size}; write one number a rank, "
                f"{name} of length {world_size}"
            )
    _refuse(~(np.isfinite(wall) & (wall >= 0)), "wall_ms", wall, "a finite time in ms, at least 0")
    _refuse(~(batches >= 0) | (batches != np.floor(batches)), "actual_batches", batches, "a whole number, at least 0")
    idle = (batches == 0) & (wall > 0)
    if idle.any():
        rank = int(idle.argmax())
        raise ValueError(
            f"rank {rank}: actual_batches=0 but wall_ms={wall[rank]:g}; time without a batch is no measurement of "
            f"speed, write wall_ms[{rank}]=0.0 for a rank that ran nothing"
        )
    return wall, batches


def _refuse(bad: np.ndarray, name: str, values: np.ndarray, wanted: str) -> None:
    if bad.any():
        rank = int(bad.argmax())
        raise ValueError(f"rank {rank}: {name}={values[rank]:g} must be {wanted}; leave the report out or correct it")
