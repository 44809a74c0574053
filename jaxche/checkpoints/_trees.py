"""The arrays of a checkpoint by name: trees as nested dicts, and their leaves by path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxche.averaging import escape_name, path_names


def to_nested(tree: Any) -> dict[str, Any]:
    """A pytree as nested dicts with the names of its paths, which plain Orbax restores without its classes."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        if 0 in leaf.shape:  # Orbax cannot save it
            continue
        *folders, name = _names(path, ".")  # Orbax joins them by dots
        inner = found
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = leaf
    return found


def from_nested(like: Any, found: Mapping[str, Any]) -> Any:
    """The inverse of :func:`to_nested`, with the structure of ``like``."""

    def pick(path: Any, leaf: Any) -> Any:
        if 0 in leaf.shape:
            empty = np.zeros(leaf.shape, leaf.dtype)
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, empty.__getitem__)
        inner: Any = found
        for name in _names(path, "."):
            inner = inner[name]
        return inner

    return jax.tree.map_with_path(pick, like)


def leaf_shapes(trees: Mapping[str, Any]) -> dict[str, str]:
    """Shape and dtype of every leaf by its path, e.g. ``{"params/w": "float32[3,2]"}``."""
    return {name: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for name, leaf in leaf_names(trees)}


def leaf_names(trees: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, e.g. ``params/w``."""
    for name, tree in trees.items():
        for path, leaf in jax.tree.leaves_with_path(tree):
            yield "/".join((name, *_names(path, "/"))), leaf


def items_of(trees: Mapping[str, Any]) -> dict[str, Any]:
    """The items of a checkpoint: ``params``, ``residual`` and ``state`` with all other trees, unless empty."""
    own = {name: to_nested(trees[name]) for name in ("params", "residual") if name in trees}
    rest = {name: to_nested(tree) for name, tree in trees.items() if name not in own}
    return own | ({"state": rest} if rest else {})


def _names(path: Any, separator: str) -> tuple[str, ...]:
    """The names of a path, which are joined by ``separator``."""
    return tuple(escape_name(name, separator) for name in path_names(path) or ("value",))
