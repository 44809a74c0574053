"""Whole parameters from slices and slices of gradients: all-gathers and reduce-scatters of trees.

Parameters are gathered twice, for the forward and for the backward pass, so that no whole copy is kept in between.
Transpositions of gradients are deferred until after the reduce-scatter, when only slices are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

from jaxche.averaging import in_buckets, split_like, sum_dtype
from jaxche.sharding._strategy import SHARD, Layout, Leaf

# A collective synchronises all devices, however small the array; a bucket of leaves shares one, at the price of two
# copies. So only small leaves are put into buckets, and a bucket is small against the memory of a device.
_SMALL_BYTES = 256 * 1024
_BUCKET_BYTES = 4 * 1024 * 1024
# Primitives that only rearrange an array. Their result on a gathered parameter is as large as the parameter.
REARRANGES = ("convert_element_type", "copy", "reshape", "squeeze", "transpose")


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["permutation"])
@dataclass(frozen=True)
class DeferredTranspose:
    """``array.transpose(permutation)``, not computed yet; ``array`` itself without a permutation."""

    array: Any
    permutation: tuple[int, ...] | None = None

    def axis(self, axis: int) -> int:
        """The axis of ``array`` that becomes ``axis``."""
        return axis if self.permutation is None else self.permutation[axis]

    def transposed(self) -> Any:
        """The transposed array."""
        return self.array if self.permutation is None else lax.transpose(self.array, self.permutation)


def all_gather(layout: Layout, tree: Any, by_layer: Collection[int] = ()) -> Any:
    """Whole leaves from slices, over the axis ``shard`` of a ``shard_map``; those of ``by_layer`` stay as they are."""
    count = layout.mesh.shape[SHARD]

    def of_bucket(leaves: list[Leaf], slices: list[Any]) -> list[Any]:
        rows = lax.all_gather(jnp.concatenate([x.ravel() for x in slices]), SHARD)
        parts = jax.vmap(lambda row: split_like(row, slices))(rows)
        return [
            jnp.moveaxis(part, 0, _axis(leaf)).reshape(leaf.shape) for leaf, part in zip(leaves, parts, strict=True)
        ]

    def of_leaf(leaf: Leaf, x: Any) -> Any:
        return lax.all_gather(x, SHARD, axis=_axis(leaf), tiled=True)

    slices, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(_per_bucket(_gathered(layout, by_layer), slices, of_bucket, of_leaf, count))


def reduce_scatter(layout: Layout, tree: Any, by_layer: Collection[int] = ()) -> Any:
    """This device's slices of the sums over ``shard`` of whole leaves, each a :class:`DeferredTranspose`.

    Those of ``by_layer`` are such slices already.
    """
    count = layout.mesh.shape[SHARD]
    wholes, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, DeferredTranspose))
    leaves = [
        leaf if leaf.axis is None else leaf._replace(axis=x.axis(leaf.axis))
        for leaf, x in zip(_gathered(layout, by_layer), wholes, strict=True)
    ]

    def of_bucket(leaves: list[Leaf], arrays: list[Any]) -> list[Any]:
        pieces = [_cut(leaf, x, count) for leaf, x in zip(leaves, arrays, strict=True)]
        rows = jnp.concatenate([x.reshape(count, -1) for x in pieces], axis=1)
        summed = from_real(lax.psum_scatter(as_real(rows), SHARD), rows)
        return split_like(summed, [x[0] for x in pieces])

    def of_leaf(leaf: Leaf, x: Any) -> Any:
        return from_real(lax.psum_scatter(as_real(x), SHARD, scatter_dimension=_axis(leaf), tiled=True), x)

    slices = _per_bucket(leaves, [x.array for x in wholes], of_bucket, of_leaf, 1)
    return treedef.unflatten([DeferredTranspose(x, whole.permutation) for x, whole in zip(slices, wholes, strict=True)])


def gather_layer(leaf: Leaf, dtype: Any) -> Callable[[Any], Any]:
    """A function that gathers a layer of a stacked leaf in ``dtype``, and reduce-scatters its gradient.

    Slices, and so the gradient, are in the dtype of sums.
    """

    def gather(x: Any) -> Any:
        return lax.all_gather(x.astype(dtype), SHARD, axis=_axis(leaf) - 1, tiled=True)

    call = jax.custom_vjp(gather)
    call.defvjp(lambda x: (gather(x), None), lambda _, g: (_scattered(leaf, g),))
    return call


def scatter_layer(layer_and_slice: tuple[Any, Any], leaf: Leaf) -> Any:
    """The layer of a stacked leaf that is whole; the gradient of the slice is that of the layer, reduce-scattered."""
    call = jax.custom_vjp(lambda layer, part: layer)
    call.defvjp(lambda layer, part: (layer, None), lambda _, g: (None, _scattered(leaf, g)))
    return call(*layer_and_slice)


def _scattered(leaf: Leaf, g: Any) -> Any:
    real = as_real(g.astype(sum_dtype(leaf.dtype)))
    return from_real(lax.psum_scatter(real, SHARD, scatter_dimension=_axis(leaf) - 1, tiled=True), g)


def is_gathered_by_layer(leaf: Leaf) -> bool:
    """Whether a leaf is worth collectives for each layer, if a scan reads it so."""
    layer = math.prod(leaf.shape[1:]) * jnp.dtype(leaf.dtype).itemsize
    return bool(leaf.axis) and layer > _SMALL_BYTES


def _gathered(layout: Layout, by_layer: Collection[int]) -> list[Leaf]:
    return [leaf._replace(axis=None) if i in by_layer else leaf for i, leaf in enumerate(layout.leaves)]


def as_real(x: Any) -> Any:
    """A complex array as real numbers, with one more axis of two; others as they are."""
    # XLA for the CPU aborts the process at a sum of complex constants over devices, such as the gradients of a complex
    # parameter that a loss does not use.
    return jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x


def from_real(x: Any, like: Any) -> Any:
    """The inverse of :func:`as_real`, if ``like`` is complex."""
    return lax.complex(x[..., 0], x[..., 1]) if jnp.iscomplexobj(like) else x


def gather_twice(forward: Callable[..., Any], gather: Callable[..., Any], params: Any) -> Any:
    """``forward(gather(params))``, ``(loss, pullback, aux)``, whose pullback gathers the parameters again."""
    # Residuals that are parameters, or rearranged parameters, are recomputed from the second gather. A policy for
    # jax.checkpoint could do the same, but it rounds all other residuals to their own precision, which the CPU compiler
    # does not remove.
    leaves, treedef = jax.tree.flatten(gather(params))
    closed, shapes = jax.make_jaxpr(lambda *leaves: forward(treedef.unflatten(leaves)), return_shape=True)(*leaves)
    # Variable -> the parameter it is a rearrangement of, and the equations in between.
    made: dict[Any, Any] = {var: (i, ()) for i, var in enumerate(closed.jaxpr.invars)}
    for equation in closed.jaxpr.eqns:
        source = equation.invars[0] if equation.invars else None
        if equation.primitive.name in REARRANGES and not isinstance(source, Literal) and source in made:
            i, before = made[source]
            made[equation.outvars[0]] = i, (*before, equation)
    structure = jax.tree.structure(shapes)
    loss, pullback, aux = structure.unflatten(jaxpr_as_fun(closed)(*leaves))
    _, kept, _ = structure.unflatten(closed.jaxpr.outvars)
    # The second gather waits for the forward pass; until then only slices are kept.
    params, loss = lax.optimization_barrier((params, loss))
    again = jax.tree.leaves(gather(params))

    def remake(var: Any, residual: Any) -> Any:
        if isinstance(var, Literal) or var not in made:
            return residual
        i, equations = made[var]
        x = again[i]
        for equation in equations:
            x = equation.primitive.bind(x, **equation.params)
        return x

    residuals, outer = jax.tree.flatten(pullback)
    pairs = zip(jax.tree.leaves(kept), residuals, strict=True)
    return loss, outer.unflatten([remake(var, residual) for var, residual in pairs]), aux


def deferred_gradients(pullback: Callable[..., Any], cotangent: Any) -> Any:
    """The gradients of a pullback, with a transposition that comes last deferred."""
    # The gradient of a matrix product ends in one. Before a reduce-scatter it would transpose the whole array, and some
    # compilers would choose a slower product to avoid that.
    closed, shapes = jax.make_jaxpr(lambda cotangent: pullback(cotangent)[0], return_shape=True)(cotangent)
    last = {
        equation.outvars[0]: equation.params["permutation"]
        for equation in closed.jaxpr.eqns
        if equation.primitive.name == "transpose"
    }
    deferred = []
    for var, x in zip(closed.jaxpr.outvars, jaxpr_as_fun(closed)(cotangent), strict=True):
        permutation = None if isinstance(var, Literal) else last.get(var)
        if permutation is None:
            deferred.append(DeferredTranspose(x))
        else:  # the compiler removes the transposition and its inverse
            undo = tuple(int(i) for i in np.argsort(permutation))
            deferred.append(DeferredTranspose(lax.transpose(x, undo), tuple(permutation)))
    return jax.tree.structure(shapes).unflatten(deferred)


def _per_bucket(leaves: Sequence[Leaf], values: list[Any], of_bucket: Any, of_leaf: Any, parts: int) -> list[Any]:
    """``of_bucket`` of each bucket of small leaves, and ``of_leaf`` of each other leaf that is cut."""
    values = list(values)
    for bucket in _buckets(leaves, values, parts):
        chosen = [leaves[i] for i in bucket]
        if len(bucket) == 1:
            values[bucket[0]] = of_leaf(chosen[0], values[bucket[0]])
            continue
        for i, value in zip(bucket, of_bucket(chosen, [values[i] for i in bucket]), strict=True):
            values[i] = value
    return values


def _buckets(leaves: Sequence[Leaf], values: list[Any], parts: int) -> list[list[int]]:
    """Indices of the leaves of each collective; ``parts``: number of ``values`` that make up a whole leaf."""
    cut = [i for i, leaf in enumerate(leaves) if leaf.axis is not None]
    sizes = [parts * values[i].size * values[i].dtype.itemsize for i in cut]
    kinds = [i if size > _SMALL_BYTES else values[i].dtype for i, size in zip(cut, sizes, strict=True)]
    return [[cut[j] for j in bucket] for bucket in in_buckets(kinds, sizes, _BUCKET_BYTES)]


def _cut(leaf: Leaf, x: Any, count: int) -> Any:
    """A whole leaf as ``[devices, *slice]``."""
    axis = _axis(leaf)
    parts = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0)


def _axis(leaf: Leaf) -> int:
    assert leaf.axis is not None  # only leaves that are cut are gathered
    return leaf.axis
