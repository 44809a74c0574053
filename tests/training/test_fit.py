"""Epochs in a row: callbacks, stopping, dry runs, progress, interrupts."""

import jax
import numpy as np
import optax
import pytest

import jaxche
from jaxche.training._state import Stop


@pytest.fixture
def trainer(problem, devices, lockstep):
    return jaxche.Trainer(problem.loss, optax.adam(0.02), che=lockstep(), replicas=devices[:2])


def test_epochs_count_from_where_the_state_is(trainer, problem):
    start = trainer.init(problem.params)
    once, history = trainer.fit(start, problem.data, epochs=1, progress=False)
    twice, more = trainer.fit(once, problem.data, epochs=2, progress=False)
    assert (once.epoch, twice.epoch) == (1, 3)
    assert [info.round for info in [*history, *more]] == list(range(len(history) + len(more)))


def test_every_callback_sees_every_round_and_one_can_stop(trainer, problem):
    seen = []

    def stop(state, info):
        seen.append(("stop", info.round, state.round))
        return info.round == 1

    def watch(state, info):
        seen.append(("watch", info.round, state.round))

    state, history = trainer.fit(trainer.init(problem.params), problem.data, callbacks=[stop, watch], progress=False)
    assert len(history) == 2
    assert seen == [(who, r, r + 1) for r in range(2) for who in ("stop", "watch")]
    assert state.cursor == sum(info.batches for info in history)


def test_a_requested_stop_takes_effect_in_the_next_merge(trainer, problem):
    def ask(state, info):
        if info.round == 1:
            trainer.request_stop()

    _, history = trainer.fit(trainer.init(problem.params), problem.data, epochs=3, callbacks=[ask], progress=False)
    assert [info.stop for info in history] == [0, 0, 1]


def test_a_stop_that_comes_while_replicas_merge_is_for_the_next_round(trainer, problem, monkeypatch):
    merge, left = trainer._engine.merge, [1]

    def asked_meanwhile(*args):
        if left:
            trainer.request_stop()
            left.pop()
        return merge(*args)

    monkeypatch.setattr(trainer._engine, "merge", asked_meanwhile)
    _, history = trainer.fit(trainer.init(problem.params), problem.data, epochs=3, progress=False)
    assert [info.stop for info in history] == [0, 1]


def test_the_most_urgent_stop_counts(trainer, problem):
    for stop in (Stop.ASKED, Stop.PREEMPTED, Stop.ASKED):
        trainer.request_stop(stop)
    _, info = trainer.round(trainer.init(problem.params), problem.data)
    assert info.stop == Stop.PREEMPTED


def test_dry_run_tries_everything_and_changes_nothing(trainer, problem):
    start = trainer.init(problem.params)
    state, history = trainer.fit(start, problem.data, dry_run=True)
    assert state is start
    assert [info.counts for info in history] == [(1, 1)]
    assert trainer.compilations == 2
    other = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=jax.devices()[:2])
    bad = [{"x": np.ones((4, 5)), "y": np.ones((3, 2))}]
    with pytest.raises(ValueError, match="leading axes"):
        other.fit(start, bad, dry_run=True)


def test_an_interrupt_returns_what_was_reached(trainer, problem):
    def interrupt(state, info):
        if info.round == 1:
            raise KeyboardInterrupt

    state, history = trainer.fit(trainer.init(problem.params), problem.data, callbacks=[interrupt], progress=False)
    assert state.round == len(history) == 2


def test_an_error_keeps_the_last_good_state(trainer, problem):
    def fail(state, info):
        if info.round == 1:
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        trainer.fit(trainer.init(problem.params), problem.data, callbacks=[fail], progress=False)
    assert trainer.last_good_state.round == 2


def test_progress_speaks_on_a_log_without_a_terminal(trainer, problem, capsys):
    trainer.fit(trainer.init(problem.params), problem.data, epochs=2)
    err = capsys.readouterr().err
    assert "loss" in err
    assert "counts" in err
    assert "efficiency" in err
    assert "(24/24 batches, 0 s left)" in err
    trainer.fit(trainer.init(problem.params), problem.data, progress=False)
    assert capsys.readouterr().err == ""


def test_an_outer_momentum_over_few_rounds_is_warned_of(problem, devices):
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), outer=outer, replicas=devices[:2])
    with pytest.warns(UserWarning, match="momentum mostly overshoots"):
        trainer.fit(trainer.init(problem.params), problem.data, progress=False)
    plain = jaxche.Trainer(problem.loss, optax.sgd(0.1), outer=optax.sgd(1.0), replicas=devices[:2])
    plain.fit(plain.init(problem.params), problem.data, progress=False)


def test_data_that_is_no_sequence_is_refused(trainer, problem):
    with pytest.raises(ValueError, match=r"len\(data\) and data\[i\]"):
        trainer.fit(trainer.init(problem.params), 1)


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True])
def test_bad_epochs_are_named(trainer, problem, epochs):
    with pytest.raises(ValueError, match="epochs="):
        trainer.fit(trainer.init(problem.params), problem.data, epochs=epochs)
