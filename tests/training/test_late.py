"""A replica that turns slow: it stops early, what it owes is done first, and nothing is done twice."""

from dataclasses import replace
from pathlib import Path

import jax
import optax
import pytest

import jaxche


def read(history):
    """The batches of a record, in order of the ranks: those that were taken of each share."""
    found = []
    for info in history:
        start = info.cursor
        for planned, done in zip(info.planned, info.counts, strict=True):
            found += [(info.epoch, start + i) for i in range(done)]
            start += planned
    return found


@pytest.fixture
def slowed(problem, devices, thread_clock):
    """A trainer whose second replica takes 120 ms a step, and a state whose cadence has learnt that both take 10 ms."""
    che = jaxche.ElChe(world_size=2, anchor=6, max_anchor=6, tuner="steady").report_timing([60.0, 60.0], [6, 6], 0.0)

    def make(pace_ms=(10.0, 120.0), **knobs):
        trainer = jaxche.Trainer(
            problem.loss, optax.adam(0.05), che=che, replicas=devices[:2], pace_ms=pace_ms, **knobs
        )
        return trainer, trainer.init(problem.params)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("merge", ["steps", "batch", "fednova"])
def test_a_replica_out_of_time_stops_early_and_its_batches_come_next(problem, slowed, same, merge):
    trainer, start = slowed(merge=merge)
    state, first = trainer.round(start, problem.data)
    assert first.planned == (6, 6)
    assert first.counts[0] == 6
    assert 1 <= first.counts[1] < 6  # less than half a second for steps of 120 ms
    assert state.pending_batches == ((0, 6 + first.counts[1], 12),)
    assert (state.epoch, state.cursor) == (1, 0)
    # The next plan follows at once, and is of what is owed.
    assert state.che.batch_counts[0] > state.che.batch_counts[1]
    state, second = trainer.round(state, problem.data)
    assert (second.epoch, second.cursor) == (0, 6 + first.counts[1])
    assert sum(second.planned) <= 6 - first.counts[1]
    # The same steps by two replicas that were planned no more make the same parameters.
    other, again = slowed(pace_ms=None, merge=merge)
    again, info = other.round(again, problem.data, counts=(6, first.counts[1]))
    assert info.weights == first.weights
    assert info.alpha == first.alpha
    undisturbed, _ = trainer.replay(start, problem.data, [first])
    same(again.params, undisturbed.params)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_every_batch_of_every_epoch_is_trained_on_once(problem, slowed, same, told, recorder, policy, tmp_path):
    trainer, start = slowed(policy=policy)
    reads = recorder(problem.data)
    state, history = trainer.fit(start, reads, epochs=2, progress=False)
    assert any(info.counts != info.planned for info in history)
    assert sorted(read(history)) == [(e, i) for e in range(2) for i in range(12)]
    assert set(reads.reads) == set(read(history))
    assert (state.epoch, state.pending_batches) == (2, ())
    # The record runs again bit for bit, on replicas of any speed.
    history.to_json(tmp_path / "history.jsonl")
    record = jaxche.History.from_json(Path(tmp_path / "history.jsonl"))
    other, begin = slowed(pace_ms=None, policy=policy)
    again, rounds = other.replay(begin, problem.data, record)
    same(again.params, state.params)
    same(again.opt_state, state.opt_state)
    same_but = {"wall_ms": (), "sync_ms": 0, "clock_ms": 0, "verdict": ""}
    assert told(replace(i, **same_but) for i in rounds) == told(replace(i, **same_but) for i in history)


def test_what_is_owed_outlives_a_restart(problem, slowed, same, told, tmp_path):
    trainer, start = slowed()

    def stop(state, info):
        return info.counts != info.planned

    left, part = trainer.fit(start, problem.data, 1, callbacks=[stop], progress=False, checkpoints=tmp_path)
    assert left.pending_batches
    other, begin = slowed(pace_ms=None)
    state, history = other.fit(begin, problem.data, 1, progress=False, checkpoints=tmp_path)
    assert told(history[: len(part)]) == told(part)
    assert sorted(read(history)) == [(0, i) for i in range(12)]
    assert (state.epoch, state.pending_batches) == (1, ())
    again, _ = other.replay(begin, problem.data, history)
    same(jax.device_get(again.params), jax.device_get(state.params))


def test_a_record_of_another_run_is_refused(problem, slowed):
    trainer, start = slowed(pace_ms=None)
    _, first = trainer.round(start, problem.data, counts=(2, 2))
    later = replace(first, cursor=5)
    with pytest.raises(ValueError, match="history has round 0 at batch 5 of epoch 0, but the state is at round 0"):
        trainer.replay(start, problem.data, [later])


def test_a_record_of_another_number_of_replicas_is_refused_before_the_first_round(problem, slowed, recorder):
    trainer, start = slowed(pace_ms=None)
    state, first = trainer.round(start, problem.data, counts=(2, 2))
    _, second = trainer.round(state, problem.data, counts=(2, 1))
    left = replace(second, counts=(2,), planned=(2,))
    reads = recorder(problem.data)
    with pytest.raises(ValueError, match=r"1 replicas in round 1, and this trainer has 2.*history\[:1\]"):
        trainer.replay(start, reads, [first, left])
    assert not reads.reads
    _, again = trainer.replay(start, reads, jaxche.History([first, left])[:1])
    assert [info.counts for info in again] == [(2, 2)]
