"""What contributors must tell each other to estimate the noise: a handful of sums, whoever adds them up."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Sums(NamedTuple):
    r"""Additive statistics of some contributors with gradients :math:`g_i`, batches :math:`b_i`, weights :math:`c_i`.

    Sums of several contributors are the sums of these, so they can be carried through a loop of micro-batches, added
    over a leading axis, or travel in any ``psum`` a program makes anyway: ``G + 5`` numbers, nothing model-sized.

    Attributes:
      squares: ``[G]``, :math:`\sum c_i \|g_i\|^2` of each parameter group.
      weight: :math:`\sum c_i`.
      weight_per_example: :math:`\sum c_i / b_i`.
      weight_sq_per_example: :math:`\sum c_i^2 / b_i`.
      examples: :math:`\sum b_i`.
      contributors: how many have :math:`b_i > 0`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> sums = noise_scale.local_sums(noise_scale.init(jnp.zeros(2)), jnp.array([3.0, 4.0]), 8)
      >>> float(sums.examples), float(sums.contributors)
      (8.0, 1.0)
    """

    squares: jax.Array
    weight: jax.Array
    weight_per_example: jax.Array
    weight_sq_per_example: jax.Array
    examples: jax.Array
    contributors: jax.Array


def make_sums(squares: jax.Array, batch_size: Any, weight: Any | None) -> Sums:
    """The sums of one contributor; with no examples it contributes nothing, whatever its gradient."""
    b = jnp.asarray(batch_size).astype(jnp.float32)
    c = b if weight is None else jnp.asarray(weight).astype(jnp.float32)
    present = b > 0
    c = jnp.where(present, c, jnp.float32(0))
    per_example = c / jnp.where(present, b, jnp.float32(1))
    return Sums(
        # 0 * NaN is NaN: an idle contributor's gradient must be dropped, not weighted.
        squares=jnp.where(present, c * squares, jnp.zeros_like(squares)),
        weight=c,
        weight_per_example=per_example,
        weight_sq_per_example=c * per_example,
        examples=jnp.where(present, b, jnp.float32(0)),
        contributors=present.astype(jnp.float32),
    )


def estimate(sums: Sums, mean_squares: jax.Array) -> tuple[jax.Array, jax.Array]:
    r"""Unbiased :math:`(\|G\|^2, \operatorname{tr}\Sigma)` per group, from contributors of any batch sizes.

    With normalised weights :math:`c_i`, :math:`\bar g = \sum c_i g_i` and one example's covariance :math:`\Sigma`,

    .. math:: \mathbb E \sum c_i \|g_i\|^2 = \|G\|^2 + A \operatorname{tr}\Sigma, \quad A = \sum c_i / b_i
    .. math:: \mathbb E \|\bar g\|^2 = \|G\|^2 + C \operatorname{tr}\Sigma, \quad C = \sum c_i^2 / b_i

    two equations for two unknowns. Weights :math:`c_i = b_i / B` make it
    :math:`\sum b_i \|g_i - \bar g\|^2 / (R - 1)`; equal batches on top of that make it AdaptDL's formula.

    Args:
      sums: of two contributors or more.
      mean_squares: ``[G]``, :math:`\|\bar g\|^2` per group.

    References:
      McCandlish et al., *An empirical model of large-batch training*, 2018, appendix A. AdaptDL (Qiao et al.,
      *Pollux*, OSDI 2021) for equal batches.
    """
    local = sums.squares / sums.weight
    a = sums.weight_per_example / sums.weight
    c = sums.weight_sq_per_example / jnp.square(sums.weight)
    trace = (local - mean_squares) / (a - c)
    return mean_squares - c * trace, trace
