"""The numeric cases every implementation of these strategies must give: mean reductions over ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxche.sharding import (
    FullShard,
    HybridShard,
    HybridShardGradOp,
    Layout,
    NoShard,
    ShardGradOp,
    as_loss,
    sharded_step,
    value_and_grad,
)

TENS, ONES = [10, 20, 30, 40], [1, 2, 3, 4]


def by_rank(array):
    """What each rank holds."""
    order = {device: i for i, device in enumerate(array.sharding.mesh.devices.flat)}
    return [s.data.tolist() for s in sorted(array.addressable_shards, key=lambda s: order[s.device])]


def placed(strategy, devices, params):
    params = jnp.asarray(params, jnp.float32)
    layout = Layout(strategy, strategy.mesh(devices), params)
    return layout, jax.device_put(params, layout.params)


def differentiated(layout, params, loss_fn, batch):
    fn = value_and_grad(as_loss(loss_fn), layout)
    jitted = jax.jit(fn, compiler_options=layout.compiler_options)
    (loss, _), grads = jax.block_until_ready(jitted(params, None, np.asarray(batch, np.float32), jax.random.key(0)))
    return loss, grads


@pytest.mark.parametrize(
    ("strategy", "world", "held"),
    [
        (FullShard(), 2, [[10, 20], [30, 40]]),
        (ShardGradOp(), 2, [TENS] * 2),
        (NoShard(), 2, [TENS] * 2),
        (HybridShard(2), 4, [[10, 20], [30, 40]] * 2),
        (HybridShardGradOp(2), 4, [TENS] * 4),
    ],
    ids=str,
)
def test_what_a_rank_holds_of_the_parameters(strategy, world, held, devices):
    _, params = placed(strategy, devices[:world], TENS)
    assert by_rank(params) == held


NODES = [[2, 4, 6, 8]] * 2 + [TENS] * 2


@pytest.mark.parametrize(
    ("strategy", "per_rank", "held"),
    [
        (FullShard(), [ONES] * 2, [[1, 2], [3, 4]]),
        (ShardGradOp(), [ONES] * 2, [[1, 2], [3, 4]]),
        (NoShard(), [ONES] * 2, [ONES] * 2),
        (HybridShard(2), NODES, [[6, 12], [18, 24]] * 2),
        (HybridShardGradOp(2), NODES, [[6, 12], [18, 24]] * 2),
        (NoShard(), NODES, [[6, 12, 18, 24]] * 4),
    ],
    ids=str,
)
def test_what_a_rank_holds_of_the_gradients(strategy, per_rank, held, devices):
    layout, params = placed(strategy, devices[: len(per_rank)], TENS)
    # The gradient of this loss on rank i is row i of the batch.
    _, grads = differentiated(layout, params, lambda p, rows: (rows @ p).mean(), per_rank)
    assert by_rank(grads) == held


@pytest.mark.parametrize("strategy", [FullShard(), ShardGradOp(), NoShard(), HybridShard(2)], ids=str)
def test_every_rank_computes_with_whole_parameters(strategy, devices):
    layout, params = placed(strategy, devices[:2], ONES)
    loss, _ = differentiated(layout, params, lambda p, x: (x * p.sum()).mean(), [2, 2])
    assert [float(s.data) for s in loss.addressable_shards] == [20.0, 20.0]


@pytest.mark.parametrize("strategy", [FullShard(), HybridShard(4)], ids=str)
def test_a_gather_keeps_the_order_of_ranks(strategy, devices):
    layout, params = placed(strategy, devices[:4], [[10 * r, 10 * r + 1] for r in range(4)])
    # Of half the square the gradient is the gathered parameter itself.
    _, grads = differentiated(layout, params, lambda p, x: 0.5 * jnp.sum(p**2) + 0 * x.mean(), [0] * 4)
    assert np.asarray(grads).ravel().tolist() == [0, 1, 10, 11, 20, 21, 30, 31]


@pytest.mark.parametrize(
    ("values", "before", "after", "held"),
    [
        # Sizes that ranks do not divide stay whole on each, so that ranks need not pad or differ in size.
        (range(1, 10), 3, 2, [list(range(1, 10))] * 2),
        (range(1, 8), 1, 4, [list(range(1, 8))] * 4),
        (range(1, 13), 3, 2, [list(range(1, 7)), list(range(7, 13))]),
        (range(1, 9), 2, 4, [[1, 2], [3, 4], [5, 6], [7, 8]]),
    ],
)
def test_a_checkpoint_opens_on_another_number_of_ranks(values, before, after, held, devices, through_orbax):
    params = jnp.array(list(values), jnp.float32)
    steps = [
        sharded_step(lambda p, x: (p * x.mean()).sum(), optax.sgd(0.1), FullShard(), FullShard().mesh(devices[:world]))
        for world in (before, after)
    ]
    state = through_orbax(steps[0].init(params), steps[1].abstract_state(params))
    assert by_rank(state.params) == held
