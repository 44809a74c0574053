"""Checks of ``groups=``: the replicas that merge among themselves within a round."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import optax

from jaxche.cadence import ApplyPolicy, whole_number
from jaxche.replicas import BatchPlacement


def checked_groups(
    groups: Any,
    placements: Sequence[BatchPlacement],
    policy: ApplyPolicy,
    average: str,
    merge: str,
    scaling: Any,
    staged: bool,
) -> tuple[tuple[int, ...], ...]:
    """The ranks of each group of two replicas or more; none where all replicas would be one group."""
    if groups is None:
        return ()
    line = "leave groups= out"
    if policy not in (ApplyPolicy.CADENCE, ApplyPolicy.ASYNC) or average != "parameters" or merge != "steps":
        raise ValueError(
            f"groups={groups!r} averages parameters by steps within rounds, and this trainer has "
            f"policy={policy.value!r}, average={average!r}, merge={merge!r}; write policy='cadence' and merge='steps', "
            f"or {line}"
        )
    if scaling is not None or staged:
        what = "stages of a jaxche.Partitioned" if staged else "scaling="
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
    return tuple(group for group in found if 1 < len(group) < len(placements))


def _checked_ranks(groups: Any, world_size: int) -> list[tuple[int, ...]]:
    """Groups of ranks, none of them in two."""
    try:
        found = [tuple(operator.index(rank) for rank in group) for group in groups]
    except TypeError:
        found = []
    ranks = [rank for group in found for rank in group]
    if not ranks or isinstance(groups, str) or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world_size)):
        example = [list(range(world_size // 2)), list(range(world_size // 2, world_size))]
        raise ValueError(
            f"groups={groups!r} must be 'process', or lists of different ranks from 0 to {world_size - 1}; write e.g. "
            f"groups={example}"
        )
    return found


def checked_group_merges(merges: Any, groups: Any) -> int | None:
    """The given number of merges in a round; None where it follows their costs."""
    if merges is None:
        return None
    if groups is None:
        raise ValueError(f"group_merges={merges!r} is of groups=; write groups='process', or leave it out")
    return whole_number("group_merges", merges, 1, "group_merges=8, or leave it out")


def check_moments(groups: Any, opt_state: str, tx: Any, shapes: Any) -> None:
    """Refuse to average what ``optax.MultiSteps`` has accumulated: its replicas are at different steps of theirs."""
    if not groups or opt_state != "average":
        return
    states = jax.tree.leaves(jax.eval_shape(tx.init, shapes), is_leaf=lambda x: isinstance(x, optax.MultiStepsState))
    if any(isinstance(state, optax.MultiStepsState) for state in states):
        raise ValueError(
            f"groups={groups!r} with opt_state='average' would average gradients that an optax.MultiSteps in tx has "
            "accumulated, and the replicas have accumulated different numbers of them; write opt_state='local'"
        )
