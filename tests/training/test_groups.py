"""Groups of replicas that merge within rounds: against a slow twin, replayed, resumed, and what is refused."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.cadence import ApplyPolicy, merge_steps
from jaxche.replicas import _group_merge
from jaxche.training._checks import Averaging
from jaxche.training._groups import checked_groups

GROUPS = [[0, 1], [2, 3]]
FLEET = jaxche.VirtualFleet([20, 50, 20, 50], sync_ms=200.0, group_sync_ms=5.0)
COUNTS = [(10, 4, 10, 4), (6, 3, 5, 0), (2, 1, 8, 4)]
RATE = 0.05
ADAM = optax.adam(RATE)


def loss_fn(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1600, 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5], np.float32) + 0.1 * rng.normal(size=1600).astype(np.float32)
    return jaxche.Batches({"x": x, "y": y}, batch_size=4)


@pytest.fixture(scope="module")
def make(devices):
    def trainer(tx=None, fleet=FLEET, loss=loss_fn, **options):
        options = {"groups": GROUPS, "replicas": devices[:4]} | options
        return jaxche.Trainer(loss, tx or optax.sgd(RATE), fleet=fleet, **options)

    return trainer


@pytest.fixture(scope="module")
def made(make):
    """The same, made once for equal arguments: its programs stay compiled."""
    return functools.cache(make)


class Slow:
    """A replica in NumPy, in one round."""

    def __init__(self, x, batches):
        self.x, self.start, self.batches, self.done = x.copy(), x, batches, 0

    def run(self, end):
        """Steps to the end of a part of the round."""
        for batch in self.batches[self.done : end]:
            error = batch["x"].astype(float) @ self.x - batch["y"]
            self.x = self.x - RATE * 2 * batch["x"].T.astype(float) @ error / len(error)
        self.done = end

    def land(self, merged, after, start=None):
        """Take in a merge in flight, unless there is none."""
        if merged is not None:
            self.run(max(self.done, after))
            self.x = self.x + merged - (self.start if start is None else start)


def slow_round(starts, batches, merges, landing, part):
    """The replicas at the end of a round."""
    replicas = [Slow(x, own) for x, own in zip(starts, batches, strict=True)]
    counts = [len(own) for own in batches]
    merges = min([merges, *(n for n in counts if n)])
    after = [int(part * n) for n in counts]
    for group in GROUPS:
        members = [rank for rank in group if counts[rank]]
        ends = list(zip(*merge_steps([counts[rank] for rank in members], merges), strict=True)) * (len(members) > 1)
        early, before, start = [end for end in ends if end[0] < after[members[0]]], [0] * len(members), None
        for number, end in enumerate(ends):
            if number == len(early):
                for rank in members:
                    replicas[rank].land(landing, after[rank], start)
            ends_here = [
                (min if number < len(early) else max)(n, after[rank]) if landing is not None else n
                for n, rank in zip(end, members, strict=True)
            ]
            for n, rank in zip(ends_here, members, strict=True):
                replicas[rank].run(n)
            taken, before = np.subtract(ends_here, before), ends_here
            mean = sum(n * replicas[rank].x for n, rank in zip(taken, members, strict=True)) / sum(taken)
            if start is None:
                start = sum(n * replicas[rank].start for n, rank in zip(taken, members, strict=True)) / sum(taken)
            for rank in members:
                replicas[rank].x = mean
        if len(early) == len(ends):
            for rank in group:
                replicas[rank].land(landing, after[rank], start if rank in members else None)
    for replica, n in zip(replicas, counts, strict=True):
        replica.run(n)
    return [replica.x for replica in replicas]


def twin(data, merges, part=None):
    """The parameters after each round, in NumPy; with ``part``, merges come in after that part of the next round."""
    rows = iter([data[i] for i in range(sum(map(sum, COUNTS)))])
    x, landing, merged = [np.zeros(3)] * 4, None, []
    for counts in COUNTS:
        batches = [[next(rows) for _ in range(n)] for n in counts]
        x = slow_round(x, batches, merges, landing, part or 0.0)
        mean = sum(n * one for n, one in zip(counts, x, strict=True)) / sum(counts)
        merged.append(mean)
        x, landing = (x, mean) if part else ([mean] * 4, None)
    return merged


@pytest.mark.parametrize("merges", [2, 3, 4])
def test_rounds_are_those_of_a_slow_twin(made, data, close, merges):
    one = made(group_merges=merges)
    state = one.init(jnp.zeros(3))
    for counts, params in zip(COUNTS, twin(data, merges), strict=True):
        state, info = one.round(state, data, counts)
        close(one.params(state), params, rtol=1e-4, atol=1e-5)
        assert info.group_merges == min([merges, *(n for n in counts if n)])


def test_corrections_of_a_merge_in_flight_are_those_of_a_slow_twin(make, data, close):
    one = make(group_merges=3, overlap=0.5)
    state = one.init(jnp.zeros(3))
    for counts, params in zip(COUNTS, twin(data, 3, part=0.5), strict=True):
        state, info = one.round(state, data, counts)
        close(one.params(state), params, rtol=1e-4, atol=1e-5)
    assert info.overlapped == (1, 0, 4, 2)


def test_a_correction_loses_and_adds_nothing(make):
    # Gradients of the first round only: all later merges find the same parameters.
    counts = [(10, 4, 7, 5), (10, 4, 7, 5), (9, 4, 6, 3), (10, 4, 7, 5)]
    x = np.zeros((sum(map(sum, counts)), 3), np.float32)
    x[: sum(counts[0])] = 10 * np.random.default_rng(0).normal(size=(sum(counts[0]), 3))
    data = [{"x": row[None]} for row in x]
    one = make(loss=lambda w, batch: jnp.sum(batch["x"] @ w), overlap=0.5, group_merges=4)
    state, found = one.init(jnp.zeros(3)), []
    for row in counts:
        state, _ = one.round(state, data, row)
        found.append(np.asarray(one.params(state)))
    np.testing.assert_allclose(found[1:], [found[0]] * 3, atol=1e-5)
    assert np.abs(found[0]).max() > 0.1


def test_one_merge_in_a_round_is_a_trainer_without_groups(make, made, data, same):
    one, plain = make(group_merges=1), made(groups=None)
    state, history = one.fit(one.init(jnp.zeros(3)), data, progress=False)
    other, again = plain.fit(plain.init(jnp.zeros(3)), data, progress=False)
    same(state.local_states, other.local_states)
    assert [info.counts for info in history] == [info.counts for info in again]


def test_the_clock_has_all_merges_and_the_cadence_sees_those_of_all_replicas(made, data):
    one, plain = made(group_merges=4), made(groups=None)
    state, info = one.round(one.init(jnp.zeros(3)), data, (10, 4, 10, 4))
    # Merges are after 1, 2 and 3 steps of 50 ms of the slow, when the fast have done 3, 5 and 8 of 20 ms.
    assert info.group_ms == pytest.approx((60 + 50 + 60) + 3 * 5.0 + (200 - 150) - 200)
    assert info.sync_ms == pytest.approx(200.0 + info.group_ms)
    assert state.clock_ms == info.clock_ms == pytest.approx(info.period_ms)
    state, _ = one.round(state, data, (10, 4, 10, 4))
    other, _ = plain.round(plain.init(jnp.zeros(3)), data, (10, 4, 10, 4))
    other, _ = plain.round(other, data, (10, 4, 10, 4))
    assert state.che.sync_samples == other.che.sync_samples
    assert state.che.ms_per_batch == other.che.ms_per_batch


def test_their_number_follows_the_costs(make, data):
    def last(**costs):
        fleet = jaxche.VirtualFleet([20, 50, 20, 50], sync_ms=200.0, **costs)
        one = make(ADAM, fleet=fleet)
        state, history = one.fit(one.init(jnp.zeros(3)), data, epochs=4, progress=False)
        assert f"merge {state.group_merges} times in a round" in one.explain(state)
        return history[-2]

    cheap, dear = last(group_sync_ms=1.0), last(group_sync_ms=80.0)
    assert cheap.group_merges > dear.group_merges >= 2
    assert cheap.planned == dear.planned


def test_the_wait_in_a_merge_of_a_group_counts_once_where_time_is_measured(make, data, thread_clock):
    one = make(fleet=None, pace_ms=[200.0, 300.0, 200.0, 300.0])
    state = one.init(jnp.zeros(3))
    for _ in range(2):
        began = thread_clock.perf_counter()
        # They merge after one step of 300 ms, for which the others wait, and after two of 200 ms.
        state, info = one.round(state, data, (3, 2, 3, 2))
        elapsed_ms = (thread_clock.perf_counter() - began) * 1e3
    assert info.wall_ms == pytest.approx((600.0, 600.0, 600.0, 600.0))
    assert info.group_ms == pytest.approx(100.0 + 5.0)
    assert info.period_ms == pytest.approx(elapsed_ms) == pytest.approx(705.0)


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_runs_replay_bit_for_bit(make, made, data, same, overlap):
    one = made(ADAM, overlap=overlap)
    state, history = one.fit(one.init(jnp.zeros(3)), data, epochs=2, progress=False)
    assert max(info.group_merges for info in history) > 2
    real = make(ADAM, overlap=overlap, fleet=None)
    again, repeated = real.replay(real.init(jnp.zeros(3)), data, jaxche.History.from_json(history.to_json()))
    same(again.local_states, state.local_states)
    assert [info.group_merges for info in repeated] == [info.group_merges for info in history]
    for groups in (None, [[0, 2], [1, 3]]):
        with pytest.raises(
            ValueError, match=r"other groups= \(\(0, 0, 1, 1\) .* write jaxche.Trainer\(..., groups=...\)"
        ):
            make(ADAM, groups=groups, overlap=overlap).replay(one.init(jnp.zeros(3)), data, history)


def test_a_stream_that_ends_before_one_has_a_batch_replays(made, same):
    def source(epoch):
        rng = np.random.default_rng(epoch)
        for _ in range(29):
            x = rng.normal(size=(4, 3)).astype(np.float32)
            yield {"x": x, "y": x.sum(1)}

    one = made(group_merges=2)
    state, history = one.fit(one.init(jnp.zeros(3)), jaxche.Stream(source), epochs=1, progress=False)
    assert any(0 in info.counts and 0 not in info.planned for info in history)
    again, _ = one.replay(one.init(jnp.zeros(3)), jaxche.Stream(source), history)
    same(one.params(again), one.params(state))


def test_a_short_round_does_not_forget_the_number_of_merges(made, data):
    one = made(ADAM, overlap=0.0)
    state, _ = one.fit(one.init(jnp.zeros(3)), data, epochs=2, progress=False)
    before = state.group_merges
    assert before > 2
    state, info = one.round(state, data, (1, 1, 1, 1))
    assert (info.group_merges, state.group_merges) == (1, before)


def test_a_resumed_run_has_the_rounds_of_its_own_groups(make, made, data, tmp_path):
    options = {"checkpoints": tmp_path, "progress": False}
    one, plain = make(), made(groups=None)
    state, _ = plain.fit(plain.init(jnp.zeros(3)), data, epochs=1, **options)
    assert state.che.half_life == 1.0
    state, _ = one.fit(one.init(jnp.zeros(3)), data, epochs=2, **options)
    assert state.che.half_life == 3.0


@pytest.mark.parametrize("kind", ["MultiSteps", "apply_every"])
def test_gradients_that_are_accumulated_are_not_averaged(make, kind):
    tx = optax.MultiSteps(optax.sgd(RATE), 3)
    if kind == "apply_every":
        tx = optax.chain(optax.apply_every(3), optax.sgd(RATE))
    with pytest.raises(ValueError, match="write opt_state='local'"):
        make(tx).init(jnp.zeros(3))
    make(tx, opt_state="local").init(jnp.zeros(3))


def test_no_program_is_compiled_for_fewer_members(make, data, devices):
    def loss(w, batch, model_state):
        return loss_fn(w, batch), ({}, {"mean": batch["x"].mean(0), "var": batch["x"].var(0)})

    fleet = jaxche.VirtualFleet([20, 20, 20, 20], sync_ms=200.0, group_sync_ms=5.0)
    one = make(loss=loss, fleet=fleet, groups=[[0, 1, 2]], group_merges=2)
    state = one.init(jnp.zeros(3), {"mean": jnp.zeros(3), "var": jnp.ones(3)})
    state, _ = one.round(state, data, (4, 4, 4, 4))
    state, _ = one.round(state, data, (4, 4, 4, 4))
    programs = (_group_merge._add, _group_merge._end, _group_merge._moments, _group_merge._pooled)
    before = [program._cache_size() for program in programs]
    one.round(state, data, (4, 0, 4, 4))
    assert [program._cache_size() for program in programs] == before


@pytest.mark.slow
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(make, made, data, same, interrupted):
    trainers = iter([made(ADAM, overlap=0.0), make(ADAM), made(ADAM, overlap=0.0)])

    def fit(**options):
        one = next(trainers)
        return one.fit(one.init(jnp.zeros(3)), data, epochs=2, checkpoint_every=40, progress=False, **options)

    (resumed, told), (whole, history) = interrupted(fit, round=6)
    assert [info.group_merges for info in told][-3:] == [info.group_merges for info in history][-3:]
    same(resumed.local_states, whole.local_states)


def test_islands_merge_on_their_devices(devices, data, close):
    strategy = jaxche.FullShard()
    islands = [strategy.mesh(devices[2 * i : 2 * i + 2]) for i in range(4)]
    found = []
    for options in ({"replicas": islands, "strategy": strategy}, {"replicas": devices[:4]}):
        tx = optax.sgd(RATE, momentum=0.9)
        one = jaxche.Trainer(loss_fn, tx, groups=GROUPS, group_merges=3, fleet=FLEET, **options)
        state = one.init(jnp.zeros(4)[:3])
        for counts in COUNTS:
            state, _ = one.round(state, data, counts)
        found.append(jax.device_get(one.params(state)))
    close(*found)


def test_measured_times_have_the_waits_apart_from_the_steps(make, data, thread_clock, monkeypatch):
    one = make(fleet=None, pace_ms=[4.0, 8.0, 4.0, 8.0], group_merges=3)
    state, _ = one.round(one.init(jnp.zeros(3)), data, (8, 4, 4, 2))
    merge = one._engine.merge
    monkeypatch.setattr(one._engine, "merge", lambda *given: thread_clock.sleep(0.02) or merge(*given))
    _, info = one.round(state, data, (8, 4, 4, 2))
    assert info.wall_ms == pytest.approx((32.0, 32.0, 16.0, 16.0))
    assert info.group_merges == 2
    assert info.group_ms == pytest.approx(5.0)
    assert info.sync_ms == pytest.approx(5.0 + 20.0)


def test_an_error_of_one_replica_is_raised_and_nobody_waits(make, data):
    one = make(fleet=None, group_merges=3)
    state, _ = one.round(one.init(jnp.zeros(3)), data, (6, 3, 6, 3))

    class Broken:
        def __len__(self):
            return len(data)

        def __getitem__(self, i):
            if i == 25:
                raise OSError("the file is gone")
            return data[i]

    with pytest.raises(OSError, match="the file is gone"):
        one.round(state, Broken(), (6, 3, 6, 3))
    after, _ = one.round(state, data, (6, 3, 6, 3))
    assert np.isfinite(one.params(after)).all()


def test_numbers_that_become_infinite_in_one_replica_are_found(made, data):
    one = made(group_merges=3)
    state = one.init(jnp.zeros(3))
    # Of the second replica, from which the first gets it.
    bad = [data[i] | ({"x": data[i]["x"] * np.inf} if i == 6 else {}) for i in range(40)]
    with pytest.raises(jaxche.NonFiniteLossError, match=r"its group \(0, 1\) did .* has infinity in .* of batch 6"):
        one.round(state, bad, (6, 3, 6, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": "host"}, r"groups='host' must be 'process', or lists .* write e.g. groups=\[\[0, 1\], \[2, 3\]\]"),
        ({"groups": [[0, 1], [1, 2]]}, "lists of different ranks from 0 to 3"),
        ({"groups": np.array([[0, 1], [1, 2]])}, "lists of different ranks from 0 to 3"),
        ({"groups": [[0, 4]]}, "lists of different ranks from 0 to 3"),
        ({"groups": [[0, 1.5]]}, "lists of different ranks"),
        ({"groups": []}, "lists of different ranks"),
        ({"replicas": None, "strategy": jaxche.FullShard(), "fleet": None}, "for three replicas or more: leave it out"),
        ({"groups": 2}, "lists of different ranks"),
        ({"groups": [[0, 1, 2, 3]]}, "is one group of all replicas, .* leave groups= out"),
        ({"policy": "sync"}, "write policy='cadence' and merge='steps'"),
        ({"policy": "auto"}, "write policy='cadence' and merge='steps'"),
        ({"merge": "fednova"}, "write policy='cadence' and merge='steps'"),
        ({"average": "gradients"}, "write policy='cadence' and merge='steps'"),
        ({"scaling": jaxche.AdaScale()}, "has no programs for scaling=; leave groups= out"),
        ({"group_merges": 0}, "group_merges=0 must be at least 1; write e.g. group_merges=8"),
        ({"group_merges": 2.5}, "group_merges=2.5 must be a whole number"),
        ({"group_merges": 4, "groups": None}, "group_merges=4 is of groups="),
    ],
)
def test_what_cannot_be_a_group_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_the_replicas_of_a_single_process_are_no_group_of_it(make):
    assert "groups" not in repr(make(groups="process"))
    assert "groups=((0, 1), (2, 3))" in repr(make())


def test_replicas_of_several_processes_are_no_group():
    averaging = Averaging(ApplyPolicy.CADENCE, "parameters", "steps", "local", None, None, "auto", False)
    homes = [SimpleNamespace(devices=np.array([SimpleNamespace(process_index=process)])) for process in (0, 0, 1)]
    assert checked_groups("process", None, averaging, homes).ranks == ((0, 1),)
    with pytest.raises(ValueError, match=r"replicas \(1, 2\) are in the processes \[0, 1\].*write groups='process'"):
        checked_groups([[1, 2]], None, averaging, homes)


def test_steps_on_parts_of_batches_have_no_merges_of_groups(make, data):
    one = make(ADAM, rows="speed")
    _, history = one.fit(one.init(jnp.zeros(3)), data, progress=False)
    assert {info.group_merges for info in history if info.shares} == {1}
    assert max(info.group_merges for info in history) > 1
