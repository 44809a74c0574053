"""The ways to use the replicas of a fleet, with the progress that each is expected to make."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxche.cadence._round_plan import ApplyPolicy
from jaxche.cadence._row_shares import AT_ONCE, Cut, RowShares
from jaxche.cadence._shared_steps import best_shared_steps, effective_ranks, more_steps, shared_worth
from jaxche.cadence._tuner_progress import MergeCost, best_round_ms

# Progress of local steps beside merges, relative to steps that wait for them: moments are not merged. It falls further
# with the time until the result of a merge comes in.
_BESIDE = 0.96


@dataclass(frozen=True)
class Option:
    """A way to use the replicas, and its expected progress.

    Attributes:
      policy: ``sync`` or ``cadence``.
      joined: as :attr:`Choice.joined`.
      active: whether each replica takes part; empty for all.
      progress: in steps of the fastest replica alone.
      rate: the share of the summed speeds.
      round_ms: the length of a round without its merge.
      overlap: the part of a round that runs beside the merge of the round before it.
    """

    policy: ApplyPolicy
    joined: int
    active: tuple[bool, ...]
    progress: float
    rate: float
    round_ms: float
    overlap: float = 0.0


class LocalCosts(NamedTuple):
    """What local steps cost.

    Attributes:
      merge: a merge of them.
      tau_ms: round length τ at which local steps on whole batches make half of their progress.
    """

    merge: MergeCost
    tau_ms: float

    def rate(self, round_ms: float) -> float:
        """The share of the time in which replicas take local steps on whole batches, T / (T + C)."""
        return round_ms / (round_ms + self.merge.added_ms(round_ms))

    def worth(self, round_ms: Any, tau_ms: float) -> Any:
        """The progress of local steps beside merges, relative to steps that wait for them, 0.96 / (1 + f T / τ)."""
        overlap = self.merge.overlap
        return _BESIDE / (1 + overlap * round_ms / tau_ms) if overlap else 1.0


def options(
    shares: RowShares,
    cuts: Mapping[int, Cut],
    batch_rows: int,
    sync_ms: float,
    local_costs: Sequence[LocalCosts],
    shared: int = 0,
) -> list[Option]:
    """All ways to use these replicas, with their progress.

    sync:     k^0.75 / (T_k + C),   T_k the time in which all replicas process the rows of k batches
    cadence:  0.93 k^0.75 / T_k · R D / (1 + (T / T₀)²),   T₀ = 0.65 τ / (ρ √N),   steps share k batches
    cadence:  N^-0.25 · Σ v_i · R D / (1 + T / τ),   T ≈ √(C τ),   N = (Σ v)² / Σ v², on the m fastest

    R = T / (T + C) is the share of the time that is not spent on merges; with overlap C is what a merge adds, and
    D = 0.96 / (1 + f T / τ) what steps beside merges are worth, f the part of a round beside one; 1 without overlap.
    Replicas that share k batches in each step take ρ times as many steps in the same time, in the mean square over
    batches: ρ² = (Σ v)³ / Σ v³ / k². They move as much faster. Whole batches are then an option only if such steps make
    less progress than the fastest replica alone, or some of the replicas more than all of them, however these merge.

    Args:
      shares: the measured speeds.
      cuts: those of :meth:`RowShares.cuts`.
      batch_rows: rows of a whole batch.
      sync_ms: the time of a merge of exact sync.
      local_costs: what local steps cost, for each way to merge them.
      shared: the number of batches that local steps share, 0 if they are on whole batches.
    """
    fixed, slope = shares.fit()
    ms = fixed + slope * batch_rows
    found = _sync_options(ms, cuts, sync_ms)
    whole = [whole_options(ms, costs) for costs in local_costs]
    if not shared:
        return [*found, *itertools.chain.from_iterable(whole)]
    sharing = [_shared_option(ms, cuts[shared], shared, costs) for costs in local_costs]
    all_ranks = max(own[-1].progress for own in whole)
    is_dear = max(one.progress for one in sharing) < max(own[0].progress for own in whole)
    for each, own in zip(sharing, whole, strict=True):
        best = max(own, key=lambda one: one.progress)
        found += [each, best] if is_dear or best.progress > all_ranks else [each]
    return found


def _sync_options(ms: np.ndarray, cuts: Mapping[int, Cut], sync_ms: float) -> list[Option]:
    """Exact sync of different numbers of batches."""
    fast, summed = float(ms.min()), (1 / ms).sum()
    # At most what all do while the fastest replica does one batch. Steps of few rows may take as long as those of many:
    # then that is measured, and other options win.
    most = math.ceil(fast * summed - 1e-9)
    return [
        Option(
            ApplyPolicy.SYNC, k, (), k**AT_ONCE / (wall + sync_ms) * fast, k / (wall + sync_ms) / summed, round_ms=wall
        )
        for k, (_, wall) in cuts.items()
        if k <= most
    ]


def _shared_option(ms: np.ndarray, cut: Cut, shared: int, costs: LocalCosts) -> Option:
    """Local steps that share batches, in rounds of their best length."""
    speed, fast, (rows, wall) = 1 / ms, float(ms.min()), cut
    alike, tau = effective_ranks(rows), costs.tau_ms / more_steps(speed, shared)
    merge = costs.merge
    number = best_shared_steps(merge, tau, alike, wall)
    length = number * wall
    rate = shared / wall * length / (length + merge.added_to([length], [number]))
    worth = shared ** (AT_ONCE - 1) * shared_worth(length, tau, alike) * costs.worth(length, tau)
    return Option(ApplyPolicy.CADENCE, shared, (), rate * worth * fast, rate / speed.sum(), length, merge.overlap)


def whole_options(ms: np.ndarray, costs: LocalCosts) -> list[Option]:
    """Local steps on whole batches, by the fastest replica, by the two fastest, and so on to all.

    A round has whole steps of the slowest of them: about as many as in the best length, or as many as hide a merge.
    """
    order, fast, (merge, tau) = np.argsort(ms, kind="stable"), float(ms.min()), costs
    slow = ms[order]
    speed = 1 / slow
    summed = np.cumsum(speed)  # of the m fastest, and so are all arrays
    # k replicas of equal speed that take a step each and merge make as much progress as an update from k batches.
    # Replicas of unequal speeds v count as (Σ v)² / Σ v² replicas.
    alike = summed**2 / np.cumsum(speed**2)
    steps = max(best_round_ms(merge, tau), fast) / slow
    numbers = [np.floor(steps), np.ceil(steps)]
    if merge.overlap:
        numbers.append(np.ceil(np.ceil(merge.ms / slow) / merge.overlap))
    numbers = np.maximum(1, numbers)
    walls = numbers * slow
    rate = walls / (walls + merge.added_to_steps(numbers, slow))
    worths = rate * alike ** (AT_ONCE - 1) / (1 + walls / tau) * costs.worth(walls, tau)
    best = worths.argmax(0), np.arange(len(ms))
    rates, lengths = summed * rate[best], walls[best].tolist()
    progress = summed * worths[best] * fast
    lengths[0] = alone_batches(merge, fast) * fast
    rates[0] = speed[0] * costs.rate(lengths[0])
    progress[0] = rates[0] * fast
    active = [*map(tuple, (np.argsort(order) <= np.arange(len(ms))[:, None]).tolist())]
    active[-1] = ()  # all of them
    rows = zip(active, progress.tolist(), (rates / summed[-1]).tolist(), lengths, strict=True)
    return [Option(ApplyPolicy.CADENCE, 0, *row, merge.overlap) for row in rows]


def alone_batches(merge: MergeCost, fast_ms: float) -> int:
    """Batches between the merges of a replica that trains alone; the merges add at most 1 % to their time.

    The choice is made again after each of them, so they are few: at the start of a run replicas move fast, and soon the
    others are worth having.
    """
    return max(20, math.ceil(merge.least_round_ms(0.01) / fast_ms))
