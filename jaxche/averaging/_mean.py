"""The weighted mean over a named axis, in few large all-reduces."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxche.averaging._sums import weighted

# One all-reduce a leaf costs a network round trip a leaf; one for everything doubles the memory of a large model.
# Buckets of this many bytes pay neither: a small model goes as one, a large one in pieces that amortise latency.
_BUCKET_BYTES = 32 * 1024 * 1024


def psum_buckets(tree: Any, axis_name: str) -> Any:
    """Sum every leaf over ``axis_name``, concatenated into a few large all-reduces.

    Args:
      tree: pytree of arrays; leaves of one dtype travel together.
      axis_name: the mapped axis.

    Returns:
      The pytree of sums, shapes and dtypes kept.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> f = jax.vmap(lambda x: psum_buckets({"a": x, "b": -x}, "r")["a"], axis_name="r")
      >>> f(jnp.arange(3.0)).tolist()
      [3.0, 3.0, 3.0]
    """
    leaves, treedef = jax.tree.flatten(tree)
    summed: list[Any] = [None] * len(leaves)
    for bucket in _buckets(leaves):
        if len(bucket) == 1:
            summed[bucket[0]] = lax.psum(leaves[bucket[0]], axis_name)
            continue
        flat = lax.psum(jnp.concatenate([leaves[i].ravel() for i in bucket]), axis_name)
        offset = 0
        for i in bucket:
            summed[i] = flat[offset : offset + leaves[i].size].reshape(leaves[i].shape)
            offset += leaves[i].size
    return jax.tree.unflatten(treedef, summed)


def _buckets(leaves: list[Any]) -> list[list[int]]:
    """Indices of the leaves that share an all-reduce: same dtype, together at most ``_BUCKET_BYTES``."""
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}
    for i, leaf in enumerate(leaves):
        nbytes = leaf.size * leaf.dtype.itemsize
        bucket, used = open_buckets.get(leaf.dtype, ([], 0))
        if not bucket or used + nbytes > _BUCKET_BYTES:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_buckets[leaf.dtype] = (bucket, used + nbytes)
    return buckets


def is_float(leaf: Any) -> bool:
    """Whether a leaf is averaged: real or complex floats are, integers, booleans and PRNG keys are not.

    Args:
      leaf: an array, or anything with a dtype.

    Returns:
      Whether it is.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> is_float(jnp.ones(2)), is_float(jnp.arange(2)), is_float(jax.random.key(0))
      (True, False, False)
    """
    return bool(jnp.issubdtype(jnp.asarray(leaf).dtype if not hasattr(leaf, "dtype") else leaf.dtype, jnp.inexact))


def weighted_mean(tree: Any, weight: Any, axis_name: str) -> Any:
    r"""Mean of a pytree over a named axis, each device with its own weight.

    .. math:: \bar x = \frac{\sum_i w_i x_i}{\sum_i w_i}

    For use inside ``shard_map``, ``pmap`` or ``vmap``. Float leaves are summed in float32 at least and come back in
    their own dtype; integers, booleans and PRNG keys are returned untouched, each device keeping its own.

    Args:
      tree: pytree of this device's arrays.
      weight: this device's scalar weight, e.g. its number of local steps. Weights need not be normalised. A device of
        weight 0 adds nothing, also where its arrays are not finite.
      axis_name: the mapped axis over which devices average.

    Returns:
      The pytree of weighted means, equal on every device.

    Raises:
      NameError: ``axis_name`` is not bound: call it inside ``shard_map`` or ``pmap`` over that axis.

    References:
      flodl's weighted all-reduce; McMahan et al., *Communication-efficient learning of deep networks from
      decentralized data*, AISTATS 2017.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mean = jax.vmap(lambda x, w: weighted_mean(x, w, "replica"), axis_name="replica")
      >>> mean(jnp.array([1.0, 5.0]), jnp.array([1, 3])).tolist()
      [4.0, 4.0]
    """
    leaves, treedef = jax.tree.flatten(tree)
    averaged = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    arrays = [jnp.asarray(leaves[i]) for i in averaged]
    weight = jnp.asarray(weight)
    sums, total = psum_buckets((weighted(arrays, weight), weight.astype(jnp.float32)), axis_name)
    for i, x, s in zip(averaged, arrays, sums, strict=True):
        leaves[i] = (s / total.astype(s.dtype)).astype(x.dtype)
    return jax.tree.unflatten(treedef, leaves)
