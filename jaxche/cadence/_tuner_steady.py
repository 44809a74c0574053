"""The tuner `steady`: the smallest anchor that meets the overhead target, in closed form, from any start.

Arrays have one entry a rank [R] in float64; 0 ms a batch means that the rank was never measured.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxche.cadence._round_plan import ratio_counts, speed_ratios
from jaxche.cadence._tuner import CadenceState, Report, Tuner
from jaxche.cadence._tuner_progress import MergeCost, measured

# A count is kept while the exact value is this close, a little more than rounding allows.
HYSTERESIS = 0.6


def update(che: CadenceState, report: Report) -> dict[str, Any]:
    """The fields of ``che`` that a report changes."""
    ms, rows, merges = measured(che, report)
    if not ms.any():
        return merges
    target, max_lead = che.overhead_target, che.max_batch_diff
    chosen = min(che.anchor, che.max_anchor)
    cost = MergeCost.of(merges["sync_samples"], merges["exchange_samples"], che.overlap)
    if report.sync_ms:
        # A first report may include compilation. It may shorten the next round, which is cheap, but not lengthen it.
        high = che.max_anchor if che.sync_samples else chosen
        chosen = steady_anchor(ms, cost, target, high, max_lead)
    counts = steady_counts(chosen, ms, np.array(che.batch_counts, np.float64), max_lead, cost, target)
    return merges | {"anchor": chosen, "batch_counts": counts, "ms_per_batch": ms, "ms_samples": rows}


def plan_overhead(
    anchor: int, counts: np.ndarray, exact: np.ndarray, ms: np.ndarray, slow: float, cost: MergeCost
) -> float:
    """Time that the merge and the waiting caused by whole counts add to a round, relative to its work."""
    wall = float((counts * ms).max())
    wall += cost.added_ms(wall)
    return wall / (anchor * slow) * float(exact.sum() / counts.sum()) - 1


def steady_anchor(ms: np.ndarray, cost: MergeCost, target: float, high: int, max_lead: int | None) -> int:
    """Smallest anchor whose overhead meets the target: the merge, and the waiting caused by whole counts.

    overhead(a) = (max_i n_i t_i + C) / (a t_slow) · Σ a t_slow / t_i / Σ n_i − 1, n_i = round(a t_slow / t_i)

    With counts that need no rounding this is C / (a t_slow), met first at a = ⌈C / (target t_slow)⌉. Counts that are
    rounded up can meet it half a batch before: it is at least C / (a t_slow) · Σ a t_slow / t_i / Σ n_i. Without the
    part of the waiting, a cheap merge would give an anchor of 1, where 2.5 : 1 runs as 3 : 1. With overlap C is what
    the merge and the exchange of measurements add to the round, as :class:`MergeCost` has it.
    """
    slow, ratio = float(ms.max()), speed_ratios(ms)
    rounding = (ms.size - 1) / 2 / float(ratio.sum())
    first = max(1, math.ceil(min(cost.least_round_ms(target) / slow - rounding, high)))
    best, least = first, math.inf
    # Rounding costs at most half a batch of wall time and half a batch of work: 1 / target more batches pay for both.
    for anchor in range(first, min(high, first + math.ceil(1 / target)) + 1):
        exact, whole = ratio_counts(anchor, ratio, max_lead)
        overhead = plan_overhead(anchor, whole, exact, ms, slow, cost)
        if overhead <= target + 1e-9:
            return anchor
        if overhead < least:
            best, least = anchor, overhead
    return best


def steady_counts(
    anchor: int,
    ms: np.ndarray,
    current: np.ndarray,
    max_lead: int | None,
    cost: MergeCost,
    target: float,
) -> np.ndarray:
    """n_i = round(a t_slow / t_i), the slowest exactly a.

    A count is kept while the exact value is within 0.6 of it, so that jitter does not change it, unless the kept counts
    miss an overhead target that rounded counts meet.
    """
    exact, whole = ratio_counts(anchor, speed_ratios(ms), max_lead)
    near = (np.abs(exact - current) <= HYSTERESIS) & (ms < ms.max())
    kept = np.where(near, current, whole)
    overhead = plan_overhead(anchor, kept, exact, ms, float(ms.max()), cost)
    return kept if overhead <= target else whole


STEADY = Tuner(update)
