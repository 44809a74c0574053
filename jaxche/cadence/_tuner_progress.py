"""The tuner `progress`: the round length at which merges and the local steps between them cost progress equally.

Here are also the medians of the last reports and the cost of a merge, which `steady` uses too. Arrays have one entry a
rank [R] in float64; 0 ms a batch means that the rank was never measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np

from jaxche.cadence._round_plan import ratio_counts, speed_ratios
from jaxche.cadence._tuner import JUMP, MEMORY, CadenceState, Report, Tuner

# τ, the round length at which local steps make half of their progress, relative to the time in which a replica moves as
# far as its parameters are long.
_HALF = 0.45
# Limits of τ for steps on whole batches, in batches of the fastest rank. At the start of a run at a high learning rate
# parameters move as far as they are long in a few steps, but local steps lose less than that says.
_SHORTEST, _LONGEST = 25.0, 2000.0
# τ before it is measured, in batches of the fastest rank.
USUAL = 50
# The round length is kept while it is this close to the best one, because other lengths need compilation.
_KEEP = 1.25
# Most growth of a round in one report.
_GROWTH = 8.0
# The steps that hide an exchange take so much longer than it has taken.
_SPARE = 1.25


# The cost of a merge.


class MergeCost(NamedTuple):
    """What a merge of C ms costs, with overlap: max(0, C - f T) + max(0, E - (1 - f) T) in a round of T ms.

    Attributes:
      ms: C, its duration.
      overlap: f, the part of a round that runs beside the merge of the round before it.
      exchange_ms: E, the time in which replicas exchange their measurements, beside the last steps of a round.
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
        left_ms = (1 - self.overlap) * round_ms
        return max(0.0, self.ms - self.overlap * round_ms) + max(0.0, self.exchange_ms - left_ms)

    def added_to(self, wall_ms: Sequence[float], counts: Sequence[int]) -> float:
        """The time that it adds to a round of these steps, of which each replica takes ⌊f n⌋ beside it."""
        beside = [int(self.overlap * n) for n in counts]
        added = exposed_ms(wall_ms, counts, beside, self.ms)
        sent = sent_after(wall_ms, counts, beside, self.exchange_ms)
        return added + exposed_exchange_ms(wall_ms, counts, sent, self.exchange_ms)

    def added_to_steps(self, numbers: np.ndarray, step_ms: float | np.ndarray) -> np.ndarray:
        """The time that it adds to rounds of these numbers of steps, as :meth:`added_to` of equal replicas."""
        beside = np.floor(self.overlap * numbers)
        after = np.minimum(np.ceil(_SPARE * self.exchange_ms / step_ms), numbers - np.maximum(1, beside))
        return np.maximum(0, self.ms - beside * step_ms) + np.maximum(0, self.exchange_ms - after * step_ms)

    def least_round_ms(self, target: float) -> float:
        """The shortest round to which it adds at most the part ``target``."""
        parts = (self.ms, self.overlap), (self.exchange_ms, 1 - self.overlap), (self.ms + self.exchange_ms, 1.0)
        return max(ms / (target + beside) for ms, beside in parts)

    def best_round_ms(self, best: Callable[[float], float], most: float = math.inf) -> float:
        """The best length of a round, where ``best`` is the function of the cost of a merge that is not hidden.

        ``most`` is the best length if rounds of all lengths took equal time.
        """
        if not self.overlap:
            return best(self.ms)
        # While neither is hidden, longer rounds take no more time, and longer ones than hide both gain nothing.
        merge, exchange = (self.ms, self.overlap), (self.exchange_ms, 1 - self.overlap)
        (first, _), (last, part) = sorted([merge, exchange], key=lambda one: one[0] / one[1])
        shortest = min(first / (1 - part), most)
        return min(max(best(last / (1 - part)), shortest), last / part)


def exposed_ms(wall_ms: Sequence[float], counts: Sequence[float], overlapped: Sequence[int], cost_ms: float) -> float:
    """The time that a merge adds to a round in which each replica takes some of its steps meanwhile.

    max_i [max(f_i w_i, C) + (1 - f_i) w_i] - max_i w_i,   f_i = overlapped_i / n_i
    """
    parts = [k / max(n, 1) for k, n in zip(overlapped, counts, strict=True)]
    ends = [max(part * wall, cost_ms) + (1 - part) * wall for wall, part in zip(wall_ms, parts, strict=True)]
    return max(ends) - max(wall_ms)


def exposed_exchange_ms(
    wall_ms: Sequence[float], counts: Sequence[int], sent: Sequence[int], exchange_ms: float
) -> float:
    """The time that an exchange adds to a round in which each replica takes the steps after the ``sent`` beside it."""
    begin = max(n and wall * k / n for wall, k, n in zip(wall_ms, sent, counts, strict=True))
    return max(0.0, begin + exchange_ms - max(wall_ms))


def sent_after(
    wall_ms: Sequence[float], counts: Sequence[int], overlapped: Sequence[int], exchange_ms: float
) -> tuple[int, ...]:
    """The steps of each replica before it sends its measurements, so that the steps that are left hide an exchange.

    At least one, and those that run beside the merge of the round before. ``wall_ms`` is the time of all ``counts``.
    """

    def one(wall: float, n: int, beside: int) -> int:
        most = n - max(1, beside)
        return n - max(0, min(math.ceil(_SPARE * exchange_ms * n / wall) if wall else 0, most))

    return tuple(map(one, wall_ms, counts, overlapped))


# Medians of the last reports.


def measured(
    che: CadenceState, report: Report
) -> tuple[np.ndarray, tuple[tuple[float, ...], ...], dict[str, tuple[float, ...]]]:
    """Milliseconds a batch after a report, their samples with it, and the fields with the samples of merges."""
    seen = (report.batches > 0) & (report.wall_ms > 0)
    rows = push_samples(che.ms_samples, report.wall_ms, report.batches, seen)
    before = np.array(che.ms_per_batch)
    merges = {
        "sync_samples": pushed(report.sync_ms, che.sync_samples),
        "exchange_samples": pushed(report.exchange_ms, che.exchange_samples),
    }
    return np.where(seen, blend_speeds(before, rows), before), rows, merges


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


# The tuner.


def update(che: CadenceState, report: Report) -> dict[str, Any]:
    """The fields of ``che`` that a report changes."""
    ms, rows, merges = measured(che, report)
    syncs, travels = merges["sync_samples"], pushed(report.travel_ms, che.travel_samples)
    merges["travel_samples"] = travels
    if not ms.any():
        return merges
    round_ms, anchor = che.round_ms, che.anchor
    if syncs and travels:
        cost, fast = MergeCost.of(syncs, merges["exchange_samples"], che.overlap), float(ms[ms > 0].min())
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


def best_round_ms(cost: MergeCost, tau: float) -> float:
    """The round length T with the most progress, T / (T + max(0, C - f T) + max(0, E - (1 - f) T)) / (1 + T / τ).

    √(C τ / (1 - f)), but at least E / (1 - f) and at most C / f, which hide the exchange and the merge
    """
    return cost.best_round_ms(lambda ms: math.sqrt(ms * tau))


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
        added = cost.added_to(walls.tolist(), list(map(int, whole))) if cost.overlap else cost.ms
        progress = float(whole.sum()) / (wall + added) / (1 + wall / tau)
        if progress > most:
            best, most = anchor, progress
    return best


PROGRESS = Tuner(update, chooses_round_ms=True)
