"""An update in two halves, for programs that already sum something over contributors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxche.averaging import is_float, sum_dtype
from jaxche.scaling._checks import known, refuse_unless_positive
from jaxche.scaling._groups import group_squares
from jaxche.scaling._moments import preconditioner
from jaxche.scaling._state import NoiseScale
from jaxche.scaling._sums import Sums, estimate, make_sums

LOG_SMOOTHING = math.log(0.999)


def local_sums(
    noise: NoiseScale,
    grads: Any,
    batch_size: Any,
    weight: Any = None,
    *,
    opt_state: Any = None,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> Sums:
    r"""One contributor's part of an update: a few numbers that add up over contributors.

    For programs that already sum something over replicas or micro-batches: put these into that sum and hand the
    total to :func:`update_from_sums`. No further collective is needed.

    Args:
      noise: the noise scale; only its groups are read.
      grads: pytree of this contributor's gradients, the mean over its batch.
      batch_size: examples in the batch.
      weight: this contributor's weight in the mean the others will form, if that is not ``batch_size``. Weights
        need not be normalised.
      opt_state: as for :func:`update`; the same for all contributors.
      b2: as for :func:`update`.
      eps: as for :func:`update`.

    Returns:
      A :class:`Sums` of arrays ``[G]`` and ``[]``.

    Raises:
      ValueError: gradients of another tree than ``init`` saw, a bad size, or no second moments.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2))
      >>> a = noise_scale.local_sums(noise, jnp.array([1.0, 0.0]), 8)
      >>> b = noise_scale.local_sums(noise, jnp.array([0.0, 1.0]), 8)
      >>> total = jax.tree.map(jnp.add, a, b)
      >>> float(noise_scale.update_from_sums(noise, total, jnp.array([0.5, 0.5])).var)
      1.0
    """
    refuse_unless_positive("batch_size", batch_size, "batch_size=32")
    factors = preconditioner(opt_state, grads, b2, eps).factors if opt_state is not None else None
    return make_sums(group_squares(noise.groups, jax.tree.leaves(grads), factors), batch_size, weight)


def update_from_sums(
    noise: NoiseScale,
    sums: Sums,
    mean_grads: Any,
    *,
    opt_state: Any = None,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> NoiseScale:
    r"""Finish an update from the contributors' summed parts and their mean gradient.

    The estimate is unbiased for any weights :math:`c_i` of that mean, not only :math:`c_i \propto b_i`: see
    :func:`local_sums`.

    Args:
      noise: from :func:`init` or an earlier update.
      sums: total of everybody's :func:`local_sums`.
      mean_grads: :math:`\sum c_i g_i / \sum c_i` with the same weights; leaves ``[...]``.
      opt_state: as for :func:`update`.
      b2: as for :func:`update`.
      eps: as for :func:`update`.

    Returns:
      The next :class:`NoiseScale`.

    Raises:
      ValueError: a single contributor without ``differenced=True``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2))
      >>> own = [noise_scale.local_sums(noise, g, 8) for g in (jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0]))]
      >>> float(noise_scale.update_from_sums(noise, jax.tree.map(jnp.add, *own), jnp.array([0.5, 0.5])).var)
      1.0
    """
    if known(sums.contributors):
        refuse_one(noise, int(sums.contributors))
    leaves = jax.tree.leaves(mean_grads)
    pre = preconditioner(opt_state, mean_grads, b2, eps) if opt_state is not None else None
    factors = pre.factors if pre else None
    mean_squares = group_squares(noise.groups, leaves, factors)
    several = sums.contributors >= 2
    sqr, trace = estimate(sums, mean_squares)
    count_scale = jnp.float32(1)
    measured = several
    if noise.previous is not None:
        before = jax.tree.leaves(noise.previous)
        halves = [_half_sum(x, y) if is_float(x) else x for x, y in zip(leaves, before, strict=True)]
        local = (group_squares(noise.groups, before, factors) + mean_squares) / 2
        both = group_squares(noise.groups, halves, factors)
        # Two contributors of this batch each: AdaptDL's formula at count 2.
        sqr = jnp.where(several, sqr, 2 * both - local)
        trace = jnp.where(several, trace, (local - both) * 2 * sums.examples)
        count_scale = jnp.where(several, jnp.float32(1), jnp.float32(2))
        measured = several | noise.has_previous
    base = jnp.where(noise.base_batch_size > 0, noise.base_batch_size, sums.examples / sums.contributors)
    log_theta = LOG_SMOOTHING * count_scale * sums.examples / base
    finite = jnp.all(jnp.isfinite(mean_squares)) & jnp.all(jnp.isfinite(sums.squares)) & (sums.contributors >= 1)
    write = measured & finite
    active = pre.active if pre else jnp.zeros((), bool)
    # Averages of another kind are no start for this one: biased against unbiased (AdaptDL), and raw against
    # preconditioned, whose sizes may differ by many orders.
    anew = (several & noise.biased) | (active != noise.preconditioned)
    blended = blend(noise, sqr, trace, log_theta=log_theta, base=base, anew=anew, write=write)
    previous = noise.previous
    if previous is not None:
        previous = jax.tree.map(
            lambda old, new: jnp.where(finite & ~several, new.astype(old.dtype), old), previous, mean_grads
        )
    return replace(
        blended,
        base_batch_size=jnp.where(finite, base, noise.base_batch_size),
        biased=jnp.where(finite & (several | (noise.previous is not None)), ~several, noise.biased),
        preconditioned=jnp.where(write, active, noise.preconditioned),
        has_previous=jnp.where(finite, ~several, noise.has_previous),
        previous=previous,
    )


def blend(
    noise: NoiseScale, sqr: jax.Array, trace: jax.Array, *, log_theta: Any, base: Any, anew: Any, write: Any
) -> NoiseScale:
    """Let one estimate into the averages, or, where ``write`` is false, leave them."""

    def average(total: jax.Array, value: Any) -> jax.Array:
        kept = jnp.where(anew, jnp.zeros_like(total), total)
        return jnp.where(write, jnp.exp(log_theta) * kept - jnp.expm1(log_theta) * value, total)

    return replace(
        noise,
        sqr_sum=average(noise.sqr_sum, sqr),
        var_sum=average(noise.var_sum, trace / base),
        unbias=average(noise.unbias, jnp.float32(1)),
    )


def refuse_one(noise: NoiseScale, contributors: int) -> None:
    """Raise ValueError when there is nothing to compare."""
    if contributors < 2 and noise.previous is None:
        raise ValueError(
            f"grads come from {contributors} contributor: noise shows in the difference of at least 2; write "
            "noise_scale.init(params, differenced=True) to compare successive gradients instead"
        )


def _half_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    wide = sum_dtype(x.dtype)
    return (x.astype(wide) + y.astype(wide)) / 2
