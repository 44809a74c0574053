"""Small arrays of a tree in one vector for each dtype: an array takes Python as long as copying 64 KiB does."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# An array of at most so many bytes is small.
_SMALL_BYTES = 64 * 1024
# Fewer small arrays are not worth the programs that pack and unpack them.
_FEWEST = 16


class Packed(NamedTuple):
    """A tree with its small arrays joined, ``[rows, numbers]`` for each dtype, and its other arrays as they are."""

    vectors: list[Any]
    others: list[Any]


class Packing:
    """How trees like this one are packed; arrays have a leading replica axis.

    Nothing else decides, so trees of the same shapes and dtypes are packed alike in every process and by every merge.
    """

    def __init__(self, tree: Any):
        leaves, self._treedef = jax.tree.flatten(tree)
        groups: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if _is_small(leaf):
                groups.setdefault(leaf.dtype, []).append(i)
        self._groups = list(groups.values())
        small = {i for group in self._groups for i in group}
        self._others = [i for i in range(len(leaves)) if i not in small]
        self._shapes = tuple(tuple(leaves[i].shape[1:] for i in group) for group in self._groups)
        self.is_worth_it = len(small) >= _FEWEST

    def pack(self, tree: Any) -> Packed:
        """The packed tree, inside or outside of a program."""
        leaves = self._treedef.flatten_up_to(tree)
        return Packed(_join([[leaves[i] for i in group] for group in self._groups]), [leaves[i] for i in self._others])

    def unpack(self, packed: Packed) -> Any:
        """The tree, inside or outside of a program."""
        leaves: list[Any] = [None] * self._treedef.num_leaves
        for group, arrays in zip(self._groups, _split(packed.vectors, self._shapes), strict=True):
            for i, array in zip(group, arrays, strict=True):
                leaves[i] = array
        for i, array in zip(self._others, packed.others, strict=True):
            leaves[i] = array
        return jax.tree.unflatten(self._treedef, leaves)


def packings(named: Mapping[str, Any]) -> dict[str, Packing]:
    """The packings of those named trees that have many small arrays."""
    made = {name: Packing(tree) for name, tree in named.items()}
    return {name: packing for name, packing in made.items() if packing.is_worth_it}


def _is_small(leaf: Any) -> bool:
    # A key cannot be joined, and a weakly typed array would lose that.
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or getattr(leaf, "weak_type", False):
        return False
    return math.prod(leaf.shape[1:]) * leaf.dtype.itemsize <= _SMALL_BYTES


@jax.jit
def _join(groups: list[list[Any]]) -> list[Any]:
    return [jnp.concatenate([x.reshape(x.shape[0], -1) for x in group], axis=1) for group in groups]


@functools.partial(jax.jit, static_argnums=1)
def _split(vectors: list[Any], shapes: tuple[tuple[tuple[int, ...], ...], ...]) -> list[list[Any]]:
    found = []
    for vector, own in zip(vectors, shapes, strict=True):
        *ends, _ = itertools.accumulate(map(math.prod, own))
        pieces = jnp.split(vector, ends, axis=1)
        found.append([piece.reshape(len(vector), *shape) for piece, shape in zip(pieces, own, strict=True)])
    return found
