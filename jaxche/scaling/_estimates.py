"""Estimates made apart and averaged, where contributors have no gradient in common: replicas between two merges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxche.scaling._combine import LOG_SMOOTHING, blend
from jaxche.scaling._groups import group_squares
from jaxche.scaling._moments import preconditioner
from jaxche.scaling._state import NoiseScale
from jaxche.scaling._sums import Sums, estimate


class Estimates(NamedTuple):
    """One replica's estimates, weighted so that those of several replicas are the sums of these.

    Attributes:
      sqr: ``[G]``, weight times the squared norm of the true gradient.
      trace: ``[G]``, weight times the trace of one example's covariance.
      weight: batches less one, the degrees of freedom; 0 where there was nothing to compare.
      preconditioned: the weight of estimates of preconditioned gradients.
      examples: behind the estimates.
      contributors: batches behind them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2))
      >>> own = [noise_scale.local_sums(noise, g, 8) for g in (jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0]))]
      >>> total = jax.tree.map(jnp.add, *own)
      >>> float(noise_scale.local_estimates(noise, total, jnp.array([0.5, 0.5])).weight)
      1.0
    """

    sqr: jax.Array
    trace: jax.Array
    weight: jax.Array
    preconditioned: jax.Array
    examples: jax.Array
    contributors: jax.Array


def local_estimates(
    noise: NoiseScale,
    sums: Sums,
    mean_grads: Any,
    *,
    opt_state: Any = None,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> Estimates:
    r"""Estimates from the batches of one replica alone.

    For replicas that take local steps: each compares only gradients of its own path, so that what replicas differ in
    by where they are does not count as noise. What a replica's own path adds does: keep rounds short against the
    time in which the gradient changes. A replica with fewer than two batches contributes nothing.

    Args:
      noise: the noise scale; only its groups are read.
      sums: total of this replica's :func:`local_sums`.
      mean_grads: the mean of its gradients with the same weights.
      opt_state: as for :func:`local_sums`, the same state.
      b2: as for :func:`update`.
      eps: as for :func:`update`.

    Returns:
      :class:`Estimates`, to be summed over replicas and handed to :func:`update_from_estimates`.

    Raises:
      ValueError: gradients of another tree than ``init`` saw, or no second moments.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2))
      >>> own = [noise_scale.local_sums(noise, g, 8) for g in (jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0]))]
      >>> own = noise_scale.local_estimates(noise, jax.tree.map(jnp.add, *own), jnp.array([0.5, 0.5]))
      >>> noise = noise_scale.update_from_estimates(noise, own)
      >>> float(noise.var), float(noise.base_batch_size)
      (1.0, 8.0)
    """
    pre = preconditioner(opt_state, mean_grads, b2, eps) if opt_state is not None else None
    squares = group_squares(noise.groups, jax.tree.leaves(mean_grads), pre and pre.of(mean_grads))
    sqr, trace = estimate(sums, squares)
    several = sums.contributors >= 2
    weight = jnp.where(several, sums.contributors - 1, jnp.zeros_like(sums.contributors))
    active = pre.active if pre else jnp.zeros((), bool)

    def weighted(x: jax.Array) -> jax.Array:
        return jnp.where(several, weight * x, jnp.zeros_like(x))

    return Estimates(
        sqr=weighted(sqr),
        trace=weighted(trace),
        weight=weight,
        preconditioned=weight * active.astype(jnp.float32),
        examples=jnp.where(several, sums.examples, jnp.zeros_like(sums.examples)),
        contributors=jnp.where(several, sums.contributors, jnp.zeros_like(sums.contributors)),
    )


def update_from_estimates(noise: NoiseScale, estimates: Estimates) -> NoiseScale:
    """Finish an update from the summed estimates of several replicas.

    Nothing is learnt where no replica had two batches, where a number is not finite, and where some replicas
    preconditioned and others did not yet.

    Args:
      noise: from :func:`init` or an earlier update.
      estimates: total of everybody's :func:`local_estimates`.

    Returns:
      The next :class:`NoiseScale`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2))
      >>> own = [noise_scale.local_sums(noise, g, 8) for g in (jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0]))]
      >>> own = noise_scale.local_estimates(noise, jax.tree.map(jnp.add, *own), jnp.array([0.5, 0.5]))
      >>> float(noise_scale.update_from_estimates(noise, own).var)
      1.0
    """
    weight = estimates.weight
    sqr, trace = estimates.sqr / weight, estimates.trace / weight
    active = estimates.preconditioned > 0
    alike = ~active | (estimates.preconditioned == weight)
    write = (weight > 0) & alike & jnp.all(jnp.isfinite(sqr)) & jnp.all(jnp.isfinite(trace))
    base = jnp.where(noise.base_batch_size > 0, noise.base_batch_size, estimates.examples / estimates.contributors)
    anew = noise.biased | (active != noise.preconditioned)
    log_theta = LOG_SMOOTHING * estimates.examples / base
    return replace(
        blend(noise, sqr, trace, log_theta=log_theta, base=base, anew=anew, write=write),
        base_batch_size=jnp.where(write, base, noise.base_batch_size),
        biased=jnp.where(write, jnp.zeros_like(noise.biased), noise.biased),
        preconditioned=jnp.where(write, active, noise.preconditioned),
    )
