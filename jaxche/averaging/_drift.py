"""How far the replicas have moved apart."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Drift(NamedTuple):
    r"""How far replicas are from their mean, by three measures.

    Attributes:
      rel: :math:`\max_i \|x_i - \bar x\| / \|\bar x\|`; grows with the learning rate and the number of steps.
      dir: :math:`\sum_i w_i \|\Delta_i - \bar\Delta\|^2 / \|\bar\Delta\|^2`; free of scale: 0 when all replicas
        moved alike, above 1 when they cancelled more than they agreed.
      cosines: ``[R, R]`` cosines between the replicas' deltas.

    Example:
      >>> from jaxche.averaging import drift_from_gram
      >>> import numpy as np
      >>> drift_from_gram(np.array([[1.0, -1.0], [-1.0, 1.0]]), [0.5, 0.5], 4.0).cosines.round(2).tolist()
      [[1.0, -1.0], [-1.0, 1.0]]
    """

    rel: float
    dir: float
    cosines: np.ndarray


def gram_matrix(deltas: Any) -> jax.Array:
    r"""Inner products :math:`G_{ij} = \langle \Delta_i, \Delta_j \rangle` of the replicas' deltas.

    Args:
      deltas: pytree with leaves ``[R, ...]``: what each replica changed in a round. Non-float leaves are skipped.

    Returns:
      ``[R, R]`` float32 matrix.

    Example:
      >>> gram_matrix({"w": jnp.array([[3.0, 4.0], [0.0, 1.0]])}).tolist()
      [[25.0, 4.0], [4.0, 1.0]]
    """
    leaves = [x for x in jax.tree.leaves(deltas) if jnp.issubdtype(x.dtype, jnp.floating)]
    flat = [x.reshape(x.shape[0], -1).astype(jnp.float32) for x in leaves]
    return jnp.sum(jnp.stack([jnp.matmul(x, x.T, precision="highest") for x in flat]), axis=0)


def drift_from_gram(gram: Any, weights: Any, mean_norm: float) -> Drift:
    r"""All measures of drift from the Gram matrix, without touching the model again.

    .. math:: \|\Delta_i - \bar\Delta\|^2 = G_{ii} - 2 (G w)_i + w^\top G w

    Args:
      gram: ``[R, R]`` matrix from :func:`gram_matrix`.
      weights: ``[R]`` merge weights that sum to one.
      mean_norm: norm of the merged parameters.

    Returns:
      A :class:`Drift`.

    Raises:
      ValueError: weights that do not fit the matrix.

    Example:
      >>> drift = drift_from_gram([[1.0, 0.0], [0.0, 1.0]], [0.5, 0.5], mean_norm=10.0)
      >>> round(drift.rel, 4), round(drift.dir, 4), drift.cosines[0, 1].item()
      (0.0707, 1.0, 0.0)
    """
    g, w = np.asarray(gram, np.float64), np.asarray(weights, np.float64)
    if g.shape != (w.size, w.size):
        raise ValueError(f"gram has shape {g.shape} for {w.size} weights; it must be [{w.size}, {w.size}]")
    mean_sq = float(w @ g @ w)
    distance_sq = np.maximum(np.diag(g) - 2 * g @ w + mean_sq, 0.0)
    norms = np.sqrt(np.maximum(np.diag(g), np.finfo(np.float64).tiny))
    return Drift(
        rel=float(np.sqrt(distance_sq.max())) / mean_norm,
        dir=float(w @ distance_sq) / max(mean_sq, np.finfo(np.float64).tiny),
        cosines=g / np.outer(norms, norms),
    )


def measure_drift(mean_of_squares: Any, mean_delta_sq: Any, mean_params_sq: Any) -> tuple[Any, Any]:
    r"""Drift from what one all-reduce already carries: ``(rel, dir)``, no second collective.

    .. math:: V = \sum_i w_i\|\Delta_i\|^2 - \|\bar\Delta\|^2, \qquad
              \mathrm{rel} = \sqrt{V} / \|\bar x\|, \qquad \mathrm{dir} = V / \|\bar\Delta\|^2

    ``dir`` is exact. ``rel`` takes the weighted root mean square over replicas where :class:`Drift` takes the
    largest, because the largest needs another round trip on the slow link; it is at most that one, and at least
    that one times the square root of the smallest weight.

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
    tiny = jnp.finfo(jnp.float32).tiny
    variance = jnp.maximum(mean_of_squares - mean_delta_sq, 0.0)
    return jnp.sqrt(variance / jnp.maximum(mean_params_sq, tiny)), variance / jnp.maximum(mean_delta_sq, tiny)
