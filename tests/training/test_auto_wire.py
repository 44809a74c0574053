"""wire="auto": float32 until merges are dear, then codes if they are faster; replayed, resumed, and what is refused."""

import dataclasses
import logging
import re

import jax.numpy as jnp
import optax
import pytest

import jaxche
from jaxche import ApplyPolicy
from jaxche.cadence import Choice, WireChoice
from jaxche.training import _arguments, _rounds

ROUNDS = [(2, 2)] * 6
LOCKSTEP = jaxche.ElChe(2, 2, 0.01, max_anchor=2, max_batch_diff=0, tuner="steady")


@pytest.fixture
def trainer(problem, devices, monkeypatch, patient):
    """Makes trainers that find merges dear once two of them are measured; one with codes takes ``coded_ms``."""

    def share(che):
        return 0.3 if len(che.sync_samples) > 1 else 0.0

    def choose(che, ms):
        return WireChoice("int4" if ms < 70 else "float32", f"{ms} ms")

    monkeypatch.setattr(_rounds, "choose_wire", choose)

    def make(coded_ms=1.0, wire="auto", dear=True, **options):
        options = {"replicas": devices[:2], "che": LOCKSTEP} | options
        one = jaxche.Trainer(problem.loss, optax.adam(0.05), wire=wire, **options)
        monkeypatch.setattr(one._engine, "merge_ms", lambda local_states: coded_ms)
        monkeypatch.setattr(_rounds, "merge_share", share if dear else lambda che: 0.0)
        return one

    return make


def run(trainer, state, data, counts=ROUNDS):
    infos = []
    for one in counts:
        state, info = trainer.round(state, data, one)
        infos.append(info)
    return state, infos


@pytest.mark.slow
def test_it_takes_codes_once_merges_are_dear_and_what_rounding_leaves_is_kept(problem, trainer, same, caplog):
    one = trainer()
    with caplog.at_level(logging.INFO, "jaxche"):
        state, infos = run(one, one.init(problem.params), problem.data)
    wires = [info.wire for info in infos]
    changed = wires.index("int4")
    assert wires == ["float32"] * changed + ["int4"] * (len(ROUNDS) - changed)
    assert 2 < changed < 5
    assert len({info.merge_bytes for info in infos}) == 2
    assert "wire='int4'; 1.0 ms" in one.explain(state)
    assert [line.message for line in caplog.records if line.message == "1.0 ms"] == ["1.0 ms"]
    # Until then it is float32 bit for bit, and from there int4 with nothing left to send.
    exact = trainer(wire="float32")
    before, _ = run(exact, exact.init(problem.params), problem.data, ROUNDS[:changed])
    start, _ = run(one, one.init(problem.params), problem.data, ())
    start, _ = one.replay(start, problem.data, infos[:changed])
    same(before.params, start.params)
    coded = trainer(wire="int4")
    fresh = [
        local._replace(residual=zero.residual)
        for local, zero in zip(before.local_states, coded.init(problem.params).local_states, strict=True)
    ]
    rest, _ = run(coded, dataclasses.replace(before, local_states=tuple(fresh)), problem.data, ROUNDS[changed:])
    same(rest.local_states, state.local_states)


def test_codes_that_are_not_faster_are_left_alone_for_good(problem, trainer, same):
    one, exact = trainer(coded_ms=100.0), trainer(wire="float32")
    state, infos = run(one, one.init(problem.params), problem.data)
    assert {info.wire for info in infos} == {"float32"}
    assert state.wire.reason == "100.0 ms"
    assert len(one._engine._merges) == 2
    wanted, _ = run(exact, exact.init(problem.params), problem.data)
    same(wanted.params, state.params)


def test_cheap_merges_stay_in_float32_and_compile_nothing_more(problem, trainer):
    one = trainer(dear=False)
    state, infos = run(one, one.init(problem.params), problem.data)
    assert {info.wire for info in infos} == {"float32"}
    assert state.wire == WireChoice()
    assert list(one._engine._merges) == ["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_runs_replay_and_resume_bit_for_bit(problem, trainer, same, tmp_path, overlap):
    one, other = trainer(overlap=overlap), trainer(overlap=overlap)
    saves = {"epochs": 4, "progress": False, "checkpoints": jaxche.training.Checkpoints(tmp_path, every=1)}
    whole, history = one.fit(one.init(problem.params), problem.data, **saves)
    wires = [info.wire for info in history]
    assert wires[0] == "float32"
    assert wires[-1] == "int4"
    record = jaxche.History.from_json(history.to_json())
    again, repeated = other.replay(other.init(problem.params), problem.data, record)
    same(again.merged().local_states, whole.merged().local_states)
    assert [info.wire for info in repeated] == wires
    # A record of the first rounds, and the state after them, go on as the run did.
    middle = len(history) - 1
    part, _ = other.replay(other.init(problem.params), problem.data, record[:middle])
    rest, _ = other.replay(part, problem.data, record[middle:])
    same(rest.merged().local_states, whole.merged().local_states)
    # The choice and what was not sent are in a checkpoint; a trainer that has compiled nothing takes them from there.
    new = trainer(overlap=overlap)
    restored, _ = new.fit(new.init(problem.params), problem.data, **saves)
    assert restored.wire == whole.wire
    same(restored.local_states, whole.local_states)
    after, _ = run(new, restored, problem.data, [(1, 1)])
    wanted, _ = run(one, whole, problem.data, [(1, 1)])
    same(after.merged().local_states, wanted.merged().local_states)


def test_a_replay_under_another_wire_is_refused(problem, trainer):
    recorded = trainer(wire="int4")
    _, infos = run(recorded, recorded.init(problem.params), problem.data, ROUNDS[:2])
    for wire in ("float32", "int8"):
        other = trainer(wire=wire)
        with pytest.raises(ValueError, match=rf"recorded with wire='int4' in round 0, .*wire='{wire}'.*wire='int4'\)"):
            other.replay(other.init(problem.params), problem.data, infos)
    one = trainer()
    _, mixed = run(one, one.init(problem.params), problem.data)
    with pytest.raises(ValueError, match=r"write jaxche.Trainer\(..., wire='auto'\)"):
        recorded.replay(recorded.init(problem.params), problem.data, mixed)
    unknown = [dataclasses.replace(info, wire="") for info in infos]
    recorded.replay(recorded.init(problem.params), problem.data, unknown)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fleet": jaxche.VirtualFleet([20, 50])}, "on the clock of a fleet= without link_mbit= they cost the same"),
        ({"che": jaxche.ElChe(2, 10)}, "tuner='seed' does not keep"),
        ({"policy": "sync"}, "sums gradients in float32"),
    ],
)
def test_what_cannot_choose_is_refused(devices, options, reason):
    with pytest.raises(ValueError, match=rf"wire='auto'.*{reason}"):
        jaxche.Trainer(lambda w, x: jnp.mean(w * x), optax.sgd(0.1), replicas=devices[:2], wire="auto", **options)


@pytest.mark.slow
def test_advice_names_what_would_make_dear_merges_cheaper(problem, devices):
    wire, overlap = "wire='int4' sends about 1/8 of the bytes", "overlap=0.5 hides up to half a round"
    short = jaxche.ElChe(2, 1, 0.015, max_anchor=1, tuner="progress")
    for sync_ms, options, advice in [
        (60.0, {}, wire),  # a delay would cost more than it hides
        (60.0, {"wire": "int4"}, ""),
        (400.0, {"che": short}, f"{wire}, {overlap}"),
        (400.0, {"che": short, "wire": "int4"}, overlap),
        (60.0, {"overlap": 0.5}, wire),
        (60.0, {"overlap": 0.5, "wire": "int4"}, ""),
        (60.0, {"policy": "auto"}, wire),
        (60.0, {"policy": "auto", "overlap": 0}, f"{wire}, {overlap}"),
        (60.0, {"rows": "speed", "wire": "int4"}, overlap),
        (60.0, {"average": "gradients"}, ""),
        (0.1, {}, ""),
    ]:
        fleet = jaxche.VirtualFleet([20, 50], sync_ms=sync_ms)
        one = jaxche.Trainer(problem.loss, optax.adam(0.05), replicas=devices[:2], fleet=fleet, **options)
        state, _ = one.fit(one.init(problem.params), problem.data, epochs=3, progress=False)
        explained = one.explain(state)
        given = re.findall(r"% of the time: ([^;]+)", explained)
        assert given == ([advice] if advice else []), explained


def test_a_merge_in_flight_ends_before_another_engine_takes_a_wire(problem, devices, monkeypatch):
    """The other wire has a merge to warm up, and one program with collectives is in flight at a time."""
    monkeypatch.setattr(_arguments, "can_overlap", lambda *_: True)  # as if they were accelerators
    one, calls = jaxche.Trainer(problem.loss, optax.adam(0.05), "auto", wire="auto", replicas=devices[:2]), []

    def notes(engine, name):
        whole = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *rest: (calls.append(name), whole(*rest)))

    def next_round(state, overlap, wire):
        choice = Choice(ApplyPolicy.CADENCE, overlap=overlap)
        state = dataclasses.replace(state, choice=choice, wire=WireChoice(wire, "as given"))
        state, info = one.round(state, problem.data, (2, 2))
        assert (info.overlap, info.wire) == (overlap, wire)
        return state

    state = next_round(next_round(one.init(problem.params), 0.0, "float32"), 0.5, "int4")
    assert state.in_flight is not None
    notes(one._local_engines[1], "settle")
    notes(one._local_engines[0], "_warm_up_merge")
    next_round(state, 0.0, "int4")
    assert calls == ["settle", "_warm_up_merge"]
