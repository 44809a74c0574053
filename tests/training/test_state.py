"""The state is a value with a view."""

import copy
import pickle
from dataclasses import replace

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


@pytest.mark.parametrize("options", [{}, {"overlap": 0.5}, {"outer": optax.sgd(1)}], ids=["plain", "overlap", "outer"])
def test_copies_train_on_alike_and_a_deep_one_has_arrays_of_its_own(problem, devices, same, options):
    tx = optax.chain(optax.add_noise(0.1, 0.55, 0), optax.adam(0.1))  # with a random key in its state
    trainer = jaxche.Trainer(problem.loss, tx, replicas=devices[:2], **options)
    state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(1, 2))
    copies = copy.copy(state), copy.deepcopy(state)
    compiled = trainer.compilations
    wanted, *found = [trainer.round(one, problem.data, counts=(2, 1))[0] for one in (state, *copies)]
    for one in found:
        same(one.params, wanted.params)
    assert trainer.compilations == compiled
    before = jax.device_get(copies[1].local_states[0].params)
    for leaf in jax.tree.leaves(state.local_states):
        leaf.delete()
    same(copies[1].local_states[0].params, before)


def test_states_with_the_same_replicas_and_equal_fields_are_equal(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    first, second = trainer.init(problem.params), trainer.init(problem.params)
    assert first != second
    assert [second, first].index(first) == 1
    assert {first: "first", second: "second"}[replace(second)] == "second"
    assert replace(first, round=1) != first != first.local_states


def test_a_pickle_is_refused_with_the_line_to_write(problem, devices):
    state = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2]).init(problem.params)
    with pytest.raises(TypeError, match=r"trainer\.fit\(state, data, checkpoints='runs/mine'\)"):
        pickle.dumps(state)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "sync"},
        {"opt_state": "local"},
        {"scaling": jaxche.AdamScale()},
        {"overlap": 0.5},
        {"strategy": jaxche.FullShard()},
    ],
    ids=str,
)
def test_the_optimizer_state_goes_on_in_a_plain_loop_and_in_another_trainer(problem, devices, same, options):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0.05, 0.0, 100)))
    replicas = devices[:2]
    if "strategy" in options:
        replicas = [options["strategy"].mesh(devices[:2]), options["strategy"].mesh(devices[2:4])]
    trainer = jaxche.Trainer(problem.loss, tx, replicas=replicas, **options)
    state, history = trainer.fit(trainer.init(problem.params), problem.data, max_steps=8, progress=False)
    params, opt_state = trainer.params(state), trainer.opt_state(state)
    view = state.opt_state.inner_state if "scaling" in options else state.opt_state
    same(opt_state, jax.tree.map(lambda x: np.asarray(x)[0], view))
    # A plain update, with parameters on the same devices, and a fresh start of the trainer.
    optax.apply_updates(params, tx.update(params, opt_state, params)[0])
    again = trainer.init(params, opt_state=opt_state)
    same(trainer.opt_state(again), opt_state)
    assert history[-1].steps_done == int(opt_state[1][1].count) == 8
