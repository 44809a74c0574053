"""Every published case of AdaptDL's scaling rules, to the digits given."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxche.scaling import AdamScale, AdaScale, LEGWScale, LinearScale, SqrtScale, noise_scale, scale_learning_rate

GROUPS = SimpleNamespace(var=np.array([1.0, 0, 0, 2], np.float32), sqr=np.array([-1.0, 0, -1, 1], np.float32))


def samples():
    """Four contributors, scale 4."""
    grads = jnp.array([[1.0, 0.0], [3.0, 0.0], [2.0, 1.0], [2.0, -1.0]])
    noise = noise_scale.update(noise_scale.init(jnp.zeros(2)), grads, [16] * 4)
    return [noise.sqr, noise.var, noise.gain(2), noise.gain(4)]


def differenced(first, second, scale, gain_at=2):
    """One contributor whose batch is ``scale`` base batches."""
    noise = noise_scale.init(jnp.zeros(2), base_batch_size=16, differenced=True)
    for grad in (first, second):
        noise = noise_scale.update(noise, jnp.array([grad], jnp.float32), [16 * scale])
    assert noise.biased
    return [noise.sqr, noise.var, noise.gain(gain_at)]


LAYER = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}


def layer_gradient(params, x):
    """The gradient of ``Linear(2, 2)`` with bias; the loss is the sum of the outputs."""
    return jax.grad(lambda p: jnp.sum(p["w"] @ x + p["b"]))(params)


def linear(*inputs):
    """One input a contributor: the gain at scale 2, from stacked gradients and over a mesh."""
    x = jnp.array(inputs, jnp.float32)
    stacked = noise_scale.update(noise_scale.init(LAYER), jax.vmap(layer_gradient, (None, 0))(LAYER, x), [1, 1])

    def body(x):
        grads = layer_gradient(jax.lax.pcast(LAYER, "r", to="varying"), x[0])
        return noise_scale.update(noise_scale.init(LAYER), grads, 1, axis_name="r").gain(2)

    mesh = Mesh(np.array(jax.devices()[:2]), ("r",), axis_types=(AxisType.Auto,))
    return [stacked.gain(2), jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("r"), out_specs=P()))(x)]


def trace(scale):
    """f = (w - t)^2 / 2 with targets 1, 3, 1, 3 and one replica: w, sqr, var and progress after each step."""
    tx = scale_learning_rate(optax.sgd(0.1), AdaScale())
    w = jnp.zeros(())
    state, noise = tx.init(w), noise_scale.init(w, base_batch_size=1, differenced=True)

    @jax.jit
    def step(w, state, noise, target):
        grad = w - target
        noise = noise_scale.update(noise, grad[None], jnp.array([scale]))
        updates, state = tx.update(grad, state, w, scale=scale, noise=noise)
        return optax.apply_updates(w, updates), state, noise

    rows = []
    for target in (1.0, 3.0, 1.0, 3.0):
        w, state, noise = step(w, state, noise, target)
        rows.append([w, noise.sqr, noise.var if noise.unbias > 0 else 0.0, state.progress])
    return np.transpose(np.array(rows, np.float64)).ravel()


def ada(scale):
    return AdaScale().lr_factor(scale, GROUPS, 0.0)


def legw(scale, progress):
    return LEGWScale(10, 1000, 100).lr_factor(scale, None, progress)


CASES = {
    "AdaScale S=.5": (lambda: ada(0.5), [0.5, 0.5, 0.5, 0.6]),
    "AdaScale S=1": (lambda: ada(1), [1, 1, 1, 1]),
    "AdaScale S=2": (lambda: ada(2), [2, 2, 2, 1.5]),
    "AdaScale S=4": (lambda: ada(4), [4, 4, 4, 2]),
    "AdaScale S=10": (lambda: ada(10), [10, 10, 10, 2.5]),
    "AdamScale S=16": (lambda: AdamScale().lr_factor(16, GROUPS, 0.0), [4, 4, 4, 1.63299316]),
    "LinearScale": (lambda: [LinearScale().lr_factor(s) for s in (1, 4, 0.5)], [1, 4, 0.5]),
    "SqrtScale": (lambda: [SqrtScale().lr_factor(s) for s in (1, 4, 2)], [1, 2, np.sqrt(2)]),
    "LEGW progress 5": (
        lambda: [legw(s, 5) for s in (1, 4, 9, 16, 25)],
        [1 / 20, 1 / 40, 1 / 60, 1 / 80, 1 / 100],
    ),
    "LEGW progress 400": (lambda: [legw(s, 400) for s in (1, 4, 9, 16, 25)], [1, 2, 4 / 3, 1, 0.8]),
    "gain(3) of var 3, sqr 1": (lambda: AdaScale().lr_factor(3, SimpleNamespace(var=3.0, sqr=1.0)), 2),
    "samples": (samples, [11 / 3, 4 / 3, 15 / 13, 1.25]),
    "differenced S=1": (lambda: differenced([1, 0], [0, 1], 1)[:2], [0, 1]),
    "differenced S=1, gain": (lambda: differenced([2, 0], [1, 0], 1), [2, 0.5, 10 / 9]),
    "differenced S=2": (lambda: differenced([2, 1], [1, 2], 2, gain_at=4), [4, 2, 4 / 3]),
    "trace S=1": (
        lambda: trace(1.0),
        [0.1, 0.39, 0.451, 0.7059, 1, 2.9, 2.3339345, 2.0737331, 0, 1.8050002, 2.2139337, 2.1023532, 1, 2, 3, 4],
    ),
    "trace S=2": (
        lambda: np.delete(trace(2.0), range(4, 8)),
        [
            *(0.10000005, 0.501254021, 0.577023019, 0.950406732),
            *(0, 3.6099995, 4.6901671, 4.3596816),
            *(1.0000005, 2.3836349, 3.9028250, 5.4438373),
        ],
    ),
    "Linear [[1,0],[0,1]]": (lambda: linear([1, 0], [0, 1]), 4 / 3),
    "Linear [[-1,1],[1,-1]]": (lambda: linear([-1, 1], [1, -1]), 2),
    "Linear [[1,4],[5,.5]]": (lambda: linear([1, 4], [5, 0.5]), 1.4688796680),
    "Linear [[-.2,3],[5,.5]]": (lambda: linear([-0.2, 3], [5, 0.5]), 1.8472893902),
}


@pytest.mark.parametrize("name", CASES)
def test_published_case(name):
    got, wanted = CASES[name]
    got = np.array(got(), np.float64).ravel()
    np.testing.assert_allclose(got, np.broadcast_to(wanted, got.shape), rtol=1e-6, atol=1e-7)
