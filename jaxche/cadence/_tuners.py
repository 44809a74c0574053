"""The tuners ``steady`` and ``progress``: the anchor and the counts from medians of the last reports.

``steady`` finds from any start the smallest anchor that meets the overhead target, in closed form, and ``progress`` the
length of a round at which merges and the local steps between them cost progress equally. Arrays have one entry a rank
[R] in float64; 0 ms a batch means that the rank was never measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, NamedTuple

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
# Limits of τ for steps on whole batches, in batches of the fastest rank. At the start of a run at a high learning rate
# parameters move as far as they are long in a few steps, but local steps lose less than that says.
_SHORTEST, _LONGEST = 25.0, 2000.0
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
    exchange_samples: tuple[float, ...] = field(default=(), kw_only=True)
    round_ms: float = field(default=0.0, kw_only=True)
    overlap: float = field(default=0.0, kw_only=True)
    half_life: float = field(default=1.0, kw_only=True)


class MergeCost(NamedTuple):
    """What a merge of C ms costs, with overlap: max(0, C - f T) + E in a round of T ms.

    Attributes:
      ms: C, its duration.
      overlap: f, the part of a round that runs beside the merge of the round before it.
      exchange_ms: E, the time at the end of a round in which replicas exchange their measurements; no steps run then.
    """

    ms: float
    overlap: float = 0.0
    exchange_ms: float = 0.0

    @classmethod
    def of(cls, syncs: Sequence[float], exchanges: Sequence[float], overlap: float) -> MergeCost:
        """From the last measurements, newest first; 0 for what was not measured."""
        # Without overlap the exchange is a part of the merge.
        exchange_ms = median_low(exchanges) if exchanges and overlap else 0.0
        return cls(median_low(syncs) if syncs else 0.0, overlap, exchange_ms)

    def added_ms(self, round_ms: float) -> float:
        """The time that it adds to a round."""
        return max(0.0, self.ms - self.overlap * round_ms) + self.exchange_ms

    def added_to(self, wall_ms: Sequence[float], counts: Sequence[float]) -> float:
        """The time that it adds to a round of these steps, of which each replica takes ⌊f n⌋ beside it."""
        return exposed_ms(wall_ms, counts, [int(self.overlap * n) for n in counts], self.ms) + self.exchange_ms

    def least_round_ms(self, target: float) -> float:
        """The shortest round to which it adds at most the part ``target``."""
        return max((self.ms + self.exchange_ms) / (target + self.overlap), self.exchange_ms / target)

    def best_round_ms(self, best: Callable[[float], float]) -> float:
        """The best length of a round, where ``best`` is the function of the cost of a merge that is not hidden."""
        # Longer rounds than hide the merge are best only where the exchange alone asks for them.
        hidden = max(self.ms / self.overlap, best(self.exchange_ms)) if self.overlap else math.inf
        return min(best((self.ms + self.exchange_ms) / (1 - self.overlap)), hidden)


def exposed_ms(wall_ms: Sequence[float], counts: Sequence[float], overlapped: Sequence[int], cost_ms: float) -> float:
    """The time that a merge adds to a round in which each replica takes some of its steps meanwhile.

    max_i [max(f_i w_i, C) + (1 - f_i) w_i] - max_i w_i,   f_i = overlapped_i / n_i
    """
    parts = [k / max(n, 1) for k, n in zip(overlapped, counts, strict=True)]
    ends = [max(part * wall, cost_ms) + (1 - part) * wall for wall, part in zip(wall_ms, parts, strict=True)]
    return max(ends) - max(wall_ms)


def steady(
    che: CadenceState, wall: np.ndarray, batches: np.ndarray, sync_ms: float, exchange_ms: float = 0.0
) -> dict[str, Any]:
    """The fields of ``che`` that a report changes under the tuner ``steady``."""
    ms, rows, syncs = measured(che, wall, batches, sync_ms)
    exchanges = pushed(exchange_ms, che.exchange_samples)
    merges = {"sync_samples": syncs, "exchange_samples": exchanges}
    if not ms.any():
        return merges
    target, max_lead = che.overhead_target, che.max_batch_diff
    chosen = min(che.anchor, che.max_anchor)
    cost = MergeCost.of(syncs, exchanges, che.overlap)
    if sync_ms:
        # A first report may include compilation. It may shorten the next round, which is cheap, but not lengthen it.
        high = che.max_anchor if che.sync_samples else chosen
        chosen = steady_anchor(ms, cost, target, high, max_lead)
    counts = steady_counts(chosen, ms, np.array(che.batch_counts, np.float64), max_lead, cost, target)
    return merges | {"anchor": chosen, "batch_counts": counts, "ms_per_batch": ms, "ms_samples": rows}


def progress(
    che: CadenceState,
    wall: np.ndarray,
    batches: np.ndarray,
    sync_ms: float,
    travel_ms: float = 0.0,
    exchange_ms: float = 0.0,
) -> dict[str, Any]:
    """The fields of ``che`` that a report changes under the tuner ``progress``."""
    ms, rows, syncs = measured(che, wall, batches, sync_ms)
    travels = pushed(travel_ms, che.travel_samples)
    exchanges = pushed(exchange_ms, che.exchange_samples)
    merges = {"sync_samples": syncs, "travel_samples": travels, "exchange_samples": exchanges}
    if not ms.any():
        return merges
    round_ms, anchor = che.round_ms, che.anchor
    if syncs and travels:
        cost, fast = MergeCost.of(syncs, exchanges, che.overlap), float(ms[ms > 0].min())
        tau = che.half_life * half_life_ms(median_low(travels), fast)
        limit = _GROWTH * (round_ms or anchor * float(ms.max()))
        if len(syncs) == 1:
            limit /= _GROWTH  # a first report may include compilation: it may shorten a round, not lengthen it
        best = min(max(best_round_ms(cost, tau), fast), limit)
        if not round_ms or not 1 / _KEEP < best / round_ms < _KEEP:
            round_ms = best
            anchor = progress_anchor(ms, cost, tau, round_ms, che.max_anchor, che.max_batch_diff)
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
    return np.where(seen, blend_speeds(before, rows), before), rows, pushed(sync_ms, che.sync_samples)


def pushed(ms: float, samples: tuple[float, ...]) -> tuple[float, ...]:
    """The last three samples of a time, newest first, with this one unless it is 0, not known."""
    return (ms, *samples)[:MEMORY] if ms else samples


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
    the merge adds to the round, max(0, C - f T) + E.
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


# The progress tuner.


def best_round_ms(cost: MergeCost, tau: float) -> float:
    """The round length T with the most progress, T / (T + max(0, C - f T) + E) / (1 + T / τ).

    √((C + E) τ / (1 - f)), but no longer than the larger of C / f, which hides the merge, and √(E τ)
    """
    return cost.best_round_ms(lambda ms: math.sqrt(ms * tau))


def best_shared_ms(cost: MergeCost, tau: float, replicas: float) -> float:
    """The round length T with the most progress where local steps share batches, T / (T + C) · worth(T).

    2 T³ + C T² = C T₀²,  with overlap as :func:`best_round_ms`
    """
    half = _shared_scale(tau, replicas)

    def best(ms: float) -> float:
        length = (ms * half**2 / 2) ** (1 / 3)
        for _ in range(8):  # Newton's method from above, on a function that is convex there
            length -= (2 * length**3 + ms * (length**2 - half**2)) / (6 * length**2 + 2 * ms * length or 1)
        return length

    return cost.best_round_ms(best)


def shared_round_ms(che: CadenceState, rows: Sequence[float], joined: int = 1) -> float:
    """The length of a round whose local steps share so many batches, each rank with so many rows of a step."""
    if not (che.sync_samples and che.travel_samples and che.round_ms):
        return che.round_ms
    cost, tau = _merge_and_half_life_ms(che, more_steps(rows, joined))
    best = best_shared_ms(cost, tau, effective_ranks(rows))
    return min(best, 2 * che.round_ms)  # which grows step by step


def _merge_and_half_life_ms(che: CadenceState, more: float) -> tuple[MergeCost, float]:
    """The measured cost of a merge, and the τ of local steps that are so many times as many as on whole batches."""
    fast = min(ms for ms in che.ms_per_batch if ms)
    cost = MergeCost.of(che.sync_samples, che.exchange_samples, che.overlap)
    return cost, che.half_life * half_life_ms(median_low(che.travel_samples), fast, more)


def shared_steps(
    che: CadenceState, rows: Sequence[float], step_ms: float, most_ms: float = math.inf, joined: int = 1
) -> int:
    """The steps that share batches in a round of at most ``most_ms``, each rank with so many rows of a step.

    Whole steps run beside a merge, ⌊f n⌋ of n: with overlap it is the n with the most progress, at most twice as many.
    """
    number = max(1, round(min(shared_round_ms(che, rows, joined), most_ms) / step_ms))
    if not (che.sync_samples and che.travel_samples):
        return number
    cost, tau = _merge_and_half_life_ms(che, more_steps(rows, joined))
    return best_shared_steps(number, cost, tau, effective_ranks(rows), step_ms)


def best_shared_steps(number: int, cost: MergeCost, tau: float, replicas: float, step_ms: float) -> int:
    """The steps with the most progress in a round that shares batches, about ``number``: whole ones hide a merge."""
    if not cost.overlap:
        return number

    def progress(n: int) -> float:
        wall = n * step_ms
        rate = wall / (wall + cost.added_to([wall], [n]))
        return rate * shared_worth(wall, tau, replicas) / (1 + cost.overlap * wall / tau)

    return max(range(1, max(2 * number, math.ceil(1 / cost.overlap)) + 1), key=progress)


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


def more_steps(speeds: Sequence[float] | np.ndarray, joined: int) -> float:
    """How many times as many steps ranks of these speeds take that share batches, ρ = √((Σ v)³ / Σ v³) / k."""
    v = np.asarray(speeds, np.float64)
    return float(np.sqrt(v.sum() ** 3 / (v**3).sum())) / joined


def half_life_ms(travel_ms: float, fast_ms: float, more: float = 1.0) -> float:
    """τ, the round length at which local steps make half of their progress.

    ``more`` is how many times as many steps ranks take as on whole batches: they move as much faster.
    """
    return min(max(_HALF * travel_ms, _SHORTEST * fast_ms / more), _LONGEST * fast_ms)


def progress_anchor(
    ms: np.ndarray, cost: MergeCost, tau: float, round_ms: float, max_anchor: int, max_lead: int | None
) -> int:
    """The anchor with the most progress a second, in whole batches, up to twice the wanted length of a round.

    progress(a) = Σ n_i / (T + C) / (1 + T / τ),   n_i = round(a t_slow / t_i),   T = max_i n_i t_i

    With overlap C is what the merge adds to a round in which each replica takes ⌊f n_i⌋ steps beside it.
    """
    slow, ratio = float(ms.max()), speed_ratios(ms)
    best, most = 1, 0.0
    high = max(math.ceil(2 * round_ms / slow), math.ceil(1 / cost.overlap) if cost.overlap else 1)
    for anchor in range(1, min(max_anchor, high) + 1):
        whole = ratio_counts(anchor, ratio, max_lead)[1]
        walls = whole * ms
        wall = float(walls.max())
        added = cost.added_to(walls.tolist(), whole.tolist()) if cost.overlap else cost.ms
        progress = float(whole.sum()) / (wall + added) / (1 + wall / tau)
        if progress > most:
            best, most = anchor, progress
    return best
