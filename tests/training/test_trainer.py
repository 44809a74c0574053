"""The trainer against slow twins that a reader can check by eye."""

import copy
import dataclasses
import pickle
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxche
from jaxche.averaging import merge_weights, outer_step
from jaxche.cadence import DivergenceCorrection, Verdict
from jaxche.replicas import _replica
from jaxche.replicas._replica import Replica
from jaxche.training import _rounds

POLICIES = ["sync", "cadence", "async"]


def single_device(problem, tx, batches):
    """One optimizer step a batch on one device: what everybody already trusts."""
    params = jax.tree.map(jnp.asarray, problem.params)
    opt_state = tx.init(params)
    for batch in batches:
        grads = jax.grad(lambda p, b: problem.loss(p, b)[0])(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


def local_sgd(problem, tx, rounds, rule="steps", opt_mode="local", outer=None):
    """Replicas in a Python loop; ``rounds`` is a list of (epoch, start, counts)."""
    x0 = jax.tree.map(jnp.asarray, problem.params)
    states = [tx.init(x0) for _ in rounds[0][2]]
    outer_state = outer.init(x0) if outer else None
    for epoch, start, counts in rounds:
        ends = []
        for rank, n in enumerate(counts):
            params = x0
            for i in range(start, start + n):
                grads = jax.grad(lambda p, b: problem.loss(p, b)[0])(params, problem.data.epoch(epoch)[i])
                updates, states[rank] = tx.update(grads, states[rank], params)
                params = optax.apply_updates(params, updates)
            start += n
            ends.append(params)
        weights, alpha = merge_weights(rule, counts)

        def mean(*leaves, weights=weights):
            total = sum(w * x for w, x in zip(weights, leaves, strict=True))
            counts = jnp.issubdtype(leaves[0].dtype, jnp.integer)  # of Adam: as old as the mean of the moments
            return (jnp.round(total).astype(leaves[0].dtype) if counts else total,) * len(leaves)

        merged = jax.tree.map(lambda *x, w=weights: sum(a * b for a, b in zip(w, x, strict=True)), *ends)
        gradient = jax.tree.map(lambda a, b, alpha=alpha: alpha * (a - b), x0, merged)
        x0, outer_state = outer_step(outer or optax.sgd(1.0), x0, gradient, outer_state or optax.sgd(1.0).init(x0))
        if opt_mode == "average":
            leaves = [jax.tree.leaves(s) for s in states]
            averaged = [mean(*column) for column in zip(*leaves, strict=True)]
            states = [
                jax.tree.unflatten(jax.tree.structure(s), [column[r] for column in averaged])
                for r, s in enumerate(states)
            ]
        elif opt_mode == "reset":
            states = [tx.init(x0) for _ in states]
    return x0, states


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("tx", [optax.sgd(0.3, momentum=0.9), optax.adam(0.05)], ids=["sgd", "adam"])
def test_sync_equals_one_device_on_the_joined_batch(problem, devices, close, replicas, tx):
    trainer = jaxche.Trainer(problem.loss, tx, policy="sync", rows="equal", replicas=devices[:replicas])
    state, history = trainer.fit(trainer.init(problem.params), problem.data, epochs=2, progress=False)
    size = len(problem.data)
    groups = [(e, range(i, min(i + replicas, size))) for e in range(2) for i in range(0, size, replicas)]
    wanted = single_device(problem, tx, [problem.joined(*group) for group in groups])
    close(trainer.params(state), wanted)
    assert [sum(info.counts) for info in history] == [len(indices) for _, indices in groups]


def test_sync_weighs_a_smaller_last_batch_by_its_examples(make_problem, devices, close):
    problem = make_problem(examples=44, batch_size=8)  # five batches of 8 and one of 4
    tx = optax.sgd(0.3)
    trainer = jaxche.Trainer(problem.loss, tx, policy="sync", rows="equal", replicas=devices[:2])
    state, history = trainer.fit(trainer.init(problem.params), problem.data, progress=False)
    close(trainer.params(state), single_device(problem, tx, [problem.joined(0, (i, i + 1)) for i in (0, 2, 4)]))
    assert history[-1].weights == pytest.approx((8 / 12, 4 / 12))


def test_averaged_gradients_equal_one_device_on_all_batches_of_the_round(problem, devices, close):
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))
    trainer = jaxche.Trainer(problem.loss, tx, average="gradients", replicas=devices[:2])
    state = trainer.init(problem.params)
    for counts in [(3, 5), (1, 3)]:
        state, _ = trainer.round(state, problem.data, counts=counts)
    wanted = single_device(problem, tx, [problem.joined(0, range(8)), problem.joined(0, range(8, 12))])
    close(trainer.params(state), wanted)
    rows = jax.tree.leaves(state.opt_state)
    assert all((row == row[:1]).all() for row in map(np.asarray, rows))  # one identical update everywhere


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["steps", "batch", "fednova"])
@pytest.mark.parametrize("opt_mode", ["local", "average", "reset"])
def test_averaged_parameters_equal_the_slow_twin(problem, devices, close, rule, opt_mode):
    tx = optax.adam(0.05)
    trainer = jaxche.Trainer(problem.loss, tx, merge=rule, opt_state=opt_mode, replicas=devices[:3])
    state = trainer.init(problem.params)
    rounds = [(0, 0, (1, 4, 2)), (0, 7, (0, 2, 3)), (1, 0, (2, 2, 1))]
    for _, _, counts in rounds:
        state, info = trainer.round(state, problem.data, counts=counts)
        assert info.weights == pytest.approx(merge_weights(rule, counts)[0])
    wanted, opt_states = local_sgd(problem, tx, rounds, rule, opt_mode)
    close(trainer.params(state), wanted)
    stacked = jax.tree.map(lambda *x: np.stack(x), *opt_states)
    close(state.opt_state, stacked)


def test_automatic_rules_are_the_ones_that_measured_best(problem, devices):
    chosen = jaxche.Trainer(problem.loss, optax.sgd(0.1), merge="auto", opt_state="auto", replicas=devices[:2])
    assert repr(chosen) == repr(jaxche.Trainer(problem.loss, optax.sgd(0.1), merge="steps", replicas=devices[:2]))
    jaxche.Trainer(problem.loss, optax.sgd(0.1), average="gradients", merge="auto", replicas=devices[:2])


def test_outer_optimizer_steps_on_the_pseudo_gradient(problem, devices, close):
    tx, outer = optax.sgd(0.1), optax.sgd(0.7, momentum=0.9, nesterov=True)
    trainer = jaxche.Trainer(problem.loss, tx, outer=outer, replicas=devices[:2])
    state = trainer.init(problem.params)
    rounds = [(0, 0, (1, 3)), (0, 4, (2, 2)), (0, 8, (3, 1))]
    for _, _, counts in rounds:
        state, _ = trainer.round(state, problem.data, counts=counts)
    close(trainer.params(state), local_sgd(problem, tx, rounds, outer=outer)[0])


def test_one_replica_is_a_plain_training_loop(problem, devices, same):
    tx = optax.adam(0.05)
    trainer = jaxche.Trainer(problem.loss, tx, replicas=devices[:1])
    state, history = trainer.fit(trainer.init(problem.params), problem.data, epochs=2, progress=False)
    assert state.che is None
    assert all(info.sync_ms == 0 for info in history)

    @jax.jit
    def step(params, opt_state, batch):
        grads = jax.grad(lambda p: problem.loss(p, batch)[0])(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.tree.map(jnp.asarray, problem.params)
    opt_state = tx.init(params)
    for e in range(2):
        for i in range(len(problem.data)):
            params, opt_state = step(params, opt_state, problem.data.epoch(e)[i])
    chex.assert_trees_all_close(trainer.params(state), params, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("examples", [96, 97, 3])
def test_every_batch_of_every_epoch_is_read_exactly_once(make_problem, recorder, devices, policy, examples, patient):
    problem = make_problem(examples=examples)
    data = recorder(problem.data)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), policy=policy, replicas=devices[:3])
    state, history = trainer.fit(trainer.init(problem.params), data, epochs=3, progress=False)
    first = (0, 0)  # read once more before anything is trained: is it the same?
    assert sorted(data.reads) == [first] + [(e, i) for e in range(3) for i in range(len(data))]
    assert (state.epoch, state.cursor) == (3, 0)
    assert sum(info.examples for info in history) == 3 * examples


def test_async_replicas_run_into_the_next_epoch(problem, devices):
    che = jaxche.ElChe(world_size=2, anchor=7)
    rounds = {}
    for policy in ("cadence", "async"):
        trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), policy=policy, che=che, replicas=devices[:2])
        state = trainer.init(problem.params)
        rounds[policy] = trainer.round(state, problem.data)
    assert rounds["cadence"][1].counts == (6, 6)
    assert (rounds["cadence"][0].epoch, rounds["cadence"][0].cursor) == (1, 0)
    assert rounds["async"][1].counts == (7, 7)
    assert (rounds["async"][0].epoch, rounds["async"][0].cursor) == (1, 2)


def test_async_sees_replicas_part_and_nudges_the_anchor_down(devices):
    """Two replicas pulled apart ever harder. The cadence is put back each round: timings here mean nothing."""
    pull = np.geomspace(1e-3, 1e3, 160).astype(np.float32)
    batches = [{"t": np.array([p * (1 if i // 8 % 2 else -1)], np.float32)} for i, p in enumerate(pull)]
    che = jaxche.ElChe(world_size=2, anchor=8)

    def loss(w, batch):
        return jnp.mean(w[1] * batch["t"])

    trainer = jaxche.Trainer(loss, optax.sgd(0.01), policy="async", che=che, replicas=devices[:2])
    state = trainer.init(jnp.array([1e3, 0.0]))  # a norm that the pull does not change
    seen = []
    for _ in range(10):
        state, info = trainer.round(dataclasses.replace(state, che=che), batches, counts=(8, 8))
        seen.append((info.drift, info.verdict, state.che.anchor))
    drifts = [drift for drift, _, _ in seen]
    assert drifts == sorted(drifts)
    assert any(verdict == "nudge" and anchor <= 4 for _, verdict, anchor in seen)


@pytest.mark.slow
def test_async_lets_the_anchor_recover_once_replicas_agree(problem, devices):
    @dataclasses.dataclass(frozen=True)
    class Scripted:
        """Nudges once, then is calm; keeps what it was shown."""

        verdicts: tuple = (Verdict.NUDGE,) + (Verdict.CALM,) * 40
        shown: tuple = ()

        def observe(self, drift, k_max):
            return Scripted(self.verdicts[1:], (*self.shown, drift)), self.verdicts[0]

    che = jaxche.ElChe(world_size=2, anchor=8, max_anchor=8)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.01), policy="async", che=che, replicas=devices[:2])
    state = dataclasses.replace(trainer.init(problem.params), correction=DivergenceCorrection(guard=Scripted()))
    anchors, drifts = [], []
    for _ in range(30):
        state, info = trainer.round(state, problem.data)
        anchors.append(state.che.anchor)
        drifts.append(info.drift)
    assert anchors[0] == 4
    assert anchors[-1] == 8
    assert list(state.correction.guard.shown) == drifts


def test_changing_counts_never_recompiles(problem, devices):
    traced = []

    def loss(params, batch):
        traced.append(batch["x"].shape)
        return problem.loss(params, batch)

    trainer = jaxche.Trainer(loss, optax.adam(1e-2), replicas=devices[:3])
    state = trainer.init(problem.params)
    state, _ = trainer.round(state, problem.data, counts=(1, 1, 1))
    compiled = trainer.compilations
    assert compiled == 3  # one step program a device
    before, merges = len(traced), trainer._engine._merge._program._cache_size()
    for counts in [(1, 2, 3), (3, 0, 1), (1, 1, 9), (5, 1, 1), (0, 12, 0)]:
        state, _ = trainer.round(state, problem.data, counts=counts)
    assert trainer.compilations == compiled
    assert len(traced) == before
    assert trainer._engine._merge._program._cache_size() == merges == 1


@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_a_round_leaves_its_state_valid_and_repeats_bit_for_bit(problem, devices, same, average):
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), average=average, replicas=devices[:2])
    start = trainer.init(problem.params)
    first, info = trainer.round(start, problem.data, counts=(2, 4))
    again, info_again = trainer.round(start, problem.data, counts=(2, 4))
    same(first.params, again.params)
    same(first.opt_state, again.opt_state)
    same(start.params, jax.tree.map(lambda x: np.stack([x, x]), problem.params))
    assert (info.loss, info.metrics, info.drift) == (info_again.loss, info_again.metrics, info_again.drift)


def test_a_recorded_run_replays_bit_for_bit(problem, devices, same):
    def make():
        trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), replicas=devices[:3])
        return trainer, trainer.init(problem.params)

    trainer, start = make()
    state, history = trainer.fit(start, problem.data, epochs=2, progress=False)
    trainer, start = make()
    again, _ = trainer.replay(start, problem.data, jaxche.History.from_json(history.to_json()))
    same(again.params, state.params)
    for wrong in ("history.jsonl", Path("history.jsonl"), history.rows):
        with pytest.raises(ValueError, match=r"history=.* is no list of rounds; write jaxche.History.from_json\(Path"):
            trainer.replay(start, problem.data, wrong)


def test_the_replica_view_has_a_row_per_replica_and_costs_no_copy(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), replicas=devices[:4], opt_state="local")
    state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(1, 2, 3, 4))
    view = state.params["w"]
    assert view.shape == (4, 5, 2)
    assert view.sharding.spec == jax.sharding.PartitionSpec("replica")
    mine = {s.device: s.data.unsafe_buffer_pointer() for s in view.addressable_shards}
    held = {local.params["w"].device: local.params["w"].unsafe_buffer_pointer() for local in state.local_states}
    assert mine == held
    assert state.opt_state[0].count.tolist() == [1, 2, 3, 4]  # integers are each replica's own


def test_the_lead_of_the_fastest_is_limited_where_a_round_is_planned(problem, devices):
    che = jaxche.ElChe(world_size=2, anchor=2, max_batch_diff=1).with_speed_ratio(1, 3.0)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), che=che, replicas=devices[:2])
    _, info = trainer.round(trainer.init(problem.params), problem.data)
    assert info.counts == (3, 2)


def test_information_of_a_round(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(problem.params)
    state, info = trainer.round(state, problem.data, counts=(2, 4))
    losses = []
    for share in ([0, 1], [2, 3, 4, 5]):
        params, own = jax.tree.map(jnp.asarray, problem.params), []
        for i in share:
            (value, _), grads = jax.value_and_grad(problem.loss, has_aux=True)(params, problem.data[i])
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            own.append(float(value))
        losses.append(own)
    assert info.losses == pytest.approx([np.mean(own) for own in losses], rel=1e-5)
    assert info.loss == pytest.approx(np.mean([*losses[0], *losses[1]]), rel=1e-5)
    assert info.metrics.keys() == {"mae"}
    assert (info.round, info.epoch, info.cursor, info.counts, info.examples) == (0, 0, 0, (2, 4), 48)
    assert len(info.wall_ms) == 2
    assert min(info.wall_ms) > 0
    assert info.sync_ms > 0
    assert 0 < info.efficiency <= 1
    assert info.drift > 0


def test_no_compilation_is_timed(devices, monkeypatch, thread_clock):
    """The last batch of an epoch has another shape; its compilation takes 3 s here, and a step none."""
    data = jaxche.Batches(np.ones((9, 4), np.float32), batch_size=4, seed=None)
    lower = Replica._lower

    def lower_slowly(self, *arguments):
        thread_clock.sleep(3.0)
        return lower(self, *arguments)

    monkeypatch.setattr(Replica, "_lower", lower_slowly)
    trainer = jaxche.Trainer(lambda w, x: jnp.mean(x @ w), optax.sgd(0.1), replicas=devices[:1])
    _, info = trainer.round(trainer.init(jnp.eye(4)), data)
    assert trainer.compilations == 2
    assert info.wall_ms == (0.0,)


def test_a_compilation_amid_a_round_is_no_time_of_its_merge(devices, monkeypatch):
    """Batches may be padded to some lengths, and one comes late: compiling for it takes a thousand seconds here."""
    data, ahead, lower = [np.ones((n, 4), np.float32) for n in (4, 4, 3, 4, 4)], {}, Replica._lower
    own, main = threading.get_ident, threading.get_ident()

    def lower_slowly(self, *arguments):
        ahead[own()] = ahead.get(own(), 0.0) + 1000.0
        return lower(self, *arguments)

    def now():
        """Only the thread that compiles is ahead, and the one that waits for it: the other replica may be in a step."""
        return time.perf_counter() + (sum(ahead.values()) if own() == main else ahead.get(own(), 0.0))

    clock = SimpleNamespace(**(vars(time) | {"perf_counter": now}))
    monkeypatch.setattr(_replica, "time", clock)
    monkeypatch.setattr(_rounds, "time", clock)
    monkeypatch.setattr(Replica, "_lower", lower_slowly)
    trainer = jaxche.Trainer(lambda w, x: jnp.mean(x @ w), optax.sgd(0.1), replicas=devices[:2])
    state, _ = trainer.round(trainer.init(jnp.eye(4)), data, counts=(1, 1))
    compiled = trainer.compilations
    state, info = trainer.round(state, data, counts=(1, 1))
    assert trainer.compilations > compiled
    assert max(info.wall_ms) < 1e5
    assert info.sync_ms < 1e5
    assert state.clock_ms < 1e5


def test_a_second_start_compiles_nothing(problem, devices, caplog):
    """As for the evaluation of other parameters, or for each rate of a sweep."""
    trainer = jaxche.Trainer(problem.loss, optax.adam(1e-2), replicas=devices[:2])
    trainer.init(problem.params)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        trainer.init(jax.tree.map(lambda x: x + 1, problem.params))
        assert "jit(start)" not in caplog.text
        jaxche.Trainer(problem.loss, optax.adam(1e-2), replicas=devices[:2]).init(problem.params)
        assert "jit(start)" in caplog.text


@pytest.mark.parametrize("policy", ["cadence", "sync"])
def test_the_loss_is_traced_once_for_all_replicas_and_by_the_caller(devices, policy):
    """Settings of JAX are those of a thread: what the caller sets around ``fit`` holds for every batch."""
    threads = []

    def loss(w, x):
        threads.append(threading.current_thread())
        return jnp.mean(x @ w)

    data = jaxche.Batches(np.ones((22, 4), np.float32), batch_size=4, seed=None)
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:4], policy=policy)
    state, _ = trainer.round(trainer.init(jnp.eye(4)), data, counts=(1, 1, 1, 1))
    assert len(threads) == 2  # the second time for the step
    trainer.fit(state, data, epochs=2, progress=False)
    assert trainer.compilations > 4  # the last batch of an epoch has 2 examples
    assert set(threads) == {threading.main_thread()}


def test_paced_replicas_take_the_time_they_are_given(problem, devices, thread_clock):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], pace_ms=(10, 60))
    state = trainer.init(problem.params)
    rates = trainer.measure_rates(state, problem.data, seconds=0.5)
    assert rates == pytest.approx((1e3 / 10, 1e3 / 60))
    for _ in range(4):
        state, info = trainer.round(state, problem.data)
        assert info.wall_ms == pytest.approx((10 * info.counts[0], 60 * info.counts[1]))
    assert state.che.batches(0) > 2 * state.che.batches(1)  # measured, not told


def test_pace_can_come_from_the_launcher(problem, devices, monkeypatch):
    monkeypatch.setenv("JAXCHE_PACE_MS", "7")
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    _, info = trainer.round(trainer.init(problem.params), problem.data, counts=(3,))
    assert info.wall_ms[0] >= 21


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


class Empty:
    def __len__(self):
        return 0

    def __getitem__(self, i):
        raise IndexError(i)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"policy": "fast"}, "fast"),
        ({"average": "weights"}, "average='weights'"),
        ({"merge": "mean"}, "merge='mean'"),
        ({"opt_state": "keep"}, "opt_state='keep'"),
        ({"tx": 0.1}, "tx=0.1"),
        ({"loss_fn": "mse"}, "loss_fn='mse'"),
        ({"loss_fn": lambda params: 0.0}, r"def loss_fn\(params, batch\)"),
        ({"outer": 0.7}, r"outer=0\.7 is not an optax transformation; write e\.g\. outer=optax\.sgd\(0\.7"),
        ({"average": "gradients", "merge": "batch"}, "average='parameters'"),
        ({"che": jaxche.ElChe(world_size=5)}, r"world_size=5, but there are 2.*write che=jaxche.ElChe\(world_size=2, "),
        (
            {"che": jaxche.ElChe(world_size=5), "replicas": None, "strategy": jaxche.FullShard()},
            "world_size=5, but there is one replica; leave che= out",
        ),
        ({"che": 10}, r"che=10 is not a cadence; write che=jaxche.ElChe\(world_size=2, "),
        ({"pace_ms": (1, 2, 3)}, "2, one per replica"),
        ({"pace_ms": -1}, "pace_ms=-1"),
        ({"pace_ms": float("nan")}, "pace_ms=nan"),
        ({"replicas": []}, "replicas"),
        ({"replicas": ["cpu"]}, "replicas"),
    ],
)
def test_bad_arguments_are_named(problem, devices, arguments, named):
    good = {"loss_fn": problem.loss, "tx": optax.sgd(0.1), "replicas": devices[:2]}
    with pytest.raises(ValueError, match=named):
        jaxche.Trainer(**(good | arguments))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (Empty(), "data set is empty"),
        ([], "data set is empty"),
        (jaxche.Stream([1, 2]), "scalar: does the stream yield examples"),
        (3, "data is an int; the trainer needs len"),
        (iter, r"data=.* is a function; .* write jaxche.Stream\(lambda epoch: batches\(epoch\)\)"),
        (np.ones((72, 5)), r"one array of shape \(72, 5\).*jaxche\.Batches\(array, batch_size=32\)"),
        (jnp.ones((3, 4, 5)), r"one array of shape \(3, 4, 5\).*list\(array\) if each row is a batch"),
        ({"x": np.ones((72, 5)), "y": np.ones((72, 2))}, r"dict of 'x', 'y'.*jaxche\.Batches\(arrays, batch_size=32\)"),
        (Pair(np.ones((72, 5)), np.ones((72, 2))), r"Pair of 'x', 'y'.*jaxche\.Batches"),
        ([{"x": np.ones((4, 5)), "y": np.ones((3, 2))}], r"leading axes of a batch differ.*4.*3.*x\[None\], batch"),
        ([{"x": np.ones((4, 5)), "y": np.float32(1)}], "scalar"),
        ([{}], "without arrays"),
    ],
)
def test_bad_data_is_refused_before_the_first_step(problem, devices, data, named):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(ValueError, match=named):
        trainer.round(trainer.init(problem.params), data)
    with pytest.raises(ValueError, match=named):
        trainer.fit(trainer.init(problem.params), data)


def test_batches_by_number_are_data_whatever_they_are_in(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    for data in ({i: problem.data[i] for i in range(12)}, [problem.data[i] for i in range(12)]):
        state, _ = trainer.fit(trainer.init(problem.params), data, progress=False)
        assert state.examples == 96


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (lambda p, b: b["x"] @ p["w"], r"shape \(8, 2\).*loss.mean\(\)"),
        (lambda p, b: (jnp.sum(p["w"]), {"vector": p["b"]}), "metric 'vector'"),
        (lambda p, b: (jnp.sum(p["w"]), 3.0), "a number beside the loss"),
        (lambda p, b: (1.0, {}, {}), "tuple of 3"),
        (lambda p, b: jnp.sum(b["z"]), "z"),
    ],
)
def test_bad_losses_are_refused_before_the_first_step(problem, devices, loss, named):
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(problem.params)
    with pytest.raises((ValueError, KeyError), match=named):
        trainer.round(state, problem.data)


@pytest.mark.parametrize("params", [{}, {"w": np.ones(3), "n": np.arange(3)}])
def test_bad_params_are_refused(problem, devices, params):
    with pytest.raises(ValueError, match="params"):
        jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2]).init(params)


@pytest.mark.parametrize("collection", ["batch_stats", "cache"])
def test_a_whole_dict_of_variables_is_refused(problem, devices, collection):
    variables = {"params": problem.params, collection: {"mean": np.zeros(2, np.float32)}}
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    line = f'write trainer.init(variables["params"], variables["{collection}"])'
    for given in (variables, lambda: variables):
        with pytest.raises(ValueError, match=re.escape(line)):
            trainer.init(given)
    with pytest.raises(ValueError, match=r"jaxche\.linen_loss.*variables\.pop"):
        trainer.init(variables)
    trainer.init({"params": problem.params})  # of a model without state
    trainer.init({"params": problem.params, "temperature": np.ones(())})


def test_counts_must_fit_the_replicas(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(ValueError, match="3 entries for 2"):
        trainer.round(trainer.init(problem.params), problem.data, counts=(1, 2, 3))


def test_a_pace_the_computation_cannot_keep_is_refused_with_one_that_works(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], pace_ms=(1e9, 1e-3))
    with pytest.raises(jaxche.training.PaceError, match=r"rank 1 is 0.001 ms.*pace_ms="):
        trainer.round(trainer.init(problem.params), problem.data)


@pytest.mark.parametrize("how", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_trainer_is_not_copied(problem, devices, how):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    with pytest.raises(TypeError, match="another one with the same arguments"):
        how(trainer)


def test_a_loss_that_becomes_nan_stops_with_the_last_good_state(devices):
    batches = [{"t": np.full((2,), np.nan if i == 5 else 1.0, np.float32)} for i in range(12)]
    trainer = jaxche.Trainer(lambda w, b: jnp.mean((w - b["t"]) ** 2), optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(jnp.zeros(()))
    state, _ = trainer.round(state, batches, counts=(1, 1))
    with pytest.raises(jaxche.NonFiniteLossError, match="rank 1 became nan in round 1") as caught:
        trainer.round(state, batches, counts=(2, 2))
    assert (caught.value.rank, caught.value.round) == (1, 1)
    assert caught.value.state is state
    assert np.isfinite(trainer.params(caught.value.state))
    copied = pickle.loads(pickle.dumps(caught.value))  # without the state, which is on the devices
    assert (type(copied), str(copied)) == (jaxche.NonFiniteLossError, str(caught.value))
    assert (copied.rank, copied.round, copied.state) == (1, 1, None)
    assert copied.batches == caught.value.batches


def test_nan_before_the_first_round_is_named(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(problem.params | {"b": np.array([0.0, np.nan], np.float32)})
    with pytest.raises(jaxche.NonFiniteLossError, match=r"There was NaN before the round, in params/b; look at what"):
        trainer.round(state, problem.data)


def test_data_that_reads_an_iterator_to_its_end_is_refused(problem, devices):
    class Next:
        def __len__(self):
            return 12

        def __getitem__(self, i):
            return problem.data[i] if i < 5 else next(iter(()))

    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(problem.params)
    with pytest.raises(ValueError, match=r"data\[5\] raised StopIteration; .* data = list\(iterator\)"):
        trainer.fit(state, Next(), epochs=1, progress=False)
    with pytest.raises(ValueError, match=r"data\[5\] raised StopIteration"):
        trainer.evaluate(state, Next())


def test_an_error_while_reading_keeps_its_type_and_says_where(problem, devices):
    class Torn:
        def __len__(self):
            return 12

        def __getitem__(self, i):
            if i == 5:
                raise OSError("disk on fire")
            return problem.data[i]

    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(problem.params)
    with pytest.raises(OSError, match="disk on fire") as caught:
        trainer.round(state, Torn(), counts=(4, 4))
    assert any("rank 1 in round 0" in note for note in caught.value.__notes__)
    after, _ = trainer.round(state, problem.data, counts=(4, 4))  # nothing is lost
    assert after.round == 1


def test_all_counts_zero_is_refused(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(ValueError, match="counts"):
        trainer.round(trainer.init(problem.params), problem.data, counts=(0, 0))


@pytest.mark.parametrize("counts", [(2.5, 1), ("2", 1), 3, (1, float("nan"))])
def test_counts_that_are_no_whole_numbers_are_refused(problem, devices, counts):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(ValueError, match=r"counts=.* must be whole numbers.*write e.g. counts=\(4, 4\)"):
        trainer.round(trainer.init(problem.params), problem.data, counts=counts)


@pytest.mark.parametrize("seed", ["a", None, 1.5])
def test_a_seed_that_is_no_whole_number_is_refused(problem, devices, seed):
    with pytest.raises(ValueError, match=f"seed={seed!r} must be a whole number; write e.g. seed=0"):
        jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], seed=seed)


def test_calls_under_a_mesh_of_all_devices_are_refused(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(problem.params)
    calls = {
        "trainer.init": lambda: trainer.init(problem.params),
        "trainer.round": lambda: trainer.round(state, problem.data),
        "trainer.fit": lambda: trainer.fit(state, problem.data, epochs=1),
        "trainer.evaluate": lambda: trainer.evaluate(state, problem.data),
    }
    with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=devices[:2])):
        for name, call in calls.items():
            with pytest.raises(
                ValueError, match=rf"{name} was called under jax.set_mesh.*; write {name}\(\.\.\.\) out"
            ):
                call()
    trainer.round(state, problem.data)


def test_one_replica_under_a_mesh_of_other_devices_is_refused(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    state = trainer.init(problem.params)
    for others in (devices[:2], devices[1:2]):
        with jax.set_mesh(jax.make_mesh((len(others),), ("data",), devices=others)):
            for call in (lambda: trainer.init(problem.params), lambda: trainer.fit(state, problem.data)):
                with pytest.raises(
                    ValueError, match=r"was called under jax.set_mesh.*; write trainer\.\w+\(\.\.\.\) out"
                ):
                    call()
    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=devices[:1])):
        trainer.round(state, problem.data)


def test_calls_under_disable_jit_are_refused(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(problem.params)
    calls = {
        "trainer.init": lambda: trainer.init(problem.params),
        "trainer.fit": lambda: trainer.fit(state, problem.data, epochs=1),
        "trainer.evaluate": lambda: trainer.evaluate(state, problem.data),
    }
    with jax.disable_jit():
        for name, call in calls.items():
            with pytest.raises(ValueError, match=rf"{name} was called under jax.disable_jit.*write loss_fn\(params"):
                call()
    trainer.round(state, problem.data)


def test_one_replica_trains_under_its_mesh(problem, devices):
    strategy = jaxche.FullShard()
    mesh = strategy.mesh(devices[:2])
    with jax.set_mesh(mesh):
        trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=[mesh], strategy=strategy)
        trainer.round(trainer.init(problem.params), problem.data)


def test_one_sharded_replica_under_another_mesh_of_its_devices_is_refused(problem, devices):
    strategy, own = jaxche.FullShard(), devices[:2]
    for name, kind in (("data", AxisType.Auto), ("shard", AxisType.Explicit)):
        mesh = jax.make_mesh((2,), (name,), devices=own, axis_types=(kind,))
        # Given as a replica, its axes become automatic.
        trainer = jaxche.Trainer(
            problem.loss, optax.sgd(0.1), strategy=strategy, replicas=[mesh if name == "shard" else strategy.mesh(own)]
        )
        with (
            jax.set_mesh(mesh),
            pytest.raises(ValueError, match=r"was called under jax.set_mesh.*; write trainer\.init\(\.\.\.\) out"),
        ):
            trainer.init(problem.params)


def test_a_seed_has_64_bits(problem, devices):
    jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], seed=2**63 - 1)
    with pytest.raises(ValueError, match=f"seed={2**63} must be at most {2**63 - 1}; write e.g. seed=0"):
        jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], seed=2**63)


def test_state_is_a_value(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(problem.params)
    assert "parameters=12" in repr(state)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.round = 3


def test_a_function_makes_one_set_of_parameters_for_all_replicas(problem, devices):
    rng = np.random.default_rng(0)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    made = trainer.init(lambda: jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), problem.params))
    for rows in jax.tree.leaves(made.params):
        np.testing.assert_array_equal(rows[0], rows[1])


@pytest.mark.parametrize("scaling", [None, jaxche.AdaScale()])
@pytest.mark.parametrize("island", [False, True])
def test_replicas_go_on_from_an_optimizer_state(problem, devices, close, scaling, island):
    tx = optax.adam(1e-2)
    grads = jax.tree.map(lambda x: np.full(x.shape, 0.5, np.float32), problem.params)
    _, reached = tx.update(grads, tx.init(problem.params), problem.params)
    strategy = jaxche.FullShard(min_size=1)
    placements = [strategy.mesh(devices[:2])] if island else devices[:2]
    trainer = jaxche.Trainer(
        problem.loss, tx, replicas=placements, strategy=strategy if island else None, scaling=scaling
    )
    found = trainer.init(problem.params, opt_state=reached).opt_state
    inner = found if scaling is None else found.inner_state
    for rows, one in zip(jax.tree.leaves(inner), jax.tree.leaves(reached), strict=True):
        np.testing.assert_allclose(rows, np.broadcast_to(one, rows.shape))


def test_an_optimizer_state_of_another_optimizer_is_refused(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.adam(1e-2), replicas=devices[:2])
    with pytest.raises(ValueError, match="opt_state is not one of this tx"):
        trainer.init(problem.params, opt_state=optax.sgd(0.1, momentum=0.9).init(problem.params))


def test_a_stop_that_came_too_late_is_not_for_the_next_fit(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], policy="sync", rows="equal")
    state, history = trainer.fit(trainer.init(problem.params), problem.data, progress=False)

    def stop_in_the_last(state, info):
        if info.round == len(history) - 1:
            trainer.request_stop()

    state, first = trainer.fit(trainer.init(problem.params), problem.data, callbacks=[stop_in_the_last], progress=False)
    _, again = trainer.fit(state, problem.data, progress=False)
    assert len(again) == len(first)


def test_a_process_that_was_started_with_others_has_to_join_them(problem, monkeypatch):
    monkeypatch.setenv("JAXCHE_NUM_PROCESSES", "2")
    with pytest.raises(ValueError, match=r"one of 2 .* write jaxche\.initialize\(\) behind the imports"):
        jaxche.Trainer(problem.loss, optax.sgd(0.1))
    monkeypatch.setenv("JAXCHE_NUM_PROCESSES", "1")
    jaxche.Trainer(problem.loss, optax.sgd(0.1))


@pytest.mark.slow
@pytest.mark.parametrize("tree", [lambda x: x, lambda x: {"x": x}], ids=["array", "dict"])
@pytest.mark.parametrize(
    "knobs",
    [
        {"replicas": 1},
        {"replicas": 2},
        {"replicas": 2, "policy": "sync"},
        {"replicas": 2, "policy": "async"},
        {"replicas": 1, "scaling": jaxche.AdaScale()},
        {"replicas": 2, "scaling": jaxche.AdaScale()},
        {"replicas": 2, "strategy": jaxche.FullShard(min_size=1)},
    ],
    ids=["one", "several", "sync", "async", "one scaled", "several scaled", "islands"],
)
def test_a_loss_may_ignore_its_batch(devices, close, tree, knobs):
    """A penalty alone: each step halves the parameters, whatever is in the batch and however few examples it has."""
    if "strategy" in knobs:
        islands = [knobs["strategy"].mesh(devices[2 * i : 2 * i + 2]) for i in range(knobs["replicas"])]
        knobs = knobs | {"replicas": islands}
    else:
        knobs = knobs | {"replicas": devices[: knobs["replicas"]]}
    data = jaxche.Batches(tree(np.ones((11, 2), np.float32)), batch_size=4)
    trainer = jaxche.Trainer(lambda p, batch: 0.25 * jnp.sum(p**2), optax.sgd(1.0), **knobs)
    state, history = trainer.fit(trainer.init(jnp.ones(4)), data, epochs=2, progress=False)
    assert sum(info.examples for info in history) == 22
    assert trainer.memory[0]["8 batches ahead"] == 8 * 4 * 2 * 4
    if "scaling" not in knobs and len(knobs["replicas"]) == 1:
        close(trainer.params(state), np.full(4, 0.5**6))
    else:
        assert np.all(trainer.params(state) < 1.0)
