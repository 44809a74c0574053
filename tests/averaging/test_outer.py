"""Outer optimizers: published cases, start [1, 2], learning rate 0.5, momentum 0.9."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxche.averaging import outer_step

SLOWMO = optax.sgd(0.5, momentum=0.9)
DILOCO = optax.sgd(0.5, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(
    ("outer", "rounds"),
    [
        (SLOWMO, [([0.5, 1.0], [0.75, 1.5]), ([0.7, 1.4], [0.5, 1.0])]),
        (DILOCO, [([0.5, 1.0], [0.525, 1.05]), ([0.5, 1.0], [0.29875, 0.5975])]),
        (optax.sgd(1.0), [([0.5, 1.0], [0.5, 1.0]), ([0.1, 0.2], [0.1, 0.2])]),
    ],
    ids=["slowmo", "diloco", "averaging"],
)
def test_published_cases(outer, rounds):
    x = jnp.array([1.0, 2.0])
    state = outer.init(x)
    for consensus, after in rounds:
        x, state = outer_step(outer, x, x - jnp.array(consensus), state)
        np.testing.assert_allclose(x, after, rtol=1e-6)
