"""Small arrays of a tree joined in vectors, and large ones taken from a state that is not kept.

Each array takes time to dispatch, and to copy to the host: small ones are in one vector for each dtype. Counts stay
arrays, so that the counts of a packed optimizer state are those of the state, in their order. In a round that does not
keep the state before it the carry has the large arrays of that state in place of copies. The steps of the round delete
them, as ``donate_argnums`` of ``jax.jit`` does, so devices hold the state once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxche.averaging import is_float
from jaxche.replicas._opt_state import is_count

# An array of at most so many bytes is small: Python takes as long for it as for copying them. If accelerators merge on
# the host, an array takes some 0.3 ms to be copied there and back (measured on an H100), as long as these bytes take.
SMALL_BYTES, SMALL_BYTES_TO_HOST = 1 << 16, 1 << 21
# Fewer small arrays are not worth the programs that pack and unpack them.
_FEWEST = 16


class Packed(NamedTuple):
    """A tree with its small arrays joined, ``[rows, numbers]`` for each dtype, and its other arrays as they are."""

    vectors: list[Any]
    others: list[Any]


class Packing:
    """How trees of these shapes and dtypes, with a leading replica axis, are packed, alike in every process."""

    def __init__(self, tree: Any, small_bytes: int = SMALL_BYTES):
        self.small_bytes = small_bytes
        leaves, self._treedef = jax.tree.flatten(tree)
        groups: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if _is_small(leaf, small_bytes):
                groups.setdefault(leaf.dtype, []).append(i)
        self._groups = list(groups.values())
        small = {i for group in self._groups for i in group}
        self._others = [i for i in range(len(leaves)) if i not in small]
        self._shapes = tuple(tuple(leaves[i].shape[1:] for i in group) for group in self._groups)
        self._starts = [[0, *itertools.accumulate(map(math.prod, own))][:-1] for own in self._shapes]
        self._starts_on: dict[Any, Any] = {}
        self.is_worth_it = len(small) >= _FEWEST

    def pack(self, tree: Any) -> Packed:
        """The packed tree, inside or outside of a program."""
        return Packed(self.vectors(tree), self.others(tree))

    def vectors(self, tree: Any) -> list[Any]:
        """The vectors of the packed tree."""
        leaves = self._treedef.flatten_up_to(tree)
        return _join([[leaves[i] for i in group] for group in self._groups])

    def others(self, tree: Any) -> list[Any]:
        """The arrays of the tree that are not joined, as they are."""
        leaves = self._treedef.flatten_up_to(tree)
        return [leaves[i] for i in self._others]

    def unpack(self, packed: Packed, places: Any = None) -> Any:
        """The tree inside a program; its arrays have the leading axes of the vectors.

        With :meth:`places` as an input of the program, arrays of one shape share a compiled loop.
        """
        return self._tree(packed, _cut(packed.vectors, self._starts if places is None else places, self._shapes))

    def unpack_now(self, packed: Packed) -> Any:
        """The tree outside of programs, from vectors on one device."""
        return self._tree(packed, _cut_now(packed.vectors, self.places(packed), self._shapes))

    def places(self, packed: Packed) -> Any:
        """The places of the arrays in these vectors, on their device."""
        if not packed.vectors:
            return []
        (device,) = packed.vectors[0].devices()
        if device not in self._starts_on:
            self._starts_on[device] = jax.device_put(jax.tree.map(np.int32, self._starts), device)
        return self._starts_on[device]

    def _tree(self, packed: Packed, pieces: Sequence[Sequence[Any]]) -> Any:
        leaves: list[Any] = [None] * self._treedef.num_leaves
        for group, arrays in zip(self._groups, pieces, strict=True):
            for i, array in zip(group, arrays, strict=True):
                leaves[i] = array
        for i, array in zip(self._others, packed.others, strict=True):
            leaves[i] = array
        return jax.tree.unflatten(self._treedef, leaves)


def packings(named: Mapping[str, Any], small_bytes: int = SMALL_BYTES) -> dict[str, Packing]:
    """The packings of those named trees that have many small arrays."""
    made = {name: Packing(tree, small_bytes) for name, tree in named.items()}
    return {name: packing for name, packing in made.items() if packing.is_worth_it}


class Deferred:
    """A tree that is made when it is first read, from its packed form if it has one.

    Most rounds need only the packed form, and making hundreds of arrays takes as long as the rest of a merge.
    """

    def __init__(self, make: Callable[[], Any], packed: Packed | None = None, small_bytes: int = SMALL_BYTES):
        self.packed, self._make, self._small_bytes = packed, make, small_bytes

    @functools.cached_property
    def tree(self) -> Any:
        """The tree."""
        return self._make()

    @property
    def made(self) -> Any:
        """Its arrays: the packed form, and the tree once it was read."""
        return self.packed, self.__dict__.get("tree")

    def packed_by(self, packing: Packing) -> Packed | None:
        """Its packed form, if this is how it is packed."""
        return self.packed if packing.small_bytes == self._small_bytes else None

    @classmethod
    def of(cls, packing: Packing, packed: Packed) -> Deferred:
        """The tree of this packed form."""
        return cls(functools.partial(packing.unpack_now, packed), packed, packing.small_bytes)


def _is_small(leaf: Any, small_bytes: int) -> bool:
    # A key cannot be joined, and a weakly typed array would lose that.
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or getattr(leaf, "weak_type", False) or is_count(leaf):
        return False
    return math.prod(leaf.shape[1:]) * leaf.dtype.itemsize <= small_bytes


@jax.jit
def _join(groups: list[list[Any]]) -> list[Any]:
    return [jnp.concatenate([x.reshape(x.shape[0], -1) for x in group], axis=1) for group in groups]


def _cut(vectors: list[Any], starts: Any, shapes: tuple[tuple[tuple[int, ...], ...], ...]) -> list[list[Any]]:
    """Arrays of these shapes from their places in the last axis of the vectors."""
    return [
        [
            lax.dynamic_slice_in_dim(vector, start, math.prod(shape), axis=-1).reshape(*vector.shape[:-1], *shape)
            for start, shape in zip(*own, strict=True)
        ]
        for vector, *own in zip(vectors, starts, shapes, strict=True)
    ]


_cut_now = jax.jit(_cut, static_argnums=2)


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
