"""Rows by speed under ``sync``: each replica runs the rows that it can in the common time, and nothing else changes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.cadence import RoundPlan
from jaxche.training import Checkpoints, _round_end

FOUR = jaxche.VirtualFleet([20, 20, 40, 80], sync_ms=0.0)
DEAR = jaxche.VirtualFleet([20, 20, 40, 80], sync_ms=11.0)
TWO = jaxche.VirtualFleet([20, 50], sync_ms=0.0, fixed_ms=4.0)


def trainer(problem, devices, fleet=FOUR, tx=None, loss=None, **options):
    replicas = options.pop("replicas", devices[: len(fleet.ms_per_batch)])
    return jaxche.Trainer(
        loss or problem.loss, tx or optax.adam(0.05), policy="sync", replicas=replicas, fleet=fleet, **options
    )


def fit(one, problem, epochs=3, state=None, **options):
    return one.fit(state or one.init(problem.params), problem.data, epochs=epochs, progress=False, **options)


def single_device(problem, tx, joined, epochs=3):
    """The parameters of one device on the joined batches."""
    params = jax.tree.map(jnp.asarray, problem.params)
    opt_state, gradient, update = tx.init(params), jax.jit(jax.grad(problem.loss, has_aux=True)), jax.jit(tx.update)
    size = len(problem.data)
    for epoch, first in itertools.product(range(epochs), range(0, size, joined)):
        batch = problem.joined(epoch, range(first, min(first + joined, size)))
        grads, _ = gradient(params, batch)
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.slow
@pytest.mark.parametrize("joined", [None, 3, 6])
@pytest.mark.parametrize("tx", [optax.sgd(0.3, momentum=0.9), optax.adam(0.05)], ids=["sgd", "adam"])
def test_it_equals_one_device_on_the_joined_batch(make_problem, devices, close, tx, joined):
    problem = make_problem(examples=16 * 20 + 5, batch_size=16)
    one = trainer(problem, devices, tx=tx, joined_batches=joined)
    state, history = fit(one, problem)
    close(one.params(state), single_device(problem, tx, joined or 4), rtol=1e-4, atol=1e-5)
    assert len({info.rows for info in history}) > 1
    assert sum(info.examples for info in history) == 3 * (16 * 20 + 5)


@pytest.mark.slow
@pytest.mark.parametrize(("fleet", "least"), [(FOUR, 0.97), (TWO, 0.95)])
def test_all_devices_end_together(make_problem, devices, fleet, least):
    problem = make_problem(examples=64 * 40, batch_size=64)
    _, history = fit(trainer(problem, devices, fleet), problem, epochs=1)
    settled = [info for info in history if info.round > 6]
    assert min(info.efficiency for info in settled) >= least
    _, equal = fit(trainer(problem, devices, fleet, rows="equal"), problem, epochs=1)
    assert max(info.efficiency for info in equal) < 0.85
    assert {info.shares for info in equal} == {()}


def test_shares_that_stay_are_compiled_for_once(make_problem, devices):
    problem = make_problem(examples=64 * 40, batch_size=64)
    one = trainer(problem, devices)
    state, history = fit(one, problem, epochs=1)
    before, shares = one.compilations, {info.shares for info in history}
    assert before <= 4 * (1 + len(shares))
    fit(one, problem, epochs=2, state=state)
    assert one.compilations == before


@pytest.mark.parametrize("fleet", [None, TWO])
def test_compilation_is_a_reason_against_new_shares(make_problem, devices, fleet):
    """From the first round on, in real time only: on a virtual clock runs repeat bit for bit."""
    problem = make_problem(examples=16 * 18, batch_size=16)
    options = {"policy": "sync", "replicas": devices[:2], "fleet": fleet}
    whole = jaxche.Trainer(problem.loss, optax.sgd(0.1), **options)
    state, _ = whole.round(whole.init(problem.params), problem.data)
    assert (state.row_shares.compile_ms > 0) is (fleet is None)
    # Equal parts in two steps each, and once times are known, one step each.
    one = jaxche.Trainer(problem.loss, optax.sgd(0.1), joined_batches=3, **options)
    state, _ = fit(one, problem, epochs=1)
    assert one.compilations > 2
    assert (state.row_shares.compile_ms > 0) is (fleet is None)


@pytest.mark.slow
def test_a_replay_and_a_resumed_run_are_equal(make_problem, devices, same, tmp_path, told):
    problem = make_problem(examples=8 * 20 + 3, batch_size=8)
    one = trainer(problem, devices)
    state, history = fit(one, problem, epochs=4)
    replayed, again = one.replay(one.init(problem.params), problem.data, history)
    same(one.params(state), one.params(replayed))
    assert [info.rows for info in again] == [info.rows for info in history]
    fit(one, problem, epochs=2, checkpoints=Checkpoints(tmp_path))
    other = trainer(problem, devices)
    resumed, whole = fit(other, problem, epochs=4, checkpoints=Checkpoints(tmp_path))
    same(one.params(state), other.params(resumed))
    assert told(whole) == told(history)


def test_a_schedule_counts_batches(make_problem, devices, close):
    """A rate that falls to zero over the batches of the run, as on one device."""
    problem = make_problem(examples=8 * 24, batch_size=8)
    schedule = optax.linear_schedule(0.1, 0.0, 2 * 24)
    one = trainer(problem, devices, tx=optax.sgd(schedule), joined_batches=3)
    state, _ = fit(one, problem, epochs=2)
    counts = [int(x[0]) for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32]
    assert counts == [48]


def test_a_schedule_counts_batches_of_fewer_rows_than_replicas(problem, devices, close):
    """Here the last batch of an epoch has one row, on one of three replicas."""
    data = jaxche.Batches(jax.tree.map(lambda x: x[:9], problem.data.arrays), 4, seed=None)
    tx, options, states = optax.sgd(optax.linear_schedule(0.5, 0.0, 6)), {"policy": "sync", "joined_batches": 1}, []
    for replicas in (devices[:3], devices[:1]):
        one = jaxche.Trainer(problem.loss, tx, replicas=replicas, **options)
        states.append(one.fit(one.init(problem.params), data, epochs=2, progress=False)[0])
    three, single = ((one.params(state), one.opt_state(state)) for state in states)
    close(three, single, rtol=1e-5, atol=1e-6)


def test_averaged_parameters_are_weighted_by_rows(make_problem, devices, close):
    problem = make_problem(examples=16 * 24, batch_size=16)
    tx = optax.sgd(0.2)
    one = trainer(problem, devices, tx=tx, average="parameters")
    state, history = fit(one, problem, epochs=1)
    # With one step of plain SGD each, the mean of parameters by rows is one step on the joined batch.
    close(one.params(state), single_device(problem, tx, 4, epochs=1), rtol=1e-4, atol=1e-5)
    assert history[-1].weights == pytest.approx(np.array(history[-1].rows) / history[-1].examples)


def test_a_part_of_a_batch_counts_as_that_part_of_a_step(make_problem, devices):
    """Four steps on three batches advance a schedule by three."""
    problem = make_problem(examples=16 * 24, batch_size=16)
    schedule = optax.linear_schedule(0.1, 0.0, 24)
    one = trainer(problem, devices, tx=optax.sgd(schedule), average="parameters", joined_batches=3)
    state, history = fit(one, problem, epochs=1)
    assert [int(x[0]) for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32] == [24]
    assert sum(info.batches for info in history) == 24
    assert sum(sum(info.counts) for info in history) == 4 * 8


def test_statistics_and_metrics_are_weighted_by_rows(make_problem, devices, close):
    problem = make_problem(examples=16 * 24, batch_size=16)

    def loss(params, batch, model_state):
        value, metrics = problem.loss(params, batch)
        return value, (metrics, {"mean": batch["x"].mean(0)})

    one = trainer(problem, devices, loss=loss)
    state = one.init(problem.params, {"mean": np.zeros(5, np.float32)})
    for _ in range(5):
        before = state
        state, info = one.round(state, problem.data)
    assert info.shares
    joined = problem.joined(0, range(info.cursor, info.cursor + 4))
    close(one.model_state(state)["mean"], joined["x"].mean(0), rtol=1e-4, atol=1e-5)
    value, metrics = problem.loss(one.params(before), joined)
    assert info.loss == pytest.approx(float(value), rel=1e-4)
    assert info.metrics["mae"] == pytest.approx(float(metrics["mae"]), rel=1e-4)


def test_replicas_draw_different_random_numbers(make_problem, devices):
    problem = make_problem(examples=16 * 24, batch_size=16)

    def loss(params, batch, rng):
        return problem.loss(params, batch)[0], {"drawn": jax.random.uniform(rng)}

    one = trainer(problem, devices, loss=loss, joined_batches=1)
    state, seen = one.init(problem.params), []
    for _ in range(12):
        state, info = one.round(state, problem.data)
        seen.append(info.metrics["drawn"])
    assert len(set(seen)) == 12
    # The mean of four draws spreads half as much as one draw.
    assert np.std(seen) < 0.25


def test_a_loss_that_needs_whole_batches_is_told_how_to_get_them(make_problem, devices):
    problem = make_problem(examples=64, batch_size=16)

    def loss(params, batch):
        return problem.loss(params, batch)[0] + jnp.mean(jnp.zeros(16) + jax.tree.leaves(batch)[0][:, 0])

    one = trainer(problem, devices, TWO, loss=loss, joined_batches=1)
    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        one.round(one.init(problem.params), problem.data)
    assert any("rows='equal' where rows are divided" in note for note in caught.value.__notes__)


def test_the_rows_of_a_sharded_replica_divide_by_its_devices(make_problem, devices):
    problem = make_problem(examples=32 * 24, batch_size=32)
    strategy = jaxche.FullShard()
    meshes = [strategy.mesh(devices[:4]), strategy.mesh(devices[4:8])]
    one = trainer(problem, devices, TWO, replicas=meshes, strategy=strategy)
    _, history = fit(one, problem, epochs=1)
    assert history[-1].shares
    assert all(n % 4 == 0 for n in history[-1].rows)


def test_a_limit_of_rows_makes_more_steps(make_problem, devices, close):
    problem = make_problem(examples=16 * 24, batch_size=16)
    tx = optax.sgd(0.2)
    one = trainer(problem, devices, tx=tx, max_rows=12)
    state, history = fit(one, problem, epochs=1)
    assert max(-(-rows // n) for rows, n in zip(history[-1].rows, history[-1].counts, strict=True)) <= 12
    assert max(history[-1].counts) == 2
    close(one.params(state), single_device(problem, tx, 4, epochs=1), rtol=1e-4, atol=1e-5)


@pytest.fixture
def merges_are_not_measured(monkeypatch):
    """As at the start of a run: rounds keep the length that they are given, and "auto" takes exact sync."""
    monkeypatch.setattr(_round_end, "_FREE_MS", 0.0)


def local_steps(problem, devices, round_ms, fleet=FOUR, **options):
    """A trainer whose local steps share batches, in rounds of this length."""
    replicas, world = devices[: len(fleet.ms_per_batch)], len(fleet.ms_per_batch)
    che = jaxche.ElChe(world, 1, tuner="progress", round_ms=round_ms, ms_per_batch=fleet.ms_per_batch)
    options = {"tx": optax.sgd(1e-3), "loss_fn": problem.loss} | options
    return jaxche.Trainer(che=che, fleet=fleet, replicas=replicas, rows="speed", **options)


@pytest.mark.usefixtures("merges_are_not_measured")
def test_local_steps_share_batches_by_speed(make_problem, devices):
    problem = make_problem(examples=16 * 61, batch_size=16)
    one = local_steps(problem, devices, 100.0)
    _, history = fit(one, problem, epochs=2)
    settled = [info for info in history if info.shares]
    assert len(settled) > 5
    for info in settled:
        assert len(set(info.counts)) == 1
        assert info.joined == info.counts[0]
        assert [rows / n for rows, n in zip(info.rows, info.counts, strict=True)] == [6, 6, 3, 1]
    assert max(info.counts[0] for info in settled) >= 10
    assert sum(info.examples for info in history) == 2 * len(problem.data) * 16
    assert np.median([info.efficiency for info in settled]) > 0.9


@pytest.mark.usefixtures("merges_are_not_measured")
def test_rounds_of_other_lengths_need_no_other_programs(make_problem, devices):
    problem = make_problem(examples=16 * 61, batch_size=16)
    compiled = []
    for round_ms in (40.0, 100.0):
        one = local_steps(problem, devices, round_ms)
        _, history = fit(one, problem, epochs=2)
        assert len({info.joined for info in history if info.shares}) > 1
        compiled.append(one.compilations)
    assert compiled == [8, 8]  # whole batches, and one share of each of four replicas


@pytest.mark.usefixtures("merges_are_not_measured")
def test_local_steps_on_rows_replay_and_resume_bit_for_bit(make_problem, devices, same, tmp_path, told):
    problem = make_problem(examples=16 * 61 + 5, batch_size=16)

    one, other = (local_steps(problem, devices, 60.0, tx=optax.adam(0.05)) for _ in range(2))
    state, history = fit(one, problem, epochs=2)
    assert len({info.joined for info in history if info.shares}) > 1
    replayed, again = one.replay(one.init(problem.params), problem.data, history)
    same((replayed.params, replayed.opt_state), (state.params, state.opt_state))
    assert [info.rows for info in again] == [info.rows for info in history]
    stop = len(history) // 2
    saves = {"checkpoints": Checkpoints(tmp_path, every=1000)}  # where a fit ends
    fit(one, problem, epochs=2, callbacks=[lambda state, info: state.round == stop], **saves)
    resumed, whole = fit(other, problem, epochs=2, **saves)
    same((resumed.params, resumed.opt_state), (state.params, state.opt_state))
    assert told(whole) == told(history)


@pytest.mark.usefixtures("merges_are_not_measured")
def test_local_steps_on_parts_of_batches_count_in_schedules(make_problem, devices):
    problem = make_problem(examples=16 * 48, batch_size=16)
    schedule = optax.linear_schedule(0.1, 0.0, 48)
    one = local_steps(problem, devices, 60.0, tx=optax.sgd(schedule))
    state, history = fit(one, problem, epochs=1)
    assert [int(x[0]) for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32] == [48]
    assert sum(info.batches for info in history) == 48


@pytest.mark.usefixtures("merges_are_not_measured")
@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_updates_from_parts_of_several_batches_count_in_schedules(make_problem, devices, overlap):
    """Before replicas share batches they take different numbers, so that each updates after other steps than others."""
    problem = make_problem(examples=16 * 64, batch_size=16)
    tx = optax.MultiSteps(optax.sgd(optax.linear_schedule(1e-3, 0.0, 32)), 4)
    one = local_steps(problem, devices, 60.0, jaxche.VirtualFleet([20, 40], sync_ms=5.0), tx=tx, overlap=overlap)
    state, history = fit(one, problem, epochs=2)
    assert sum(info.batches for info in history if info.shares) > 100
    mini_steps, *counts = (x.tolist() for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32)
    assert len(set(mini_steps)) == 2
    assert counts == [[31, 31], [31, 31]]  # of 32 from 128 batches: the first ones were not shared


@pytest.mark.usefixtures("merges_are_not_measured")
@pytest.mark.parametrize("batches", [95, 97])
def test_steps_of_two_batches_leave_a_last_one_of_fewer_rows(make_problem, devices, batches):
    """A part of each step does not depend on its rows, so that a step has two batches; an epoch has an odd number."""
    problem = make_problem(examples=16 * batches, batch_size=16)
    fleet = jaxche.VirtualFleet([20, 20, 20, 20], sync_ms=0.0, fixed_ms=3.0)
    _, history = fit(local_steps(problem, devices, 60.0, fleet), problem, epochs=1)
    *others, last = [info for info in history if info.shares]
    settled = [info for info in others if info.joined == 2 * info.counts[0]]
    assert len(settled) > 3
    assert {rows / n for info in settled for rows, n in zip(info.rows, info.counts, strict=True)} == {8}
    assert sum(info.examples for info in history) == batches * 16
    assert last.joined % 2


@pytest.mark.usefixtures("merges_are_not_measured")
def test_where_small_steps_take_long_replicas_take_whole_batches(make_problem, devices):
    problem = make_problem(examples=16 * 95, batch_size=16)
    fleet = jaxche.VirtualFleet([20, 20, 40, 80], sync_ms=0.0, fixed_ms=15.0)
    _, history = fit(local_steps(problem, devices, 100.0, fleet), problem, epochs=1)
    assert any(info.shares for info in history)  # it cannot know before it has tried
    assert not any(info.shares for info in history[-3:])


@pytest.mark.parametrize("tuner", ["steady", "seed"])
def test_tuners_that_choose_no_length_take_whole_batches(make_problem, devices, tuner):
    problem = make_problem(examples=16 * 60, batch_size=16)
    che = jaxche.ElChe(4, 2, tuner=tuner)
    one = jaxche.Trainer(problem.loss, optax.sgd(0.1), che=che, fleet=FOUR, replicas=devices[:4], rows="speed")
    _, history = fit(one, problem, epochs=1)
    assert not any(info.shares for info in history)
    assert max(history[-2].counts) > max(history[0].counts)


@pytest.mark.slow
def test_the_noise_scale_of_unequal_rows_is_that_of_equal_ones(make_problem, devices):
    problem = make_problem(examples=16 * 400, batch_size=16)
    found = {}
    for rows in ("speed", "equal"):
        one = trainer(problem, devices, rows=rows, tx=optax.sgd(1e-4), scaling=jaxche.AdaScale())
        _, history = fit(one, problem, epochs=1)
        found[rows] = np.mean([info.noise for info in history[30:]])
    assert found["speed"] == pytest.approx(found["equal"], rel=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": "fast"}, "rows='fast' is unknown"),
        ({"joined_batches": 0}, "joined_batches=0 must be at least 1"),
        ({"max_rows": 0}, "max_rows=0 must be at least 1"),
        ({"max_rows": True}, "max_rows=True must be a whole number"),
        ({"max_rows": "64"}, "max_rows='64' must be a whole number"),
        ({"max_rows": [1, 2]}, "or 4, one a replica"),
        ({"max_rows": 8, "rows": "equal"}, "here rows are equal"),
    ],
)
def test_bad_arguments_are_named(problem, devices, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(problem, devices, **options)


def test_auto_chooses_the_rows_itself(problem, devices):
    with pytest.raises(ValueError, match=r"rows='equal' takes whole batches, .*policy='cadence', or policy='sync'"):
        jaxche.Trainer(problem.loss, optax.sgd(0.1), policy="auto", rows="equal", replicas=devices[:2])


def test_only_sync_joins_a_given_number_of_batches(problem, devices):
    with pytest.raises(ValueError, match="joined_batches=3 is of policy='sync'"):
        jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], joined_batches=3)


def bucketed(rows=8):
    """Batches whose rows have 4, 6 or 8 numbers, as texts that are sorted by length; the last one is smaller."""
    rng = np.random.default_rng(3)
    x = [rng.normal(size=(rows, 4 + 2 * rng.integers(3))).astype(np.float32) for _ in range(22)]
    return [{"x": part, "y": part.sum(1)} for part in [*x, x[0][:3]]]


def loss_of_buckets(params, batch):
    predicted = jnp.tanh(batch["x"] @ params["in"][: batch["x"].shape[1]]) @ params["out"]
    return jnp.mean((predicted - batch["y"]) ** 2), {"mean": predicted.mean()}


BUCKETS = {"in": np.random.default_rng(4).normal(size=(8, 3)).astype(np.float32), "out": np.ones(3, np.float32)}


def in_buckets(devices, fleet, **options):
    options = {"policy": "sync", "replicas": devices[: len(fleet.ms_per_batch)]} | options
    return jaxche.Trainer(loss_of_buckets, optax.adam(0.05), fleet=fleet, **options)


@pytest.mark.parametrize(("fleet", "joined"), [(TWO, None), (TWO, 3), (FOUR, None), (FOUR, 6)])
def test_batches_of_unlike_shapes_make_the_update_of_one_device(devices, close, same, fleet, joined):
    data = bucketed()
    one = in_buckets(devices, fleet, joined_batches=joined)
    state, history = one.fit(one.init(BUCKETS), data, epochs=3, progress=False)
    joined, params, tx = joined or len(fleet.ms_per_batch), BUCKETS, optax.adam(0.05)
    opt_state, gradient, update = tx.init(params), jax.jit(jax.grad(loss_of_buckets, has_aux=True)), jax.jit(tx.update)
    for _, first in itertools.product(range(3), range(0, len(data), joined)):
        batches = data[first : first + joined]
        rows = np.array([len(batch["y"]) for batch in batches])
        grads = [gradient(params, batch)[0] for batch in batches]
        mean = jax.tree.map(lambda *g, rows=rows: sum(n * x for n, x in zip(rows / rows.sum(), g, strict=True)), *grads)
        updates, opt_state = update(mean, opt_state, params)
        params = optax.apply_updates(params, updates)
    close(one.params(state), params, rtol=1e-3, atol=1e-5)
    assert all(info.counts == info.planned for info in history)
    assert any(info.shares for info in history)
    assert sum(info.examples for info in history) == 3 * sum(len(batch["y"]) for batch in data)
    again, _ = one.replay(one.init(BUCKETS), data, history)
    same(one.params(again), one.params(state))


def test_auto_joins_batches_of_unlike_shapes(devices):
    one = in_buckets(devices, jaxche.VirtualFleet([20, 25], sync_ms=0.2, fixed_ms=18.0), policy="auto")
    state, history = one.fit(one.init(BUCKETS), bucketed(), epochs=3, progress=False)
    assert state.epoch == 3
    assert history[-1].loss < history[0].loss
    assert any(info.joined == 2 and info.shares for info in history)


@pytest.mark.usefixtures("merges_are_not_measured")
@pytest.mark.parametrize("policy", ["sync", "auto"])
def test_on_islands_batches_of_unlike_shapes_are_refused_with_the_line(devices, policy):
    strategy = jaxche.NoShard()
    options = {"replicas": [strategy.mesh(devices[:4]), strategy.mesh(devices[4:8])], "strategy": strategy}
    one = in_buckets(devices, TWO, policy=policy, **options)
    line = r"a row of \['x'\] has shape \(\d,\) in one and .*write rows='equal', and policy='cadence' for policy='auto'"
    with pytest.raises(ValueError, match=line):
        one.fit(one.init(BUCKETS), bucketed(), epochs=6, progress=False)
    one = in_buckets(devices, TWO, policy=policy.replace("auto", "cadence"), rows="equal", **options)
    state, _ = one.fit(one.init(BUCKETS), bucketed(), epochs=1, progress=False)
    assert state.epoch == 1


def test_steps_that_share_batches_have_others_beside_their_merge(problem, devices):
    fleet = jaxche.VirtualFleet([20, 50], sync_ms=5.0)
    one = jaxche.Trainer(problem.loss, optax.adam(0.05), replicas=devices[:2], fleet=fleet, rows="speed", overlap=0.5)
    _, history = fit(one, problem, epochs=10)
    late = [info for info in history[len(history) // 2 :] if info.shares]
    hidden = [info for info in late if info.overlapped and min(info.overlapped) >= 1]
    assert len(hidden) > 0.9 * len(late) > 4
    assert {(info.sync_ms, info.hidden_ms) for info in hidden} == {(0.0, 5.0)}


@pytest.mark.parametrize(
    ("fleet", "options"),
    [
        (DEAR, {"policy": "cadence", "rows": "speed", "wire": "int8", "overlap": 0.5}),
        (DEAR, {"policy": "async", "rows": "speed"}),
        (DEAR, {"policy": "auto", "overlap": 0}),
        (TWO, {"policy": "sync", "average": "parameters"}),
    ],
    ids=lambda one: one.get("policy") if isinstance(one, dict) else "",
)
def test_local_steps_on_batches_of_unlike_shapes_make_an_update_for_each(devices, same, fleet, options):
    data = bucketed(32)
    one = in_buckets(devices, fleet, **options)
    state, history = one.fit(one.init(BUCKETS), data, epochs=8, progress=False)
    assert sum(info.examples for info in history) == 8 * sum(len(batch["y"]) for batch in data)
    assert history[-1].loss < 0.7 * history[0].loss
    assert state.row_shares.shapes_differ
    again, _ = one.replay(one.init(BUCKETS), data, history)
    same(one.params(again), one.params(state))
    local = [info for info in history if info.policy != "sync"]
    if local:  # until a step of them is divided; then they take whole batches
        shared = [place for place, info in enumerate(local) if info.shares]
        assert len(shared) == 1
        assert not local[-1].shares


def test_a_local_step_on_rows_of_two_shapes_is_an_update_for_each_in_turn(devices, close):
    """A slow twin: each replica on its pieces of the batches, which are cut where their shapes change."""
    data = bucketed(32)
    one = jaxche.Trainer(loss_of_buckets, optax.sgd(0.05), replicas=devices[:4], fleet=DEAR, rows="speed")
    after = one.init(BUCKETS)
    for _ in range(8):
        before, (after, info) = after, one.round(after, data)
        if info.shares:
            break
    plan = RoundPlan(info.round, before.epoch, before.cursor, info.counts, len(data), info.shares, info.joined)
    gradient = jax.jit(jax.grad(lambda params, batch: loss_of_buckets(params, batch)[0]))
    total, updates = jax.tree.map(np.zeros_like, BUCKETS), 0
    for rank in range(4):
        params = one.params(before)
        for step in plan.steps(rank):
            cuts = [(data[piece.key[1]], piece.rows(len(data[piece.key[1]]["y"]))) for piece in step]
            parts = [{name: x[rows] for name, x in batch.items()} for batch, rows in cuts if rows.start < rows.stop]
            for _, alike in itertools.groupby(parts, key=lambda part: part["x"].shape[1]):
                joined = jax.tree.map(lambda *rows: np.concatenate(rows), *alike)
                params = jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient(params, joined))
                updates += 1
        share = info.shares[rank] / sum(info.shares)
        total = jax.tree.map(lambda t, p, share=share: t + share * p, total, params)
    assert updates > sum(info.counts)
    close(one.params(after), total, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("fleet", "joined"), [(TWO, None), (FOUR, 16)])
def test_no_two_batches_of_a_round_have_one_random_key_where_steps_are_divided_by_shapes(devices, fleet, joined):
    keys = []

    def loss(params, batch, rng):
        jax.debug.callback(lambda key: keys.append(tuple(key.tolist())), jax.random.key_data(rng))
        return loss_of_buckets(params, batch)

    replicas = devices[: len(fleet.ms_per_batch)]
    one = jaxche.Trainer(loss, optax.sgd(0.05), policy="sync", replicas=replicas, fleet=fleet, joined_batches=joined)
    state, divided = one.init(BUCKETS), 0
    for _ in range(12):
        jax.effects_barrier()
        keys.clear()
        compiled = one.compilations
        state, info = one.round(state, bucketed())
        jax.effects_barrier()
        if one.compilations == compiled:  # the first steps for new shapes run before the round, without keys of it
            assert len(set(keys)) == len(keys)
            divided += len(keys) > sum(info.counts)
    assert divided


def test_only_the_rows_that_a_replica_takes_are_compiled_for(make_problem, devices, monkeypatch):
    """No step on a whole batch, which no replica takes; the memory of its first step tells the rows that fit."""
    limits = []
    monkeypatch.setattr("jaxche.training._preparation.row_limit", lambda memory, _: limits.append(memory.rows) or 1e9)
    problem = make_problem(examples=16 * 8, batch_size=16)
    one = trainer(problem, devices, joined_batches=1)
    state, info = one.round(one.init(problem.params), problem.data)
    assert info.rows == (4, 4, 4, 4)
    assert one.compilations == 4
    assert limits == [4] * 4
    at_start, run = [], one._engine.run
    monkeypatch.setattr(one._engine, "run", lambda *args: at_start.append(one.compilations) or run(*args))
    state, info = one.round(state, problem.data, counts=(1, 1, 1, 1))  # whole batches after all
    assert info.rows == (16, 16, 16, 16)
    assert at_start == [8]
    one.round(state, problem.data, counts=(1, 1, 1, 1))
    assert at_start == [8, 8]


def test_a_pace_is_checked_on_whole_batches(make_problem, devices):
    problem = make_problem(examples=16 * 8, batch_size=16)
    paced = jaxche.Trainer(
        problem.loss, optax.sgd(0.1), policy="sync", joined_batches=1, replicas=devices[:2], pace_ms=(1e9, 1e-3)
    )
    with pytest.raises(jaxche.training.PaceError, match=r"rank 1 is 0.001 ms"):
        paced.round(paced.init(problem.params), problem.data)
