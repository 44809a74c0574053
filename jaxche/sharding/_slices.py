"""Gathers and reduce-scatters of trees, small leaves together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxche.sharding._layout import SHARD, Layout, Leaf
from jaxche.sharding._pullback import Turned

# A collective costs a rendezvous of all devices, however small the array; together leaves share one, at the price of
# two copies. So only small leaves travel together, and no bucket is large against what a device holds anyway.
_SMALL_BYTES = 256 * 1024
_BUCKET_BYTES = 4 * 1024 * 1024


def gather(layout: Layout, tree: Any) -> Any:
    """Whole leaves from slices, over ``shard``; inside ``shard_map``."""
    count = layout.mesh.shape[SHARD]

    def together(leaves: list[Leaf], slices: list[Any]) -> list[Any]:
        rows = lax.all_gather(jnp.concatenate([x.ravel() for x in slices]), SHARD)
        parts = jnp.split(rows, _offsets(slices), axis=1)
        return [
            _join(leaf, x.reshape(count, *_slice_shape(leaf, count))) for leaf, x in zip(leaves, parts, strict=True)
        ]

    def alone(leaf: Leaf, x: Any) -> Any:
        return lax.all_gather(x, SHARD, axis=_axis(leaf), tiled=True)

    slices, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(_by_bucket(layout.leaves, slices, together, alone, count))


def scatter(layout: Layout, tree: Any) -> Any:
    """This device's slices of the sums over ``shard`` of whole leaves, :class:`Turned`; inside ``shard_map``."""
    count = layout.mesh.shape[SHARD]
    wholes, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, Turned))
    leaves = [
        leaf if leaf.axis is None else leaf._replace(axis=x.axis(leaf.axis), shape=x.array.shape)
        for leaf, x in zip(layout.leaves, wholes, strict=True)
    ]

    def together(leaves: list[Leaf], arrays: list[Any]) -> list[Any]:
        rows = [_cut(leaf, x, count).reshape(count, -1) for leaf, x in zip(leaves, arrays, strict=True)]
        parts = jnp.split(lax.psum_scatter(jnp.concatenate(rows, axis=1), SHARD), _offsets([r[0] for r in rows]))
        return [x.reshape(_slice_shape(leaf, count)) for leaf, x in zip(leaves, parts, strict=True)]

    def alone(leaf: Leaf, x: Any) -> Any:
        return lax.psum_scatter(x, SHARD, scatter_dimension=_axis(leaf), tiled=True)

    slices = _by_bucket(leaves, [x.array for x in wholes], together, alone, 1)
    return treedef.unflatten([Turned(x, whole.permutation) for x, whole in zip(slices, wholes, strict=True)])


def _by_bucket(leaves: Sequence[Leaf], values: list[Any], together: Any, alone: Any, parts: int) -> list[Any]:
    """``together`` on each bucket of small leaves and ``alone`` on each other leaf that is cut."""
    values = list(values)
    for bucket in _buckets(leaves, values, parts):
        chosen = [leaves[i] for i in bucket]
        if len(bucket) == 1:
            values[bucket[0]] = alone(chosen[0], values[bucket[0]])
            continue
        for i, value in zip(bucket, together(chosen, [values[i] for i in bucket]), strict=True):
            values[i] = value
    return values


def _buckets(leaves: Sequence[Leaf], values: list[Any], parts: int) -> list[list[int]]:
    """Numbers of the leaves that travel together; ``parts``: how many of ``values`` make a whole leaf."""
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}
    for i, (leaf, x) in enumerate(zip(leaves, values, strict=True)):
        if leaf.axis is None:
            continue
        size = parts * x.size * x.dtype.itemsize
        if size > _SMALL_BYTES:
            buckets.append([i])
            continue
        bucket, used = open_buckets.get(x.dtype, ([], 0))
        if not bucket or used + size > _BUCKET_BYTES:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_buckets[x.dtype] = (bucket, used + size)
    return buckets


def _offsets(arrays: list[Any]) -> list[int]:
    return list(itertools.accumulate(x.size for x in arrays[:-1]))


def _slice_shape(leaf: Leaf, count: int) -> tuple[int, ...]:
    return tuple(n // count if i == leaf.axis else n for i, n in enumerate(leaf.shape))


def _cut(leaf: Leaf, x: Any, count: int) -> Any:
    """A whole leaf as ``[devices, *slice]``."""
    axis = _axis(leaf)
    parts = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0)


def _join(leaf: Leaf, x: Any) -> Any:
    """The whole leaf of ``[devices, *slice]``."""
    return jnp.moveaxis(x, 0, _axis(leaf)).reshape(leaf.shape)


def _axis(leaf: Leaf) -> int:
    assert leaf.axis is not None  # only leaves that are cut travel
    return leaf.axis
