"""Value and gradient over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxche
from jaxche.sharding import Layout, as_loss, value_and_grad

STRATEGIES = ["full", "grad_op", "none", "hybrid", "hybrid_grad_op"]


def shards(array):
    """What each device holds, in order of the mesh."""
    order = {device: i for i, device in enumerate(array.sharding.mesh.devices.flat)}
    return [s.data.tolist() for s in sorted(array.addressable_shards, key=lambda s: order[s.device])]


def gradient_of(strategy, devices, per_device):
    """Gradients of a loss whose gradient on device ``i`` is ``per_device[i]``."""
    params = jnp.array([10.0, 20.0, 30.0, 40.0])
    layout = Layout(strategy, strategy.mesh(devices), params)
    fn = value_and_grad(as_loss(lambda p, rows: (rows @ p).mean()).call, layout)
    placed = jax.device_put(params, layout.params)
    rows = np.asarray(per_device, np.float32)
    value, grads = jax.jit(fn, compiler_options=layout.compiler_options)(placed, None, rows, jax.random.key(0))
    return placed, value, jax.block_until_ready(grads)


def test_full_shard_on_two_devices(devices):
    params, _, grads = gradient_of(jaxche.FullShard(), devices[:2], [[1, 2, 3, 4]] * 2)
    assert shards(params) == [[10, 20], [30, 40]]
    assert shards(grads) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [(jaxche.NoShard(), [[1, 2, 3, 4]] * 2), (jaxche.ShardGradOp(), [[1, 2], [3, 4]])],
)
def test_whole_params_on_two_devices(strategy, expected, devices):
    params, _, grads = gradient_of(strategy, devices[:2], [[1, 2, 3, 4]] * 2)
    assert shards(params) == [[10, 20, 30, 40]] * 2
    assert shards(grads) == expected


def test_hybrid_shard_on_two_nodes_of_two(devices):
    nodes = [[2, 4, 6, 8]] * 2 + [[10, 20, 30, 40]] * 2
    params, _, grads = gradient_of(jaxche.HybridShard(2), devices[:4], nodes)
    assert shards(params) == [[10, 20], [30, 40]] * 2
    assert shards(grads) == [[6, 12], [18, 24]] * 2


def test_every_device_computes_with_whole_parameters(devices):
    params = jnp.array([1.0, 2.0, 3.0, 4.0])
    layout = Layout(jaxche.FullShard(), jaxche.FullShard().mesh(devices[:2]), params)
    fn = value_and_grad(as_loss(lambda p, x: (x * p.sum()).mean()).call, layout)
    (loss, _), grads = jax.jit(fn)(
        jax.device_put(params, layout.params), None, np.full(2, 2.0, np.float32), jax.random.key(0)
    )
    assert [float(s.data) for s in loss.addressable_shards] == [20.0, 20.0]
    assert shards(grads) == [[2, 2], [2, 2]]


def test_gathering_keeps_the_order_of_ranks(devices):
    params = jnp.concatenate([jnp.array([10.0 * r, 10.0 * r + 1]) for r in range(4)])
    layout = Layout(jaxche.FullShard(), jaxche.FullShard().mesh(devices[:4]), params)
    # The gradient of half the square is the gathered parameter itself.
    fn = value_and_grad(as_loss(lambda p, x: 0.5 * jnp.sum(p**2) + 0 * x.mean()).call, layout)
    _, grads = jax.jit(fn)(jax.device_put(params, layout.params), None, np.zeros(4, np.float32), jax.random.key(0))
    assert np.asarray(grads).tolist() == [0, 1, 10, 11, 20, 21, 30, 31]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_ragged_batch_is_computed_whole_by_everybody(name, devices, problem):
    strategy, params, batch = problem.strategies[name](4), problem.params(), problem.batches(1, rows=7)[0]
    layout = Layout(strategy, strategy.mesh(devices[:4]), params)

    def loss_fn(params, batch, rng):
        loss, metrics = problem.loss(params, batch)
        return loss, metrics | {"drawn": jax.random.uniform(rng)}

    fn = jax.jit(value_and_grad(as_loss(loss_fn).call, layout), compiler_options=layout.compiler_options)
    (loss, (metrics, _)), grads = fn(jax.device_put(params, layout.params), None, batch, jax.random.key(3))
    (expected, _), theirs = jax.value_and_grad(problem.loss, has_aux=True)(params, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert float(metrics["drawn"]) == pytest.approx(float(jax.random.uniform(jax.random.key(3))))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), jax.device_get(grads), theirs)
    assert jax.tree.all(jax.tree.map(lambda g, s: g.sharding.is_equivalent_to(s, g.ndim), grads, layout.grads))
