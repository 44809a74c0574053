"""The two halves of a step on a mesh: value and gradient, and the optimizer's update."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxche.sharding import (
    FullShard,
    HybridShardGradOp,
    Layout,
    NoShard,
    ShardGradOp,
    as_loss,
    sharded_update,
    value_and_grad,
)

PARAMS = {"w": jnp.arange(32.0).reshape(8, 4) / 10, "b": jnp.ones(3)}
GRADS = jax.tree.map(lambda p: jnp.cos(p), PARAMS)


def test_a_ragged_batch_is_computed_whole_by_everybody(name, devices, problem, close):
    strategy, params, batch = problem.strategies[name](4), problem.params(), problem.batches(1, rows=7)[0]
    layout = Layout(strategy, strategy.mesh(devices[:4]), params)

    def loss_fn(params, batch, rng):
        loss, metrics = problem.loss(params, batch)
        return loss, metrics | {"drawn": jax.random.uniform(rng)}

    fn = jax.jit(value_and_grad(as_loss(loss_fn), layout), compiler_options=layout.compiler_options)
    (loss, (metrics, _)), grads = fn(jax.device_put(params, layout.params), None, batch, jax.random.key(3))
    (expected, _), theirs = jax.value_and_grad(problem.loss, has_aux=True)(params, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert float(metrics["drawn"]) == pytest.approx(float(jax.random.uniform(jax.random.key(3))))
    close(grads, theirs)
    assert jax.tree.all(jax.tree.map(lambda g, s: g.sharding.is_equivalent_to(s, g.ndim), grads, layout.grads))


def test_micro_batches_keep_no_outputs(devices):
    layout = Layout(NoShard(), NoShard().mesh(devices[:2]), jnp.ones(3))
    call = as_loss(lambda params, batch: (jnp.mean(batch @ params), {"y": batch @ params}), outputs=True)
    with pytest.raises(ValueError, match=r"accumulate=2 keeps no outputs.*write as_loss\(loss_fn\)"):
        jax.jit(value_and_grad(call, layout, accumulate=2))(jnp.ones(3), None, jnp.ones((4, 3)), jax.random.key(0))


@pytest.mark.parametrize(
    ("strategy", "size", "gathers"),
    [(FullShard(), 4, True), (FullShard(), 3, False), (ShardGradOp(), 4, False), (NoShard(), 4, False)],
)
def test_only_gathers_are_held_back_by_a_barrier(strategy, size, gathers, devices):
    """XLA of jax 0.12 ends the process at a barrier in a small loop without collectives."""
    params, batch = jnp.ones(size), jnp.ones((4, size))
    layout = Layout(strategy, strategy.mesh(devices[:2]), params)
    fn = value_and_grad(as_loss(lambda p, x: ((x @ p) ** 2).mean()), layout, accumulate=2)
    program = str(jax.make_jaxpr(fn)(params, None, batch, jax.random.key(0)))
    # One before the gather of each micro-batch, and one before its second gather.
    assert program.count("optimization_barrier") == (2 if gathers else 0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FullShard(), ShardGradOp(), NoShard(), HybridShardGradOp(2)], ids=str)
@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)),
        optax.multi_transform({"a": optax.adam(0.1), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
        optax.lion(0.1),
        optax.adafactor(0.1, min_dim_size_to_factor=4),
    ],
    ids=["clipped", "multi", "lion", "adafactor"],
)
def test_any_transformation_gives_what_it_gives_on_one_device(tx, strategy, devices, close):
    layout = Layout(strategy, strategy.mesh(devices[:4]), PARAMS)
    step = jax.jit(lambda g, s, p: sharded_update(tx, layout, g, s, p))
    params, state = step(GRADS, tx.init(PARAMS), PARAMS)
    params, state = jax.block_until_ready(step(GRADS, state, params))
    expected, theirs = PARAMS, tx.init(PARAMS)
    for _ in range(2):
        updates, theirs = tx.update(GRADS, theirs, expected)
        expected = optax.apply_updates(expected, updates)

    close((params, state), (expected, theirs))
    jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(f"{x.sharding}"), params, layout.params
    )
