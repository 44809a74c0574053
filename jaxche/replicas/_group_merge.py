r"""Merges within a round, of replicas of one process only.

A group of replicas of one process merges several times in a round, without the other processes:

.. math:: x_i \leftarrow \frac{\sum_j n_j x_j}{\sum_j n_j}

with the :math:`n_j` steps since its last merge. The merge at the end of the round is the ordinary one, of all replicas.
With the steps of the whole round as weights it is the mean of the groups, each by the steps of its replicas.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.averaging import from_moments, is_float, sum_dtype, to_moments, weighted
from jaxche.cadence import merge_steps
from jaxche.replicas._opt_state import are_plateaus
from jaxche.replicas._overlap import Correction
from jaxche.replicas._programs import Carry, LocalState


class GroupMerge:
    """The merges of a group in one round; each member calls :meth:`join` for each of them, from its own thread."""

    def __init__(self, size: int, average_moments: bool, corrects: bool = False):
        self._average_moments, self._corrects = average_moments, corrects
        self._barrier = threading.Barrier(size, self._merge)
        self._carries: list[Any] = [None] * size
        self._weights, self._steps = np.zeros(size), [0] * size
        # The parameters of each member at the start of the round, for corrections; merged by the first merge.
        self._starts: list[Any] = [None] * size
        self._merges = 0

    def join(self, member: int, start: Any, carry: Carry, steps: int) -> Carry:
        """The merged carry of this member, on its own devices; waits for all members.

        ``start`` are its parameters at the start of the round, and ``steps`` those of the round so far. After an error
        of another member it is the carry as it was: the round is not going to be merged.
        """
        self._carries[member] = carry
        if not self._merges:
            self._starts[member] = start
        self._weights[member], self._steps[member] = steps - self._steps[member], steps
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            return carry
        return self._carries[member]

    def start(self, member: int) -> Any:
        """The parameters that a correction of this member subtracts: its start, or, after a merge, the mean of all.

        With the weights of the first merge it moves their mean as a correction before that merge would.
        """
        return self._starts[member]

    def leave(self) -> None:
        """End the waits of the others for a member that failed."""
        self._barrier.abort()

    def _merge(self) -> None:
        # In the thread of the last member that joins.
        if self._weights.any():
            weights = self._weights.tolist()
            self._carries = merge_carries(self._carries, weights, self._average_moments)
            if not self._merges and self._corrects:
                self._starts = merge_trees(self._starts, weights)
            self._merges += 1


class GroupPause(NamedTuple):
    """A merge of one replica with its group, after ``after`` steps of a round."""

    after: int
    merge: GroupMerge
    member: int

    def apply(self, local: LocalState, carry: Carry, steps: int) -> tuple[Carry, float]:
        """The merged carry, and the seconds that it took, the wait for the others included.

        ``steps`` are those that were taken: fewer than :attr:`after` if there are no more batches.
        """
        jax.block_until_ready(carry)  # steps that are under way are no wait
        clock = time.perf_counter()
        carry = jax.block_until_ready(self.merge.join(self.member, local.params, carry, steps))
        return carry, time.perf_counter() - clock


# The result of a merge, which a replica takes in between two steps of a round.
Pause: TypeAlias = Correction | GroupPause


def group_pauses(
    groups: Sequence[Sequence[int]],
    counts: Sequence[int],
    merges: int,
    average_moments: bool,
    corrections: Sequence[Correction | None],
) -> list[list[Pause]]:
    """The pauses of each replica in a round: the merges with its group, and the correction of a merge in flight.

    ``groups`` have replicas by their place in this process, and ``merges`` include the last one, of all replicas.
    """
    pauses: list[list[Pause]] = [[one] if one else [] for one in corrections]
    for group in groups:
        members = [one for one in group if counts[one]]
        if len(members) < 2:
            continue
        corrects = any(corrections[one] is not None for one in members)
        merge, early = GroupMerge(len(members), average_moments, corrects), merges
        ends = merge_steps([counts[one] for one in members], merges)
        for member, (one, own) in enumerate(zip(members, ends, strict=True)):
            correction = corrections[one]
            if correction is not None:
                if member == 0:  # the others take it in between the same merges
                    early = sum(n < correction.after for n in own)
                own = [
                    *(min(n, correction.after) for n in own[:early]),
                    *(max(n, correction.after) for n in own[early:]),
                ]
            with_group = [GroupPause(after, merge, member) for after in own]
            if correction is not None and early:
                pauses[one] = [correction._replace(start=functools.partial(merge.start, member))]
            pauses[one] = [*with_group[:early], *pauses[one], *with_group[early:]]
    return pauses


def merge_carries(carries: Sequence[Carry], steps: Sequence[float], average_moments: bool) -> list[Carry]:
    """The carries of a group with the weighted means of parameters, statistics and, if asked, optimizer moments."""
    numbers = [_as_numbers(carry.opt_state) if average_moments else () for carry in carries]
    trees = [(carry.params, carry.model_state, own) for carry, own in zip(carries, numbers, strict=True)]
    params, states, means = zip(*merge_trees(trees, steps), strict=True)
    if moments := _moments(carries[0].model_state, states[0]):
        others = [_moments(_like(carry.model_state, states[0]), states[0]) for carry in carries[1:]]
        pooled = _pooled(_mean([moments, *others], steps), states[0])
        states = [_with_floats(state, _like(_floats(pooled), _floats(state))) for state in states]
    merged = [c._replace(params=x, model_state=s) for c, x, s in zip(carries, params, states, strict=True)]
    if not average_moments:
        return merged
    pairs = zip(merged, means, strict=True)
    return [carry._replace(opt_state=_with_means(carry.opt_state, own)) for carry, own in pairs]


def _as_numbers(opt_state: Any) -> Any:
    """The state with its flags as numbers, whose mean is a vote as in a merge of all replicas."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == bool else x, opt_state)


def _with_means(opt_state: Any, means: Any) -> Any:
    """The state with the means of :func:`_as_numbers`, but its own ``optax.contrib.reduce_on_plateau``."""
    leaves, treedef = jax.tree.flatten(opt_state)
    plateaus = _plateaus(treedef)
    for i, mean in enumerate(jax.tree.leaves(means)):
        if i not in plateaus:
            leaves[i] = mean > 0.5 if leaves[i].dtype == bool else mean
    return treedef.unflatten(leaves)


@functools.lru_cache(maxsize=8)
def _plateaus(structure: Any) -> list[int]:
    """The leaves of an ``optax.contrib.reduce_on_plateau``, found once for a structure: replicas wait meanwhile."""
    found = are_plateaus(structure.unflatten(range(structure.num_leaves)))
    return [i for i, is_plateau in enumerate(found) if is_plateau]


def merge_trees(trees: Sequence[Any], steps: Sequence[float]) -> list[Any]:
    """Trees of a group with the weighted mean of their floats, each on its own devices."""
    means = _mean([_floats(tree) for tree in trees], steps)
    return [_with_floats(tree, _like(means, _floats(tree))) for tree in trees]


def _floats(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def _with_floats(tree: Any, floats: Sequence[Any]) -> Any:
    """The tree with these in place of its floats."""
    given = iter(floats)
    return jax.tree.map(lambda leaf: next(given) if is_float(leaf) else leaf, tree)


def _mean(lists: Sequence[list[Any]], steps: Sequence[float]) -> list[Any]:
    """The weighted mean of lists of floats, on the devices of the first.

    One after the other, so that these devices hold two of them and the sum, however many there are. Relative to the
    first, so that equal numbers stay as they are.
    """
    shares = np.asarray(steps, np.float32) / np.float32(np.sum(steps))
    first, moved = lists[0], _zeros(lists[0])
    for floats, share in zip(lists[1:], shares[1:], strict=True):
        moved = _add(moved, first, _like(floats, first), share)
    return _end(first, moved)


def _like(tree: Any, other: Any) -> Any:
    """A copy of the tree on the devices of another one: the next step of each replica takes the buffers of its own."""
    return jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, other), may_alias=False)


def _wide(x: Any) -> Any:
    return x.astype(sum_dtype(x.dtype))


@jax.jit
def _zeros(first: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros_like(_wide(x)), first)


@functools.partial(jax.jit, donate_argnums=0)
def _add(moved: Any, first: Any, other: Any, share: Any) -> Any:
    changes = jax.tree.map(lambda x, y: _wide(y) - _wide(x), first, other)
    return jax.tree.map(jnp.add, moved, weighted(changes, share))


@jax.jit
def _end(first: Any, moved: Any) -> Any:
    # An infinite number stays so, as in a weighted sum.
    return jax.tree.map(lambda x, c: jnp.where(jnp.isfinite(x), (_wide(x) + c).astype(x.dtype), x), first, moved)


_moments = jax.jit(to_moments)


@jax.jit
def _pooled(moments: Any, means: Any) -> Any:
    """The means with the differences between them in their variances."""
    return jax.tree.map(lambda new, old: new.astype(old.dtype), from_moments(moments, means), means)
