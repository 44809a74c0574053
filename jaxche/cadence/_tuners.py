"""The tuners ``steady`` and ``progress``: the anchor and the counts from medians of the last reports.

``steady`` finds from any start the smallest anchor that meets the overhead target, in closed form, and ``progress`` the
length of a round at which merges and the local steps between them cost progress equally. Arrays have one entry a rank
[R] in float64; 0 ms a batch means that the rank was never measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# NumPy holds counts in 64 bits; a time near 0 must not overflow them.
LARGEST_COUNT = 2.0**53
# Number of stored reports.
MEMORY = 3
# A relative error of the median above this is a change of speed, not jitter.
JUMP = 0.5
# A count is kept while the exact value is this close, a little more than rounding allows.
HYSTERESIS = 0.6
# τ, the round length at which local steps make half of their progress, relative to the time in which a replica moves as
# far as its parameters are long.
_HALF = 0.45
# The same where N = 1 / Σ w² replicas share batches in each step, relative to τ / √N, and the progress of such steps in
# short rounds, relative to as many steps of one device.
_SHARED, _SHARED_WORTH = 0.65, 0.93
# Limits of that time, in batches of the fastest rank.
_SHORTEST, _LONGEST = 5.0, 2000.0
# The round length is kept while it is this close to the best one, because other lengths need compilation.
_KEEP = 1.25
# Most growth of a round in one report.
_GROWTH = 8.0


@dataclass(frozen=True, repr=False)
class CadenceState:
    """The fields of :class:`~jaxche.ElChe`, which documents them: what the tuners read, and what they change."""

    world_size: int = 2
    anchor: int = 10
    overhead_target: float = 0.10
    max_anchor: int = 200
    max_batch_diff: int | None = None
    tuner: str = "seed"
    min_anchor: int = field(default=0, kw_only=True)
    batch_counts: tuple[int, ...] = field(default=(), kw_only=True)
    ms_per_batch: tuple[float, ...] = field(default=(), kw_only=True)
    ms_samples: tuple[tuple[float, ...], ...] = field(default=(), kw_only=True)
    sync_samples: tuple[float, ...] = field(default=(), kw_only=True)
    travel_samples: tuple[float, ...] = field(default=(), kw_only=True)
    round_ms: float = field(default=0.0, kw_only=True)
    overlap: float = field(default=0.0, kw_only=True)
    half_life: float = field(default=1.0, kw_only=True)


def steady(che: CadenceState, wall: np.ndarray, batches: np.ndarray, sync_ms: float) -> dict[str, Any]:
    """The fields of ``che`` that a report changes under the tuner ``steady``."""
    ms, rows, syncs = measured(che, wall, batches, sync_ms)
    if not ms.any():
        return {"sync_samples": syncs}
    target, max_lead = che.overhead_target, che.max_batch_diff
    chosen = min(che.anchor, che.max_anchor)
    sync = middle(syncs) if syncs else 0.0
    if sync_ms:
        # A first report may include compilation. It may shorten the next round, which is cheap, but not lengthen it.
        high = che.max_anchor if che.sync_samples else chosen
        chosen = steady_anchor(ms, sync, target, high, max_lead, che.overlap)
    counts = steady_counts(chosen, ms, np.array(che.batch_counts, np.float64), max_lead, sync, target, che.overlap)
    return {"anchor": chosen, "batch_counts": counts, "ms_per_batch": ms, "ms_samples": rows, "sync_samples": syncs}


def progress(
    che: CadenceState, wall: np.ndarray, batches: np.ndarray, sync_ms: float, travel_ms: float = 0.0
) -> dict[str, Any]:
    """The fields of ``che`` that a report changes under the tuner ``progress``."""
    ms, rows, syncs = measured(che, wall, batches, sync_ms)
    travels = (travel_ms, *che.travel_samples)[:MEMORY] if travel_ms else che.travel_samples
    merges = {"sync_samples": syncs, "travel_samples": travels}
    if not ms.any():
        return merges
    round_ms, anchor = che.round_ms, che.anchor
    if syncs and travels:
        sync, fast = middle(syncs), float(ms[ms > 0].min())
        tau = che.half_life * half_life_ms(middle(travels), fast)
        limit = _GROWTH * (round_ms or anchor * float(ms.max()))
        if len(syncs) == 1:
            limit /= _GROWTH  # a first report may include compilation: it may shorten a round, not lengthen it
        best = min(max(best_round_ms(sync, tau, che.overlap), fast), limit)
        if not round_ms or not 1 / _KEEP < best / round_ms < _KEEP:
            round_ms = best
            anchor = progress_anchor(ms, sync, tau, round_ms, che.max_anchor, che.max_batch_diff, che.overlap)
    anchor = min(anchor, che.max_anchor)
    counts = ratio_counts(anchor, speed_ratios(ms), che.max_batch_diff)[1]
    return merges | {
        "anchor": anchor,
        "batch_counts": counts,
        "ms_per_batch": ms,
        "ms_samples": rows,
        "round_ms": round_ms,
    }


# Measured speeds.


def measured(
    che: CadenceState, wall: np.ndarray, batches: np.ndarray, sync_ms: float
) -> tuple[np.ndarray, tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """Milliseconds a batch after a report, and with it the samples of speeds and of merges."""
    seen = (batches > 0) & (wall > 0)
    rows = push_samples(che.ms_samples, wall, batches, seen)
    before = np.array(che.ms_per_batch)
    syncs = (sync_ms, *che.sync_samples)[:MEMORY] if sync_ms else che.sync_samples
    return np.where(seen, blend_speeds(before, rows), before), rows, syncs


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


# Counts in proportion to speeds.


def round_half_away(x: np.ndarray) -> np.ndarray:
    """Round non-negative numbers as Rust does, halves up; NumPy and Python round halves to even."""
    whole = np.floor(x)
    return whole + (x - whole >= 0.5)


def speed_ratios(ms: np.ndarray) -> np.ndarray:
    """t_slow / t_i: exactly 1 for the slowest rank, and 1 for one never measured."""
    with np.errstate(over="ignore"):
        return np.minimum(np.divide(ms.max(), ms, out=np.ones_like(ms), where=ms > 0), LARGEST_COUNT)


def ratio_counts(anchor: int, ratio: np.ndarray, max_lead: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(exact, whole) counts that fill the time of ``anchor`` slow batches: a t_slow / t_i, at most a + max_lead."""
    exact = np.minimum(anchor * ratio, LARGEST_COUNT if max_lead is None else float(anchor + max_lead))
    # Ratios are at least 1, so no count rounds to 0.
    return exact, round_half_away(exact)


# The steady tuner.


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


def steady_anchor(
    ms: np.ndarray, sync_ms: float, target: float, high: int, max_lead: int | None, overlap: float = 0.0
) -> int:
    """Smallest anchor whose overhead meets the target: the merge, and the waiting caused by whole counts.

    overhead(a) = (max_i n_i t_i + C) / (a t_slow) · Σ a t_slow / t_i / Σ n_i − 1, n_i = round(a t_slow / t_i)

    With counts that need no rounding this is C / (a t_slow), met first at a = ⌈C / (target t_slow)⌉. Counts that are
    rounded up can meet it half a batch before: it is at least C / (a t_slow) · Σ a t_slow / t_i / Σ n_i. Without the
    part of the waiting, a cheap merge would give an anchor of 1, where 2.5 : 1 runs as 3 : 1.
    """
    slow, ratio = float(ms.max()), speed_ratios(ms)
    rounding = (ms.size - 1) / 2 / float(ratio.sum())
    first = max(1, math.ceil(min(sync_ms / (target + overlap) / slow - rounding, high)))
    best, least = first, math.inf
    # Rounding costs at most half a batch of wall time and half a batch of work: 1 / target more batches pay for both.
    for anchor in range(first, min(high, first + math.ceil(1 / target)) + 1):
        exact, whole = ratio_counts(anchor, ratio, max_lead)
        overhead = plan_overhead(anchor, whole, exact, ms, slow, sync_ms, overlap)
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


# The progress tuner.


def best_round_ms(sync_ms: float, tau: float, overlap: float = 0.0) -> float:
    """The round length T with the most progress, T / (T + max(0, C - f T)) / (1 + T / τ).

    √(C τ / (1 - f)), but no longer than hides the merge, C / f
    """
    hidden = sync_ms / overlap if overlap else math.inf
    return min(math.sqrt(sync_ms * tau / (1 - overlap)), hidden)


def best_shared_ms(sync_ms: float, tau: float, replicas: float, overlap: float = 0.0) -> float:
    """The round length T with the most progress where local steps share batches, T / (T + C - f T) · worth(T).

    2 T³ + C T² = C T₀²  with C / (1 - f) for C, but no longer than hides the merge, C / f
    """
    hidden = sync_ms / overlap if overlap else math.inf
    cost, half = sync_ms / (1 - overlap), _shared_scale(tau, replicas)
    length = (cost * half**2 / 2) ** (1 / 3)
    for _ in range(8):  # Newton's method from above, on a function that is convex there
        length -= (2 * length**3 + cost * (length**2 - half**2)) / (6 * length**2 + 2 * cost * length or 1)
    return min(length, hidden)


def shared_round_ms(che: CadenceState, rows: Sequence[float]) -> float:
    """The length of a round whose local steps share batches, each rank with so many rows of a step."""
    if not (che.sync_samples and che.travel_samples and che.round_ms):
        return che.round_ms
    sync, tau = _merge_and_half_life_ms(che)
    best = best_shared_ms(sync, tau, effective_ranks(rows), che.overlap)
    return min(best, 2 * che.round_ms)  # which grows step by step


def _merge_and_half_life_ms(che: CadenceState) -> tuple[float, float]:
    """The measured time of a merge, and the τ of local steps."""
    fast = min(ms for ms in che.ms_per_batch if ms)
    return middle(che.sync_samples), che.half_life * half_life_ms(middle(che.travel_samples), fast)


def shared_steps(che: CadenceState, rows: Sequence[float], step_ms: float, most_ms: float = math.inf) -> int:
    """The steps that share batches in a round of at most ``most_ms``, each rank with so many rows of a step.

    Whole steps run beside a merge, ⌊f n⌋ of n: with overlap it is the n with the most progress, at most twice as many.
    """
    number = max(1, round(min(shared_round_ms(che, rows), most_ms) / step_ms))
    if not (che.overlap and che.sync_samples and che.travel_samples):
        return number
    (sync, tau), replicas = _merge_and_half_life_ms(che), effective_ranks(rows)

    def progress(n: int) -> float:
        wall, waited = n * step_ms, max(0.0, sync - int(che.overlap * n) * step_ms)
        return wall / (wall + waited) * shared_worth(wall, tau, replicas) / (1 + che.overlap * wall / tau)

    return max(range(1, max(2 * number, math.ceil(1 / che.overlap)) + 1), key=progress)


def effective_ranks(speeds: Sequence[float] | np.ndarray) -> float:
    """The number of ranks of equal speed whose mean is as noisy, (Σ v)² / Σ v²."""
    v = np.asarray(speeds, np.float64)
    return float(v.sum() ** 2 / (v**2).sum())


def shared_worth(round_ms: float, tau: float, replicas: float) -> float:
    """The progress of local steps that share batches, relative to as many steps of one device, 0.93 / (1 + (T / T₀)²).

    To first order in the learning rate they are those steps, so what is lost grows with the square of a round.
    """
    return _SHARED_WORTH / (1 + (round_ms / _shared_scale(tau, replicas)) ** 2)


def _shared_scale(tau: float, replicas: float) -> float:
    """T₀, the round length at which local steps that share batches make half of their progress."""
    return _SHARED * tau / math.sqrt(replicas)


def half_life_ms(travel_ms: float, fast_ms: float) -> float:
    """τ, the round length at which local steps make half of their progress."""
    return min(max(_HALF * travel_ms, _SHORTEST * fast_ms), _LONGEST * fast_ms)


def progress_anchor(
    ms: np.ndarray,
    sync_ms: float,
    tau: float,
    round_ms: float,
    max_anchor: int,
    max_lead: int | None,
    overlap: float = 0.0,
) -> int:
    """The anchor with the most progress a second, in whole batches, up to twice the wanted length of a round.

    progress(a) = Σ n_i / (T + max(0, C - f T)) / (1 + T / τ),   n_i = round(a t_slow / t_i),   T = max_i n_i t_i
    """
    slow, ratio = float(ms.max()), speed_ratios(ms)
    best, most = 1, 0.0
    for anchor in range(1, max(1, min(max_anchor, math.ceil(2 * round_ms / slow))) + 1):
        whole = ratio_counts(anchor, ratio, max_lead)[1]
        wall = float((whole * ms).max())
        progress = float(whole.sum()) / (wall + max(0.0, sync_ms - overlap * wall)) / (1 + wall / tau)
        if progress > most:
            best, most = anchor, progress
    return best
