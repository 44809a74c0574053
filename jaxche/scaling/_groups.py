"""Parameter groups: the group of each leaf, norms and factors of groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxche.averaging import is_float, sum_dtype


class Groups(NamedTuple):
    """Groups of the leaves of one tree; hashable, so that it can be a static part of a state."""

    names: tuple[str, ...] | None  # the labels in sorted order, or None for one unnamed group
    of_leaf: tuple[int, ...]  # index of each leaf's group, in flattening order

    @property
    def count(self) -> int:
        return 1 if self.names is None else len(self.names)


def make_groups(params: Any, labels: Any | Callable[[Any], Any] | None) -> Groups:
    """Groups from labels as ``optax.partition`` takes them: a tree (or prefix) of labels, or a function giving one."""
    leaves = jax.tree.leaves(params)
    if labels is None:
        return Groups(None, (0,) * len(leaves))
    tree = labels(params) if callable(labels) else labels
    try:
        flat = [str(label) for label in jax.tree.leaves(jax.tree.broadcast(tree, params))]
    except ValueError as error:
        raise ValueError(
            f"groups={labels!r} does not label params: {error}; write a tree of labels like params or a prefix of "
            "it, e.g. groups={'encoder': 'slow', 'head': 'fast'}, or a function of params that returns one"
        ) from None
    names = tuple(sorted(set(flat)))
    return Groups(names, tuple(names.index(label) for label in flat))


def group_squares(groups: Groups, leaves: Sequence[Any], factors: Sequence[Any] | None) -> jax.Array:
    r"""Squared norm :math:`\|f x\|^2` of each group, ``[G]`` float32; leaves that are not float are skipped."""
    _check_count(groups, leaves)
    sums = [jnp.zeros((), jnp.float32)] * groups.count
    for i, (leaf, group) in enumerate(zip(leaves, groups.of_leaf, strict=True)):
        if is_float(leaf):
            x = _scaled(leaf, factors and factors[i])
            sums[group] = sums[group] + jnp.sum(jnp.square(jnp.abs(x))).astype(jnp.float32)
    return jnp.stack(sums)


def group_products(
    groups: Groups, leaves: Sequence[Any], others: Sequence[Any], factors: Sequence[Any] | None
) -> tuple[jax.Array, jax.Array]:
    r"""For each group :math:`\langle f x, f y \rangle` and :math:`\|f (x - y)\|^2`, ``[G]`` float32 each."""
    _check_count(groups, leaves)
    products = [jnp.zeros((), jnp.float32)] * groups.count
    squares = list(products)
    for i, (leaf, other, group) in enumerate(zip(leaves, others, groups.of_leaf, strict=True)):
        if is_float(leaf):
            x, y = (_scaled(one, factors and factors[i]) for one in (leaf, other))
            products[group] = products[group] + jnp.sum(jnp.real(x * jnp.conj(y))).astype(jnp.float32)
            squares[group] = squares[group] + jnp.sum(jnp.square(jnp.abs(x - y))).astype(jnp.float32)
    return jnp.stack(products), jnp.stack(squares)


def _scaled(leaf: Any, factor: Any) -> Any:
    x = jnp.asarray(leaf)
    x = x.astype(sum_dtype(x.dtype))
    return x if factor is None else x * factor.astype(x.dtype)


def _check_count(groups: Groups, leaves: Sequence[Any]) -> None:
    if len(leaves) != len(groups.of_leaf):
        raise ValueError(
            f"grads has {len(leaves)} leaves, but the params given to init had {len(groups.of_leaf)}; "
            "pass gradients of the same tree"
        )


def scale_leaves(groups: Groups, tree: Any, factors: Any) -> Any:
    """Multiply each float leaf by its group's factor (``[G]``), or by a single factor (``[]``)."""
    leaves, treedef = jax.tree.flatten(tree)
    for i, (leaf, group) in enumerate(zip(leaves, groups.of_leaf, strict=True)):
        if is_float(leaf):
            factor = factors if factors.ndim == 0 else factors[group]
            leaves[i] = leaf * factor.astype(leaf.dtype)
    return jax.tree.unflatten(treedef, leaves)
