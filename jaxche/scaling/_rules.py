"""Scaling rules: the factor on the learning rate for a larger batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxche.messages import brief
from jaxche.scaling._checks import check_positive


class ScalingRule(Protocol):
    """The protocol of scaling rules: any object with this method is a scaling rule.

    Example:
      >>> import jax.numpy as jnp
      >>> class Half:
      ...     def lr_factor(self, scale, noise=None, progress=None):
      ...         return jnp.maximum(1.0, 0.5 * scale)
      >>> rule: ScalingRule = Half()
      >>> float(rule.lr_factor(8.0))
      4.0
    """

    def lr_factor(self, scale: Any, noise: Any = None, progress: Any = None) -> jax.Array:
        """Factor on the learning rate that was tuned for scale 1.

        Args:
          scale: batch divided by base batch, a number or an array.
          noise: a :class:`~jaxche.scaling.noise_scale.NoiseScale`; some rules ignore it.
          progress: effective steps so far; some rules ignore it.

        Returns:
          Float32, ``[]``, or ``[G]`` for rules with a factor for each parameter group and noise with named groups.

        Raises:
          ValueError: a scale that is not finite and positive, or noise or progress is missing that the rule needs.
        """
        ...


@dataclass(frozen=True)
class LinearScale:
    r"""Learning rate in proportion to the batch: factor :math:`S`.

    Use it while noise dominates; at larger scales training degrades or diverges.

    References:
      Goyal et al., *Accurate, large minibatch SGD*, 2017.

    Example:
      >>> from jaxche.scaling import LinearScale
      >>> float(LinearScale().lr_factor(8))
      8.0
    """

    def lr_factor(self, scale: Any, noise: Any = None, progress: Any = None) -> jax.Array:
        r"""Factor :math:`S`; ``noise`` and ``progress`` are ignored."""
        return _scale(scale)


@dataclass(frozen=True)
class SqrtScale:
    r"""Learning rate with the square root of the batch: factor :math:`\sqrt S`.

    The variance of Adam's steps then stays the same. For SGD the rule is conservative.

    References:
      Krizhevsky, *One weird trick for parallelizing convolutional neural networks*, 2014. Hoffer et al., *Train
      longer, generalize better*, NeurIPS 2017.

    Example:
      >>> from jaxche.scaling import SqrtScale
      >>> float(SqrtScale().lr_factor(16))
      4.0
    """

    def lr_factor(self, scale: Any, noise: Any = None, progress: Any = None) -> jax.Array:
        r"""Factor :math:`\sqrt S`; ``noise`` and ``progress`` are ignored."""
        return jnp.sqrt(_scale(scale))


@dataclass(frozen=True)
class AdaScale:
    r"""Learning rate in proportion to the gain of the larger batch at the measured noise, for SGD.

    .. math:: \mathrm{factor} = \frac{v + s}{v / S + s}

    for each parameter group. It is near :math:`S` if noise dominates, and 1 without noise.

    References:
      Johnson et al., *AdaScale SGD*, ICML 2020; AdaptDL (Qiao et al., *Pollux*, OSDI 2021).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import AdaScale, noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2))
      >>> noise = noise_scale.update(noise, jnp.array([[2.0, 0.0], [1.0, 1.0]]), [8, 8])
      >>> round(float(AdaScale().lr_factor(4, noise)), 3)
      1.333
    """

    def lr_factor(self, scale: Any, noise: Any = None, progress: Any = None) -> jax.Array:
        """The gain of each parameter group."""
        return _gain(self, scale, noise)


@dataclass(frozen=True)
class AdamScale:
    r"""The square root of AdaScale's factor, for Adam-type optimizers.

    .. math:: \mathrm{factor} = \sqrt{\frac{v + s}{v / S + s}}

    Measure the noise of preconditioned gradients: ``noise_scale.update(..., opt_state=opt_state)``.

    References:
      AdaptDL (Qiao et al., *Pollux*, OSDI 2021).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import AdamScale, noise_scale
      >>> round(float(AdamScale().lr_factor(4, noise_scale.init(jnp.zeros(2)))), 3)
      1.0
    """

    def lr_factor(self, scale: Any, noise: Any = None, progress: Any = None) -> jax.Array:
        """Square root of the gain of each parameter group."""
        return jnp.sqrt(_gain(self, scale, noise))


@dataclass(frozen=True)
class LEGWScale:
    r"""Square-root scaling with a warmup that grows with the batch (linear-epoch gradual warmup).

    .. math:: \mathrm{factor} = \sqrt S \min\left(1, \frac{\mathrm{progress}}{E S D / b}\right)

    The first step, at progress 0, has a factor of 0, as in AdaptDL.

    Args:
      base_warmup_epochs: E, epochs of warmup at scale 1.
      data_size: D, examples in an epoch.
      batch_size: b, examples in a batch of scale 1.

    Raises:
      ValueError: an argument that is not finite and positive.

    References:
      You et al., *Large-batch training for LSTM and beyond*, SC 2019; AdaptDL.

    Example:
      >>> from jaxche.scaling import LEGWScale
      >>> rule = LEGWScale(base_warmup_epochs=10, data_size=1000, batch_size=100)
      >>> round(float(rule.lr_factor(4, progress=5)), 4), float(rule.lr_factor(4, progress=400))
      (0.025, 2.0)
    """

    base_warmup_epochs: float
    data_size: float
    batch_size: float

    def __post_init__(self) -> None:
        line = "jaxche.LEGWScale(base_warmup_epochs=5, data_size=60_000, batch_size=128)"
        for name in ("base_warmup_epochs", "data_size", "batch_size"):
            check_positive(name, getattr(self, name), line)

    def lr_factor(self, scale: Any, noise: Any = None, progress: Any = None) -> jax.Array:
        r"""Factor at this progress."""
        if progress is None:
            raise ValueError("LEGWScale needs the progress; write rule.lr_factor(scale, progress=state.progress)")
        s = _scale(scale)
        warmup = jnp.float32(self.base_warmup_epochs * self.data_size / self.batch_size) * s
        return jnp.sqrt(s) * jnp.minimum(jnp.asarray(progress).astype(jnp.float32) / warmup, jnp.float32(1))


def effective_replicas(weights: Sequence[float], counts: Sequence[float], alpha: float = 1.0) -> float:
    r"""The scale of a merge of local steps for a scaling rule: its effective number of replicas.

    .. math:: m_{eff} = \frac{\sum_i w_i n_i}{\alpha \sum_i w_i^2 n_i}

    It is the signal-to-noise ratio of the merged progress divided by that of one replica's steps: R for equal counts
    and weights, less if some replicas do most of the work.

    Args:
      weights: merge weights that sum to one, from :func:`~jaxche.merge_weights`.
      counts: local steps of each replica.
      alpha: step length of the merge.

    Returns:
      A float, the ``scale`` for a rule if parameters are averaged.

    Raises:
      ValueError: no lists of numbers, lists of different lengths, numbers that are negative or not finite, or no
        progress at all.

    Example:
      >>> from jaxche.scaling import effective_replicas
      >>> effective_replicas([0.5, 0.5], [1, 3]), round(effective_replicas([0.25, 0.75], [1, 3]), 2)
      (2.0, 1.43)
      >>> effective_replicas([0.5, 0.5], [1, 3], alpha=1.25)
      1.6
    """
    for name, values in (("weights", weights), ("counts", counts)):
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError):
            raise ValueError(f"{name}={brief(values)} must be a list of numbers, one per replica") from None
        if any(not math.isfinite(value) or value < 0 for value in numbers):
            raise ValueError(f"{name}={brief(values)}: every entry must be finite and not negative")
    if len(weights) != len(counts):
        raise ValueError(f"weights has {len(weights)} entries for {len(counts)} counts; give one per replica")
    check_positive("alpha", alpha, "alpha=1.0")
    signal = sum(w * n for w, n in zip(weights, counts, strict=True))
    noise = sum(w * w * n for w, n in zip(weights, counts, strict=True))
    if not (signal > 0 and noise > 0):
        raise ValueError(
            f"weights={list(weights)} and counts={list(counts)} make no progress; write e.g. "
            "effective_replicas(*jaxche.merge_weights('steps', [10, 23])[:1], [10, 23])"
        )
    return signal / (alpha * noise)


def _scale(scale: Any) -> jax.Array:
    check_positive("scale", scale, "scale=8 (batch size divided by the one that was tuned)")
    return jnp.asarray(scale).astype(jnp.float32)


def _gain(rule: Any, scale: Any, noise: Any) -> jax.Array:
    s = _scale(scale)
    if not (hasattr(noise, "sqr") and hasattr(noise, "var")):
        found = "" if noise is None else f", and noise={brief(noise)} is none"
        raise ValueError(
            f"{type(rule).__name__} needs the noise scale{found}; write noise=jaxche.noise_scale.update(noise, grads, "
            "batch_sizes), or take a rule that needs none, e.g. jaxche.SqrtScale()"
        )
    # Clipped again: noise may be any object with these two numbers.
    sqr = jnp.maximum(jnp.asarray(noise.sqr).astype(jnp.float32), jnp.float32(0))
    var = jnp.maximum(jnp.asarray(noise.var).astype(jnp.float32), jnp.float32(1e-6))
    return (var + sqr) / (var / s + sqr)
