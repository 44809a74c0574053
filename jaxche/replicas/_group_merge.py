r"""Merges within a round, of replicas of one process only.

A group of replicas of one process merges several times in a round, without the other processes:

.. math:: x_i \leftarrow \frac{\sum_j n_j x_j}{\sum_j n_j}

with the :math:`n_j` steps since its last merge. The merge at the end of the round is the ordinary one, of all replicas.
With the steps of the whole round as weights it is the mean of the groups, each by the steps of its replicas.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.averaging import from_moments, is_float, sum_dtype, to_moments, weighted
from jaxche.cadence import merge_steps
from jaxche.replicas._overlap import Correction
from jaxche.replicas._programs import Carry, LocalState


class GroupMerge:
    """The merges of a group in one round; each member calls :meth:`join` for each of them, from its own thread."""

    def __init__(self, size: int, average_moments: bool):
        self._average_moments = average_moments
        self._barrier = threading.Barrier(size, self._merge)
        self._carries: list[Any] = [None] * size
        self._weights, self._steps = np.zeros(size), [0] * size
        self.waited_s = [0.0] * size  # of each member, in all its merges

    def join(self, member: int, carry: Carry, steps: int) -> Carry:
        """The merged carry of this member, on its own devices; waits for all members.

        ``steps`` are those of the round so far. After an error of another member it is the carry as it was: the round
        is not going to be merged.
        """
        self._carries[member] = carry
        self._weights[member], self._steps[member] = steps - self._steps[member], steps
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            return carry
        return self._carries[member]

    def leave(self) -> None:
        """End the waits of the others for a member that failed."""
        self._barrier.abort()

    def _merge(self) -> None:
        # In the thread of the last member that joins.
        if self._weights.any():
            self._carries = merge_carries(self._carries, self._weights.tolist(), self._average_moments)


class GroupPause(NamedTuple):
    """A merge of one replica with its group, after ``after`` steps of a round."""

    after: int
    merge: GroupMerge
    member: int

    def apply(self, local: LocalState, carry: Carry, steps: int) -> tuple[Carry, float]:
        """The merged carry, and the seconds that it took, the wait for the others included."""
        jax.block_until_ready(carry)  # steps that are under way are no wait
        clock = time.perf_counter()
        carry = jax.block_until_ready(self.merge.join(self.member, carry, steps))
        waited_s = time.perf_counter() - clock
        self.merge.waited_s[self.member] += waited_s
        return carry, waited_s


def group_pauses(
    groups: Sequence[Sequence[int]],
    counts: Sequence[int],
    merges: int,
    average_moments: bool,
    corrections: Sequence[Correction | None],
) -> list[list[Correction | GroupPause]]:
    """The pauses of each replica in a round: the merges with its group, and the correction of a merge in flight.

    Args:
      groups: the replicas of each group, by their place in this process.
      counts: steps of each replica of this process in the round.
      merges: merges of the round, its last one included, which is that of all replicas.
      average_moments: whether the moments of the optimizer are merged.
      corrections: of each replica, or None.
    """
    pauses: list[list[Correction | GroupPause]] = [[one] if one else [] for one in corrections]
    for group in groups:
        members = [one for one in group if counts[one]]
        if len(members) < 2:
            continue
        merge, early = GroupMerge(len(members), average_moments), merges
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
            pauses[one] = [*with_group[:early], *pauses[one], *with_group[early:]]
    return pauses


def merge_carries(carries: Sequence[Carry], steps: Sequence[float], average_moments: bool) -> list[Carry]:
    """The carries of a group with the weighted mean of their parameters and statistics, each on its own devices.

    The mean is made on the devices of the first. The means of the moments of the optimizer are taken too, unless each
    replica keeps its own.
    """
    shares = np.asarray(steps, np.float32) / np.float32(np.sum(steps))
    names = ["params", "opt_state"] if average_moments else ["params"]
    trees = [[getattr(carry, name) for name in names] for carry in carries]
    floats = [[leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)] for tree in trees]
    moved = _zeros(floats[0])
    for share, leaves in zip(shares[1:], floats[1:], strict=True):
        moved = _add(moved, floats[0], _like(leaves, floats[0]), share)
    means = _end(floats[0], moved)
    states = [carry.model_state for carry in carries]
    pooled = _pooled([states[0], *(_like(state, states[0]) for state in states[1:])], shares)
    merged = []
    for carry, tree, own in zip(carries, trees, floats, strict=True):
        placed = iter(_like(means, own))
        found = jax.tree.map(lambda leaf, placed=placed: next(placed) if is_float(leaf) else leaf, tree)
        state = jax.tree.map(
            lambda new, leaf: new if is_float(leaf) else leaf, _like(pooled, carry.model_state), carry.model_state
        )
        merged.append(carry._replace(model_state=state, **dict(zip(names, found, strict=True))))
    return merged


def _like(tree: Any, other: Any) -> Any:
    """A copy of the tree on the devices of another one: the next step of each replica takes the buffers of its own."""
    return jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, other), may_alias=False)


def _wide(x: Any) -> Any:
    return x.astype(sum_dtype(x.dtype))


@jax.jit
def _zeros(first: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros_like(_wide(x)), first)


# One member after the other, so that the first device holds the trees of two, however many there are. Relative to the
# first, so that equal numbers stay as they are.
@jax.jit(donate_argnums=0)
def _add(moved: Any, first: Any, other: Any, share: Any) -> Any:
    changes = jax.tree.map(lambda x, y: _wide(y) - _wide(x), first, other)
    return jax.tree.map(jnp.add, moved, weighted(changes, share))


@jax.jit
def _end(first: Any, moved: Any) -> Any:
    return jax.tree.map(lambda x, change: (_wide(x) + change).astype(x.dtype), first, moved)


@jax.jit
def _pooled(states: Sequence[Any], shares: Any) -> Any:
    """The weighted mean of model states, with the differences of the means in their variances."""

    def mean(*values: Any) -> Any:
        if not is_float(values[0]):
            return values[0]
        terms = [weighted(value, share) for value, share in zip(values, shares, strict=True)]
        return sum(terms[1:], terms[0])

    means = jax.tree.map(mean, *states)
    means = from_moments(jax.tree.map(mean, *[to_moments(state, means) for state in states]), means)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), means, states[0])
