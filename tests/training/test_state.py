"""The state is a value with a view."""

import jax
import numpy as np
import optax
import pytest

import jaxche


def test_views_cover_every_part(problem, devices):
    trainer = jaxche.Trainer(
        lambda p, b, model_state: (problem.loss(p, b)[0], ({}, model_state)),
        optax.adam(0.1),
        outer=optax.sgd(0.5, momentum=0.9),
        replicas=devices[:3],
    )
    state = trainer.init(problem.params, model_state={"ema": np.zeros(4, np.float32)})
    for view in (state.params, state.opt_state, state.model_state, state.outer_state):
        leaves = jax.tree.leaves(view)
        assert leaves
        for leaf in leaves:
            assert leaf.shape[0] == 3
            assert leaf.sharding.spec == jax.sharding.PartitionSpec("replica")
    assert len(state.local_states) == 3


def test_period_and_waits_follow_from_the_walls(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    _, info = trainer.round(trainer.init(problem.params), problem.data, counts=(1, 6))
    assert info.period_ms == pytest.approx(max(info.wall_ms) + info.sync_ms)
    assert min(info.wait_ms) == 0.0
    assert info.wait_ms == tuple(max(info.wall_ms) - w for w in info.wall_ms)
