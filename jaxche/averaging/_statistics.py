"""Pooled batch statistics: the statistics of all examples, from those of each replica."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxche.averaging._trees import is_float, path_names, sum_dtype

_VALUE = jax.tree_util.GetAttrKey("value")


def to_moments(tree: Any, reference: Any) -> list[tuple[Any, Any]]:
    r"""First and second moment of each ``mean`` that has a sibling ``var``, about a common reference.

    .. math:: d_i = m_i - m_0, \qquad q_i = v_i + d_i^2

    A mean of variances ignores the differences between the replicas' means. Moments about a common ``m_0`` can be
    averaged, and :func:`from_moments` computes pooled statistics from their weighted mean (law of total variance). The
    rounding error is smallest if ``m_0`` is near the pooled mean: average the means first, and use their weighted mean
    as the reference.

    Args:
      tree: one replica's statistics, e.g. a Flax ``batch_stats`` collection.
      reference: statistics common to all replicas, same structure: the weighted mean of their trees.

    Returns:
      ``(d_i, q_i)`` of each pair, in the order of the ``var`` leaves, in float32 or wider; empty without pairs.

    References:
      Chan, Golub, LeVeque, *Algorithms for computing the sample variance: analysis and recommendations*, The American
      Statistician 37, 1983 (the corrected two-pass algorithm).

    Example:
      >>> stats = {"bn": {"mean": jnp.array(3.0), "var": jnp.array(1.0)}}
      >>> [(d, q)] = to_moments(stats, {"bn": {"mean": jnp.array(1.0), "var": jnp.array(1.0)}})
      >>> float(d), float(q)
      (2.0, 5.0)
    """
    leaves, origin, moments = jax.tree.leaves(tree), jax.tree.leaves(reference), []
    for mean, var in _pairs(tree):
        wide = sum_dtype(leaves[mean].dtype)
        d = jnp.asarray(leaves[mean]).astype(wide) - jnp.asarray(origin[mean]).astype(wide)
        moments.append((d, jnp.asarray(leaves[var]).astype(sum_dtype(leaves[var].dtype)) + _square(d)))
    return moments


def from_moments(moments: Any, reference: Any) -> Any:
    r"""Pooled statistics from the weighted mean of the replicas' moments.

    .. math:: m = m_0 + \bar d, \qquad v = \bar q - \bar d^2

    Args:
      moments: weighted mean of the results of :func:`to_moments` on the replicas.
      reference: as for :func:`to_moments`.

    Returns:
      The reference with the pooled means and variances; other leaves unchanged. No variance is negative.

    Example:
      >>> a, b = ({"mean": jnp.array(m), "var": jnp.array(1.0)} for m in (0.0, 2.0))
      >>> half = lambda x, y: (x + y) / 2
      >>> means = jax.tree.map(half, a, b)
      >>> pooled = from_moments(jax.tree.map(half, to_moments(a, means), to_moments(b, means)), means)
      >>> float(pooled["mean"]), float(pooled["var"])
      (1.0, 2.0)
    """
    leaves, treedef = jax.tree.flatten(reference)
    for (mean, var), (d, q) in zip(_pairs(reference), moments, strict=True):
        leaves[mean] = jnp.asarray(leaves[mean]).astype(d.dtype) + d
        leaves[var] = jnp.maximum(q - _square(d), 0)
    return jax.tree.unflatten(treedef, leaves)


def _pairs(tree: Any) -> list[tuple[int, int]]:
    """Positions of each ``var`` and of the ``mean`` of the same shape beside it; floats only."""
    # The path of an array in a variable of nnx, or in a box of linen, ends in the attribute with its value.
    flat = [
        (path_names(path[:-1] if path[-1:] == (_VALUE,) else path), leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]
    positions = {names: i for i, (names, _) in enumerate(flat)}
    pairs = []
    for i, (names, var) in enumerate(flat):
        at = positions.get((*names[:-1], "mean")) if names and names[-1] == "var" else None
        if at is None:
            continue
        mean = flat[at][1]
        if is_float(var) and is_float(mean) and jnp.shape(var) == jnp.shape(mean):
            pairs.append((at, i))
    return pairs


def _square(x: Any) -> Any:
    return jnp.square(jnp.abs(x))
