"""Rounds of local steps that share batches: their best length, and the progress of such steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low
from typing import Any

import numpy as np

from jaxche.cadence._tuner import CadenceState
from jaxche.cadence._tuner_progress import USUAL, MergeCost, half_life_ms

# The round length at which such steps of N = 1 / Σ w² replicas make half of their progress, relative to τ / √N, and
# their progress in short rounds, relative to as many steps of one device.
_SHARED, _SHARED_WORTH = 0.65, 0.93


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

    return cost.best_round_ms(best, half)


def shared_steps(che: CadenceState, rows: Sequence[float], joined: int, step_ms: float, most_ms: float) -> int:
    """The steps that share ``joined`` batches in a round of at most ``most_ms``, each rank with so many rows of a step.

    They make the most progress in at most twice the time of a round on whole batches, which grows report by report.
    Before the first of these rounds, what merges cost may be known from exact sync; then it has its best length.
    """
    if not che.sync_samples or (che.round_ms and not che.travel_samples):
        return max(1, round(min(che.round_ms, most_ms) / step_ms))
    fast = min(ms for ms in che.ms_per_batch if ms)
    cost, tau = MergeCost.of(che.sync_samples, che.exchange_samples, che.overlap), USUAL * fast
    if che.travel_samples:
        tau = half_life_ms(median_low(che.travel_samples), fast, more_steps(rows, joined))
        most_ms = min(2 * che.round_ms, most_ms)
    return best_shared_steps(cost, che.half_life * tau, effective_ranks(rows), step_ms, most_ms)


def best_shared_steps(cost: MergeCost, tau: float, replicas: float, step_ms: float, most_ms: float = math.inf) -> int:
    """The steps with the most progress in a round that shares batches, whose best length is at most ``most_ms``.

    Whole steps run beside a merge, ⌊f n⌋ of n: with overlap it is the n with the most progress, at most twice as many.
    """
    number = max(1, round(min(best_shared_ms(cost, tau, replicas), most_ms) / step_ms))
    if not cost.overlap:
        return number
    numbers = np.arange(1, max(2 * number, math.ceil(1 / cost.overlap)) + 1)
    wall = numbers * step_ms
    rate = wall / (wall + cost.added_to_steps(numbers, step_ms))
    progress = rate * shared_worth(wall, tau, replicas) / (1 + cost.overlap * wall / tau)
    return int(numbers[progress.argmax()])


def effective_ranks(speeds: Sequence[float] | np.ndarray) -> float:
    """The number of ranks of equal speed whose mean is as noisy, (Σ v)² / Σ v²."""
    v = np.asarray(speeds, np.float64)
    return float(v.sum() ** 2 / (v**2).sum())


def shared_worth(round_ms: Any, tau: float, replicas: float) -> Any:
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
