"""Leaves of trees: which are averaged, their weighted sums, and their names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Weighted(NamedTuple):
    r"""A weighted sum and the sum of its weights; together they are a mean that combines exactly.

    .. math:: \bar{x} = \frac{\sum_b \mathrm{total}_b}{\sum_b \mathrm{weight}_b}

    A loss over tokens is a mean over the tokens of a batch, and padded batches have unequal numbers of them. A mean of
    the means of batches would give each batch the same weight. The sums give every token the same weight.

    Args:
      total: the sum of weight times value, a scalar array.
      weight: the sum of the weights, a scalar array of at least 0, e.g. the number of tokens.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> batches = [Weighted(jnp.float32(6), jnp.float32(2)), Weighted(jnp.float32(4), jnp.float32(8))]
      >>> float(jax.tree.map(lambda *x: sum(x), *batches).mean)
      1.0
    """

    total: Any
    weight: Any

    @property
    def mean(self) -> Any:
        """The total divided by the weight."""
        return self.total / self.weight


def is_float(leaf: Any) -> bool:
    """Whether a leaf is averaged: real and complex floats are; integers, booleans and PRNG keys are not."""
    return bool(jnp.issubdtype(jnp.asarray(leaf).dtype if not hasattr(leaf, "dtype") else leaf.dtype, jnp.inexact))


def sum_dtype(dtype: Any) -> Any:
    """The dtype in which floats of ``dtype`` are summed: their own, or float32 if that is wider."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def change(new: Any, old: Any) -> Any:
    """``new - old`` of floats, in the dtypes in which they are summed; 0 for a number that stays infinite."""

    def difference(a: Any, b: Any) -> Any:
        a, b = (x.astype(sum_dtype(x.dtype)) for x in (a, b))
        return jnp.where(a == b, 0, a - b)

    return jax.tree.map(difference, new, old)


def zero_sums(tree: Any) -> Any:
    """Zeros like a tree of floats, in the dtypes in which it is summed."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x.dtype)), tree)


def weighted(tree: Any, weight: jax.Array) -> Any:
    r"""The tree times a scalar weight, :math:`w x`, in the dtypes in which it is summed.

    Where :math:`w` is 0 the product is 0 even if :math:`x` is NaN or infinite, so that a replica of weight 0 adds
    nothing to a sum.
    """

    def product(x: Any) -> Any:
        wide = sum_dtype(x.dtype)
        return jnp.where(weight != 0, x.astype(wide) * weight.astype(wide), jnp.zeros((), wide))

    return jax.tree.map(product, tree)


def add_weighted(sums: Any, tree: Any, weight: jax.Array) -> Any:
    r"""One more term of a weighted sum, :math:`s + w x`; the first sums are :func:`zero_sums`."""
    return jax.tree.map(jnp.add, sums, weighted(tree, weight))


def split_like(vector: jax.Array, arrays: Sequence[Any]) -> list[jax.Array]:
    """Arrays of these shapes from the vector of all their numbers, in order, in its dtype."""
    ends = list(itertools.accumulate(x.size for x in arrays))
    parts = jnp.split(vector, ends[:-1])
    return [part.reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]


def path_names(path: Sequence[Any]) -> tuple[str, ...]:
    """The keys of a path from ``jax.tree.leaves_with_path`` as text, e.g. ``("layers", "0", "w")``."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def escape_name(name: str, separator: str) -> str:
    """``name`` with the separator percent-encoded, as in a URL, so that different paths have different joined names."""
    return name.replace("%", "%25").replace(separator, f"%{ord(separator):02X}")
