"""Merges that overlap the next round: against a slow twin, replayed, resumed, on both clocks, and what is refused."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.replicas import Carry, EarlyResult, LocalResult
from jaxche.replicas._opt_state import counts_of
from jaxche.replicas._table import HOST_COLUMNS
from jaxche.training._plan import GivenRound

COUNTS = [(4, 2), (6, 3), (1, 1), (5, 0), (8, 4)]
FLEET = jaxche.VirtualFleet([20, 50], sync_ms=100.0)
RATE = 0.05
ADAM = optax.adam(RATE)


def loss_fn(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def stateful_loss(w, batch, model_state):
    state = {"mean": 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0), "seen": model_state["seen"] + 1}
    return loss_fn(w, batch), ({}, state)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5], np.float32) + 0.1 * rng.normal(size=400).astype(np.float32)
    return jaxche.Batches({"x": x, "y": y}, batch_size=4)


@pytest.fixture(scope="module")
def make(devices):
    def trainer(tx=None, fleet=FLEET, loss=loss_fn, **options):
        options = {"overlap": 0.5, "replicas": devices[:2]} | options
        return jaxche.Trainer(loss, tx or optax.sgd(RATE), fleet=fleet, **options)

    return trainer


@pytest.fixture(scope="module")
def made(make):
    """The same, made once for equal arguments: its programs stay compiled."""
    return functools.cache(make)


def rounds(trainer, state, data, counts=COUNTS):
    infos = []
    for one in counts:
        state, info = trainer.round(state, data, one)
        infos.append(info)
    return state, infos


def twin(data, part, merge="steps", outer=None):
    """The parameters after each merge, in NumPy: replicas correct themselves after a part of their next steps."""
    rows = [data[i] for i in range(sum(map(sum, COUNTS)))]
    common, velocity, cursor, merged = np.zeros(3), np.zeros(3), 0, []
    x, landing = [np.zeros(3), np.zeros(3)], None
    for counts in COUNTS:
        for i, n in enumerate(counts):
            start, k = x[i].copy(), int(part * n)
            for step in range(n + 1):
                if step == k and landing is not None:
                    x[i] = x[i] + landing - start
                if step < n:
                    batch = rows[cursor + step]
                    error = batch["x"].astype(float) @ x[i] - batch["y"]
                    x[i] = x[i] - RATE * 2 * batch["x"].T.astype(float) @ error / len(error)
            cursor += n
        common = common if landing is None else landing
        weights, alpha = jaxche.merge_weights(merge, counts)
        step = alpha * sum(w * (common - one) for w, one in zip(weights, x, strict=True))
        if outer:
            velocity = outer["momentum"] * velocity + step
            step = outer["learning_rate"] * velocity
        landing = common - step
        merged.append(landing)
    return merged


@pytest.mark.parametrize(
    ("part", "options"),
    [
        (0.5, {}),
        (0.25, {"merge": "fednova"}),
        (0.5, {"merge": "batch", "outer": {"learning_rate": 0.7, "momentum": 0.9}}),
    ],
)
def test_corrections_are_those_of_a_slow_twin(make, data, close, part, options):
    wanted = twin(data, part, **options)
    outer = {"outer": optax.sgd(**options["outer"])} if "outer" in options else {}
    one = make(overlap=part, **options | outer)
    state = one.init(jnp.zeros(3))
    for counts, params in zip(COUNTS, wanted, strict=True):
        state, info = one.round(state, data, counts)
        close(one.params(state), params, rtol=1e-4, atol=1e-5)
        assert info.counts == counts
    assert info.overlapped == tuple(int(part * n) for n in COUNTS[-1])


def test_the_first_round_has_nothing_to_correct_and_drift_is_of_the_merge_that_landed(made, data):
    one, waiting = made(), made(overlap=0.0)
    state, infos = rounds(one, one.init(jnp.zeros(3)), data)
    _, blocking = rounds(waiting, waiting.init(jnp.zeros(3)), data)
    assert [info.overlapped for info in infos] == [(), (3, 1), (0, 0), (2, 0), (4, 2)]
    assert np.isnan(infos[0].drift)
    assert infos[1].drift == pytest.approx(blocking[0].drift, rel=1e-5)
    assert state.in_flight is not None
    assert state.merged().in_flight is None


def test_the_table_takes_one_trip_over_the_link(make, data):
    """An all-reduce of four replicas takes six, which nothing hides."""
    one = make(optax.adam(optax.linear_schedule(RATE, 0.0, 100)))
    state, _ = one.round(one.init(jnp.zeros(3)), data, (1, 1))
    merge, replicas = one._engine._merge, one._engine._replicas
    carries = [replica.idle(local).carry for replica, local in zip(replicas, state.local_states, strict=True)]
    measured = [{"sums": c.sums, "not_finite": c.not_finite, "counts": counts_of(c.opt_state)} for c in carries]
    before = [{"counts": local.counts} for local in state.local_states]
    mesh = one._engine._replica_mesh
    arguments = mesh.stack(before), mesh.stack(measured), mesh.rows(np.zeros((2, len(HOST_COLUMNS)), np.float32))
    text = merge._numbers.lower(*arguments).as_text()
    found = [text.count(f"stablehlo.{name}") for name in ("all_to_all", "all_reduce", "all_gather")]
    assert found == [1, 0, 0]


def test_a_thread_merges_beside_steps_what_a_virtual_fleet_merges_at_once(make, made, data, same):
    one, real = made(ADAM), make(ADAM, fleet=None)
    after, _ = rounds(one, one.init(jnp.zeros(3)), data)
    again, infos = rounds(real, real.init(jnp.zeros(3)), data)
    same(after.merged().local_states, again.merged().local_states)
    assert all(info.hidden_ms >= 0 and info.sync_ms >= 0 for info in infos)


def test_codes_of_few_bytes_are_taken_in_too(make, made, data, same, close):
    plain, one = made(ADAM), make(ADAM, wire="int8")
    exact, _ = rounds(plain, plain.init(jnp.zeros(3)), data)
    state, infos = rounds(one, one.init(jnp.zeros(3)), data)
    close(one.params(state), plain.params(exact), rtol=0.05, atol=0.02)
    assert infos[1].merge_bytes > 0
    other = make(ADAM, wire="int8", fleet=None)
    again, _ = other.replay(other.init(jnp.zeros(3)), data, infos)
    same(again.local_states, state.merged().local_states)


def test_moments_stay_and_schedules_count_all_replicas(make, data):
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda count: -RATE / (1 + count)))
    one = make(tx)
    state = one.init(jnp.zeros(3))
    for counts in COUNTS[:3]:
        before = state
        state, _ = one.round(state, data, counts)
        for local in (*state.local_states, *state.merged().local_states):
            assert int(local.opt_state[1].count[0]) == state.steps
    own = [int(local.opt_state[0].count[0]) for local in state.local_states]
    assert own == [sum(one) for one in zip(*COUNTS[:3], strict=True)]
    assert before.steps == 15


def test_statistics_are_merged_and_other_states_stay(make, data):
    one = make(loss=stateful_loss)
    state = one.init(jnp.zeros(3), {"mean": jnp.zeros(3), "seen": jnp.int32(0)})
    state, _ = rounds(one, state, data, COUNTS[:2])
    merged = [local.model_state for local in state.merged().local_states]
    assert np.array_equal(merged[0]["mean"], merged[1]["mean"])
    assert [int(one["seen"][0]) for one in merged] == [10, 5]


def test_runs_replay_bit_for_bit(make, made, data, same):
    one = made(ADAM)
    state, history = one.fit(one.init(jnp.zeros(3)), data, epochs=2, progress=False, validation=data, eval_every=60)
    assert state.in_flight is None
    assert any(info.overlapped for info in history)
    assert "wire='float32', beside the first 50% of the next round; merges take" in one.explain(state)
    assert one.explain(state).endswith("% of the time: wire='int4' sends about 1/8 of the bytes")
    record = jaxche.History.from_json(history.to_json())
    other = make(ADAM, fleet=None)
    again, repeated = other.replay(other.init(jnp.zeros(3)), data, record)
    same(again.local_states, state.local_states)
    assert [info.overlapped for info in repeated] == [info.overlapped for info in history]
    for overlap in (0.0, 0.25):
        with pytest.raises(ValueError, match=rf"with overlap=0\.5 .* has overlap={overlap}; .*, overlap=0\.5\)"):
            make(ADAM, overlap=overlap).replay(one.init(jnp.zeros(3)), data, record)


@pytest.mark.slow
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(make, made, data, same, interrupted):
    trainers = iter([made(ADAM), make(ADAM), made(ADAM)])

    def fit(**options):
        one = next(trainers)
        return one.fit(one.init(jnp.zeros(3)), data, epochs=3, checkpoint_every=40, progress=False, **options)

    (resumed, told), (whole, history) = interrupted(fit, round=12)
    assert [info.counts for info in told][-3:] == [info.counts for info in history][-3:]
    assert resumed.round == whole.round
    same(resumed.local_states, whole.local_states)
    # A round after a checkpoint begins from what was saved.
    assert sum(not info.overlapped for info in history) > 2


@pytest.mark.parametrize(
    ("every", "options", "is_warned"), [(1, {}, True), (1, {"checkpoint_every": 40}, False), (None, {}, False)]
)
def test_checkpoints_after_every_round_leave_nothing_to_overlap(
    made, data, tmp_path, caplog, every, options, is_warned
):
    one, checkpoints = made(), jaxche.Checkpoints(tmp_path, every=every)
    with caplog.at_level("WARNING", "jaxche"):
        _, history = one.fit(one.init(jnp.zeros(3)), data, progress=False, checkpoints=checkpoints, **options)
    assert any(info.overlapped for info in history) is not is_warned
    assert ("write trainer.fit(..., checkpoint_every=" in caplog.text) is is_warned


@pytest.mark.parametrize("fleet", [jaxche.VirtualFleet([20, 40], sync_ms=30.0), None], ids=["virtual", "measured"])
def test_a_merge_that_was_waited_for_is_reported_as_such(make, data, fleet):
    one = make(fleet=fleet)
    state, _ = rounds(one, one.init(jnp.zeros(3)), data, [(4, 2)] * 2)
    assert state.merge_ms == 0.0
    merged = state.merged()
    took_ms = state.in_flight.duration_ms
    assert took_ms == 30.0 if fleet else took_ms > 0
    assert (merged.sync_ms, merged.merge_ms) == (state.sync_ms + took_ms, took_ms)
    assert merged.clock_ms - state.clock_ms == merged.clock_merge_ms - state.clock_merge_ms == (30.0 if fleet else 0.0)


@pytest.mark.slow
def test_evaluation_sees_the_merged_parameters_and_changes_nothing(made, data, same, close):
    one = made()
    state, _ = rounds(one, one.init(jnp.zeros(3)), data)
    found = one.evaluate(state, data)
    w = np.asarray(one.params(state))
    batches = [data[i] for i in range(len(data))]
    close(found["loss"], np.mean([np.mean((b["x"] @ w - b["y"]) ** 2) for b in batches]), rtol=1e-4)
    assert np.array_equal(state.params[0], w)
    assert np.array_equal(state.params[1], w)
    assert state.in_flight is not None
    followed, _ = one.round(state, data, (2, 2))
    other, _ = rounds(one, one.init(jnp.zeros(3)), data)
    same(one.params(followed), one.params(one.round(other, data, (2, 2))[0]))


def test_the_fleets_clock_has_the_merge_in_flight_at_the_end(made, data):
    one = made()
    state, infos = rounds(one, one.init(jnp.zeros(3)), data)
    walls = sum(max(info.wall_ms) for info in infos)
    assert [info.sync_ms for info in infos] == pytest.approx([0.0, 50.0, 100.0, 60.0, 0.0])
    assert [info.hidden_ms for info in infos] == pytest.approx([0.0, 50.0, 0.0, 40.0, 100.0])
    assert state.clock_ms == pytest.approx(walls + 210.0)
    assert state.merged().clock_ms == pytest.approx(walls + 310.0)


def test_nothing_runs_beside_an_exchange_before_one_is_measured(make, data):
    one = make(fleet=replace(FLEET, exchange_ms=7.0))
    state, infos = rounds(one, one.init(jnp.zeros(3)), data)
    walls = sum(max(info.wall_ms) for info in infos)
    assert [info.sync_ms for info in infos] == pytest.approx([7.0, 57.0, 107.0, 60.0, 0.0])
    assert [info.hidden_ms for info in infos] == pytest.approx([0.0, 50.0, 0.0, 40.0, 100.0])
    assert state.clock_ms == pytest.approx(walls + 210.0 + 3 * 7.0)
    assert state.che.sync_samples == pytest.approx([100.0] * 3)  # hidden and waited for, without the exchange
    state, _ = one.fit(state, data, max_steps=100, progress=False)
    assert state.che.exchange_samples == pytest.approx([7.0] * 3)
    assert state.che.sync_samples == pytest.approx([100.0] * 3)
    assert "of the next round, and measurements 7 ms beside the last steps of this one" in one.explain(state)


EXCHANGE = replace(FLEET, sync_ms=60.0, exchange_ms=25.0)


@pytest.fixture(scope="module")
def exchanged(made, data):
    """A run whose replicas exchange their measurements beside their last steps: the trainer, states and rounds."""
    one = made(ADAM, fleet=EXCHANGE, che=jaxche.ElChe(2, 3, tuner="progress"))
    state, found = one.init(jnp.zeros(3)), []
    for _ in range(6):
        state, info = one.round(state, data)
        found.append((state, info))
    return one, found


def test_measurements_are_exchanged_beside_the_last_steps(exchanged):
    """Two steps of 20 ms, or one of 50 ms, take 1.25 times as long as the exchange, or longer."""
    _, found = exchanged
    sent = [info.sent_after for _, info in found]
    # In the first two rounds no exchange has been measured, or no merge was in flight.
    assert sent[:2] == [(), ()]
    for (_, info), after in list(zip(found, sent, strict=True))[2:]:
        fast, slow = info.counts
        assert after == (fast - 2, slow - 1)
        assert (info.sync_ms, info.hidden_ms) == (0.0, 60.0)
        assert info.clock_ms - found[info.round - 1][1].clock_ms == max(info.wall_ms)
        assert sum(info.rows) == 4 * sum(info.counts)
    assert found[-1][0].che.exchange_samples == (25.0,) * 3
    assert found[1][1].sync_ms >= 25.0


def test_the_table_has_the_losses_that_were_sent(exchanged, data):
    """Those of the last steps come with the next table."""
    one, found = exchanged
    for before, (state, info) in itertools.pairwise(found[1:]):
        losses = np.array([np.asarray(sums)[0, 1] for sums in state.unsent.sums])
        rows = np.array([np.asarray(sums)[0, 0] for sums in state.unsent.sums])
        assert rows.tolist() == [4 * (n - sent) for n, sent in zip(info.counts, info.sent_after, strict=True)]
        held = before[0].unsent
        came = [0, 0] if held is None else [np.asarray(sums)[0, 0] for sums in held.sums]
        assert info.loss_weight == sum(4 * sent for sent in info.sent_after) + sum(came)
        assert np.isfinite(losses).all()
    last, info = found[-1]
    after, told = one._round(last, data, given=GivenRound((3, 1), sent_after=()))
    assert (told.sent_after, after.unsent) == ((), None)
    assert told.loss_weight == 4 * 4 + sum(float(np.asarray(sums)[0, 0]) for sums in last.unsent.sums)
    assert last.merged().unsent is None


def test_all_losses_are_in_the_history(make, data):
    """The mean of the rounds, by their weights, is that of all batches but those before the end of the run."""

    def total(fleet):
        one = make(optax.sgd(0.0), fleet=fleet, che=jaxche.ElChe(2, 3, tuner="progress"))
        _, history = one.fit(one.init(jnp.ones(3)), data, epochs=2, progress=False)
        assert any(info.sent_after for info in history) is (fleet is EXCHANGE)
        return sum(info.loss * info.loss_weight for info in history), sum(info.loss_weight for info in history)

    found = total(EXCHANGE)
    assert found == pytest.approx(total(replace(EXCHANGE, exchange_ms=0.0)), rel=1e-5)
    assert found[1] == 800


def test_the_exchange_beside_steps_changes_no_parameter(make, data, same):
    """Given equal counts, also with the counts of a schedule, and a weight of the merge that follows from examples."""
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda count: -RATE / (1 + count)))
    one = make(tx, fleet=EXCHANGE, merge="batch", che=jaxche.ElChe(2, 3, tuner="progress"))
    state, history = one.fit(one.init(jnp.zeros(3)), data, epochs=2, progress=False)
    assert any(info.sent_after for info in history)
    assert {int(local.opt_state[1].count[0]) for local in state.local_states} == {200}
    plain = make(tx, fleet=EXCHANGE, merge="batch")
    record = [replace(info, sent_after=()) for info in history]
    again, told = plain.replay(plain.init(jnp.zeros(3)), data, record)
    same(again.local_states, state.local_states)
    np.testing.assert_allclose([info.weights for info in told], [info.weights for info in history], rtol=1e-6)
    assert [info.losses for info in told] != [info.losses for info in history]


@pytest.mark.parametrize("fleet", [EXCHANGE, None], ids=["virtual", "measured"])
def test_a_run_that_sends_early_replays_with_its_losses(make, data, same, fleet):
    che = jaxche.ElChe(2, 3, tuner="progress")
    one = make(ADAM, fleet=EXCHANGE, che=che)
    state, history = one.fit(one.init(jnp.zeros(3)), data, epochs=2, progress=False)
    assert any(info.sent_after for info in history)
    other = make(ADAM, fleet=fleet, che=che)
    record = jaxche.History.from_json(history.to_json())
    again, told = other.replay(other.init(jnp.zeros(3)), data, record)
    same(again.local_states, state.local_states)
    assert [info.losses for info in told] == [info.losses for info in history]
    assert [info.sent_after for info in told] == [info.sent_after for info in history]


def test_numbers_that_become_infinite_after_the_table_was_sent_are_found(exchanged, data):
    one, found = exchanged
    info = found[-1][1]
    given = GivenRound.of(info)
    start = info.cursor + info.counts[0]
    bad = start + info.sent_after[1]  # in the last step of the slow replica
    before = found[-2][0]
    with pytest.raises(jaxche.NonFiniteLossError, match="rank 1 became NaN") as caught:
        one._round(before, spoilt(data, bad), given=given)
    assert caught.value.rank == 1
    assert (0, bad) in caught.value.batches
    assert np.isfinite(one.params(caught.value.state)).all()


def refuse(x):
    if not np.isfinite(x).all():
        raise ValueError("not this batch")
    return np.float32(0)


def refusing_loss(w, batch):
    told = jax.pure_callback(refuse, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(batch["x"]))
    return loss_fn(w, batch) + told


@pytest.fixture
def with_peers(exchanged, monkeypatch):
    """The trainer as in a run of several processes, and the state before its last round, with that round."""
    one, found = exchanged
    monkeypatch.setattr(one, "_has_peers", True)
    return one, found[-2][0], found[-1][1]


def spoilt(data, *indices):
    """The same batches, some of which are not finite."""
    return [
        {"x": batch["x"] * np.inf, "y": batch["y"]} if i in indices else batch
        for i, batch in enumerate(data[i] for i in range(len(data)))
    ]


def test_processes_find_in_the_next_round_what_failed_after_the_table_was_sent(with_peers, data):
    one, before, info = with_peers
    bad = info.cursor + info.counts[0] + info.sent_after[1]
    after, told = one._round(before, spoilt(data, bad), given=GivenRound.of(info))
    assert np.isfinite(told.loss)
    assert [type(error) for error in after.unsent.errors] == [type(None), jaxche.NonFiniteLossError]
    assert np.isfinite(one.params(after)).all()  # the failed replica merged nothing
    with pytest.raises(jaxche.NonFiniteLossError, match="rank 1 became") as caught:
        one.round(after, data)
    assert caught.value.batches[0] == (0, bad)
    assert np.isfinite(one.params(caught.value.state)).all()
    # Where the loss is finite and the parameters are not, only the flag tells.
    finite = after.unsent._replace(sums=tuple(map(jnp.zeros_like, after.unsent.sums)))
    with pytest.raises(jaxche.NonFiniteLossError, match="a parameter or a state of rank 1"):
        one.round(replace(after, unsent=finite), data)


def test_the_last_round_of_a_fit_fails_by_what_came_after_its_table(with_peers, data):
    one, before, info = with_peers
    bad = info.cursor + info.counts[0] + info.sent_after[1]
    seconds = 1e-3  # one round, which is not planned as the last one
    with pytest.raises(jaxche.NonFiniteLossError, match="rank 1 became"):
        one.fit(before, spoilt(data, bad), max_time=seconds, progress=False)
    state, _ = one.fit(before, data, max_time=seconds, progress=False)
    assert (state.round, state.unsent) == (info.round + 1, None)


def test_a_step_that_fails_after_the_table_was_sent_fails_the_next_round(make, data, monkeypatch):
    one, infos = make(fleet=EXCHANGE, loss=refusing_loss), []
    states = [one.init(jnp.zeros(3))]
    for _ in range(4):
        state, info = one.round(states[-1], data)
        states.append(state)
        infos.append(info)
    info = infos[-1]
    bad = info.cursor + info.counts[0] + info.sent_after[1]
    with pytest.raises(Exception, match="not this batch"):
        one._round(states[-2], spoilt(data, bad), given=GivenRound.of(info))
    monkeypatch.setattr(one, "_has_peers", True)
    after, _ = one._round(states[-2], spoilt(data, bad), given=GivenRound.of(info))
    quiet, failed = after.unsent.errors
    assert quiet is None
    assert not isinstance(failed, jaxche.NonFiniteLossError)
    with pytest.raises(Exception, match="not this batch"):
        one.round(after, data)


def test_a_replica_without_steps_has_no_weight_by_what_was_unsent(make, data, same):
    one = make(fleet=EXCHANGE, merge="batch", che=jaxche.ElChe(2, 3, tuner="progress"))
    state = one.init(jnp.zeros(3))
    for _ in range(4):
        state, _ = one.round(state, data)
    assert min(float(np.asarray(sums)[0, 0]) for sums in state.unsent.sums) > 0
    (after, _), (other, _) = (one.round(each, data, (4, 0)) for each in (state, replace(state, unsent=None)))
    same(after.merged().local_states, other.merged().local_states)


def test_a_stream_that_was_left_hides_no_step_that_failed_before(make, data, monkeypatch):
    """Batches of a generator that were read ahead are lost when a step fails."""
    one = make(fleet=EXCHANGE, loss=refusing_loss)

    def read(bad):
        batches = spoilt(data, bad)
        stream, state, infos = jaxche.Stream(batch for batch in batches), one.init(jnp.zeros(3)), []
        for _ in range(4):
            state, info = one.round(state, stream)
            infos.append(info)
        return stream, state, infos

    _, _, infos = read(None)
    assert all(sent < n for sent, n in zip(infos[-1].sent_after, infos[-1].counts, strict=True))
    monkeypatch.setattr(one, "_has_peers", True)
    stream, state, _ = read(sum(sum(info.counts) for info in infos) - 1)
    assert "not this batch" in str(state.unsent.error)
    with pytest.raises(Exception, match="not this batch"):
        one.round(state, stream)


def test_no_checkpoint_is_without_the_steps_of_a_replica_that_failed(with_peers, data, tmp_path):
    """A run that is resumed from it would never take them."""
    one, before, info = with_peers
    bad = info.cursor + info.counts[0] + info.sent_after[1]
    save = {"checkpoints": tmp_path, "checkpoint_every": jaxche.Every(steps=1)}
    with pytest.raises(jaxche.NonFiniteLossError, match="rank 1 became"):
        one.fit(before, spoilt(data, bad), epochs=1, progress=False, **save)
    assert not [path for path in tmp_path.iterdir() if path.name.isdecimal()]
    state, _ = one.fit(before, data, max_time=1e-3, progress=False, **save)
    assert [path for path in tmp_path.iterdir() if path.name == str(state.round)]


@pytest.mark.parametrize("weighted", [False, True], ids=["other columns", "as many columns"])
def test_what_was_unsent_is_left_out_of_the_table_of_another_loss(make, data, weighted):
    def told(w, batch):
        loss = loss_fn(w, batch)
        return loss, {"loss": loss}

    def other(w, batch):
        loss = loss_fn(w, batch)
        return jaxche.Weighted(2 * loss, 2.0) if weighted else loss

    first, then = (make(fleet=EXCHANGE, loss=loss, che=jaxche.ElChe(2, 3, tuner="progress")) for loss in (told, other))
    state = first.init(jnp.zeros(3))
    for _ in range(4):
        state, _ = first.round(state, data)
    assert state.unsent is not None
    given = GivenRound((4, 2), sent_after=())
    wanted, info = then._round(replace(state, unsent=None), data, given=given)
    after, found = then._round(state, data, given=given)
    assert (found.losses, found.loss_weight) == (info.losses, info.loss_weight)
    np.testing.assert_array_equal(then.params(after), then.params(wanted))


def test_streams_are_read_before_their_last_steps(make, data):
    """With at most one batch ready for each replica, which wait for each other."""
    source = jaxche.Stream(lambda epoch: (data[i] for i in range(len(data))), prefetch=1)
    one = make(optax.sgd(0.0), fleet=EXCHANGE, che=jaxche.ElChe(2, 3, tuner="progress"))
    state, history = one.fit(one.init(jnp.ones(3)), source, epochs=2, progress=False)
    assert any(info.sent_after for info in history)
    assert sum(info.loss_weight for info in history) == sum(info.examples for info in history) == 800
    assert (state.epoch, state.steps) == (2, 200)


def test_an_early_result_has_the_time_of_all_steps():
    class Left:
        position, steps = 3, [0, 0, 0, 0, 0]

        def peek(self, position):
            return [np.zeros((4, 1))] if position == 3 else []

    early, begin = EarlyResult(3), LocalResult(None, 3, 60.0, rows=12)
    sums = jnp.ones((1, 2))
    carry = early.send(Carry(None, None, sums, opt_state=[]), Left(), begin)
    found = early.result()
    assert (found.steps, found.rows, found.wall_ms) == (4, 16, 80.0)
    assert carry.sums.tolist() == [[0.0, 0.0]]
    assert found.carry.sums.tolist() == [[1.0, 1.0]]


def test_the_exchange_is_measured_beside_the_merge(make, data):
    one = make(fleet=None)
    state, _ = one.round(one.init(jnp.zeros(3)), data)
    assert 0 < state.exchange_ms <= state.sync_ms
    assert state.merge_ms == 0.0
    state, _ = one.round(state, data)
    # The exchange of the first round, and its merge, which ended in the second.
    assert (len(state.che.exchange_samples), len(state.che.sync_samples)) == (1, 1)
    took_ms = state.in_flight.duration_ms
    merged, _ = one.round(state.merged(), data)
    assert merged.che.sync_samples[0] == pytest.approx(took_ms, rel=1e-5)


def test_the_cadence_makes_rounds_as_long_as_hides_the_merge(make, data):
    che = jaxche.ElChe(2, 1, 0.05, tuner="steady")
    one = make(che=che)
    state, history = one.fit(one.init(jnp.zeros(3)), data, epochs=6, progress=False)
    assert state.che.overlap == 0.5
    # Of 2 and 5 batches each 100 ms long, two hide a merge of 100 ms in their first half.
    assert history[-3].counts == (10, 4)
    assert history[-3].sync_ms == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": 0.7}, r"overlap=0.7 is the part"),
        ({"overlap": -0.1}, r"overlap=-0.1 is the part"),
        ({"overlap": True}, r"write overlap=0.5"),
        ({"overlap": "yes"}, r"overlap='yes' is the part"),
        ({"overlap": False}, r"write overlap=0.5"),
        ({"policy": "sync"}, r"write policy='cadence'"),
        ({"policy": "async"}, r"write policy='cadence'"),
        ({"average": "gradients"}, r"write policy='cadence', average='parameters'"),
        ({"opt_state": "average"}, r"write opt_state='local'"),
        ({"opt_state": "reset"}, r"'reset' changes them .* write opt_state='local'"),
        ({"backend": "device"}, r"leave backend= out"),
        ({"scaling": jaxche.AdaScale()}, r"leave one of them out"),
    ],
)
def test_what_cannot_be_corrected_later_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_islands_are_refused(make, devices):
    strategy = jaxche.FullShard()
    islands = [strategy.mesh(devices[:2]), strategy.mesh(devices[2:4])]
    with pytest.raises(ValueError, match="replicas of one device"):
        make(fleet=None, replicas=islands, strategy=strategy)


def test_merges_beside_steps_have_devices_of_their_own(make, data, devices, monkeypatch):
    for replicas in (devices[:2], devices):
        counts = [(2,) + (1,) * (len(replicas) - 1)] * 3
        fleet = replace(FLEET, ms_per_batch=(20.0,) * len(replicas))
        real, virtual = make(fleet=None, replicas=replicas), make(fleet=fleet, replicas=replicas)
        (after, _), (expected, _) = (rounds(one, one.init(jnp.zeros(3)), data, counts) for one in (real, virtual))
        merging = set(real._engine._replica_mesh.mesh.devices.flat)
        assert len(merging) == len(replicas)
        assert not merging & set(replicas)
        np.testing.assert_array_equal(real.params(after.merged()), virtual.params(expected.merged()))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"jax_num_cpu_devices', 16"):
        make(fleet=None, replicas=devices)


def test_numbers_that_become_infinite_end_the_run(make, made, data):
    one = made()
    state, _ = rounds(one, one.init(jnp.zeros(3)), data, COUNTS[:2])
    bad = [{"x": batch["x"] * np.inf, "y": batch["y"]} for batch in (data[i] for i in range(40))]
    with pytest.raises(jaxche.NonFiniteLossError) as caught:
        one.round(state, bad, (2, 1))
    assert np.isfinite(one.params(caught.value.state)).all()
    exploding = make(outer=optax.sgd(1e38))
    after, _ = exploding.round(exploding.init(jnp.ones(3) * 1e3), data, (4, 2))
    with pytest.raises(FloatingPointError, match="outer="):
        after.merged()
    with pytest.raises(jaxche.NonFiniteLossError):
        exploding.round(after, data, (4, 2))


def test_one_merge_is_in_flight_also_when_a_state_is_dropped(make, made, data, same):
    one = make(fleet=None)
    state = one.init(jnp.zeros(3))
    for _ in range(3):
        kept, _ = one.round(state, data, (4, 2))
    after, _ = one.round(kept, data, (6, 3))
    other = made()
    wanted, _ = rounds(other, other.init(jnp.zeros(3)), data, [(4, 2), (6, 3)])
    same(one.params(after), other.params(wanted))


def test_a_trainer_without_overlap_waits_for_the_merge_of_another(make, made, data, same):
    state, _ = rounds(made(), made().init(jnp.zeros(3)), data, COUNTS[:2])
    assert state.in_flight is not None
    plain = make(overlap=0.0, opt_state="local")
    after, info = plain.round(state, data, COUNTS[2])
    expected, wanted = plain.round(state.merged(), data, COUNTS[2])
    same(after.params, expected.params)
    assert (info.overlapped, info.clock_ms, after.in_flight) == ((), wanted.clock_ms, None)


def test_a_single_replica_has_no_merge(make, data, devices):
    one = make(fleet=None, replicas=devices[:1])
    state, info = one.round(one.init(jnp.zeros(3)), data)
    assert state.in_flight is None
    assert info.overlapped == ()


def test_it_shows_itself(make):
    assert "overlap=0.5" in repr(make())
    assert "overlap=0.5" in repr(make(overlap=np.float32(0.5)))
    assert "overlap" not in repr(make(overlap=0.0))
    assert jax.tree.leaves(make().init(jnp.zeros(3)).local_states[0].params)[0].shape == (1, 3)
