"""Merges of groups of replicas within a round: how many, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# A round has at least one merge of its groups, so that their cost is measured.
LEAST_MERGES = 2


def best_group_merges(sync_ms: float, group_ms: float) -> int:
    """The merges of a round with the most progress, √(C / c), the last one of all replicas and the others of groups.

    With merges of C ms a round of √(C τ) is best, and with merges of c ms one of √(c τ): so many of these are in one
    of those.

    Args:
      sync_ms: C, the cost of a merge of all replicas.
      group_ms: c, the cost of a merge of a group.

    Example:
      >>> best_group_merges(200.0, 5.0), best_group_merges(5.0, 5.0)
      (6, 2)
    """
    return max(LEAST_MERGES, round(math.sqrt(sync_ms / group_ms)))


def most_group_merges(groups: Sequence[Sequence[int]], counts: Sequence[int]) -> int:
    """The most merges of a round: before each of them every replica of a group has taken a step."""
    return min((counts[rank] for group in groups for rank in group if counts[rank]), default=1)


def merge_steps(counts: Sequence[int], merges: int) -> list[list[int]]:
    """For each replica of a group, its steps in a round before each merge of the group.

    Without the last of the ``merges``, which is that of all replicas. Merges are between two steps of the slowest
    replica, and the others are as far in their part of the round.

    Example:
      >>> merge_steps([10, 4], 4)
      [[3, 5, 8], [1, 2, 3]]
    """
    slow = min(counts)
    ends = [(2 * merge * slow + merges) // (2 * merges) for merge in range(1, merges)]
    return [[(2 * end * count + slow) // (2 * slow) for end in ends] for count in counts]


def group_cost_ms(groups: Sequence[Sequence[int]], paused_ms: Sequence[float], merges: int) -> float:
    """The cost of a merge of a group, of the dearest one: what the member that waited least was paused for.

    Args:
      groups: the ranks of each group.
      paused_ms: the time of each rank in the merges of its group, waits included, [R].
      merges: merges of the round, the last one of all replicas included.
    """
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
