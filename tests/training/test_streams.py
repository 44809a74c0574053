"""Training on streams: every batch once under every policy, in order, and on from any checkpoint."""

import itertools
import logging
from dataclasses import replace

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.cadence import ApplyPolicy
from jaxche.data._batches import Feed
from jaxche.replicas import LocalRound
from jaxche.training._checks import check_whole_batches
from jaxche.training._plan import GivenRound

LENGTH = 23


def batches(epoch=0, length=LENGTH):
    rng = np.random.default_rng(epoch)
    for i in range(length):
        x = rng.normal(size=(4, 3)).astype(np.float32)
        yield {"x": x, "y": np.tanh(x[:, :1]), "id": np.full(4, 1000 * epoch + i)}


def loss(w, batch, rng):
    keep = jax.random.bernoulli(rng, 0.8, batch["y"].shape)
    return jnp.mean((jnp.tanh(batch["x"] @ w * keep) - batch["y"]) ** 2)


@pytest.fixture
def trained(monkeypatch):
    """The ids of the examples that steps were taken on, by round and replica."""
    found, plain = [], Feed.__iter__

    def recorded(feed):
        own = []
        found.append(own)
        for batch in plain(feed):
            own += np.asarray(batch["id"]).tolist()
            yield batch

    monkeypatch.setattr(Feed, "__iter__", recorded)
    return found


def ids(found):
    return sorted(itertools.chain.from_iterable(found))


def all_ids(epochs, length=LENGTH):
    return [1000 * epoch + i for epoch in epochs for i in range(length) for _ in range(4)]


def make(devices, world=2, **arguments):
    trainer = jaxche.Trainer(loss, optax.adam(0.05), replicas=devices[:world], **arguments)
    return trainer, trainer.init(jnp.zeros((3, 1)))


CASES = {
    "cadence": {},
    "async": {"policy": "async"},
    "auto": {"policy": "auto"},
    "sync by speed": {"policy": "sync", "joined_batches": 5},
    "sync": {"policy": "sync", "rows": "equal"},
    "gradients": {"average": "gradients"},
    "scaled": {"scaling": jaxche.AdamScale()},
    "fleet": {"fleet": jaxche.VirtualFleet(ms_per_batch=[20.0, 50.0, 50.0]), "rows": "speed"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_example_is_trained_on_once_in_every_epoch(devices, trained, case):
    trainer, state = make(devices, 3, **CASES[case])
    state, history = trainer.fit(state, jaxche.Stream(batches), epochs=2, progress=False)
    assert (state.epoch, state.cursor, state.stream, state.pending_batches) == (2, 0, None, ())
    assert ids(trained) == all_ids((0, 1))
    assert sum(info.examples for info in history) == 2 * 4 * LENGTH
    assert sum(info.batches for info in history) == 2 * LENGTH
    assert all(info.examples for info in history)


def test_one_replica_trains_in_the_order_of_the_stream_as_on_a_sequence(devices, trained, same):
    results = []
    for data in (list(batches()), batches()):
        trainer, state = make(devices, 1)
        state, history = trainer.fit(state, data, progress=False)
        results.append((trainer.params(state), [info.loss for info in history]))
    assert trained[0] == trained[1] == all_ids((0,))
    same(*results)


def test_an_iterable_is_data_as_it_is_and_a_generator_goes_on_in_the_next_fit(devices, trained):
    trainer, state = make(devices, 2)
    state, history = trainer.fit(state, grain.MapDataset.range(4 * LENGTH).batch(4).map(grain_batch).to_iter_dataset())
    assert sum(info.examples for info in history) == 4 * LENGTH
    trained.clear()
    endless, stops = batches(length=10**9), 3
    for _ in range(stops):
        state, _ = trainer.fit(state, endless, callbacks=[lambda state, info: True], progress=False)
    found = ids(trained)
    assert found == all_ids((0,), state.stream.taken[0])
    assert state.epoch == 1


def test_an_iterator_goes_on_in_a_stream_of_its_own(devices, trained):
    trainer, state = make(devices)
    iterator = batches()
    for limits in ({"max_steps": 5}, {"max_steps": 4}, {}):
        state, _ = trainer.fit(state, jaxche.Stream(iterator), progress=False, **limits)
    assert ids(trained) == all_ids([0])
    other, seen = trainer.fit(trainer.init(jnp.zeros((3, 1))), jaxche.Stream(batches), progress=False)
    assert sum(info.examples for info in seen) == 4 * LENGTH
    assert other.epoch == 1


def grain_batch(numbers):
    x = np.stack([np.sin(numbers), np.cos(numbers), np.ones(4)], -1).astype(np.float32)
    return {"x": x, "y": x[:, :1], "id": numbers // 4}


def test_a_dry_run_takes_nothing(devices, trained):
    trainer, state = make(devices, 2)
    data = batches()
    trainer.fit(state, data, dry_run=True)
    trained.clear()
    state, _ = trainer.fit(state, data, progress=False)
    assert ids(trained) == all_ids((0,))


def test_rates_are_measured_on_batches_that_are_trained_on_later(devices, trained):
    trainer, state = make(devices, 2)
    data = batches()
    assert len(trainer.measure_rates(state, data, seconds=0.05)) == 2
    assert min(trainer.measure_rates(state, data, seconds=1e-9)) > 0  # of one batch
    trained.clear()
    trainer.fit(state, data, progress=False)
    assert ids(trained) == all_ids((0,))


def test_a_replay_repeats_bit_for_bit(devices, same, patient):
    trainer, state = make(devices, 3)
    data = jaxche.Stream(batches)
    after, history = trainer.fit(state, data, epochs=2, progress=False)
    again, repeated = trainer.replay(state, data, history)
    same(trainer.params(after), trainer.params(again))
    assert [info.counts for info in repeated] == [info.counts for info in history]
    assert (again.epoch, again.cursor, again.stream) == (2, 0, None)


def test_an_error_leaves_the_state_from_which_a_function_goes_on(devices, trained):
    trainer, state = make(devices, 2)
    bad = {"left": 1}

    def source(epoch):
        for i, batch in enumerate(batches(epoch)):
            if i == 9 and bad["left"]:
                bad["left"] -= 1
                raise OSError("disk on fire")
            yield batch

    data = jaxche.Stream(source)
    with pytest.raises(OSError, match="disk on fire"):
        trainer.fit(state, data, progress=False)
    done = trainer.last_good_state
    taken = done.stream.taken[0]
    assert 0 < taken <= 9
    trained.clear()
    trainer.fit(done, data, progress=False)
    assert ids(trained) == all_ids((0,))[4 * taken :]


def test_bad_numbers_are_named_by_their_place_in_the_stream(devices):
    def source(epoch):
        for i, batch in enumerate(batches(epoch)):
            yield batch | {"y": batch["y"] * (np.nan if i == 3 else 1)}

    trainer, state = make(devices, 2)
    state, _ = trainer.round(state, jaxche.Stream(source), counts=(1, 1))
    with pytest.raises(jaxche.NonFiniteLossError, match=r"batches (2 and 4|3 and 5) of epoch 0") as caught:
        trainer.round(state, jaxche.Stream(source), counts=(2, 2))
    assert (0, 3) in caught.value.batches


def test_a_loss_that_fails_on_one_replica_does_not_block_the_others(devices):
    def source(epoch):
        for i, batch in enumerate(batches(epoch)):
            yield batch | ({"x": np.zeros((4, 7), np.float32)} if i == 2 else {})

    trainer, state = make(devices, 3)
    with pytest.raises(TypeError):
        trainer.round(state, jaxche.Stream(source, prefetch=1), counts=(8, 1, 8))


@pytest.mark.parametrize(
    ("data", "epochs", "named"),
    [
        (lambda: iter(()), 1, "the stream of this process has no batches in epoch 0"),
        (lambda: jaxche.Stream(lambda epoch: batches(length=0 if epoch else 4)), 2, "data has no batches in epoch 1"),
        (lambda: batches(), 2, "data is a generator, which can be read once, and epochs=2"),
        (
            lambda: ({"x": 1.0, "y": 2.0} for _ in range(3)),
            1,
            r"batch\['x'\] is a scalar: does the stream yield examples",
        ),
        (lambda: ({"x": ["a"]} for _ in range(3)), 1, "is texts"),
    ],
)
def test_a_stream_that_cannot_be_trained_on_says_why(devices, data, epochs, named):
    trainer, state = make(devices, 2)
    with pytest.raises(ValueError, match=named):
        trainer.fit(state, data(), epochs=epochs, progress=False)


def test_a_generator_is_at_its_end_in_the_next_fit(devices):
    trainer, state = make(devices, 2)
    data = batches()
    state, _ = trainer.fit(state, data, progress=False)
    with pytest.raises(ValueError, match="a generator that was read already"):
        trainer.fit(state, data, progress=False)
    state, _ = trainer.fit(state, batches(), progress=False)
    assert state.epoch == 2


def test_a_generator_goes_on_with_its_next_batches_after_a_round_that_is_lost(devices, trained, caplog):
    """As after Ctrl-C in a notebook, which gives back the state before the round."""
    trainer, state = make(devices, 1)
    data = batches()
    state, _ = trainer.round(state, data, counts=(5,))
    trainer.round(state, data, counts=(5,))
    with pytest.raises(ValueError, match=r"cannot return to batch 5 .* or go on with .*\(batches, resume='continue'\)"):
        trainer.fit(state, data, progress=False)
    trained.clear()
    state, _ = trainer.fit(state, jaxche.Stream(data, resume="continue"), progress=False)
    assert "batches of the stream that were read after batch 5 are lost" in caplog.text
    (found,) = filter(None, trained)
    assert found == [i for i in range(found[0], LENGTH) for _ in range(4)]
    assert found[0] >= 10
    assert state.epoch == 1


def test_the_progress_needs_no_number_of_batches(devices, capsys, monkeypatch):
    clock = itertools.count(step=100)
    monkeypatch.setattr("jaxche.training._hooks.time.perf_counter", lambda: next(clock))
    trainer, state = make(devices, 1)
    trainer.fit(state, batches())
    assert f"({LENGTH} batches)" in capsys.readouterr().err


class Counting:
    """An iterator with a state, which notes what it reads."""

    def __init__(self, log, length=LENGTH):
        self._all, self._at, self._log = list(batches(length=length)), 0, log

    def __iter__(self):
        return self

    def __next__(self):
        if self._at == len(self._all):
            raise StopIteration
        self._log.append(self._at)
        self._at += 1
        return self._all[self._at - 1]

    def get_state(self):
        return {"at": (self._at, b"\x00")}  # no plain JSON

    def set_state(self, state):
        self._at, _ = state["at"]


def grain_source(epoch):
    numbers = grain.MapDataset.range(4 * LENGTH).seed(epoch).shuffle()
    return numbers.batch(4).map(grain_batch).to_iter_dataset()


SOURCES = {
    "a function": (lambda log: jaxche.Stream(batches), True),
    "an iterator with a state": (lambda log: Counting(log), False),
    "Grain": (lambda log: jaxche.Stream(grain_source), False),
    "a grain.IterDataset": (lambda log: grain_source(0), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(devices, tmp_path, same, told, lockstep, caplog, source):
    make_data, skips = SOURCES[source]

    def run(data, callbacks=(), **options):
        trainer, state = make(devices, 2, che=lockstep())
        epochs = 1 if isinstance(data, Counting) else 2
        return trainer.fit(state, data, epochs=epochs, progress=False, callbacks=callbacks, **options)

    checkpoints = jaxche.Checkpoints(tmp_path, every=100)
    state, history = run(make_data([]))
    left, _ = run(make_data([]), [lambda state, info: state.round == 3], checkpoints=checkpoints)
    assert left.stream.taken == (12,)
    caplog.clear()  # of the line about the end
    log = []
    with caplog.at_level(logging.WARNING, logger="jaxche"):
        resumed, record = run(make_data(log), checkpoints=checkpoints)
    same((state.params, state.opt_state), (resumed.params, resumed.opt_state))
    assert (resumed.epoch, resumed.cursor, resumed.round) == (state.epoch, state.cursor, state.round)
    untimed = [[replace(info, wall_ms=(), sync_ms=0.0, clock_ms=0.0) for info in one] for one in (history, record)]
    assert told(untimed[0]) == told(untimed[1])
    said = [record.getMessage() for record in caplog.records if record.name == "jaxche"]
    skipped = ["12 batches of the stream were read again and skipped, to continue with batch 12 of epoch 0"]
    assert said == (skipped if skips else [])
    assert not log or log == [0, *range(12, LENGTH)]


def test_a_state_that_json_does_not_hold_is_not_saved_and_batches_are_skipped(
    devices, tmp_path, caplog, trained, lockstep
):
    class Opaque(Counting):
        def get_state(self):
            return {"at": object()}

    for stop in (True, False):
        trainer, state = make(devices, 2, che=lockstep())
        callbacks = [lambda state, info, stop=stop: stop and state.round == 2]
        state, _ = trainer.fit(state, Opaque([]), progress=False, callbacks=callbacks, checkpoints=tmp_path)
    assert any("is not saved (an object has no exact form in JSON)" in text for text in caplog.messages)
    assert sum("the state of the stream" in text for text in caplog.messages) == 2  # once a run
    assert any("read again and skipped" in text for text in caplog.messages)
    assert ids(trained) == all_ids((0,))


def test_a_checkpoint_of_a_sequence_is_not_one_of_a_stream(devices, tmp_path):
    trainer, state = make(devices, 2)
    trainer.fit(state, batches(), progress=False, checkpoints=tmp_path)
    with pytest.raises(ValueError, match="is of a run with batches=a stream, and this one has 23"):
        trainer.fit(state, list(batches()), epochs=2, progress=False, checkpoints=tmp_path)


def test_a_sequence_goes_on_after_a_stream(devices):
    trainer, state = make(devices, 2)
    state, _ = trainer.fit(state, batches(), callbacks=[lambda state, info: True], progress=False)
    taken = state.stream.taken[0]
    state, history = trainer.fit(state, list(batches()), progress=False)
    assert history[0].cursor == taken
    assert state.stream is None
    assert sum(info.batches for info in history) == LENGTH - taken


def test_rows_by_speed_are_refused_where_they_would_cross_processes():
    check_whole_batches(ApplyPolicy.SYNC, None, 2, 2)
    for arguments, name in [
        ((ApplyPolicy.AUTO, None, 2, 2), "policy='auto'"),
        ((ApplyPolicy.SYNC, "speed", 2, 2), "rows='speed'"),
        ((ApplyPolicy.SYNC, None, 4, 2), "joined_batches=4"),
    ]:
        with pytest.raises(ValueError, match=f"{name} deals out rows by speed, .*shards=False"):
            check_whole_batches(*arguments)


def test_a_late_replica_leaves_its_next_batch_in_the_stream(devices, trained):
    trainer, state = make(devices, 1)
    data = jaxche.Stream(batches)
    state, _ = trainer.round(state, data, counts=(2,))
    reader = trainer._reader(data)
    (replica,), (local,) = trainer._engine._replicas, state.local_states
    (feed,) = reader.begin(trainer._plan(state, 100, given=GivenRound((9,))), state, [0], (9,))
    trained.clear()
    result = replica.run(local, feed, LocalRound(time_limit_ms=1e-9))
    assert (result.error, result.steps, ids(trained)) == (None, 1, [2] * 4)
    assert ids([np.asarray(reader._queue.take((0, 3))["id"])]) == [3] * 4


def test_a_stream_is_kept_while_other_data_is_read(devices, trained):
    trainer, state = make(devices, 2)
    data, other = batches(), list(batches())
    state, _ = trainer.round(state, data, counts=(2, 2))
    trainer.measure_rates(trainer.init(jnp.zeros((3, 1))), other, seconds=0.02)
    trained.clear()
    trainer.fit(state, data, progress=False)
    assert ids(trained) == all_ids((0,))[4 * 4 :]


def test_pipelines_take_streams_within_a_process_and_refuse_them_over_several(devices, trained, monkeypatch):
    stages = [lambda w, batch: jnp.tanh(batch["x"] @ w), lambda w, x: x @ w]
    model = jaxche.Partitioned(stages, lambda y, batch: jnp.mean((y - batch["y"]) ** 2), jaxche.Direct())
    trainer = jaxche.Trainer(model, optax.sgd(0.1), replicas=[devices[:2], devices[2:4]])
    state = trainer.init([jnp.ones((3, 2)), jnp.ones((2, 1))])
    trainer.fit(state, batches(), progress=False)
    assert ids(trained) == all_ids((0,))
    settings = replace(trainer._settings, processes_of_ranks=[(0, 1)])
    monkeypatch.setattr(trainer, "_settings", settings)
    with pytest.raises(ValueError, match=r"stages of a replica that are in several processes.*jaxche.Batches"):
        trainer.fit(state, jaxche.Stream(batches, shards=False))


@pytest.mark.parametrize(
    ("data", "limits", "is_told"),
    [
        (lambda: batches(length=6), {"max_steps": 8}, True),
        (lambda: batches(length=6), {"max_steps": 6}, False),
        (lambda: batches(length=6), {"max_examples": 24}, False),
        (lambda: batches(length=6), {}, False),
        (lambda: jaxche.Stream(lambda epoch: batches(epoch, length=6)), {"max_steps": 8}, False),
    ],
    ids=["before max_steps", "at max_steps", "at max_examples", "no limit", "more epochs"],
)
def test_a_generator_that_ends_before_the_limits_of_a_fit_is_logged(devices, caplog, data, limits, is_told):
    trainer, state = make(devices)
    state, _ = trainer.fit(state, data(), progress=False, **limits)
    assert state.steps == (6 if is_told else limits.get("max_steps", 6))
    line = "data ended after 6 steps, before the limits of this fit: it is a generator, which can be read once"
    assert (line in caplog.text) == is_told
