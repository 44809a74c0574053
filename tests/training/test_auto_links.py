"""policy="auto" on a slow link: codes and overlap for its local steps, and exact sync without them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.cadence import ApplyPolicy
from jaxche.training import Checkpoints
from jaxche.training import _plan as plan_module

# Codes of 4 bits for parameters and two moments of Adam are fewer bytes than float32 gradients.
SLOW = {"sync_ms": 1.0, "link_mbit": 5.0}
# On a fast link exact sync is best.
FAST = {"sync_ms": 0.1, "link_mbit": 1000.0}


class Wide:
    """A network of 1,794 parameters, whose codes fill whole blocks."""

    def __init__(self, examples=16 * 60 + 5):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(examples, 5)).astype(np.float32)
        y = np.tanh(x @ rng.normal(size=(5, 2))).astype(np.float32)
        self.data = jaxche.Batches({"x": x, "y": y}, 16, seed=3)
        hidden, out = rng.normal(size=(5, 256)), rng.normal(size=(256, 2))
        self.params = {"hidden": np.float32(hidden / 5), "out": np.float32(out / 32), "bias": np.zeros(2, np.float32)}

    @staticmethod
    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["hidden"])
        return jnp.mean((hidden @ params["out"] + params["bias"] - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def large():
    return Wide()


@pytest.fixture(scope="module")
def trainer(large, devices):
    def make(ms=(20, 20, 40, 80), link=SLOW, **options):
        replicas, fleet = devices[: len(ms)], jaxche.VirtualFleet(ms, **link)
        return jaxche.Trainer(large.loss, optax.adam(1e-3), policy="auto", fleet=fleet, replicas=replicas, **options)

    return make


def fit(one, problem, epochs=3, **options):
    return one.fit(one.init(problem.params), problem.data, epochs=epochs, progress=False, **options)


@pytest.fixture(scope="module")
def coded(trainer, large):
    """A trainer with codes on a fast link, and its run."""
    one = trainer(wire="int4", overlap=0, link=FAST)
    return one, *fit(one, large)


def alternate(monkeypatch):
    """Choose exact sync and local steps in turns, three rounds each."""

    def choose(now, shares, che, batch_rows, round, *rest):
        policy = ApplyPolicy.CADENCE if (round + 1) // 3 % 2 else ApplyPolicy.SYNC
        return dataclasses.replace(now, policy=policy)

    monkeypatch.setattr(plan_module, "choose", choose)


@pytest.mark.parametrize(
    "options", [{"wire": "int4", "overlap": 0}, {"wire": "int8", "overlap": 0.5}, {"overlap": 0.25}]
)
def test_local_steps_have_the_wire_and_the_overlap_and_updates_neither(trainer, large, monkeypatch, options):
    alternate(monkeypatch)
    one = trainer(**options)
    state, history = fit(one, large, epochs=2)
    sync = [info for info in history if info.policy == "sync"]
    local = [info for info in history if info.policy == "cadence"]
    assert min(len(sync), len(local)) > 4
    assert {(info.wire, info.overlap, info.average) for info in sync} == {("float32", 0.0, "gradients")}
    assert {(info.wire, info.overlap) for info in local} == {
        (options.get("wire", "float32"), options.get("overlap", 0.0))
    }
    assert sum(info.examples for info in history) == 2 * (16 * 60 + 5)
    for leaf in jax.tree.leaves(state.params):
        assert (np.asarray(leaf) == np.asarray(leaf)[:1]).all()


def test_what_rounding_leaves_outlasts_exact_sync(trainer, large, monkeypatch, same):
    """An update of exact sync sends no code, so a replica still has to send what it had before."""
    alternate(monkeypatch)
    one = trainer(wire="int4", overlap=0)
    state, kept = one.init(large.params), 0
    for _ in range(8):
        before = state
        state, info = one.round(state, large.data)
        if info.policy == "sync":
            same([local.residual for local in before.local_states], [local.residual for local in state.local_states])
            kept += any(np.any(leaf) for leaf in jax.tree.leaves(before.local_states[0].residual))
    assert kept > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"wire": "int4", "link": FAST}, {"wire": "int4", "overlap": 0.5, "link": FAST}, {"wire": "auto"}],
    ids=["wire", "wire and overlap", "wire auto"],
)
def test_a_run_repeats_resumes_and_replays(trainer, large, same, tmp_path, told, options):
    one = trainer(**options)
    # A checkpoint waits for the merge in flight, so both runs save after each epoch.
    saves, end = {"checkpoint_every": jaxche.Every(epochs=1)}, {"epochs": None, "max_steps": 80}
    state, history = fit(one, large, **end, checkpoints=Checkpoints(tmp_path / "whole"), **saves)
    assert {info.policy for info in history} == {"sync", "cadence"}
    assert "int4" in {info.wire for info in history}
    fit(one, large, epochs=1, checkpoints=Checkpoints(tmp_path / "parts"), **saves)
    other = trainer(**options)
    resumed, whole = fit(other, large, **end, checkpoints=Checkpoints(tmp_path / "parts"), **saves)
    same(one.params(state), other.params(resumed))
    assert told(whole) == told(history)
    replayed, _ = one.replay(one.init(large.params), large.data, history)
    same(one.params(state), one.params(replayed))


def test_a_replay_with_another_wire_is_refused(trainer, large, coded):
    _, _, history = coded
    other = trainer(wire="int8")
    with pytest.raises(ValueError, match=r"recorded with wire='int4' .*and this trainer has wire='int8'"):
        other.replay(other.init(large.params), large.data, history)


def test_a_wire_says_that_the_link_is_slow(trainer, large):
    for options in ({"wire": "int8"}, {"overlap": 0.5}):
        one = trainer(**options)
        _, info = one.round(one.init(large.params), large.data)
        assert info.policy == "cadence"
    for options in ({}, {"wire": "auto"}):
        one = trainer(**options)
        _, info = one.round(one.init(large.params), large.data)
        assert info.policy == "sync"


def test_the_time_of_a_merge_follows_from_its_bytes(coded):
    _, _, history = coded
    for info in history:
        assert info.sync_ms == pytest.approx(0.1 + 8e-3 * info.merge_bytes / 1000.0)
    sync, local = ({info.merge_bytes for info in history if info.policy == policy} for policy in ("sync", "cadence"))
    assert max(local) < 0.8 * min(sync)


def test_both_kinds_of_merges_are_measured(coded):
    one, state, history = coded
    sync_ms, local_ms = (
        next(info.sync_ms for info in history if info.policy == policy) for policy in ("sync", "cadence")
    )
    assert state.choice.before_ms == 0
    found = state.choice.merges_ms([sync_ms] if state.choice.policy is ApplyPolicy.SYNC else [local_ms])
    assert found[:2] == pytest.approx((sync_ms, local_ms))
    assert f"{sync_ms:.3g} ms to merge" in one.explain(state)


def test_codes_make_local_steps_worth_more(trainer, large):
    """In float32 merges take so long that four replicas make little more progress than the fastest alone."""

    def progress(wire):
        one = trainer(link={"sync_ms": 1.0, "link_mbit": 0.03}, wire=wire, overlap=0)
        state, _ = fit(one, large, epochs=6)
        found = re.search(r"local steps .* ([\d.]+) times the progress of the fastest alone", one.explain(state))
        return float(found[1])

    assert 1 < progress("float32") < 0.9 * progress("int4")


def test_rounds_of_some_replicas_alone_measure_their_merges(large, devices):
    """The counts of such rounds are not those of the cadence."""
    fleet = jaxche.VirtualFleet([20, 50], sync_ms=1.0, link_mbit=0.1)
    one = jaxche.Trainer(large.loss, optax.adam(1e-3), policy="auto", fleet=fleet, replicas=devices[:2], overlap=0)
    state, history = fit(one, large, epochs=20)
    alone = [info for info in history if 0 in info.counts]
    assert len(alone) > 3
    assert state.che.sync_samples[0] == pytest.approx(alone[-2].sync_ms)
    assert state.choice.merges_ms(state.che.sync_samples)[:2] == pytest.approx((history[0].sync_ms, alone[-2].sync_ms))


def test_wire_auto_keeps_the_relative_time_of_merges(trainer, large):
    one = trainer(wire="auto", overlap=0)
    state, history = fit(one, large, epochs=4)
    wires = {info.wire for info in history if info.policy == "cadence"}
    assert wires == {"float32", "int4"}
    sync_ms = next(info.sync_ms for info in history if info.policy == "sync")
    coded_ms = next(info.sync_ms for info in history if info.wire == "int4")
    assert state.choice.merges_ms([coded_ms])[:2] == pytest.approx((sync_ms, coded_ms))
    assert "wire='int4'" in one.explain(state)


def test_wire_auto_needs_a_link_on_a_virtual_clock(trainer):
    with pytest.raises(ValueError, match="without link_mbit= they cost the same"):
        trainer(link={"sync_ms": 5.0}, wire="auto")


def test_merges_that_checkpoints_wait_for_are_measured_too(trainer, large, tmp_path):
    one = trainer(overlap=0.5, wire="int4")
    state, history = fit(one, large, epochs=1, checkpoints=Checkpoints(tmp_path, every=1))
    assert state.choice.since > 0
    fleet = one._settings.fleet
    merge_ms, exchange_ms = fleet.merge_ms(one._local_engines[0].sent_bytes), fleet.sync_ms
    assert state.che.sync_samples == pytest.approx([merge_ms] * len(state.che.sync_samples))
    assert state.che.exchange_samples == pytest.approx([exchange_ms] * len(state.che.exchange_samples))
    assert not any(info.overlapped for info in history)
    assert history[-1].clock_ms == pytest.approx(
        sum(max(info.wall_ms) + exchange_ms for info in history) + merge_ms * len(history[:-1])
    )


def test_wire_auto_counts_merges_in_codes_at_once(trainer, large):
    """Those in float32 are of the past: the next choice must not take them for merges in codes."""
    one = trainer(wire="auto", overlap=0)
    state, found = one.init(large.params), []
    for _ in range(40):
        before, (state, info) = state, one.round(state, large.data)
        if state.wire.wire != before.wire.wire:
            found = state.che.sync_samples
            break
    coded_ms = one._settings.fleet.merge_ms(one._engine.sent_bytes)
    assert found == (coded_ms,) * 3
    assert coded_ms < 0.5 * info.sync_ms
