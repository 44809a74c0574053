"""Outer optimizers: published cases, start [1, 2], learning rate 0.5, momentum 0.9."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxche.averaging import outer_init, outer_step

SLOWMO = optax.sgd(0.5, momentum=0.9)
DILOCO = optax.sgd(0.5, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("make", [float, np.float64])
def test_numbers_of_python_and_numpy(make):
    x, state = outer_step(SLOWMO, make(1), make(0.5), outer_init(SLOWMO, make(1)))
    assert (float(x), float(state[0].trace)) == (0.75, 0.5)


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
    state = outer_init(outer, x)
    for consensus, after in rounds:
        x, state = outer_step(outer, x, x - jnp.array(consensus), state)
        np.testing.assert_allclose(x, after, rtol=1e-6)


def test_low_precision_parameters_are_rounded_once():
    # bfloat16 has no number between 1 and 1.0078: the momentum alone would be lost.
    outer = optax.chain(optax.trace(0.5), optax.scale(-1.0))
    x = jnp.ones(1, jnp.bfloat16)
    state = outer_init(outer, x)
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == [jnp.float32]
    y, state = outer_step(outer, x, jnp.full(1, -0.002, jnp.float32), state)
    assert (float(y[0]), y.dtype) == (1.0, jnp.bfloat16)
    y, state = outer_step(outer, x, jnp.full(1, -0.003, jnp.float32), state)
    assert float(y[0]) == float(jnp.bfloat16(1.0 + 0.003 + 0.5 * 0.002))
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == [jnp.float32]


def test_the_outer_optimizer_sees_the_parameters():
    x, outer = jnp.array([1.0, 2.0]), optax.chain(optax.add_decayed_weights(0.25), optax.sgd(1.0))
    x, _ = outer_step(outer, x, jnp.array([0.5, 0.0]), outer.init(x))
    assert x.tolist() == [0.25, 1.5]


def test_other_outer_optimizers_are_refused():
    x = jnp.ones(2)
    for call in (lambda: outer_init(5, x), lambda: outer_step(5, x, x, ())):
        with pytest.raises(ValueError, match=r"outer=5 is not an optax transformation; write e\.g\. outer=optax\.sgd"):
            call()
