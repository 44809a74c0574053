"""An update in two halves, for programs that already sum something over contributors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxche.scaling._checks import known, refuse_unless_positive
from jaxche.scaling._groups import group_products, group_squares
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
    factors = preconditioner(opt_state, grads, b2, eps).of(grads) if opt_state is not None else None
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
    factors = pre.of(mean_grads) if pre else None
    mean_squares = group_squares(noise.groups, leaves, factors)
    several = sums.contributors >= 2
    sqr, trace = estimate(sums, mean_squares)
    if noise.previous is not None:
        alone = _differenced(noise, leaves, factors, sums.examples)
        sqr, trace = (jnp.where(several, x, y) for x, y in zip((sqr, trace), alone, strict=True))
    finite = jnp.all(jnp.isfinite(mean_squares)) & jnp.all(jnp.isfinite(sums.squares)) & (sums.contributors >= 1)
    return _learnt(noise, sqr, trace, mean_grads, sums.examples, sums.contributors, finite, pre)


def update_from_one(
    noise: NoiseScale, grads: Any, batch_size: Any, *, opt_state: Any = None, b2: float = 0.999, eps: float = 1e-8
) -> NoiseScale:
    r"""An update by a single contributor: what :func:`update_from_sums` does then, without what only several need.

    .. math:: \hat s = \langle g, g' \rangle, \qquad \hat\Sigma = b \, \|g - g'\|^2 / 2

    with the gradient before it, :math:`g'`.

    Args:
      noise: from ``init(..., differenced=True)`` or an earlier update.
      grads: pytree of its gradients, the mean over its batch; leaves ``[...]``.
      batch_size: examples in the batch.
      opt_state: as for :func:`update`.
      b2: as for :func:`update`.
      eps: as for :func:`update`.

    Returns:
      The next :class:`NoiseScale`.

    Raises:
      ValueError: a bad size, or a noise scale without ``differenced=True``.

    References:
      AdaptDL (Qiao et al., *Pollux*, OSDI 2021).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2), differenced=True)
      >>> for grads in (jnp.array([2.0, 0.0]), jnp.array([1.0, 0.0])):
      ...     noise = noise_scale.update_from_one(noise, grads, 16)
      >>> float(noise.sqr), float(noise.var)
      (2.0, 0.5)
    """
    refuse_unless_positive("batch_size", batch_size, "batch_size=32")
    refuse_one(noise, 1)
    examples = jnp.asarray(batch_size).astype(jnp.float32)
    pre = preconditioner(opt_state, grads, b2, eps) if opt_state is not None else None
    sqr, trace = _differenced(noise, jax.tree.leaves(grads), pre.of(grads) if pre else None, examples)
    finite = jnp.all(jnp.isfinite(sqr)) & jnp.all(jnp.isfinite(trace))
    return _learnt(noise, sqr, trace, grads, examples, jnp.float32(1), finite, pre)


def _learnt(
    noise: NoiseScale, sqr: Any, trace: Any, grads: Any, examples: Any, contributors: Any, finite: Any, pre: Any
) -> NoiseScale:
    """The noise scale after an estimate from so many contributors; a single one's spans two of its gradients."""
    several = contributors >= 2
    measured = several if noise.previous is None else several | noise.has_previous
    steps = jnp.where(several | (noise.previous is None), jnp.float32(1), jnp.float32(2))
    base = jnp.where(noise.base_batch_size > 0, noise.base_batch_size, examples / contributors)
    active, write = pre.active if pre else jnp.zeros((), bool), measured & finite
    blended = blend(
        noise,
        sqr,
        trace,
        log_theta=LOG_SMOOTHING * steps * examples / base,
        base=base,
        # Averages of another kind are no start for this one: biased against unbiased (AdaptDL), and raw against
        # preconditioned, whose sizes may differ by many orders.
        anew=(several & noise.biased) | (active != noise.preconditioned),
        write=write,
    )
    return replace(
        blended,
        base_batch_size=jnp.where(finite, base, noise.base_batch_size),
        biased=jnp.where(finite & (several | (noise.previous is not None)), ~several, noise.biased),
        preconditioned=jnp.where(write, active, noise.preconditioned),
        # One that is not finite is kept too, but nothing is compared with it: a choice between two gradients would
        # hold on to both, which cost more than all of the estimate.
        has_previous=finite & ~several,
        previous=None if noise.previous is None else _like(noise.previous, grads),
    )


def _differenced(noise: NoiseScale, leaves: Any, factors: Any, examples: Any) -> tuple[jax.Array, jax.Array]:
    """AdaptDL's formula at count 2, whose contributors are this gradient and the one before, of this batch each.

    With g and g' it comes to the inner product of both, and to half the square of their difference: one pass less
    than by norms, and nothing cancels.
    """
    # What is kept of one that was not finite must not make this one look so.
    before = [jnp.where(noise.has_previous, x, jnp.zeros_like(x)) for x in jax.tree.leaves(noise.previous)]
    products, squares = group_products(noise.groups, leaves, before, factors)
    return products, squares / 2 * examples


def _like(before: Any, grads: Any) -> Any:
    return jax.tree.map(lambda old, new: new.astype(old.dtype), before, grads)


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
