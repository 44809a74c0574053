"""The end of a fit: exactly after so many steps, at the first merge after so many examples or seconds."""

import functools

import optax
import pytest

import jaxche

FLEET = jaxche.VirtualFleet([20.0, 50.0], sync_ms=5.0)


POLICIES = {
    "cadence": {},
    "async": {"policy": "async", "che": jaxche.ElChe(2, 4)},
    "sync": {"policy": "sync", "rows": "equal"},
    "sync by speed": {"policy": "sync", "joined_batches": 3},
    "lockstep": {"che": jaxche.ElChe(2, 2, max_anchor=2, max_batch_diff=0)},
    "equal speeds": {"fleet": jaxche.VirtualFleet([20.0, 20.0], sync_ms=5.0)},
    "long rounds": {"che": jaxche.ElChe(2, 40)},
}


@pytest.fixture(scope="module")
def another(make_problem, devices):
    """Makes a trainer of one of POLICIES, and its first state."""
    problem = make_problem()

    def make(policy):
        options = {"replicas": devices[:2], "fleet": FLEET} | POLICIES[policy]
        trainer = jaxche.Trainer(problem.loss, optax.adam(0.02), **options)
        return trainer, trainer.init(problem.params)

    return make


@pytest.fixture(scope="module")
def make(another):
    """The same, made once for each policy: its programs stay compiled."""
    return functools.cache(another)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cadence", "async", "sync", "sync by speed", "lockstep"])
def test_steps_end_a_run_exactly(problem, make, policy):
    trainer, state = make(policy)
    for steps, total in ((31, 31), (1, 32)):
        state, history = trainer.fit(state, problem.data, max_steps=steps, progress=False)
        assert state.steps == history[-1].steps_done == total
        assert sum(info.batches for info in history) == steps
    assert (state.epoch, state.cursor) == (2, 8)  # of 12 batches: none twice, none left out
    assert state.examples == history[-1].examples_done == 32 * 8


def test_steps_that_a_late_replica_left_are_done_before_the_end(problem, devices, lockstep):
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.02), che=lockstep(), replicas=devices[:2])
    state, _ = trainer.round(trainer.init(problem.params), problem.data)
    owing = type(state)(**{**vars(state), "pending_batches": ((0, 1, 4),), "cursor": 6, "steps": 3})
    end, history = trainer.fit(owing, problem.data, max_steps=2, progress=False)
    assert (end.steps, end.pending_batches, end.cursor) == (5, ((0, 3, 4),), 6)
    end, history = trainer.fit(owing, problem.data, max_steps=5, progress=False)
    assert (end.steps, end.pending_batches, end.cursor) == (8, (), 8)
    assert sum(info.batches for info in history) == 5


def test_a_single_replica_ends_exactly(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    state, history = trainer.fit(trainer.init(problem.params), problem.data, max_steps=30, progress=False)
    assert (state.steps, state.epoch, state.cursor) == (30, 2, 6)
    assert history[-1].steps_done == 30


def test_examples_are_counted_by_the_batches_of_the_data_at_hand(problem, make):
    trainer, state = make("equal speeds")
    state, _ = trainer.fit(state, problem.data, progress=False)
    larger = jaxche.Batches(problem.data.arrays, 3 * problem.data.batch_size)
    state, history = trainer.fit(state, larger, max_examples=2 * larger.batch_size, progress=False)
    assert sum(info.examples for info in history) == 2 * larger.batch_size
    assert history[0].wall_ms == (20.0, 20.0)  # of one batch each


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cadence", "async", "sync by speed"])
@pytest.mark.parametrize("examples", [1, 96, 101, 250])
def test_examples_end_a_run_without_more_batches_than_needed(problem, make, policy, examples):
    trainer, state = make(policy)
    state, history = trainer.fit(state, problem.data, max_examples=examples, progress=False)
    assert examples <= state.examples < examples + 8
    assert len(history) == 1 or history[-2].examples_done < examples


def test_smaller_batches_need_another_round(make_problem, devices):
    problem = make_problem(examples=20, batch_size=8)  # 8, 8 and 4
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    state, _ = trainer.fit(trainer.init(problem.params), problem.data, max_examples=21, progress=False)
    assert state.examples == 28


@pytest.mark.parametrize("seconds", [0.001, 0.3, 0.5])
def test_seconds_end_a_run_at_the_first_merge_after(problem, make, seconds):
    trainer, state = make("cadence")
    start = 0.0
    for _ in range(2):  # the second counts from the first
        state, history = trainer.fit(state, problem.data, max_time=seconds, progress=False)
        late = [info.clock_ms >= start + seconds * 1e3 for info in history]
        assert late == [False] * (len(history) - 1) + [True]
        start = state.clock_ms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({}, 12),
        ({"epochs": 2}, 24),
        ({"epochs": 2, "max_steps": 30}, 24),
        ({"epochs": 3, "max_steps": 30}, 30),
        ({"max_steps": 30}, 30),
        ({"epochs": 9, "max_steps": 90, "max_examples": 160}, 20),
    ],
)
def test_the_first_limit_ends_it(problem, make, limits, steps):
    trainer, state = make("cadence")
    state, _ = trainer.fit(state, problem.data, progress=False, **limits)
    assert state.steps == steps


@pytest.mark.slow
def test_a_resumed_run_ends_where_it_would_have_ended(problem, make, another, tmp_path):
    def run(folder, stops, make=make):
        trainer, state = make("cadence")
        callbacks = [lambda state, info: stops and info.steps_done >= 10]
        options = {"checkpoints": folder, "callbacks": callbacks, "progress": False}
        return trainer.fit(state, problem.data, max_steps=31, **options)

    whole, _ = run(tmp_path / "whole", False)
    part, _ = run(tmp_path / "parts", True)
    assert 10 <= part.steps < 31
    rest, history = run(tmp_path / "parts", False, another)
    assert (rest.steps, rest.cursor) == (whole.steps, whole.cursor) == (31, 7)
    assert [info.steps_done for info in history] == [
        sum(info.batches for info in history[: i + 1]) for i in range(len(history))
    ]


def test_the_plan_is_no_longer_than_the_run(problem, make):
    trainer, state = make("long rounds")
    _, history = trainer.fit(state, problem.data, max_examples=8, progress=False)
    assert [info.planned for info in history] == [(1, 0)]


def test_nothing_is_read_ahead_of_the_end(problem, make, recorder):
    trainer, state = make("cadence")
    data = recorder(problem.data)
    trainer.fit(state, data, max_steps=7, progress=False)
    trainer._reader(data).wait()
    assert max(index for _, index in data.reads[2:]) == 6  # the first two reads check that data repeats


@pytest.mark.parametrize("name", ["max_steps", "max_examples", "max_time"])
@pytest.mark.parametrize("value", [0, -1, "9", True, float("inf")])
def test_bad_limits_are_named(problem, make, name, value):
    trainer, state = make("cadence")
    with pytest.raises(ValueError, match=f"{name}=.* must be a .*number above 0; write {name}="):
        trainer.fit(state, problem.data, progress=False, **{name: value})
