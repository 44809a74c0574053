"""The steady tuner: from any start the smallest anchor that meets the overhead target, in closed form.

Arrays have one entry a rank [R] in float64; 0 ms a batch means that the rank was never measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxche.cadence._cadence_state import CadenceState
from jaxche.cadence._counts import LARGEST_COUNT, round_half_away

# Reports kept.
MEMORY = 3
# A relative error of the median above this is a change of speed, not jitter.
JUMP = 0.5
# A count is kept while the exact value is this close, a little more than rounding allows.
HYSTERESIS = 0.6


def update(che: CadenceState, wall: np.ndarray, batches: np.ndarray, sync_ms: float) -> dict[str, Any]:
    """The fields of ``che`` that a round's timings change."""
    syncs = (sync_ms, *che.sync_samples)[:MEMORY] if sync_ms else che.sync_samples
    seen = (batches > 0) & (wall > 0)
    rows = push_samples(che.ms_samples, wall, batches, seen)
    before = np.array(che.ms_per_batch)
    ms = np.where(seen, blend_speeds(before, rows), before)
    if not ms.any():
        return {"sync_samples": syncs}
    target, max_lead = che.overhead_target, che.max_batch_diff
    chosen = min(che.anchor, che.max_anchor)
    sync = middle(syncs) if syncs else 0.0
    if sync_ms:
        # A first report may include compilation. It may shorten the next round, which is cheap, but not lengthen it.
        high = che.max_anchor if che.sync_samples else chosen
        chosen = choose_anchor(ms, sync, target, high, max_lead, che.overlap)
    counts = choose_counts(chosen, ms, np.array(che.batch_counts, np.float64), max_lead, sync, target, che.overlap)
    measured = {"ms_samples": rows, "sync_samples": syncs}
    return {"anchor": chosen, "batch_counts": counts, "ms_per_batch": ms} | measured


def push_samples(
    rows: tuple[tuple[float, ...], ...], wall: np.ndarray, batches: np.ndarray, seen: np.ndarray
) -> tuple[tuple[float, ...], ...]:
    """Push this round's ms a batch onto the last three of each measured rank, newest first; 0 is an empty entry."""
    newest = np.divide(wall, batches, out=np.zeros_like(wall), where=seen)
    if seen.all():
        return (tuple(newest.tolist()), *rows[: MEMORY - 1])
    # A rank that ran nothing keeps its samples, so the columns are pushed one by one.
    old = np.zeros((MEMORY, wall.size))
    old[: len(rows)] = rows or old[:0]
    pushed = np.where(seen, np.vstack([newest, old[:-1]]), old)
    return tuple(tuple(row.tolist()) for row in pushed)


def lower_median(rows: np.ndarray) -> np.ndarray:
    """Median of the non-zero entries of each column, the smaller middle one of an even number; 0 where there is none.

    Of two samples it is the smaller one: a first report that includes compilation is dropped at the second.
    """
    ordered = np.sort(rows, axis=0)
    filled = np.count_nonzero(rows, axis=0)
    # Zeros sort to the front; the (filled − 1) // 2 th after them is the median.
    place = len(rows) - filled + (filled - 1) // 2
    return np.take_along_axis(ordered, place[None], axis=0)[0]


def middle(samples: Sequence[float]) -> float:
    """The median, the smaller middle one of an even number."""
    return sorted(samples)[(len(samples) - 1) // 2]


def blend_speeds(ms: np.ndarray, rows: tuple[tuple[float, ...], ...]) -> np.ndarray:
    """Blend in the median of the last three by its own error, as the seed tuner does with the last time.

    The median replaces the estimate at once where it is more than 50 % off, and until there are three reports.
    """
    samples = np.array(rows)
    median = lower_median(samples)
    with np.errstate(over="ignore"):
        error = np.divide(np.abs(median - ms), ms, out=np.ones_like(ms), where=ms > 0)
    at_once = (error > JUMP) | (np.count_nonzero(samples, axis=0) < MEMORY)
    alpha = np.where(at_once, 1.0, np.clip(error, 0.1, 0.8))
    return alpha * median + (1.0 - alpha) * ms


def speed_ratios(ms: np.ndarray) -> np.ndarray:
    """t_slow / t_i: exactly 1 for the slowest rank, and 1 for one never measured."""
    with np.errstate(over="ignore"):
        return np.minimum(np.divide(ms.max(), ms, out=np.ones_like(ms), where=ms > 0), LARGEST_COUNT)


def ratio_counts(anchor: int, ratio: np.ndarray, max_lead: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(exact, whole) counts that fill the time of ``anchor`` slow batches: a t_slow / t_i, at most a + max_lead."""
    exact = np.minimum(anchor * ratio, LARGEST_COUNT if max_lead is None else float(anchor + max_lead))
    # Ratios are at least 1, so no count rounds to 0.
    return exact, round_half_away(exact)


def plan_overhead(
    anchor: int,
    counts: np.ndarray,
    exact: np.ndarray,
    ms: np.ndarray,
    slow: float,
    sync_ms: float,
    overlap: float = 0.0,
) -> float:
    """Time that the merge and the waiting caused by whole counts add to a round, relative to its work.

    The part ``overlap`` of the round hides as much of the merge.
    """
    wall = float((counts * ms).max())
    wall += max(0.0, sync_ms - overlap * wall)
    return wall / (anchor * slow) * float(exact.sum() / counts.sum()) - 1


def choose_anchor(
    ms: np.ndarray, sync_ms: float, target: float, high: int, max_lead: int | None, overlap: float = 0.0
) -> int:
    """Smallest anchor whose overhead meets the target: the merge, and the waiting caused by whole counts.

    overhead(a) = (max_i n_i t_i + C) / (a t_slow) · Σ a t_slow / t_i / Σ n_i − 1, n_i = round(a t_slow / t_i)

    With counts that need no rounding this is C / (a t_slow), met first at a = ⌈C / (target t_slow)⌉; rounding only
    increases it. Without its part, a cheap merge would give an anchor of 1, where 2.5 : 1 runs as 3 : 1.
    """
    slow = float(ms.max())
    # Tolerance: a rounding error in 0.1 · 10 must not add a batch.
    first = max(1, math.ceil(min(sync_ms / (target + overlap) / slow, high) - 1e-9))
    best, least, ratio = first, math.inf, speed_ratios(ms)
    # Rounding costs at most half a batch of wall time and half a batch of work: 1 / target more batches pay for both.
    for anchor in range(first, min(high, first + math.ceil(1 / target)) + 1):
        exact, whole = ratio_counts(anchor, ratio, max_lead)
        overhead = plan_overhead(anchor, whole, exact, ms, slow, sync_ms, overlap)
        if overhead <= target + 1e-9:
            return anchor
        if overhead < least:
            best, least = anchor, overhead
    return best


def choose_counts(
    anchor: int,
    ms: np.ndarray,
    current: np.ndarray,
    max_lead: int | None,
    sync_ms: float,
    target: float,
    overlap: float = 0.0,
) -> np.ndarray:
    """n_i = round(a t_slow / t_i), the slowest exactly a.

    A count is kept while the exact value is within 0.6 of it, so that jitter does not change it, unless the kept counts
    miss an overhead target that rounded counts meet.
    """
    exact, whole = ratio_counts(anchor, speed_ratios(ms), max_lead)
    near = (np.abs(exact - current) <= HYSTERESIS) & (ms < ms.max())
    kept = np.where(near, current, whole)
    overhead = plan_overhead(anchor, kept, exact, ms, float(ms.max()), sync_ms, overlap)
    return kept if overhead <= target else whole
