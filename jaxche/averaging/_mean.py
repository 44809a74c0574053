"""The weighted mean over a named axis, in few large all-reduces, and the drift of the replicas from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxche.averaging._trees import is_float, split_like, weighted

# One all-reduce a leaf costs a network round trip a leaf; one for all leaves doubles the memory of a large model.
# With buckets of this size a small model takes one all-reduce, and a large one a few that amortise latency.
_BUCKET_BYTES = 32 * 1024 * 1024


# Up to so many bytes are exchanged: more would be sent more often than in an all-reduce.
_EXCHANGED_BYTES = 64 * 1024


def exchange(x: jax.Array, axis_name: str) -> jax.Array:
    """The arrays of all replicas, stacked in their order.

    Each replica sends its own directly to all others, which takes one round trip over a link. An all-reduce around a
    ring of n replicas takes n - 1 after each other, and half as many an all-gather.
    """
    return lax.all_to_all(jnp.broadcast_to(x, (lax.axis_size(axis_name), *x.shape)), axis_name, 0, 0)


def psum_buckets(tree: Any, axis_name: str, exchanges: bool = False) -> Any:
    """Sum every leaf over ``axis_name``; leaves of one dtype are concatenated into a few large all-reduces.

    With ``exchanges`` small ones are exchanged and summed by each replica, for links with long round trips.
    """

    def total(x: Any) -> Any:
        is_small = exchanges and x.size * x.dtype.itemsize <= _EXCHANGED_BYTES
        return exchange(x, axis_name).sum(0, dtype=x.dtype) if is_small else lax.psum(x, axis_name)

    leaves, treedef = jax.tree.flatten(tree)
    summed: list[Any] = [None] * len(leaves)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
    for bucket in in_buckets([leaf.dtype for leaf in leaves], sizes, _BUCKET_BYTES):
        if len(bucket) == 1:
            summed[bucket[0]] = total(leaves[bucket[0]])
            continue
        arrays = [leaves[i] for i in bucket]
        flat = total(jnp.concatenate([x.ravel() for x in arrays]))
        for i, x in zip(bucket, split_like(flat, arrays), strict=True):
            summed[i] = x
    return jax.tree.unflatten(treedef, summed)


def in_buckets(kinds: Sequence[Any], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Indices of the arrays that share a collective: of one kind, such as a dtype, and together at most ``most`` bytes.

    An array of more bytes has a bucket of its own.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}
    for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        bucket, used = open_buckets.get(kind, ([], 0))
        if not bucket or used + size > most:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_buckets[kind] = (bucket, used + size)
    return buckets


def weighted_mean(tree: Any, weight: Any, axis_name: str) -> Any:
    r"""Mean of a pytree over a named axis, each device with its own weight.

    .. math:: \bar x = \frac{\sum_i w_i x_i}{\sum_i w_i}

    For use inside ``shard_map``, ``pmap`` or ``vmap``. Float leaves are summed in float32 or wider and returned in
    their own dtype. Integers, booleans and PRNG keys are not averaged: each device keeps its own.

    Args:
      tree: pytree of this device's arrays.
      weight: this device's scalar weight, e.g. its number of local steps. Weights need not be normalised. A device of
        weight 0 adds nothing, even if its arrays are not finite.
      axis_name: the mapped axis over which devices average.

    Returns:
      The pytree of weighted means, equal on every device.

    Raises:
      NameError: ``axis_name`` is not bound: call it inside ``shard_map`` or ``pmap`` over that axis.
      ValueError: a weight that is not one number.

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
    if weight.size != 1:
        raise ValueError(
            f"weight has shape {weight.shape}, and it is the one number of this device; in shard_map, cut the weights "
            f"over the axis: in_specs=P({axis_name!r})"
        )
    weight = weight.reshape(())  # of shape [1] in a shard_map
    products = weighted(arrays, weight)
    # In each dtype the weights are rounded as in the products, so that a mean of equal numbers is that number.
    weights = {x.dtype.name: weight.astype(x.dtype) for x in products}
    sums, totals = psum_buckets((products, weights), axis_name)
    for i, x, s in zip(averaged, arrays, sums, strict=True):
        leaves[i] = (s / totals[s.dtype.name]).astype(x.dtype)
    return jax.tree.unflatten(treedef, leaves)


def measure_drift(
    mean_of_squares: jax.Array, mean_delta_sq: jax.Array, mean_params_sq: jax.Array
) -> tuple[jax.Array, jax.Array]:
    r"""Drift: how far the replicas moved apart in a round, from scalars in the all-reduce of the merge.

    .. math:: V = \sum_i w_i\|\Delta_i\|^2 - \|\bar\Delta\|^2, \qquad
              \mathrm{rel} = \sqrt{V} / \|\bar x\|, \qquad \mathrm{dir} = V / \|\bar\Delta\|^2

    with the deltas :math:`\Delta_i = x_0 - x_i` of the replicas and the merged parameters :math:`\bar x`. ``rel`` is
    relative to the parameters, and grows with the learning rate and the number of steps. ``dir`` does not depend on the
    scale of the parameters: it is 0 if all replicas moved alike, and above 1 if more of the movement cancelled than
    added up. A :math:`V` no larger than the rounding of the squares counts as 0.

    Args:
      mean_of_squares: :math:`\sum_i w_i \|\Delta_i\|^2`.
      mean_delta_sq: :math:`\|\bar\Delta\|^2`.
      mean_params_sq: :math:`\|\bar x\|^2` of the merged parameters.

    Returns:
      ``(rel, dir)`` as float32 scalars.

    Example:
      >>> rel, direction = measure_drift(jnp.array(1.0), jnp.array(0.5), jnp.array(100.0))
      >>> round(float(rel), 4), float(direction)
      (0.0707, 1.0)
    """
    tiny, eps = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).eps)
    difference = mean_of_squares - mean_delta_sq
    # Where replicas agree, the difference is the rounding of two equal squares.
    variance = jnp.where(difference <= 4 * eps * mean_of_squares, 0.0, difference)
    return jnp.sqrt(variance / jnp.maximum(mean_params_sq, tiny)), variance / jnp.maximum(mean_delta_sq, tiny)
