"""The seed tuner: flodl 0.4.0, number for number.

Arrays have one entry a rank [R] in float64; 0 ms a batch means that the rank was never measured.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxche.cadence._round_plan import round_half_away
from jaxche.cadence._tuner import LARGEST_COUNT, CadenceState, Report, Tuner


def update(che: CadenceState, report: Report) -> dict[str, Any]:
    """The fields of ``che`` that a report changes."""
    ms = blend_speeds(np.array(che.ms_per_batch), report.wall_ms, report.batches)
    if not ms.any():
        return {}
    chosen = choose_anchor(che, float(report.wall_ms.max()), report.sync_ms)
    return {"anchor": chosen, "batch_counts": choose_counts(che, chosen, ms), "ms_per_batch": ms}


def blend_speeds(ms: np.ndarray, wall: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """Blend each new time a batch in by its own error: t ← α t_new + (1 − α) t, α = clip(|t_new − t| / t, 0.1, 0.8)."""
    seen = (batches > 0) & (wall > 0)
    new = np.divide(wall, batches, out=ms.copy(), where=seen)
    with np.errstate(over="ignore"):
        error = np.divide(np.abs(new - ms), ms, out=np.ones_like(ms), where=ms > 0)
    alpha = np.clip(error, 0.1, 0.8)
    return np.where(seen & (ms > 0), alpha * new + (1.0 - alpha) * ms, new)


def choose_anchor(che: CadenceState, compute_ms: float, sync_ms: float) -> int:
    """Grow the anchor in proportion when the overhead passes the target; drop it by 1 below half the target."""
    anchor, low, target = che.anchor, che.min_anchor, che.overhead_target
    if compute_ms <= 0 or sync_ms <= 0:
        return anchor
    overhead = sync_ms / compute_ms
    if overhead > target:
        return max(low, math.ceil(min(anchor * (overhead / target), che.max_anchor)))
    return anchor - 1 if overhead < target * 0.5 and anchor > low else anchor


def choose_counts(che: CadenceState, anchor: int, ms: np.ndarray) -> np.ndarray:
    """n_i = round(a t_slow / t_i), kept while it moves by 10 % or less, and moved by max_batch_diff at most."""
    slow, current = ms.max(), np.array(che.batch_counts, np.float64)
    level = (ms <= 0) | (np.abs(ms - slow) < 1e-6)
    with np.errstate(over="ignore"):
        ratio = np.divide(slow, ms, out=np.ones_like(ms), where=~level)
        wanted = round_half_away(np.minimum(anchor * ratio, LARGEST_COUNT))
    target = np.where(level, anchor, np.maximum(wanted, 1.0))
    if not any(che.ms_per_batch):
        return target
    moved, most = target, che.max_batch_diff
    if most is not None:
        moved = np.clip(target, np.maximum(current - most, 1.0), current + most)
    return np.where(np.abs(target - current) > current * 0.10, moved, current)


def nudged(che: CadenceState, anchor: int) -> np.ndarray:
    """The counts of a cadence whose anchor is lowered to ``anchor``."""
    return choose_counts(che, anchor, np.array(che.ms_per_batch))


SEED = Tuner(update, nudged, stores_merges=False, has_min_anchor=True)
