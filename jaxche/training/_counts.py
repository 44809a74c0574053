"""The counts in an optimizer's state: schedules follow the whole run, moments the updates of their replica.

A schedule inside ``tx`` is a function of a count in the state of the optimizer. On one device it counts the updates,
one a batch. With several replicas it counts those of all of them: in a round of N steps over all replicas, of which
this one takes n, the count advances by N/n at each step, and after the merge it is the same everywhere. Where gradients
are averaged, the one update of the round advances it by N. Counts of moments, as the one of Adam's bias correction,
belong to the moments and count updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# The counts that a schedule is a function of, by the class of the state. A transformation of the user's own whose rate
# depends on a count keeps it in an optax.ScaleByScheduleState.
_SCHEDULES = {
    "AddNoiseState": ("count",),
    "InjectHyperparamsState": ("count",),
    "InjectStatefulHyperparamsState": ("count",),
    "MultiStepsState": ("gradient_step",),
    "ScaleByAdemamixState": ("count_m2",),
    "ScaleByScheduleState": ("count",),
    "ScheduleFreeState": ("step_count",),
    "WeightDecaySchedule": ("count",),
    "WrappedScheduleState": ("count",),
}


def counts_of(opt_state: Any) -> list[Any]:
    """The counts in an optimizer's state: its signed integers of one number, with or without a replica axis."""
    return [leaf for leaf in jax.tree.leaves(opt_state) if _is_count(leaf)]


def with_counts(opt_state: Any, counts: Sequence[Any]) -> Any:
    """The state with other counts, in the order of :func:`counts_of`."""
    left = iter(counts)
    return jax.tree.map(lambda leaf: next(left) if _is_count(leaf) else leaf, opt_state)


def are_schedules(opt_state: Any) -> list[bool]:
    """Of each of :func:`counts_of`, whether a schedule depends on it."""
    marks = jax.tree.leaves(_marked(opt_state))
    return [mark for mark, leaf in zip(marks, jax.tree.leaves(opt_state), strict=True) if _is_count(leaf)]


def ahead(opt_state: Any, start: Sequence[Any], stride: Any) -> Any:
    """The state as an update sees it in the middle of a round: schedules count the steps of all replicas.

    Args:
      opt_state: of one replica, whose counts count its own steps since the start of the round.
      start: its counts at the start of the round.
      stride: steps of all replicas for one of this replica.
    """

    def one(count: Any, first: Any, scheduled: bool) -> Any:
        return first + jnp.round((count - first) * stride).astype(count.dtype) if scheduled else count

    found = zip(counts_of(opt_state), start, are_schedules(opt_state), strict=True)
    return with_counts(opt_state, [one(*each) for each in found])


def advanced(before: Any, seen: Any, after: Any, by: Any = 1) -> Any:
    """The state after an update, in which schedules have advanced by so much for each count of the update.

    Args:
      before: the state before it.
      seen: the same as the update saw it, see :func:`ahead`.
      after: what the update made of it.
      by: what one count of a schedule is worth.
    """

    def one(count: Any, old: Any, new: Any, scheduled: bool) -> Any:
        return count + (new - old) * jnp.asarray(by).astype(count.dtype) if scheduled else new

    found = zip(*map(counts_of, (before, seen, after)), are_schedules(before), strict=True)
    return with_counts(after, [one(*each) for each in found])


def _is_count(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.signedinteger) and leaf.size == 1


def _is_schedule(node: Any) -> bool:
    return isinstance(node, tuple) and type(node).__name__ in _SCHEDULES


def _marked(tree: Any) -> Any:
    """The tree with true where a schedule has its count."""

    def node(found: Any) -> Any:
        if not _is_schedule(found):
            return False
        fields = _SCHEDULES[type(found).__name__]
        return found._replace(**{name: name in fields or _marked(getattr(found, name)) for name in found._fields})

    return jax.tree.map(node, tree, is_leaf=_is_schedule)
