"""Schedules follow the progress of the whole run; counts of moments follow the moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.replicas._opt_state import (
    advance_by_batches,
    are_accumulators,
    are_schedules,
    counts_of,
    update_in_round,
    with_counts,
)

BATCHES = 24
DATA = [{"x": np.ones(2, np.float32)} for _ in range(BATCHES)]


def rate(count):
    """Falls to zero over the batches of the run."""
    return 1.0 - count / BATCHES


def slope(w, batch):
    """Its gradient is 1, so that a parameter goes down by the sum of the rates."""
    return jnp.sum(w) * batch["x"].mean()


def start(trainer):
    return trainer.init(jnp.zeros(()))


def schedule_counts(opt_state):
    """Rows of each count that a schedule depends on."""
    marks = are_schedules(jax.tree.map(lambda x: x[:1], opt_state))
    found = [leaf for leaf in jax.tree.leaves(opt_state) if leaf.ndim == 1 and leaf.dtype == jnp.int32]
    return [np.asarray(leaf).tolist() for leaf, mark in zip(found, marks, strict=True) if mark]


def every(k, tx):
    return optax.MultiSteps(tx, every_k_schedule=k).gradient_transformation()


OPTIMIZERS = {
    "chain": optax.chain(optax.clip_by_global_norm(9.0), optax.sgd(rate)),
    "inject": optax.inject_hyperparams(optax.sgd)(learning_rate=rate),
    "multi_transform": optax.multi_transform({"all": optax.sgd(rate)}, "all"),
    "masked": optax.masked(optax.sgd(rate), True),
    "adamw": optax.adamw(rate),
    "decay": optax.chain(optax.add_decayed_weights(rate), optax.sgd(rate)),
    "schedule_free": optax.contrib.schedule_free(optax.sgd(rate), rate),
    "momo": optax.contrib.momo(rate),
}
SETTINGS = {
    "cadence": {},
    "async": {"policy": "async"},
    "sync": {"policy": "sync", "rows": "equal"},
    "gradients": {"average": "gradients"},
    "average": {"opt_state": "average"},
    "reset": {"opt_state": "reset"},
    "host": {"backend": "host"},
    "outer": {"outer": optax.sgd(1.0)},
}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_schedule_has_run_when_the_batches_are_used_up(devices, lockstep, setting, world):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    trainer = jaxche.Trainer(slope, tx, replicas=devices[:world], che=lockstep(world), **SETTINGS[setting])
    state, _ = trainer.fit(start(trainer), DATA, epochs=1, progress=False)
    assert schedule_counts(state.opt_state) == [[BATCHES] * world] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_through_every_wrapper(devices, average, name):
    trainer = jaxche.Trainer(slope, OPTIMIZERS[name], replicas=devices[:2], average=average)
    state = start(trainer)
    for counts in ((1, 4), (3, 2), (0, 5)):
        state, _ = trainer.round(state, DATA, counts=counts)
    found = schedule_counts(state.opt_state)
    begun = [row[0] for row in schedule_counts(start(trainer).opt_state)]  # schedule_free counts from 1
    assert found
    assert found == [[first + 15] * 2 for first in begun]


@pytest.mark.parametrize(("average", "rounds", "updates"), [("parameters", 3, 12), ("gradients", 4, 16)])
def test_through_accumulated_steps(devices, average, rounds, updates):
    # Of two batches each: half as many updates as batches, as on one device.
    trainer = jaxche.Trainer(slope, every(2, optax.sgd(rate)), replicas=devices[:2], average=average)
    state = start(trainer)
    for _ in range(rounds):
        state, _ = trainer.round(state, DATA, counts=(2, 6))
    assert schedule_counts(state.opt_state) == [[updates, updates]] * 2


UNLIKE = ((1, 0), (3, 4), (2, 0), (0, 5), (1, 1), (4, 3))  # 1, 7, 2, 5, 2, 7 batches


@pytest.mark.parametrize("k", [1, 2, 3])
def test_updates_on_accumulated_averages_count_all_batches_since_the_one_before(devices, k):
    trainer = jaxche.Trainer(slope, every(k, optax.sgd(rate)), replicas=devices[:2], average="gradients")
    state, batches, moved = start(trainer), 0, 0.0
    for n, counts in enumerate(UNLIKE, start=1):
        seen = int(schedule_counts(state.opt_state)[1][0])
        state, _ = trainer.round(state, DATA, counts=counts)
        batches += sum(counts)
        if n % k == 0:  # a mean of k rounds, at the rate of the batches before it
            moved -= rate(seen)
            assert schedule_counts(state.opt_state) == [[batches // k] * 2] * 2
            assert state.accumulated == batches % k
        assert float(trainer.params(state)) == pytest.approx(moved, rel=1e-6)


@pytest.mark.parametrize("before", ["a loop by hand", "a trainer of one replica"])
def test_mini_steps_of_the_state_that_a_run_starts_from_count(devices, before):
    tx = every(3, optax.sgd(rate))
    one = jaxche.Trainer(slope, tx, replicas=devices[:1])
    state, _ = one.fit(start(one), DATA, max_steps=5, progress=False)  # an update, and two mini-steps
    w, opt_state = one.params(state), one.opt_state(state)
    if before == "a loop by hand":
        w, opt_state = jnp.zeros(()), tx.init(jnp.zeros(()))
        for _ in range(5):
            updates, opt_state = tx.update(jnp.ones(()), opt_state, w)
            w = optax.apply_updates(w, updates)
    trainer = jaxche.Trainer(slope, tx, replicas=devices[:2], policy="sync", joined_batches=1)
    state, _ = trainer.fit(trainer.init(w, opt_state=opt_state), DATA, max_steps=10, progress=False)
    assert float(trainer.params(state)) == pytest.approx(-sum(map(rate, range(5))), rel=1e-6)
    assert int(trainer.opt_state(state).gradient_step) == 5
    assert state.accumulated == 0


def test_batches_that_wait_for_an_update_are_saved(devices, tmp_path):
    def trainer():
        tx = every(3, optax.sgd(rate))
        return jaxche.Trainer(slope, tx, replicas=devices[:2], average="gradients", che=jaxche.ElChe(2, anchor=4))

    first = trainer()
    half, _ = first.fit(start(first), DATA, progress=False, checkpoints=tmp_path, callbacks=[lambda *_: True])
    assert half.accumulated == 8
    second = trainer()
    seen = []
    second.fit(
        start(second),
        DATA,
        progress=False,
        checkpoints=tmp_path,
        callbacks=[lambda state, info: seen.append((state.round, state.accumulated)) or True],
    )
    assert seen == [(2, 8 + second_round(tmp_path))]


def second_round(folder):
    """Batches of the second round of a saved record."""
    return sum(jaxche.History.from_json(folder / "history.jsonl")[1].counts)


@pytest.mark.parametrize(
    ("mini_step", "updates", "accumulated"),
    [(1, 0, 9), (0, 0, 4)],  # one more mini-step; one that MultiSteps skipped
)
def test_a_mini_step_that_is_skipped_counts_for_nothing(mini_step, updates, accumulated):
    def state(mini, made):
        return optax.MultiStepsState(jnp.int32(mini), jnp.int32(made), (optax.ScaleByScheduleState(jnp.int32(0)),), ())

    after, left = advance_by_batches(5, state(0, 0), state(mini_step, updates), 4)
    assert (int(after.inner_opt_state[0].count), int(left)) == (0, accumulated)


def test_the_rates_within_a_round_are_those_of_the_batches_so_far(devices):
    trainer = jaxche.Trainer(slope, optax.sgd(rate), replicas=devices[:2], merge="batch")
    state, w, done = start(trainer), 0.0, 0
    for counts in ((2, 6), (1, 4), (3, 3)):
        total = sum(counts)
        moved = [sum(rate(done + round(step * total / n)) for step in range(n)) for n in counts]
        w, done = w - np.mean(moved), done + total
        state, _ = trainer.round(state, DATA, counts=counts)
        assert float(trainer.params(state)) == pytest.approx(w, rel=1e-6)


def test_a_schedule_counts_where_promotion_is_forbidden(devices):
    with jax.numpy_dtype_promotion("strict"):
        trainer = jaxche.Trainer(slope, optax.sgd(rate), replicas=devices[:2])
        state, _ = trainer.round(start(trainer), DATA, counts=(2, 6))
    assert schedule_counts(state.opt_state) == [[8, 8]]


def test_the_update_on_averaged_gradients_has_the_rate_of_the_batches_so_far(devices):
    trainer = jaxche.Trainer(slope, optax.sgd(rate), replicas=devices[:2], average="gradients")
    state = start(trainer)
    for counts in ((2, 6), (1, 3)):
        state, _ = trainer.round(state, DATA, counts=counts)
    assert float(trainer.params(state)) == pytest.approx(-rate(0) - rate(8))


def test_one_replica_counts_as_ever(devices, same):
    tx = optax.chain(optax.adam(rate), optax.scale(0.5))
    trainer = jaxche.Trainer(slope, tx, replicas=devices[:1])
    state, _ = trainer.fit(start(trainer), DATA, epochs=1, progress=False)
    params = jnp.zeros(())
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(slope)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in DATA:
        params, opt_state = step(params, opt_state, batch)
    same((params, opt_state), (trainer.params(state), jax.tree.map(lambda x: x[0], state.opt_state)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [jaxche.FullShard(), jaxche.ShardGradOp()])
@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_islands_of_unlike_sizes_agree(devices, average, strategy):
    replicas = [strategy.mesh(devices[:2]), strategy.mesh(devices[2:6])]
    trainer = jaxche.Trainer(slope, optax.adam(rate), replicas=replicas, strategy=strategy, average=average)
    state, _ = trainer.round(start(trainer), DATA, counts=(1, 4))
    assert schedule_counts(state.opt_state) == [[5, 5]]


@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_every_stage_agrees(devices, average):
    stages = [lambda p, batch: p * batch["x"], lambda p, x: p + x]
    model = jaxche.Partitioned(stages, lambda y, batch: jnp.mean(y), jaxche.Direct())
    replicas = [devices[:2], devices[2:4]]
    trainer = jaxche.Trainer(model, optax.adam(rate), replicas=replicas, average=average, opt_state="local")
    state = trainer.init([jnp.zeros(()), jnp.zeros(())])
    for counts in ((1, 4), (3, 2)):
        state, _ = trainer.round(state, DATA, counts=counts)
    assert [schedule_counts(stage) for stage in state.opt_state] == [[[10, 10]], [[10, 10]]]
    if average == "parameters":
        adam = [np.asarray(stage[0].count).tolist() for stage in state.opt_state]
        assert adam == [[4, 6], [4, 6]]


@pytest.mark.slow
@pytest.mark.parametrize("other", [1, 3])
def test_a_resume_with_other_replicas_goes_on_where_the_schedule_was(devices, lockstep, tmp_path, other):
    def trainer(world):
        che = lockstep(world) if world > 1 else None
        return jaxche.Trainer(slope, optax.adam(rate), replicas=devices[:world], che=che)

    first = trainer(2)
    half, _ = first.fit(
        start(first), DATA, progress=False, checkpoints=tmp_path, callbacks=[lambda state, info: state.round == 3]
    )
    assert schedule_counts(half.opt_state) == [[12, 12]]
    second = trainer(other)
    state, _ = second.fit(start(second), DATA, progress=False, checkpoints=tmp_path)
    assert schedule_counts(state.opt_state) == [[BATCHES] * other]


def test_a_scaled_optimizer_keeps_its_own_progress_beside_the_schedule(devices):
    trainer = jaxche.Trainer(
        slope, optax.sgd(rate), replicas=devices[:2], average="gradients", scaling=jaxche.LinearScale()
    )
    state, info = trainer.round(start(trainer), DATA, counts=(2, 6))
    assert schedule_counts(state.opt_state) == [[8, 8]]
    assert info.progress == pytest.approx(1.0, rel=1e-5)  # without noise a larger batch is worth no more


@pytest.mark.parametrize("options", [{}, {"average": "gradients"}, {"overlap": 0.5}], ids=str)
def test_a_count_ends_at_the_largest_number_as_in_optax(devices, options):
    tx, most = optax.adam(rate), 2**31 - 1
    near = jax.tree.map(lambda x: x + most - 8 if x.dtype == jnp.int32 else x, tx.init(jnp.zeros(())))
    trainer = jaxche.Trainer(slope, tx, replicas=devices[:2], **options)
    state, _ = trainer.round(trainer.init(jnp.zeros(()), opt_state=near), DATA, counts=(4, 8))
    moments, schedule = state.merged().opt_state
    assert all(most - 8 < int(count) <= most for count in (*moments.count, *schedule.count))


@pytest.mark.parametrize("counts", [(1, 1), (1, 3)])
def test_a_count_that_begins_again_falls(devices, counts):
    """That of updates in a row which were not finite: after one that is, it is 0 in each replica."""
    tx = optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=40)
    begun = tx.init(jnp.zeros(()))._replace(notfinite_count=jnp.int32(3))
    trainer = jaxche.Trainer(slope, tx, replicas=devices[:2])
    state, _ = trainer.round(trainer.init(jnp.zeros(()), opt_state=begun), DATA, counts=counts)
    assert int(trainer.opt_state(state).notfinite_count) == 0


def test_averaged_moments_are_as_old_as_their_mean(devices):
    trainer = jaxche.Trainer(slope, optax.adam(0.01), replicas=devices[:2], opt_state="average")
    state, _ = trainer.round(start(trainer), DATA, counts=(1, 20))
    assert np.asarray(state.opt_state[0].count).tolist() == [19, 19]  # (1 * 1 + 20 * 20) / 21
    before = trainer.params(state)
    state, _ = trainer.round(state, DATA, counts=(1, 0))
    # Adam's step on a constant gradient is one rate long, at whatever age of its moments.
    assert float(before - trainer.params(state)) == pytest.approx(0.01, rel=0.03)


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)])
@pytest.mark.parametrize("opt_state", ["local", "average", "reset"])
def test_an_optimizer_need_not_count(devices, opt_state, tx):
    trainer = jaxche.Trainer(slope, tx, replicas=devices[:2], opt_state=opt_state)
    state, _ = trainer.round(start(trainer), DATA, counts=(1, 4))
    state, _ = trainer.round(state, DATA, counts=(2, 2))
    assert float(trainer.params(state)) < 0


def test_own_moments_count_the_updates_of_their_replica(devices):
    trainer = jaxche.Trainer(slope, optax.adam(rate), replicas=devices[:2], opt_state="local")
    state, _ = trainer.round(start(trainer), DATA, counts=(1, 4))
    assert np.asarray(state.opt_state[0].count).tolist() == [1, 4]


def test_a_reset_forgets_moments_and_not_the_schedule(devices):
    trainer = jaxche.Trainer(slope, optax.adam(rate), replicas=devices[:2], opt_state="reset")
    state, _ = trainer.round(start(trainer), DATA, counts=(1, 4))
    adam, schedule = state.opt_state
    assert np.asarray(adam.count).tolist() == [0, 0]
    assert not np.asarray(adam.mu).any()
    assert np.asarray(schedule.count).tolist() == [5, 5]


def draw_from_words(updates, key, params=None):
    """The update of a transformation whose state is a random key as two words."""
    key, own = jax.random.split(key)
    return jax.tree.map(lambda x: x + jax.random.normal(own, x.shape), updates), key


@pytest.mark.parametrize(
    "noise",
    [
        optax.add_noise(1.0, 0.0, 0),
        optax.GradientTransformation(lambda params: jax.random.PRNGKey(0), draw_from_words),
    ],
    ids=["typed", "words"],
)
def test_a_reset_does_not_draw_the_same_numbers_in_every_round(devices, noise):
    tx = optax.chain(noise, optax.sgd(0.1))
    trainer = jaxche.Trainer(lambda w, x: 0.0 * slope(w, x), tx, replicas=devices[:2], opt_state="reset")
    state, places = start(trainer), [0.0]
    for _ in range(3):
        state, _ = trainer.round(state, DATA, counts=(2, 2))
        places.append(float(trainer.params(state)))
    one, opt_state, expected = jnp.zeros(()), tx.init(jnp.zeros(())), [0.0]
    for step in range(6):
        updates, opt_state = tx.update(jnp.zeros(()), opt_state)
        one += updates
        expected += [float(one)] * (step % 2)
    assert places == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"opt_state": "local"}, {"opt_state": "reset"}], ids=str)
def test_a_reset_keeps_a_rate_that_was_put_into_the_state(devices, options):
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    opt_state = tx.init(jnp.zeros(()))
    opt_state.hyperparams["learning_rate"] = jnp.float32(0.25)
    trainer = jaxche.Trainer(slope, tx, replicas=devices[:2], **options)
    state = trainer.init(jnp.zeros(()), opt_state=opt_state)
    for _ in range(2):
        state, _ = trainer.round(state, DATA, counts=(2, 2))
    np.testing.assert_array_equal(state.opt_state.hyperparams["learning_rate"], 0.25)
    assert float(trainer.params(state)) == pytest.approx(-4 * 0.25, rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"opt_state": "local"}, {"wire": "int8"}, {"overlap": 0.5}], ids=str)
def test_a_count_may_be_an_array_of_one_number(devices, options):
    def update(updates, state, params=None):
        return updates, {"array": state["array"] + 1, "scalar": state["scalar"] + 1}

    def init(params):
        return {"array": jnp.zeros(1, jnp.int32), "scalar": jnp.zeros((), jnp.int32)}

    tx = optax.chain(optax.GradientTransformation(init, update), optax.sgd(rate))
    trainer = jaxche.Trainer(slope, tx, replicas=devices[:2], **options)
    state, _ = trainer.round(start(trainer), DATA, counts=(2, 2))
    state, _ = trainer.round(state, DATA, counts=(2, 2))
    opt_state = trainer.opt_state(state)[0]
    assert opt_state["array"].tolist() == [4]
    assert int(opt_state["scalar"]) == 4


def test_moments_of_unlike_ages_are_handed_over_as_one_of_their_mean_age(devices):
    trainer = jaxche.Trainer(slope, optax.adam(0.01), replicas=devices[:2], opt_state="local")
    state, _ = trainer.round(start(trainer), DATA, counts=(1, 5))
    state_dict = trainer._engine.state_dict(state.local_states)
    assert int(state_dict.pooled()["opt_state"][0].count) == 3


def test_a_plateau_and_a_subspace_are_handed_over_as_those_of_one(devices):
    tx = optax.chain(optax.contrib.scale_by_galore(rank=1), optax.contrib.reduce_on_plateau(accumulation_size=4))
    trainer = jaxche.Trainer(slope, tx, replicas=devices[:2], opt_state="local")
    state, _ = trainer.round(trainer.init(jnp.zeros((3, 2))), DATA, counts=(5, 3))
    galore, plateau = trainer._engine.state_dict(state.local_states).pooled()["opt_state"]
    assert np.isfinite(plateau.best_value)  # the other has none yet, and their mean is infinite
    assert int(plateau.count) == 1
    assert int(galore.count) == 5


def test_counts_by_hand():
    state = (optax.ScaleByAdamState(jnp.int32(7), jnp.ones(2), jnp.ones(2)), optax.ScaleByScheduleState(jnp.int32(20)))
    assert are_schedules(state) == [False, True]

    def update(seen):
        assert [int(n) for n in counts_of(seen)] == [7, 23]
        return "params", with_counts(seen, list(map(jnp.int32, (8, 24))))

    params, after = update_in_round(update, state, [jnp.int32(5), jnp.int32(18)], 2.5)
    assert (params, [int(n) for n in counts_of(after)]) == ("params", [8, 21])
    after, accumulated = advance_by_batches(5, state, with_counts(state, list(map(jnp.int32, (8, 21)))), 0)
    assert ([int(n) for n in counts_of(after)], int(accumulated)) == ([8, 25], 0)
    assert counts_of({"key": jax.random.key(0), "n": jnp.uint32(3), "x": jnp.zeros(()), "i": jnp.arange(2)}) == []


ACCUMULATE = {
    "MultiSteps": every(5, optax.sgd(5.0)),  # applies the mean of five gradients
    "apply_every": optax.chain(optax.apply_every(5), optax.sgd(1.0)),  # and their sum
    "microbatches": optax.chain(optax.experimental.aggregating.accumulate_avg_updates(5), optax.sgd(5.0)),
}


@pytest.mark.parametrize("options", [{}, {"opt_state": "local"}, {"opt_state": "reset"}, {"wire": "int8"}], ids=str)
@pytest.mark.parametrize("kind", ACCUMULATE)
def test_no_merge_loses_gradients_that_a_replica_has_accumulated(devices, kind, options):
    trainer = jaxche.Trainer(slope, ACCUMULATE[kind], replicas=devices[:3], **options)
    state = start(trainer)
    for _ in range(10):
        state, _ = trainer.round(state, DATA * 5, counts=(3, 1, 2))
    # Updates of five gradients each, with the weight of their replica in the merge of their round.
    moved = 5 * (6 * 3 + 2 * 1 + 4 * 2) / 6
    np.testing.assert_allclose(trainer.params(state), -moved, rtol=1e-2 if "wire" in options else 1e-6)


def test_a_resumed_run_has_the_gradients_that_each_replica_had_accumulated(devices, tmp_path):
    options = {"policy": "sync", "average": "parameters", "rows": "equal", "replicas": devices[:2]}
    first, second = (
        jaxche.Trainer(lambda w, batch: w * batch["x"].mean(), ACCUMULATE["MultiSteps"], **options) for _ in range(2)
    )

    def run(trainer, stop, **checkpoints):
        ends = {"callbacks": [lambda state, info: info.round == stop]} if stop else {}
        return trainer.fit(start(trainer), data, progress=False, **ends, **checkpoints)[0]

    data = [{"x": np.full(2, i, np.float32)} for i in range(12)]
    whole = run(first, None)
    run(first, 2, checkpoints=tmp_path)
    resumed = run(second, None, checkpoints=tmp_path)
    for one, other in zip(jax.tree.leaves(whole.opt_state), jax.tree.leaves(resumed.opt_state), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(whole.params, resumed.params)


def test_what_accumulates_is_found_at_any_depth():
    tx = optax.chain(optax.adam(0.1), optax.masked(every(3, optax.chain(optax.apply_every(2), optax.adam(0.1))), True))
    adam, masked = tx.init(jnp.zeros(2))
    inner = masked.inner_state
    marks = iter(are_accumulators((adam, masked)))
    found = [leaf for leaf in jax.tree.leaves((adam, masked)) if next(marks)]
    applied = inner.inner_opt_state[0]
    assert list(map(id, found)) == list(map(id, [inner.mini_step, applied.count, applied.grad_acc, inner.acc_grads]))


def plateau():
    """Lowers the rate after two windows of eight losses without an improvement."""
    return optax.chain(optax.contrib.reduce_on_plateau(0.5, 2, rtol=0.01, accumulation_size=8), optax.sgd(0.0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"wire": "int8"},
        {"groups": [[0, 1], [2]], "group_merges": 2},
        {"opt_state": "reset"},
        {"opt_state": "local"},
    ],
    ids=str,
)
def test_a_rate_falls_on_a_plateau_though_windows_of_losses_end_at_other_rounds(devices, options):
    """The mean of a best loss and of none yet is infinite, and then every loss is an improvement."""
    trainer = jaxche.Trainer(
        lambda w, batch: jnp.sum(w) + batch["x"].mean(), plateau(), replicas=devices[:3], **options
    )
    state = start(trainer)
    for _ in range(12):
        state, _ = trainer.round(state, DATA * 10, counts=(2, 5, 3))
    of_replicas = state.opt_state[0]
    steps = [24, 60, 36] if options.get("opt_state") else [60] * 3  # those of the replica with most
    np.testing.assert_array_equal(of_replicas.count, np.asarray(steps) % 8)
    # The first window improves on nothing, and two more are a plateau.
    np.testing.assert_array_equal(of_replicas.scale, 0.5 ** ((np.asarray(steps) // 8 - 1) // 2))
    np.testing.assert_array_equal(of_replicas.best_value, 1.0)
    assert state.opt_states_differ or len(set(steps)) == 1  # a checkpoint has those of each
    np.testing.assert_array_equal(of_replicas.avg_value, np.asarray(steps) % 8 > 0)
