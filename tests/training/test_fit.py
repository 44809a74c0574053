"""Epochs in a row: callbacks, stopping, dry runs, progress, interrupts."""

import itertools
import signal
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxche
from jaxche.distributed import PREEMPTED_CODE
from jaxche.replicas import LocalState, free
from jaxche.replicas._replica import Replica
from jaxche.training import _fit
from jaxche.training._state import Stop


@pytest.fixture(scope="module")
def trainer(make_problem, devices):
    """Two replicas that take two steps a round each, however long a stall of this machine."""
    che = jaxche.ElChe(world_size=2, anchor=2, max_anchor=2, max_batch_diff=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxche.training._plan._MIN_EXTRA_MS", 60_000.0)
        yield jaxche.Trainer(make_problem.loss, optax.adam(0.02), che=che, replicas=devices[:2])


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


def test_callbacks_may_come_from_a_generator(trainer, problem):
    seen = []
    callbacks = (lambda state, info, name=name: seen.append(name) for name in "ab")
    _, history = trainer.fit(trainer.init(problem.params), problem.data, callbacks=callbacks, progress=False)
    assert seen == ["a", "b"] * len(history)


@pytest.mark.parametrize("one", [jnp.bool_, np.bool_, lambda stops: jnp.array([stops])])
def test_a_callback_may_return_one_bool_of_an_array(trainer, problem, one):
    def stop(state, info):
        return one(info.round == 1)

    _, history = trainer.fit(trainer.init(problem.params), problem.data, callbacks=[stop], progress=False)
    assert len(history) == 2


def test_a_requested_stop_takes_effect_in_the_next_merge(trainer, problem):
    def ask(state, info):
        if info.round == 1:
            trainer.request_stop()

    _, history = trainer.fit(trainer.init(problem.params), problem.data, epochs=3, callbacks=[ask], progress=False)
    assert [info.stop for info in history] == [0, 0, 1]


def test_a_stop_that_comes_while_replicas_merge_is_for_the_next_round(trainer, problem, monkeypatch):
    merge, left = trainer._engine.merge, [1]

    def asked_meanwhile(planned, results, rows):
        def sent(results):
            found = rows(results)
            if left:
                trainer.request_stop()
                left.pop()
            return found

        return merge(planned, results, sent)

    monkeypatch.setattr(trainer._engine, "merge", asked_meanwhile)
    _, history = trainer.fit(trainer.init(problem.params), problem.data, epochs=3, progress=False)
    assert [info.stop for info in history] == [0, 1]


def test_the_most_urgent_stop_counts(trainer, problem):
    for stop in (Stop.ASKED, Stop.PREEMPTED, Stop.ASKED):
        trainer.request_stop(stop)
    _, info = trainer.round(trainer.init(problem.params), problem.data)
    assert info.stop == Stop.PREEMPTED


def test_dry_run_tries_everything_and_changes_nothing(problem, devices, lockstep):
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.02), che=lockstep(), replicas=devices[:2])
    start = trainer.init(problem.params)
    state, history = trainer.fit(start, problem.data, dry_run=True)
    assert state is start
    assert [info.counts for info in history] == [(1, 1)]
    assert trainer.compilations == 2
    other = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=jax.devices()[:2])
    bad = [{"x": np.ones((4, 5)), "y": np.ones((3, 2))}]
    with pytest.raises(ValueError, match="leading axes"):
        other.fit(other.init(problem.params), bad, dry_run=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric_fn": lambda params, batch: {"error": batch["z"].mean()}}, "'z'"),
        ({"metric_fn": lambda params, batch: {"error": batch["x"]}}, "metric 'error' has shape"),
        ({"validation": [{"x": np.ones((4, 2)), "y": np.ones((4, 1))}]}, "dot_general"),
        ({"validation": [{"x": np.ones((4, 3)), "y": np.array(list("abcd"))}]}, "text or objects and not numbers"),
        (
            {"metric_fn": lambda params, batch: {"loss": 1.0}, "metrics": nnx.metrics.Average("error")},
            "Expected keyword argument 'error'",
        ),
    ],
)
def test_what_an_evaluation_would_refuse_is_refused_before_the_first_step(trainer, problem, arguments, message):
    seen = []
    options = {"validation": problem.data, "callbacks": [lambda state, info: seen.append(info)]} | arguments
    with pytest.raises((KeyError, TypeError, ValueError), match=message) as caught:
        trainer.fit(trainer.init(problem.params), problem.data, progress=False, **options)
    assert seen == []
    assert "raised by the first batch of validation data, before the first step" in caught.value.__notes__


def test_validation_that_is_an_iterator_in_the_form_of_a_sequence_is_refused_by_name(trainer, problem):
    class Ended(list):
        def __getitem__(self, i):
            return next(iter(()))

    with pytest.raises(ValueError, match=r"data\[0\] raised StopIteration"):
        trainer.fit(trainer.init(problem.params), problem.data, validation=Ended([1]), progress=False)


def test_a_dry_run_refuses_validation_without_batches(trainer, problem):
    empty = jaxche.Stream(lambda epoch: iter([]))
    with pytest.raises(ValueError, match="the data set is empty; give at least one batch"):
        trainer.fit(trainer.init(problem.params), problem.data, dry_run=True, validation=empty)


def test_an_interrupt_returns_what_was_reached_and_says_so_without_progress(trainer, problem, caplog):
    def interrupt(state, info):
        if info.round == 1:
            raise KeyboardInterrupt

    state, history = trainer.fit(trainer.init(problem.params), problem.data, callbacks=[interrupt], progress=False)
    assert state.round == len(history) == 2
    assert "interrupted: fit returns the state after round 1, and the script goes on after it" in caplog.text


def test_an_interrupt_before_the_rounds_is_raised_and_the_next_fit_is_not_affected(trainer, problem):
    class Validation(list):
        def __getitem__(self, i):
            if interrupts:
                raise KeyboardInterrupt
            return super().__getitem__(i)

    state, validation, interrupts = trainer.init(problem.params), Validation([problem.data[0]]), [True]
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(state, problem.data, validation=validation, progress=False)
    interrupts.clear()
    state, history = trainer.fit(state, problem.data, validation=validation, progress=False)
    assert state.epoch == 1
    assert history[-1].validation


def interrupt():
    """Interrupt ``fit`` as Ctrl-C does, once it waits: Python can miss a signal on the way into a wait."""
    time.sleep(0.3)
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize("streams", [False, True])
def test_an_interrupt_within_a_round_ends_its_steps(problem, devices, monkeypatch, same, streams):
    """What still ran took batches and threads of the next fit, which then waited forever for a stream."""
    run, active, calls = Replica.run, [], []

    def interrupted(self, local, feed, *rest):
        active.append(self.rank)
        calls.append(self.rank)
        if len(calls) == 3:  # the first one in the second round
            interrupt()
            time.sleep(0.5)
        result = run(self, local, feed, *rest)
        active.remove(self.rank)
        return result

    monkeypatch.setattr(Replica, "run", interrupted)
    data = jaxche.Stream(lambda epoch: iter([*problem.data.epoch(epoch)])) if streams else problem.data
    che = jaxche.ElChe(2, 3, max_anchor=3, max_batch_diff=0)
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.02), che=che, replicas=devices[:2])
    state, history = trainer.fit(trainer.init(problem.params), data, progress=False)
    assert (state.round, len(history), active) == (1, 1, [])
    state, _ = trainer.fit(state, data, max_steps=len(problem.data) - state.steps, progress=False)
    assert state.examples == len(problem.data) * problem.data.batch_size
    other = jaxche.Trainer(problem.loss, optax.adam(0.02), che=che, replicas=devices[:2])
    whole, _ = other.fit(other.init(problem.params), problem.data, progress=False)
    if not streams:  # whose replicas take batches in another order
        same(trainer.params(state), other.params(whole))


def test_an_interrupt_does_not_wait_for_a_stream_that_has_stalled(problem, devices):
    returned, waits = threading.Event(), []

    def batches(epoch):
        yield from itertools.islice(problem.data.epoch(epoch), 4)
        interrupt()
        waits.append(returned.wait(120))

    che = jaxche.ElChe(2, 3, max_anchor=3, max_batch_diff=0)
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.02), che=che, replicas=devices[:2])
    trainer.fit(trainer.init(problem.params), jaxche.Stream(batches), progress=False)
    assert waits == []
    returned.set()


def test_an_error_keeps_the_last_good_state(trainer, problem):
    def fail(state, info):
        if info.round == 1:
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        trainer.fit(trainer.init(problem.params), problem.data, callbacks=[fail], progress=False)
    assert trainer.last_good_state.round == 2


def test_a_merge_that_fails_in_a_run_that_cannot_shrink_is_an_error(trainer, problem, monkeypatch):
    merge, merges = trainer._engine.merge, []

    def fails(*args):
        merges.append(args)
        if len(merges) == 3:
            raise jaxche.PeerLostError("did one of them die?")
        return merge(*args)

    monkeypatch.setattr(trainer._engine, "merge", fails)
    with pytest.raises(jaxche.PeerLostError, match="did one of them die"):
        trainer.fit(trainer.init(problem.params), problem.data, progress=False)
    assert (trainer.last_good_state.round, len(merges)) == (2, 3)


@pytest.mark.parametrize(
    ("error", "all_end", "raised", "message"),
    [
        (KeyboardInterrupt(), True, KeyboardInterrupt, "^$"),
        (
            SystemExit(3),
            False,
            RuntimeError,
            r"sys.exit\(3\) ended process 1 within fit, and others still train; ",
        ),
        (SystemExit(3), True, SystemExit, "3"),
        (SystemExit(PREEMPTED_CODE), False, SystemExit, str(PREEMPTED_CODE)),
    ],
)
def test_what_ends_one_of_several_processes_is_raised(monkeypatch, error, all_end, raised, message):
    def ends(trainer, run):
        raise error

    monkeypatch.setattr(_fit, "_run_rounds", ends)
    group = SimpleNamespace(num_processes=2, process_index=1, ends_together=lambda: all_end)
    run = SimpleNamespace(hooks=(), state=SimpleNamespace(round=0))
    with pytest.raises(raised, match=message):
        _fit._train(SimpleNamespace(_group=group, _membership=None), run)


def test_a_process_that_waits_for_admission_checks_its_arguments_alone():
    def refused(trainer, state):
        raise ValueError("epochs=0")

    trainer = SimpleNamespace(_group=SimpleNamespace(standby=True))
    with pytest.raises(ValueError, match=r"^epochs=0$"):
        _fit._agree(trainer, None, SimpleNamespace(checked=refused))
    assert _fit._agree(trainer, None, SimpleNamespace(checked=lambda trainer, state: "checked")) == "checked"


def test_progress_speaks_on_a_log_without_a_terminal(trainer, problem, capsys):
    trainer.fit(trainer.init(problem.params), problem.data, epochs=2)
    err = capsys.readouterr().err
    assert "loss" in err
    assert "counts" in err
    assert "efficiency" in err
    assert "(24/24 batches, 0 s left)" in err
    assert " epoch 1 " in err.splitlines()[-1]  # the second, as in the history
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


def test_epochs_of_data_without_an_end_are_refused_unless_another_limit_ends_the_fit(problem, devices):
    class Repeated:
        def __len__(self):
            return sys.maxsize

        def __getitem__(self, i):
            return problem.data[i % len(problem.data)]

    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    start = trainer.init(problem.params)
    for given, epochs in ({"epochs": 3}, 3), ({}, 1):
        refused = rf"epochs={epochs}, .* 9,223,.* leave out \.repeat\(\), or write max_steps=1000"
        with pytest.raises(ValueError, match=refused):
            trainer.fit(start, Repeated(), callbacks=[lambda state, info: True], progress=False, **given)
    state, _ = trainer.fit(start, Repeated(), epochs=3, max_steps=20, progress=False)
    assert state.steps == 20


FLEET = jaxche.VirtualFleet([20.0, 50.0], sync_ms=5.0)


@pytest.fixture(scope="module")
def on_fleet(make_problem, devices):
    trainer = jaxche.Trainer(make_problem.loss, optax.adam(0.02), replicas=devices[:2], fleet=FLEET)
    return trainer, trainer.init(make_problem().params)


def evaluated(history):
    return [info.steps_done for info in history if info.validation]


def test_validation_follows_every_epoch_unless_told_otherwise(on_fleet, problem):
    trainer, state = on_fleet
    state, history = trainer.fit(state, problem.data, epochs=3, validation=problem.data, progress=False)
    assert evaluated(history) == [12, 24, 36]
    assert history[-1].validation == trainer.evaluate(state, problem.data)
    assert [info.steps_done for info in history if info.cursor + info.batches == 12] == [12, 24, 36]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "reached"),
    [
        (1, lambda info: info.steps_done),
        (10, lambda info: info.steps_done // 10),
        (jaxche.Every(examples=100), lambda info: info.examples_done // 100),
        (jaxche.Every(epochs=2), lambda info: info.steps_done // 24),
        (jaxche.Every(seconds=0.2), lambda info: info.clock_ms // 200),
    ],
)
def test_validation_is_due_at_the_first_merge_after_and_at_the_end(on_fleet, problem, every, reached):
    trainer, state = on_fleet
    seen = []
    callbacks = [lambda state, info: seen.append(bool(info.validation))]
    options = {"validation": problem.data, "eval_every": every, "callbacks": callbacks, "progress": False}
    state, history = trainer.fit(state, problem.data, max_steps=41, **options)
    assert seen == [bool(info.validation) for info in history]
    values = [0, *map(reached, history)]
    due = [before < after for before, after in itertools.pairwise(values)]
    assert [bool(info.validation) for info in history] == [*due[:-1], True]
    assert any(due)


def test_an_evaluation_changes_no_plan_and_no_clock(on_fleet, problem, told):
    trainer, state = on_fleet
    _, plain = trainer.fit(state, problem.data, epochs=2, progress=False)
    _, history = trainer.fit(state, problem.data, epochs=2, validation=problem.data, eval_every=1, progress=False)
    for info in history:
        assert info.validation
        info.validation.clear()
    assert told(history) == told(plain)


def test_callbacks_read_the_evaluation_of_their_round(on_fleet, problem):
    trainer, state = on_fleet
    seen = []

    def early_stopping(state, info):
        seen.append((info.steps_done, bool(info.validation)))
        return info.validation and info.steps_done >= 24

    options = {"validation": problem.data, "callbacks": [early_stopping], "progress": False}
    state, history = trainer.fit(state, problem.data, epochs=9, **options)
    assert state.steps == 24
    assert seen == [(info.steps_done, bool(info.validation)) for info in history]


def test_a_stopped_run_is_evaluated_at_its_end_and_the_record_has_it(on_fleet, problem, tmp_path):
    trainer, state = on_fleet
    options = {"validation": problem.data, "checkpoints": tmp_path, "progress": False}
    callbacks = [lambda state, info: info.round == 1]
    state, history = trainer.fit(state, problem.data, epochs=9, callbacks=callbacks, **options)
    assert len(history) == 2
    assert evaluated(history) == [history[-1].steps_done]
    assert history[-1].validation == trainer.evaluate(state, problem.data)
    on_file = jaxche.History.from_json(tmp_path / "history.jsonl")
    assert on_file[-1].validation == history[-1].validation
    _, more = trainer.fit(trainer.init(problem.params), problem.data, epochs=1, **options)
    assert evaluated(more) == [*evaluated(history), 12]
    on_file = jaxche.History.from_json(tmp_path / "history.jsonl")
    assert evaluated(on_file) == evaluated(more)
    assert [info.round for info in on_file] == list(range(len(more)))


def test_an_interrupt_is_not_followed_by_an_evaluation(on_fleet, problem):
    trainer, state = on_fleet

    def interrupt(state, info):
        raise KeyboardInterrupt

    options = {"validation": problem.data, "callbacks": [interrupt], "progress": False}
    _, history = trainer.fit(state, problem.data, **options)
    assert evaluated(history) == []


class Log(jaxche.reports.Logger):
    def __init__(self):
        self.steps = []

    def __call__(self, state, info):
        self.steps.append(info.steps_done)


def test_a_single_replica_is_evaluated_at_the_steps_that_are_asked_for(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.adam(1e-2), replicas=devices[:1])
    options = {"validation": problem.data, "eval_every": 3, "log_every": 4, "progress": False}
    _, history = trainer.fit(trainer.init(problem.params), problem.data, max_steps=12, **options)
    assert [info.steps_done for info in history if info.validation] == [3, 6, 9, 12]
    assert {4, 8} <= {info.steps_done for info in history}


def test_loggers_get_what_log_every_says_and_other_callbacks_all(on_fleet, problem):
    trainer, state = on_fleet
    log, all_rounds, every = Log(), [], Log()
    callbacks = [log, lambda state, info: all_rounds.append(info.steps_done)]
    options = {"validation": problem.data, "eval_every": jaxche.Every(epochs=2), "progress": False}
    _, history = trainer.fit(state, problem.data, max_steps=31, callbacks=callbacks, log_every=10, **options)
    assert all_rounds == [info.steps_done for info in history]
    steps = [0, *all_rounds]
    due = {after for before, after in itertools.pairwise(steps) if after // 10 > before // 10}
    assert log.steps == sorted(due | {24, 31})
    assert len(log.steps) < len(all_rounds)
    trainer.fit(state, problem.data, max_steps=31, callbacks=[every], progress=False)
    assert every.steps == all_rounds


def test_loggers_get_the_round_after_which_a_callback_stops(on_fleet, problem):
    trainer, state = on_fleet
    log, seen = Log(), []
    callbacks = [log, lambda state, info: seen.append(info.validation), lambda state, info: info.round == 1]
    options = {"validation": problem.data, "eval_every": 1000, "log_every": 1000, "progress": False}
    _, history = trainer.fit(state, problem.data, callbacks=callbacks, **options)
    assert log.steps == [history[1].steps_done] == [history[-1].steps_done]
    assert seen == [{}, {}]
    assert history[-1].validation


def test_lines_are_printed_as_often_as_log_every_says(on_fleet, problem, devices, capsys):
    trainer, state = on_fleet
    trainer.fit(state, problem.data, max_steps=31, log_every=10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3  # 10, 20, and 31 after 30
    assert "(31/31 batches, 0 s left)" in lines[-1]
    alone = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    alone.fit(alone.init(problem.params), problem.data, max_steps=2, log_every=1)
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("(1/2 batches)")  # its round compiles, and lasts longer than the others
    assert last.endswith("(2/2 batches, 0 s left)")
    _, history = trainer.fit(state, problem.data, max_examples=160, validation=problem.data)
    lines = capsys.readouterr().err.splitlines()
    assert [f"validation loss {history[-1].validation['loss']:.4g}" in line for line in lines] == [False, True]
    assert lines[-1].endswith("(20 batches)")


def test_checkpoints_are_saved_as_often_as_checkpoint_every_says(on_fleet, problem, tmp_path):
    trainer, state = on_fleet
    config = jaxche.Checkpoints(tmp_path, every=1, keep=99)
    options = {"checkpoints": config, "checkpoint_every": jaxche.Every(epochs=1), "progress": False}
    _, history = trainer.fit(state, problem.data, max_steps=31, **options)
    saved = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    assert [history[number - 1].steps_done for number in saved] == [12, 24, 31]


def test_a_dry_run_evaluates_a_batch(on_fleet, problem):
    trainer, state = on_fleet
    _, history = trainer.fit(state, problem.data, validation=problem.data, dry_run=True)
    assert list(history[0].validation) == ["loss", "mae"]
    with pytest.raises(ValueError, match="metric 'bad' has shape"):
        trainer.fit(
            state,
            problem.data,
            validation=problem.data,
            metric_fn=lambda params, batch: {"bad": batch["x"]},
            dry_run=True,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_every": 5}, "eval_every= is given without validation="),
        ({"metric_fn": lambda params, batch: {}}, "metric_fn= is given without validation="),
        ({"checkpoint_every": 5}, "checkpoint_every= is given without checkpoints="),
        ({"log_every": 0}, r"log_every=0 must be a whole number above 0; write log_every=1000 for steps, or"),
        ({"validation": iter([1])}, r"validation is a list_iterator, which can be read once only.*validation=list\("),
        ({"validation": 7}, r"validation: data is an int; the trainer needs len\(data\)"),
        ({"validation": []}, "validation: .*the data set is empty"),
        ({"validation": range(sys.maxsize // 4)}, r"validation: data has 2,305,.* batches, .* leave out \.repeat\(\)"),
    ],
)
def test_arguments_that_lack_another_are_refused(on_fleet, problem, options, message):
    trainer, state = on_fleet
    with pytest.raises(ValueError, match=message):
        trainer.fit(state, problem.data, progress=False, **options)


@pytest.mark.parametrize(("options", "rounds"), [({}, 1), ({"overlap": 0.5}, 2)])
def test_a_donated_state_is_freed_once_no_merge_needs_it(problem, devices, lockstep, options, rounds):
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.02), che=lockstep(), replicas=devices[:2], **options)
    state, freed = trainer.init(problem.params), []

    def look(after, info):
        freed.append(state.local_states[0].params["w"].is_deleted())

    trainer.fit(state, problem.data, progress=False, donate=True, callbacks=[look])
    assert set(freed[:rounds]) == {False}
    assert set(freed[rounds:]) == {True}


def test_a_state_that_a_fit_returns_unchanged_is_not_freed(trainer, problem, tmp_path):
    state, _ = trainer.fit(trainer.init(problem.params), problem.data, progress=False, checkpoints=tmp_path)
    again, _ = trainer.fit(state, problem.data, progress=False, dry_run=True, donate=True)
    assert again is state
    trainer.params(again)  # a dry run takes nothing
    # The run in the folder has ended, and fit returns what it has restored.
    given = trainer.init(problem.params)
    after, _ = trainer.fit(given, problem.data, progress=False, checkpoints=tmp_path, donate=True)
    assert given.local_states[0].params["w"].is_deleted()
    jax.tree.map(np.testing.assert_array_equal, *map(trainer.params, (after, state)))


def test_buffers_that_the_next_state_shares_are_kept():
    one, two = jnp.ones(3), jnp.zeros(3)
    old = LocalState(one, two, (), ())
    free([old], [LocalState(two, (), (), ())])
    assert (one.is_deleted(), two.is_deleted()) == (True, False)
