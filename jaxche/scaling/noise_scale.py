r"""The gradient noise scale, from equal or unequal replicas: ``init``, ``update``, and what is read of the state.

>>> import jax.numpy as jnp
>>> from jaxche.scaling import noise_scale
>>> noise = noise_scale.init(jnp.zeros(2), base_batch_size=8)
>>> noise = noise_scale.update(noise, jnp.array([[1.0, 0.0], [2.0, 1.0]]), batch_sizes=[8, 32])
>>> [round(float(x), 3) for x in (noise.sqr, noise.var, noise.gain(5), noise.critical_batch_size)]
[3.56, 1.6, 1.33, 3.595]
"""

from jaxche.scaling._combine import local_sums, update_from_one, update_from_sums
from jaxche.scaling._deltas import delta_lengths, pseudo_gradients
from jaxche.scaling._estimates import Estimates, local_estimates, update_from_estimates
from jaxche.scaling._moments import Preconditioner, preconditioner
from jaxche.scaling._noise import init, update
from jaxche.scaling._skip import skip
from jaxche.scaling._state import NoiseScale
from jaxche.scaling._sums import Sums

__all__ = [
    "Estimates",
    "NoiseScale",
    "Preconditioner",
    "Sums",
    "delta_lengths",
    "init",
    "local_estimates",
    "local_sums",
    "preconditioner",
    "pseudo_gradients",
    "skip",
    "update",
    "update_from_estimates",
    "update_from_one",
    "update_from_sums",
]
