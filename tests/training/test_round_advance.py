"""What follows from a round: only the plan and the table decide."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.cadence import ApplyPolicy, DivergenceCorrection, ElChe, RoundPlan, Verdict, VirtualFleet
from jaxche.cadence._divergence import GrowthGuard
from jaxche.data import SequenceReader
from jaxche.replicas._merge import Merged
from jaxche.replicas._merge_program import Report
from jaxche.replicas._table import HOST_COLUMNS, ROW_MODULUS, Columns
from jaxche.training import TrainerState
from jaxche.training._plan import PlannedRound
from jaxche.training._round_end import RoundStatistics, RoundTimes, advance

READER = SequenceReader([np.zeros(2)] * 100)


def state(che, **fields):
    return TrainerState(local_states=(), che=che, correction=DivergenceCorrection(), **fields)


def merged(counts, wall, last_sync=20.0, examples_per_batch=(8, 8), drift=(0.1, 0.5)):
    rows = []
    for n, w, b in zip(counts, wall, examples_per_batch, strict=True):
        host = dict.fromkeys(HOST_COLUMNS, 0.0) | {"count": n, "batches": n, "wall_ms": w}
        host |= {"last_sync_ms": last_sync, "last_merge_ms": last_sync}
        host["rows"] = n * b % ROW_MODULUS
        rows.append([*host.values(), 0.0, n * b, n * b * 0.5])
    table = np.array(rows)
    return Merged(("after",), table, Report(*drift)), RoundStatistics(table, Columns())


def after(che, counts, wall, policy=ApplyPolicy.CADENCE, rule="steps", start=0, planned=None, **options):
    plan = RoundPlan(round=3, epoch=1, start=start, counts=planned or counts, epoch_size=100)
    before = PlannedRound(state(che, round=3, epoch=1), plan, READER, policy=policy, rule=rule)
    return advance(before, *merged(counts, wall, **options), RoundTimes(7.0))


def test_a_whole_round_teaches_speeds_and_overhead():
    che = ElChe(2, anchor=10)
    next_state, info = after(che, (10, 10), (100.0, 250.0))
    assert next_state.che == che.report_timing((100.0, 250.0), (10, 10), 20.0)
    assert (next_state.round, next_state.epoch, next_state.cursor) == (4, 1, 20)
    assert next_state.sync_ms == info.sync_ms == 7.0  # this process's own; it reaches the others in the next merge
    assert next_state.local_states == ("after",)
    assert (info.weights, info.examples, info.anchor) == ((0.5, 0.5), 160, 10)


def test_a_round_cut_short_teaches_speeds_only():
    """Its overhead is that of a short round: learning from it would grow the anchor at every end of an epoch."""
    che = ElChe(2, anchor=10)
    next_state, _ = after(che, (2, 2), (20.0, 50.0), start=96)
    assert next_state.che == che.report_timing((20.0, 50.0), (2, 2), 0.0)
    assert next_state.che.anchor == 10
    assert (next_state.epoch, next_state.cursor) == (2, 0)


def test_a_replica_that_ran_out_of_time_is_slow_at_once():
    """The steady tuner leaves out one stray report, and the next round would run out of time like this one."""
    che = ElChe(2, anchor=10, max_anchor=10, tuner="steady")
    for _ in range(3):
        che = che.report_timing((100.0, 100.0), (10, 10), 10.0)
    wall, counts = (100.0, 240.0), (10, 4)
    assert che.report_timing(wall, counts, 0.0).ms_per_batch == (10.0, 10.0)
    next_state, info = after(che, counts, wall, planned=(10, 10))
    assert next_state.che.ms_per_batch == (10.0, 60.0)
    assert next_state.che.batch_counts == (60, 10)
    assert next_state.pending_batches == ((1, 14, 20),)
    assert (info.planned, info.counts) == ((10, 10), counts)
    # One that did all that was planned may have met a hiccup only.
    assert after(che, (10, 10), (100.0, 600.0))[0].che.ms_per_batch == (10.0, 10.0)


def test_a_round_cut_by_the_lead_limit_is_a_whole_one():
    che = ElChe(2, anchor=10, max_batch_diff=2).with_speed_ratio(1, 3.0)
    next_state, _ = after(che, (12, 10), (100.0, 100.0))
    assert next_state.che.anchor > 10  # 20 ms of 100 is above the target, and was seen


def test_only_async_corrects_divergence():
    class Alarmed:
        def observe(self, drift, k_max):
            assert (drift, k_max) == (0.1, 10)
            return self, Verdict.NUDGE

    alarmed = DivergenceCorrection(guard=Alarmed())
    for policy, verdict, anchor in [(ApplyPolicy.CADENCE, "calm", 10), (ApplyPolicy.ASYNC, "nudge", 5)]:
        before = dataclasses.replace(state(ElChe(2, anchor=10)), correction=alarmed)
        plan = RoundPlan(round=0, epoch=0, start=0, counts=(10, 10), epoch_size=100)
        planned = PlannedRound(before, plan, READER, policy=policy)
        next_state, info = advance(planned, *merged((10, 10), (500.0, 500.0)), RoundTimes(1.0))
        assert (info.verdict, next_state.che.anchor) == (verdict, anchor)


@pytest.mark.parametrize(
    ("rule", "weights"), [("steps", (0.25, 0.75)), ("batch", (2 / 3, 1 / 3)), (None, (2 / 5, 3 / 5))]
)
def test_weights_are_those_of_the_merge(rule, weights):
    _, info = after(ElChe(2, anchor=2), (1, 3), (10.0, 10.0), rule=rule, examples_per_batch=(16, 8))
    assert info.weights == pytest.approx(weights)
    assert info.anchor == 1


def test_one_replica_has_no_cadence():
    next_state, info = after(None, (5, 0), (10.0, 0.0))
    assert next_state.che is None
    assert info.anchor == 5


def test_what_is_owed_is_done_in_the_order_of_the_data_and_the_state_stays_where_it_was():
    before = state(
        ElChe(2, anchor=4), round=3, epoch=1, cursor=60, examples=40, pending_batches=((0, 30, 40), (0, 50, 51))
    )
    plan = RoundPlan(round=3, epoch=0, start=30, counts=(4, 2), epoch_size=100)
    planned = PlannedRound(before, plan, READER)
    next_state, info = advance(planned, *merged((2, 1), (9.0, 9.0)), RoundTimes(1.0))
    assert next_state.pending_batches == ((0, 32, 34), (0, 35, 36), (0, 36, 40), (0, 50, 51))
    assert (next_state.epoch, next_state.cursor) == (1, 60)
    assert (info.examples, next_state.examples) == (24, 64)


def test_the_clock_of_processes_never_goes_back_and_is_right_in_the_end():
    """A slow merge stands for the next one, which was fast, and the rounds after it are shorter than the difference."""
    before, clocks, known_ms = state(None), [], [0.0, 90.0, *[5.0] * 10]  # of the last merge, a round later
    for last_sync_ms in known_ms:
        _, table = merged((1, 1), (10.0, 8.0), last_sync=last_sync_ms)
        times = RoundTimes(1.0).with_clock(before, table, is_shared=True)
        before = dataclasses.replace(before, clock_ms=times.clock_ms, clock_merge_ms=times.clock_merge_ms)
        clocks.append(times.clock_ms)
    assert clocks[:5] == [10.0, 200.0, 200.0, 200.0, 200.0]
    assert clocks == sorted(clocks)
    # The steps of all rounds, the known merges, and the last of these once more for the merge that is not known yet.
    assert clocks[-1] == 10.0 * len(known_ms) + sum(known_ms) + 5.0


def test_examples_are_exact_though_their_sum_on_devices_is_rounded():
    rows = [29_999_400, 2**23 - 1, 2**30 + 1, 0]
    table = []
    for n in rows:
        host = dict.fromkeys(HOST_COLUMNS, 0.0) | {"count": 1, "batches": 1, "rows": n % ROW_MODULUS}
        table.append([*host.values(), 0.0, np.float32(n) + 3 * np.spacing(np.float32(n)), 0.5])
    assert RoundStatistics(np.array(table), Columns()).examples.tolist() == rows


def test_a_round_of_many_examples_has_their_number(devices):
    data = [{"x": np.zeros((399_999, 1), np.float32)}] * 50
    trainer = jaxche.Trainer(lambda w, b: jnp.mean((b["x"] - w) ** 2), optax.sgd(0.1), replicas=devices[:1])
    state, history = trainer.fit(trainer.init(jnp.zeros(())), data, epochs=1, progress=False)
    assert max(info.examples for info in history) > 2**24
    assert state.examples == 50 * 399_999


def test_the_growth_of_drift_is_that_of_the_steps_taken(problem):
    che, fleet = ElChe(2, 10, max_batch_diff=2), VirtualFleet([10, 100])
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.01), policy="async", che=che, fleet=fleet)
    state, history = trainer.fit(trainer.init(problem.params), problem.data, max_steps=60, progress=False)
    assert max(map(max, (info.counts for info in history))) <= 12 < max(state.che.batch_counts)
    guard = GrowthGuard()
    for info in history:
        guard, _ = guard.observe(info.drift, max(info.counts))
    assert state.correction.guard == guard


@pytest.mark.parametrize("tuner", ["steady", "progress"])
def test_an_anchor_that_is_longer_than_an_epoch_finds_its_length(tuner):
    anchors = []
    for anchor in (10, 100):
        che, fleet = ElChe(2, anchor, tuner=tuner), VirtualFleet([10, 23], sync_ms=5.0)
        trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1) ** 2), optax.sgd(0.01), che=che, fleet=fleet)
        data = jaxche.Batches(np.ones((120, 2), np.float32), 2)  # 60 batches
        state, _ = trainer.fit(trainer.init(jnp.zeros(2)), data, epochs=12, progress=False)
        anchors.append(state.che.anchor)
        assert state.che.sync_samples == (5.0,) * 3
    assert anchors[1] < 30
    assert tuner == "progress" or anchors == [3, 3]
