"""Scaling rules: how much longer a step may be when its batch is larger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxche.scaling._checks import refuse_unless_positive


class ScalingRule(Protocol):
    """What a rule must do; any object with this method is one.

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
          scale: batch over base batch.
          noise: a :class:`~jaxche.scaling.noise_scale.NoiseScale`; rules that need none ignore it.
          progress: effective steps so far; rules that need none ignore it.

        Returns:
          A scalar, or ``[G]`` for rules that tell parameter groups apart and noise that does.
        """
        ...


@dataclass(frozen=True)
class LinearScale:
    r"""Learning rate in proportion to the batch: factor :math:`S`.

    Right while noise dominates; at scales where it does not, training degrades or diverges.

    References:
      Goyal et al., *Accurate, large minibatch SGD*, 2017.

    Example:
      >>> from jaxche.scaling import LinearScale
      >>> float(LinearScale().lr_factor(8))
      8.0
    """

    def lr_factor(self, scale: Any, noise: Any = None, progress: Any = None) -> jax.Array:
        r"""Factor :math:`S`; ``noise`` and ``progress`` are ignored.

        Args:
          scale: batch over base batch, a number or an array.
          noise: ignored.
          progress: ignored.

        Returns:
          Float32 array like ``scale``.

        Raises:
          ValueError: a scale that is not finite and positive.
        """
        del noise, progress
        return _scale(scale)


@dataclass(frozen=True)
class SqrtScale:
    r"""Learning rate with the square root of the batch: factor :math:`\sqrt S`.

    Keeps the variance of Adam's steps; cautious for SGD.

    References:
      Krizhevsky, *One weird trick for parallelizing convolutional neural networks*, 2014. Hoffer et al., *Train
      longer, generalize better*, NeurIPS 2017.

    Example:
      >>> from jaxche.scaling import SqrtScale
      >>> float(SqrtScale().lr_factor(16))
      4.0
    """

    def lr_factor(self, scale: Any, noise: Any = None, progress: Any = None) -> jax.Array:
        r"""Factor :math:`\sqrt S`; ``noise`` and ``progress`` are ignored.

        Args:
          scale: batch over base batch, a number or an array.
          noise: ignored.
          progress: ignored.

        Returns:
          Float32 array like ``scale``.

        Raises:
          ValueError: a scale that is not finite and positive.
        """
        del noise, progress
        return jnp.sqrt(_scale(scale))


@dataclass(frozen=True)
class AdaScale:
    r"""Learning rate by what the larger batch is worth at the present noise, for SGD.

    .. math:: \mathrm{factor} = \frac{v + s}{v / S + s}

    for every parameter group apart: :math:`S` while noise dominates, 1 when there is none.

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
        """The gain of each parameter group.

        Args:
          scale: batch over base batch, a number or a scalar array.
          noise: the noise scale: its ``sqr`` and ``var`` are read.
          progress: ignored.

        Returns:
          Float32, ``[]``, or ``[G]`` with named groups.

        Raises:
          ValueError: a scale that is not finite and positive, or no noise.
        """
        del progress
        return _gain(self, scale, noise)


@dataclass(frozen=True)
class AdamScale:
    r"""The square root of AdaScale's factor, for Adam-type optimizers.

    .. math:: \mathrm{factor} = \sqrt{\frac{v + s}{v / S + s}}

    Measure the noise as the optimizer sees it: ``noise_scale.update(..., opt_state=opt_state)``.

    References:
      AdaptDL (Qiao et al., *Pollux*, OSDI 2021).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import AdamScale, noise_scale
      >>> round(float(AdamScale().lr_factor(4, noise_scale.init(jnp.zeros(2)))), 3)
      1.0
    """

    def lr_factor(self, scale: Any, noise: Any = None, progress: Any = None) -> jax.Array:
        """Square root of the gain of each parameter group.

        Args:
          scale: batch over base batch, a number or a scalar array.
          noise: the noise scale: its ``sqr`` and ``var`` are read.
          progress: ignored.

        Returns:
          Float32, ``[]``, or ``[G]`` with named groups.

        Raises:
          ValueError: a scale that is not finite and positive, or no noise.
        """
        del progress
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
            refuse_unless_positive(name, getattr(self, name), line)

    def lr_factor(self, scale: Any, noise: Any = None, progress: Any = None) -> jax.Array:
        r"""Factor at this progress.

        Args:
          scale: batch over base batch, a number or an array.
          noise: ignored.
          progress: effective steps so far, a number or an array.

        Returns:
          Float32 array.

        Raises:
          ValueError: a scale that is not finite and positive, or no progress.
        """
        del noise
        if progress is None:
            raise ValueError("LEGWScale needs the progress; write rule.lr_factor(scale, progress=state.progress)")
        s = _scale(scale)
        warmup = jnp.float32(self.base_warmup_epochs * self.data_size / self.batch_size) * s
        return jnp.sqrt(s) * jnp.minimum(jnp.asarray(progress).astype(jnp.float32) / warmup, jnp.float32(1))


def _scale(scale: Any) -> jax.Array:
    refuse_unless_positive("scale", scale, "scale=8 (the batch over the one the learning rate was tuned for)")
    return jnp.asarray(scale).astype(jnp.float32)


def _gain(rule: Any, scale: Any, noise: Any) -> jax.Array:
    s = _scale(scale)
    if noise is None:
        raise ValueError(
            f"{type(rule).__name__} needs the noise scale; write noise=jaxche.noise_scale.update(noise, grads, "
            "batch_sizes), or take a rule that needs none, e.g. jaxche.SqrtScale()"
        )
    # Clipped again: any object with these two numbers may be given.
    sqr = jnp.maximum(jnp.asarray(noise.sqr).astype(jnp.float32), jnp.float32(0))
    var = jnp.maximum(jnp.asarray(noise.var).astype(jnp.float32), jnp.float32(1e-6))
    return (var + sqr) / (var / s + sqr)
