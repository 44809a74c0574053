"""The gradient noise scale as a value: averages that are carried, and what is read from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxche.scaling._checks import refuse_unless_positive
from jaxche.scaling._groups import Groups

_MIN_VAR = 1e-6


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class NoiseScale:
    r"""How noisy gradients are: running averages from :func:`~jaxche.scaling.noise_scale.update`.

    A batch of ``scale`` times the base batch has a gradient of squared norm :math:`s + v / \mathrm{scale}`: ``sqr``
    is :math:`s = \|G\|^2` of the true gradient, ``var`` is :math:`v = \operatorname{tr}\Sigma / b_{base}`.
    Both are scalars, or ``[G]`` when the parameters are in named groups (sorted by name).

    It is a pytree of arrays: carry it through ``jit``, ``scan`` and checkpoints like any state.

    Attributes:
      sqr_sum: ``[G]``, the exponential average of the squared norm before its bias correction.
      var_sum: ``[G]``, the same of the variance.
      unbias: its bias correction: 0 before the first estimate, then towards 1, or towards the share of the examples
        that was measured.
      base_batch_size: examples in a batch of scale 1; 0 until the first update, if it was not given.
      biased: whether the averages come from differences of successive gradients of a single contributor.
      preconditioned: whether they are of gradients divided by an optimizer's second moments.
      previous: the previous gradient of a single contributor, or None without the differenced estimator.
      has_previous: whether there is one.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2), base_batch_size=8)
      >>> noise = noise_scale.update(noise, jnp.array([[1.0, 0.0], [2.0, 1.0]]), batch_sizes=[8, 32])
      >>> round(float(noise.critical_batch_size), 3), round(float(noise.gain(5)), 3)
      (3.595, 1.33)
    """

    sqr_sum: jax.Array
    var_sum: jax.Array
    unbias: jax.Array
    base_batch_size: jax.Array
    biased: jax.Array
    preconditioned: jax.Array
    has_previous: jax.Array
    previous: Any = field(repr=False)
    groups: Groups = field(metadata={"static": True}, repr=False)

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the parameter groups, in the order of the entries of ``sqr`` and ``var``; empty without groups."""
        return self.groups.names or ()

    @property
    def sqr(self) -> jax.Array:
        r"""Squared norm of the true gradient, clipped to :math:`\ge 0`; 1 before the first estimate."""
        return self._read(self._sqr)

    @property
    def var(self) -> jax.Array:
        r"""Variance (trace of the covariance) of a base batch's gradient, clipped to :math:`\ge 10^{-6}`."""
        return self._read(self._var)

    def gain(self, scale: Any) -> jax.Array:
        r"""Base steps that one step on ``scale`` base batches is worth, all groups together.

        .. math:: \mathrm{gain}(S) = \frac{\sum v + \sum s}{\sum v / S + \sum s}

        Args:
          scale: batch over base batch, a number or an array.

        Returns:
          Between 1 (no noise) and ``scale`` (all noise), for ``scale`` above 1.

        Raises:
          ValueError: a scale that is not finite and positive.

        References:
          Johnson et al., *AdaScale SGD*, ICML 2020; AdaptDL.
        """
        refuse_unless_positive("scale", scale, "noise.gain(scale=8)")
        sqr, var = jnp.sum(self._sqr), jnp.sum(self._var)
        return (var + sqr) / (var / jnp.asarray(scale).astype(jnp.float32) + sqr)

    @property
    def critical_batch_size(self) -> jax.Array:
        r"""Batch, in examples, at which noise and signal are equal: :math:`\operatorname{tr}\Sigma / \|G\|^2`.

        Well below it, twice the batch halves the steps; well above, it is wasted. All groups together; infinite
        while no signal is seen, nan before any update.
        """
        ratio = jnp.sum(self._var) * self.base_batch_size / jnp.sum(self._sqr)
        return jnp.where(self.base_batch_size > 0, ratio, jnp.float32(jnp.nan))

    @property
    def _sqr(self) -> jax.Array:
        return jnp.maximum(self._average(self.sqr_sum, 1.0), jnp.float32(0))

    @property
    def _var(self) -> jax.Array:
        return jnp.maximum(self._average(self.var_sum, 0.0), jnp.float32(_MIN_VAR))

    def _average(self, total: jax.Array, unknown: float) -> jax.Array:
        known = self.unbias > 0
        return jnp.where(known, total / jnp.where(known, self.unbias, jnp.float32(1)), jnp.float32(unknown))

    def _read(self, per_group: jax.Array) -> jax.Array:
        return per_group[0] if self.groups.names is None else per_group
