"""Rounds that do not keep the state before them: the carry has the large arrays of that state in place of copies.

The steps of the round delete them, as ``donate_argnums`` of ``jax.jit`` does, so devices hold the state once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.averaging import is_float
from jaxche.replicas._packing import SMALL_BYTES


class _Taken(NamedTuple):
    """Stands for an array that is no output of a program, which would copy it."""


def without_large(tree: Any, small_bytes: int = SMALL_BYTES) -> Any:
    """A tree, as the output of a program, without the large arrays that :func:`with_large` puts back."""
    return jax.tree.map(lambda x: _Taken() if _is_large(x, small_bytes) else x, tree)


def with_large(tree: Any, arrays: Sequence[Any], small_bytes: int = SMALL_BYTES) -> Any:
    """The tree of :func:`without_large` with the large ones of these arrays, which are in its order."""
    large = (x for x in arrays if _is_large(x, small_bytes))
    return jax.tree.map(lambda x: next(large) if _is_taken(x) else x, tree, is_leaf=_is_taken)


def _is_taken(x: Any) -> bool:
    return isinstance(x, _Taken)


def _is_large(x: Any, small_bytes: int) -> bool:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return not is_key and x.size * x.dtype.itemsize > small_bytes


def marked(tree: Any, small_bytes: int = SMALL_BYTES) -> Any:
    """The tree with one number in place of each large array: 0 if all its numbers are finite, else NaN.

    A comparison with it is one with the array, but for arrays with NaN or infinite numbers, which it leaves out.
    """
    return jax.tree.map(lambda x: _mark(x) if _is_large(x, small_bytes) else x, tree)


def _mark(x: Any) -> Any:
    return jnp.sum(x - x) if is_float(x) else jnp.zeros((), x.dtype)


def revived(tree: Any) -> Any:
    """The tree with zeros for its deleted arrays; not a collective, so one process may call it alone."""
    return jax.tree.map(lambda x: _zeros(x) if isinstance(x, jax.Array) and x.is_deleted() else x, tree)


def _zeros(x: jax.Array) -> jax.Array:
    shape = x.sharding.shard_shape(x.shape)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda _: np.zeros(shape, x.dtype))
