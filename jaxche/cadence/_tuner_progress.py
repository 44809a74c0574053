"""The progress tuner: the length of a round at which merges and the local steps between them cost progress equally.

Arrays have one entry a rank [R] in float64; 0 ms a batch means that the rank was never measured.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxche.cadence._cadence_state import CadenceState
from jaxche.cadence._tuner_steady import MEMORY, blend_speeds, middle, push_samples, ratio_counts, speed_ratios

# Local steps lose half of their worth in a round that takes this part of the time in which a replica moves as far as
# its parameters are long.
_HALF = 0.45
# That time lies within these numbers of batches of the fastest rank, whatever a report says.
_SHORTEST, _LONGEST = 5.0, 2000.0
# The round length is kept while it is this close to the best one, which is flat: other rows are compiled for.
_KEEP = 1.25
# Most growth of a round in one report.
_GROWTH = 8.0


def update(
    che: CadenceState, wall: np.ndarray, batches: np.ndarray, sync_ms: float, travel_ms: float = 0.0
) -> dict[str, Any]:
    """The fields of ``che`` that the report of a round changes."""
    syncs = (sync_ms, *che.sync_samples)[:MEMORY] if sync_ms else che.sync_samples
    travels = (travel_ms, *che.travel_samples)[:MEMORY] if travel_ms else che.travel_samples
    seen = (batches > 0) & (wall > 0)
    rows = push_samples(che.ms_samples, wall, batches, seen)
    before = np.array(che.ms_per_batch)
    ms = np.where(seen, blend_speeds(before, rows), before)
    measured = {"sync_samples": syncs, "travel_samples": travels}
    if not ms.any():
        return measured
    round_ms, anchor = che.round_ms, che.anchor
    if syncs and travels:
        sync, tau = middle(syncs), che.half_life * half_life_ms(middle(travels), float(ms[ms > 0].min()))
        limit = _GROWTH * (round_ms or anchor * float(ms.max()))
        if len(syncs) == 1:
            limit /= _GROWTH  # a first report may include compilation: it may shorten a round, not lengthen it
        best = min(max(best_round_ms(sync, tau, che.overlap), float(ms[ms > 0].min())), limit)
        if not round_ms or not 1 / _KEEP < best / round_ms < _KEEP:
            round_ms = best
            anchor = choose_anchor(ms, sync, tau, round_ms, che.max_anchor, che.max_batch_diff, che.overlap)
    anchor = min(anchor, che.max_anchor)
    counts = ratio_counts(anchor, speed_ratios(ms), che.max_batch_diff)[1]
    measured |= {"anchor": anchor, "batch_counts": counts, "ms_per_batch": ms, "ms_samples": rows}
    return measured | {"round_ms": round_ms}


def best_round_ms(sync_ms: float, tau: float, overlap: float = 0.0) -> float:
    """The round length T with the most progress, T / (T + max(0, C - f T)) / (1 + T / τ).

    √(C τ / (1 - f)), but no longer than hides the merge, C / f
    """
    hidden = sync_ms / overlap if overlap else math.inf
    return min(math.sqrt(sync_ms * tau / (1 - overlap)), hidden)


def half_life_ms(travel_ms: float, fast_ms: float) -> float:
    """The length of a round in which local steps lose half of their worth."""
    return min(max(_HALF * travel_ms, _SHORTEST * fast_ms), _LONGEST * fast_ms)


def choose_anchor(
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
