"""Groups of replicas that merge among themselves within a round: their checks, and the number of their merges."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxche.cadence import (
    LEAST_MERGES,
    ApplyPolicy,
    RoundPlan,
    best_group_merges,
    group_cost_ms,
    half_life_of,
    most_group_merges,
)
from jaxche.messages import whole_number
from jaxche.replicas import BatchPlacement
from jaxche.training._checks import Averaging
from jaxche.training._state import TrainerState


@dataclass(frozen=True)
class Groups:
    """Ranks that merge among themselves within a round, none without ``groups=``."""

    ranks: tuple[tuple[int, ...], ...] = ()
    merges: int | None = None  # of a round, the last one of all replicas included; None if not given

    def present(self, order: Sequence[int]) -> Groups:
        """The groups with two or more of these ranks, but not all of them, renumbered in this order."""
        groups = (tuple(rank for rank, one in enumerate(order) if one in group) for group in self.ranks)
        return replace(self, ranks=tuple(group for group in groups if 1 < len(group) < len(order)))

    def numbers(self, world_size: int) -> tuple[int, ...]:
        """The number of the group of each rank, -1 for one in none; empty without groups."""
        numbers = {rank: number for number, group in enumerate(self.ranks) for rank in group}
        return tuple(numbers.get(rank, -1) for rank in range(world_size)) if numbers else ()

    def half_life(self, world_size: int) -> float:
        """How much longer rounds may be, because groups merge within them."""
        return 1.0 if self.merges == 1 else half_life_of(self.ranks, world_size)

    def merges_of(self, state: TrainerState, plan: RoundPlan) -> int:
        """The merges of a round, the last one of all replicas included."""
        if plan.shares:
            return 1
        return min(self.merges or max(state.group_merges, LEAST_MERGES), most_group_merges(self.ranks, plan.counts))

    def next_merges(self, state: TrainerState, group_ms: Sequence[float], merges: int) -> int:
        """The merges of the next round, from the times of those of this round; unchanged if it had none in groups."""
        cost_ms = group_cost_ms(self.ranks, group_ms, merges)
        if self.merges or not cost_ms or state.che is None:
            return self.merges or state.group_merges
        return best_group_merges(state.che, cost_ms)


def checked_groups(groups: Any, merges: Any, averaging: Averaging, placements: Sequence[BatchPlacement]) -> Groups:
    """The groups of two replicas or more; none where all replicas would be one group."""
    if groups is None:
        if merges is not None:
            raise ValueError(f"group_merges={merges!r} is of groups=; write groups='process', or leave it out")
        return Groups()
    if merges is not None:
        merges = whole_number("group_merges", merges, 1, "group_merges=8, or leave it out")
    line, policy, average, merge = "leave groups= out", averaging.policy, averaging.average, averaging.merge
    if policy not in (ApplyPolicy.CADENCE, ApplyPolicy.ASYNC) or average != "parameters" or merge != "steps":
        raise ValueError(
            f"groups={groups!r} averages parameters by steps within rounds, and this trainer has "
            f"policy={policy.value!r}, average={average!r}, merge={merge!r}; write policy='cadence' and merge='steps', "
            f"or {line}"
        )
    if averaging.scaling is not None or averaging.staged:
        what = "stages of a jaxche.Partitioned" if averaging.staged else "scaling="
        raise ValueError(f"groups={groups!r} has no programs for {what}; {line}")
    processes = [{device.process_index for device in placement.devices.flat} for placement in placements]
    if isinstance(groups, str) and groups == "process":
        alone = {rank: next(iter(found)) for rank, found in enumerate(processes) if len(found) == 1}
        found = [tuple(rank for rank, own in alone.items() if own == one) for one in sorted(set(alone.values()))]
    else:
        found = _checked_ranks(groups, len(placements))
        for group in found:
            if len(group) == len(placements):
                raise ValueError(
                    f"groups={groups!r} is one group of all replicas, which merge after each round; {line}"
                )
            if len(everywhere := set().union(*(processes[rank] for rank in group))) > 1:
                raise ValueError(
                    f"groups={groups!r}: the replicas {group} are in the processes {sorted(everywhere)}, and a group "
                    "merges within one; write groups='process', and start one process on each host"
                )
    return Groups(tuple(group for group in found if 1 < len(group) < len(placements)), merges)


def _checked_ranks(groups: Any, world_size: int) -> list[tuple[int, ...]]:
    """Groups of ranks, none of them in two."""
    try:
        found = [tuple(operator.index(rank) for rank in group) for group in groups]
    except TypeError:
        found = []
    ranks = [rank for group in found for rank in group]
    if not ranks or isinstance(groups, str) or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world_size)):
        example = [list(range(world_size // 2)), list(range(world_size // 2, world_size))]
        line = f"write e.g. groups={example}" if world_size > 2 else "it is for three replicas or more: leave it out"
        raise ValueError(
            f"groups={groups!r} must be 'process', or lists of different ranks from 0 to {world_size - 1}; {line}"
        )
    return found
