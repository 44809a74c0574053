"""Batch statistics of several replicas as if all examples had passed through one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxche.averaging._mean import is_float
from jaxche.averaging._sums import sum_dtype


def path_names(path: Any) -> tuple[str, ...]:
    """The names on the way to a leaf, as people write them.

    Args:
      path: of a leaf, as ``jax.tree.leaves_with_path`` gives it.

    Returns:
      A name a key; none for a tree that is a leaf.

    Example:
      >>> import jax
      >>> [path_names(path) for path, _ in jax.tree.leaves_with_path({"layers": [{"w": 1.0}]})]
      [('layers', '0', 'w')]
    """
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def to_moments(tree: Any, reference: Any) -> Any:
    r"""Replace each ``var`` that has a sibling ``mean`` by its second moment about a common reference.

    .. math:: q_i = v_i + (m_i - m_0)^2

    A plain mean of variances forgets that the replicas' means differ. Second moments do average, so the merge
    takes the weighted mean of these trees and :func:`from_moments` turns the result back (law of total variance).
    Moments about ``m_0``, the mean every replica had when the round began, lose no digits when ``m^2`` is much
    larger than ``v``.

    Args:
      tree: one replica's statistics, e.g. a Flax ``batch_stats`` collection.
      reference: the statistics common to all replicas at the start of the round, same structure.

    Returns:
      The tree with every paired ``var`` replaced; other leaves unchanged.

    References:
      Chan, Golub, LeVeque, *Updating formulae and a pairwise algorithm for computing sample variances*, 1979.

    Example:
      >>> stats = {"bn": {"mean": jnp.array(3.0), "var": jnp.array(1.0)}}
      >>> float(to_moments(stats, {"bn": {"mean": jnp.array(1.0), "var": jnp.array(1.0)}})["bn"]["var"])
      5.0
    """
    return _shift_variances(tree, reference, 1.0)


def from_moments(tree: Any, reference: Any) -> Any:
    r"""Undo :func:`to_moments` on the weighted mean of the replicas: :math:`v = q - (m - m_0)^2`.

    Args:
      tree: weighted mean of trees made by :func:`to_moments`.
      reference: the same reference.

    Returns:
      Statistics with the pooled mean and the pooled variance.

    Example:
      >>> zero = {"mean": jnp.array(0.0), "var": jnp.array(0.0)}
      >>> a = to_moments({"mean": jnp.array(0.0), "var": jnp.array(1.0)}, zero)
      >>> b = to_moments({"mean": jnp.array(2.0), "var": jnp.array(1.0)}, zero)
      >>> pooled = from_moments(jax.tree.map(lambda x, y: (x + y) / 2, a, b), zero)
      >>> float(pooled["mean"]), float(pooled["var"])
      (1.0, 2.0)
    """
    return _shift_variances(tree, reference, -1.0)


def _shift_variances(tree: Any, reference: Any, sign: float) -> Any:
    paths, treedef = jax.tree.flatten_with_path(tree)
    by_path = {path_names(path): leaf for path, leaf in paths}
    origin = {path_names(path): leaf for path, leaf in jax.tree.leaves_with_path(reference)}
    leaves = []
    for path, leaf in paths:
        names = path_names(path)
        mean_path = (*names[:-1], "mean")
        if names and names[-1] == "var" and mean_path in by_path and is_float(leaf):
            wide = sum_dtype(leaf.dtype)
            shift = by_path[mean_path].astype(wide) - origin[mean_path].astype(wide)
            leaf = jnp.asarray(leaf).astype(wide) + sign * shift * shift
        leaves.append(leaf)
    return jax.tree.unflatten(treedef, leaves)
