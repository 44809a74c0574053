"""Steps that are not measured: what becomes of the averages then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxche.scaling._checks import refuse_unless_positive
from jaxche.scaling._combine import LOG_SMOOTHING
from jaxche.scaling._state import NoiseScale


def skip(noise: NoiseScale, examples: Any) -> NoiseScale:
    r"""Let a step pass whose gradients are not looked at, to measure only some of all steps.

    .. math:: (\bar s, \bar v, u) \leftarrow \theta \, (\bar s, \bar v, u), \qquad
              \theta = 0.999^{B / b_{base}}

    Every average decays as in an update, and so does its bias correction :math:`u`: what is read stays as it is, and
    the next estimate weighs more. The averages then reach back over as many examples of training as if every step had
    been measured; only their scatter is that of fewer estimates. A single contributor's next gradient is not compared
    with the last one that was seen: many steps lie between, and what the parameters moved in them would count as noise.

    Args:
      noise: from :func:`init` or an earlier update.
      examples: examples that all contributors trained on without measuring; 0 (possible inside ``jit`` only) for none.

    Returns:
      The next :class:`NoiseScale`.

    Raises:
      ValueError: a number of examples that is not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2), base_batch_size=8)
      >>> noise = noise_scale.update(noise, jnp.array([[1.0, 0.0], [2.0, 1.0]]), batch_sizes=[8, 8])
      >>> later = noise_scale.skip(noise, 800)
      >>> float(noise.var) == float(later.var), round(float(later.unbias / noise.unbias), 3)
      (True, 0.905)
    """
    refuse_unless_positive("examples", examples, "examples=32 (leave the call out for a step of none)")
    b = jnp.asarray(examples).astype(jnp.float32)
    # Before anything is known of a base batch there is no average to decay either.
    base = jnp.where(noise.base_batch_size > 0, noise.base_batch_size, jnp.float32(1))
    # A difference of two gradients counts as two batches.
    decay = jnp.exp(LOG_SMOOTHING * jnp.where(noise.biased, jnp.float32(2), jnp.float32(1)) * b / base)
    return replace(
        noise,
        sqr_sum=decay * noise.sqr_sum,
        var_sum=decay * noise.var_sum,
        unbias=decay * noise.unbias,
        has_previous=noise.has_previous & (b <= 0),
    )
