"""Merges of groups of replicas within a round: how many, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low

import numpy as np

from jaxche.cadence._elche import ElChe
from jaxche.cadence._tuner_progress import half_life_ms

# A round has at least one merge of its groups, so that their cost is measured.
LEAST_MERGES = 2


def half_life_of(groups: Sequence[Sequence[int]], world_size: int) -> float:
    """How much longer a round may be if replicas merge in groups within it: (N - 1) / (G - 1).

    The progress that replicas lose by moving apart follows the variance between them. The means of G groups of N / G
    replicas each have G / N of the variance of a replica. Of that the part 1 - 1 / G is between the groups; of N single
    replicas it is the part 1 - 1 / N.
    """
    apart = len(groups) + world_size - sum(map(len, groups))
    return (world_size - 1) / (apart - 1) if groups else 1.0


def best_group_merges(che: ElChe, group_ms: float) -> int:
    """The merges of a round with the most progress, the last one of all replicas and the others of groups.

    T / √(c τ) of a round of T ms, with merges of groups of c ms, as rounds of √(C τ) are best for merges of C ms.
    """
    speeds = [ms for ms in che.ms_per_batch if ms]
    if not (speeds and che.travel_samples):
        return LEAST_MERGES
    round_ms = max(n * ms for n, ms in zip(che.batch_counts, che.ms_per_batch, strict=True))
    tau = half_life_ms(median_low(che.travel_samples), min(speeds))
    return max(LEAST_MERGES, round(round_ms / math.sqrt(group_ms * tau)))


def most_group_merges(groups: Sequence[Sequence[int]], counts: Sequence[int]) -> int:
    """The most merges of a round: before each of them every replica of a group has taken a step."""
    return min((counts[rank] for group in groups for rank in group if counts[rank]), default=1)


def merge_steps(counts: Sequence[int], merges: int) -> list[list[int]]:
    """For each replica of a group, its steps in a round before each merge of the group.

    Without the last of the ``merges``, which is that of all replicas. Merges are between two steps of the slowest
    replica, and the others are as far in their part of the round: steps 3, 5 and 8 of 10, and 1, 2 and 3 of 4.
    """
    slow = min(counts)
    ends = [(2 * merge * slow + merges) // (2 * merges) for merge in range(1, merges)]
    return [[(2 * end * count + slow) // (2 * slow) for end in ends] for count in counts]


def group_cost_ms(groups: Sequence[Sequence[int]], paused_ms: Sequence[float], merges: int) -> float:
    """The cost of a merge in the dearest group: the time for which the member that waited least was paused."""
    least = [min((paused_ms[rank] for rank in group if paused_ms[rank]), default=0.0) for group in groups]
    return max(least, default=0.0) / max(merges - 1, 1)


def paused_ms(
    groups: Sequence[Sequence[int]], counts: Sequence[int], wall_ms: Sequence[float], merges: int, cost_ms: float
) -> np.ndarray:
    """The time of each rank in the merges of its group on the clock of a virtual fleet, waits included, [R]."""
    paused = np.zeros(len(counts))
    for group in groups:
        present = [rank for rank in group if counts[rank]]
        if len(present) < 2 or merges < 2:
            continue
        ends = np.array(merge_steps([counts[rank] for rank in present], merges))
        own = ends * np.array([[wall_ms[rank] / counts[rank]] for rank in present])
        steps_ms = np.diff(own, axis=1, prepend=0.0)  # between two merges, [members, merges]
        paused[present] = steps_ms.max(axis=0).sum() + cost_ms * (merges - 1) - own[:, -1]
    return paused
