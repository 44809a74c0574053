"""The state is a value with a view."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
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


def noisy(params, batch, rng):
    noise = jax.random.uniform(rng)
    return jax.numpy.mean((batch["x"] @ params - batch["y"] + noise) ** 2), {"noise": noise}


@pytest.mark.filterwarnings("ignore:an outer optimizer over only")
@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 1},
        {},
        {"policy": "sync"},
        {"policy": "auto"},
        {"outer": optax.sgd(0.7, momentum=0.9)},
        {"overlap": 0.5},
        {"wire": "int4"},
        {"scaling": jaxche.AdamScale()},
    ],
    ids=["one", "cadence", "sync", "auto", "outer", "overlap", "int4", "scaling"],
)
def test_a_state_with_other_values_continues_its_run(devices, same, options):
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    data = jaxche.Batches({"x": x, "y": x[:, 0]}, batch_size=4)
    number = options.get("replicas", 3)
    fleet = None if number == 1 else jaxche.VirtualFleet([1, 1, 2], sync_ms=0.5)
    options = {name: value for name, value in options.items() if name != "replicas"}
    trainer = jaxche.Trainer(noisy, optax.adam(0.01), replicas=devices[:number], fleet=fleet, **options)
    start = jax.numpy.zeros(3)
    state, _ = trainer.fit(trainer.init(start), data, max_steps=20, progress=False)
    again = trainer.replace(state, trainer.params(state))
    assert (again.steps, again.epoch, again.cursor, again.round) == (20, state.epoch, state.cursor, state.round)
    wanted, first = trainer.fit(state, data, max_steps=12, progress=False)
    found, second = trainer.fit(again, data, max_steps=12, progress=False)
    same(trainer.params(found), trainer.params(wanted))
    assert [info.metrics for info in first] == [info.metrics for info in second]
    assert [info.counts for info in first] == [info.counts for info in second]


def test_a_stream_goes_on_in_a_state_with_another_target(devices):
    numbers = iter(range(1000))
    stream = ({"x": np.full((2, 3), number, np.float32), "y": np.zeros(2, np.float32)} for number in numbers)

    def loss(params, batch, model_state):
        return jax.numpy.mean((params - model_state) ** 2), ({"number": batch["x"].mean()}, model_state)

    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:1])
    state, seen = trainer.init(jax.numpy.ones(3), model_state=jax.numpy.zeros(3)), []
    for _ in range(3):
        state, history = trainer.fit(state, stream, max_steps=2, progress=False)
        seen += [history[-1].metrics["number"]]
        state = trainer.replace(state, model_state=trainer.params(state))
    assert seen == [0.5, 2.5, 4.5]


def test_values_that_are_given_replace_those_of_the_state(problem, devices, same):
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.1), replicas=devices[:2], opt_state="local")
    state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(1, 2))
    assert state.opt_states_differ
    kept = trainer.replace(state, problem.params)
    same(kept.opt_state, state.opt_state)
    same(trainer.params(kept), problem.params)
    same(jax.tree.map(lambda x: x[1], kept.params), problem.params)
    given = trainer.replace(state, opt_state=trainer.opt_state(state))
    assert kept.opt_states_differ
    assert not given.opt_states_differ
    same(given.params, state.params)
    same(given.local_states[1].opt_state, given.local_states[0].opt_state)


def test_the_progress_of_a_scaling_rule_goes_on_with_another_optimizer_state(problem, devices, same):
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.1), replicas=devices[:2], scaling=jaxche.AdamScale())
    state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(2, 2))
    given = trainer.replace(state, opt_state=optax.adam(0.1).init(problem.params))
    same(trainer.opt_state(given), optax.adam(0.1).init(problem.params))
    before, after = state.local_states[0].opt_state, given.local_states[0].opt_state
    assert after.progress == before.progress > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"params": {"w": np.zeros(3, np.float32)}},
            r"params has \['w'\] float32\[3\], and that of state has \['b'\] .*trainer\.init\(params\)",
        ),
        (
            {"model_state": np.zeros(2)},
            r"model_state has an array, and that of state has NoneType; write trainer\.replace\(state, model_sta",
        ),
        (
            {"opt_state": "adam"},
            r"opt_state is 'adam', not an array of numbers; write opt_state=tx\.init\(params\), or lea",
        ),
    ],
    ids=["params", "model_state", "opt_state"],
)
def test_values_of_another_form_are_refused(problem, devices, values, message):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    with pytest.raises(ValueError, match=message):
        trainer.replace(trainer.init(problem.params), **values)


def test_the_arrays_that_differ_are_named(devices):
    params, tx = {"a": jnp.zeros(3), "b": jnp.zeros(())}, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    trainer = jaxche.Trainer(lambda p, batch: jnp.sum(p["a"]) + p["b"], tx, replicas=devices[:1])
    state = trainer.init(params)
    with pytest.raises(
        ValueError, match=r"^params has \['a'\] float32\[4\], and that of state has \['a'\] float32\[3\]; w"
    ):
        trainer.replace(state, params | {"a": jnp.zeros(4)})
    with pytest.raises(
        ValueError, match=r"^params has no other arrays, and that of state has \['b'\] float32\[\]; write"
    ):
        trainer.replace(state, {"a": jnp.zeros(3)})
    mistyped = trainer.opt_state(state)
    mistyped.hyperparams["lr"] = jnp.float32(0.2)
    named = r"has \.hyperparams\['lr'\] float32\[\], and "
    for call in (partial(trainer.init, params), partial(trainer.replace, state)):
        with pytest.raises(ValueError, match=rf"tx\.update\. It {named}tx\.init\(params\) makes no other arrays"):
            call(opt_state=mistyped)


def test_a_state_of_other_replicas_is_not_taken(problem, devices):
    one, two = (jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:n]) for n in (1, 2))
    with pytest.raises(ValueError, match="state has 1 replicas in this process, and the trainer 2"):
        two.replace(one.init(problem.params), problem.params)
    with pytest.raises(ValueError, match="is not a state of this trainer"):
        two.replace(problem.params, problem.params)


def test_a_merge_that_is_waited_for_after_its_round_counts_as_one_that_was_not_hidden(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], overlap=0.5)
    state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(2, 2))
    merge = state.in_flight
    merged = state.merged()
    assert merge.duration_ms > 0
    assert merged.sync_ms == state.sync_ms + merge.duration_ms
    assert merged.merge_ms == merge.duration_ms


def test_parameters_from_which_the_optimizer_steps_are_replaced_with_its_state(problem, devices, same):
    """The next step would return to those in its state."""
    tx = optax.contrib.schedule_free_sgd(0.1)
    trainer = jaxche.Trainer(problem.loss, tx, replicas=devices[:2])
    state, _ = trainer.round(trainer.init(problem.params), problem.data)
    with pytest.raises(ValueError, match=r"params alone replaces nothing.*opt_state=tx\.init\(params\)\)"):
        trainer.replace(state, problem.params)
    again = trainer.replace(state, problem.params, opt_state=tx.init(problem.params))
    fresh = trainer.init(problem.params)
    same(trainer.opt_state(again), trainer.opt_state(fresh))
