"""policy="auto": a run changes between exact sync and local steps without losing an example or its place."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche import ApplyPolicy
from jaxche.training import Checkpoints
from jaxche.training import _plan as plan_module


def trainer(problem, devices, ms=(20, 20, 40, 80), sync_ms=11.0, tx=None, jitter=0.0, seed=0, **options):
    fleet = jaxche.VirtualFleet(ms, jitter, sync_ms, seed=seed)
    replicas = devices[: len(ms)]
    return jaxche.Trainer(
        problem.loss, tx or optax.adam(1e-3), policy="auto", fleet=fleet, replicas=replicas, **options
    )


def fit(one, problem, epochs=3, **options):
    return one.fit(one.init(problem.params), problem.data, epochs=epochs, progress=False, **options)


@pytest.fixture
def large(make_problem):
    return make_problem(examples=16 * 60 + 5, batch_size=16)


def test_it_starts_in_sync_and_goes_where_progress_is(large, devices):
    one = trainer(large, devices)
    state, history = fit(one, large)
    assert history[0].policy == "sync"
    assert history[-1].policy == "cadence"
    assert {info.average for info in history if info.policy == "sync"} == {"gradients"}
    assert {info.average for info in history if info.policy == "cadence"} == {"parameters"}
    assert sum(info.examples for info in history) == 3 * (16 * 60 + 5)
    assert one.explain(state).startswith("local steps that share batches in rounds of")


def test_local_steps_share_batches(large, devices):
    one = trainer(large, devices, overlap=0)
    _, history = fit(one, large)
    local = [info for info in history if info.policy == "cadence"]
    # From the first one on their length follows from what merges cost, which exact sync has shown.
    assert all(min(info.counts) == max(info.counts) > 5 for info in local[:2])
    assert {info.shares for info in local[:2]} == {(6, 6, 3, 1)}
    rows = {rows for replica in one._local_engines[0]._replicas for _, rows in replica._executables.values()}
    assert 16 not in rows  # no step on a whole batch is compiled


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_share_batches_also_where_times_vary(large, devices, seed):
    """Noise in the times of steps of unlike rows looked like a part that all steps have: steps became whole batches."""
    one = trainer(large, devices, jitter=0.2, seed=seed)
    _, history = fit(one, large, epochs=6)
    local = [info for info in history if info.policy == "cadence"]
    assert np.mean([bool(info.shares) for info in local]) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("sync_ms", [0.0, 0.2])
def test_a_cheap_merge_keeps_exact_sync(large, devices, sync_ms):
    one = trainer(large, devices, sync_ms=sync_ms)
    state, history = fit(one, large)
    assert {info.policy for info in history} == {"sync"}
    assert one.explain(state).startswith(f"exact sync of a batch in 7.5 ms and {sync_ms:g} ms to merge")


def test_replicas_that_add_nothing_are_idle(large, devices):
    one = trainer(large, devices, ms=(20, 50), sync_ms=500.0)
    state, history = fit(one, large)
    assert history[-2].counts[1] == 0
    assert sum(info.examples for info in history) == 3 * (16 * 60 + 5)
    assert "ranks [1] would add nothing" in one.explain(state)


def test_an_idle_replica_that_becomes_fast_trains_again(large, devices):
    slow = jaxche.cadence.Slowdown(rank=1, round=15, factor=0.05)
    fleet = jaxche.VirtualFleet([20, 400], sync_ms=60.0, slowdown=slow)
    one = jaxche.Trainer(large.loss, optax.sgd(1e-3), policy="auto", fleet=fleet, replicas=devices[:2])
    _, history = fit(one, large, epochs=20)
    assert history[14].counts[1] == 0
    assert 0.4 < history[-2].counts[1] / sum(history[-2].counts) < 0.6
    assert sum(info.examples for info in history) == 20 * (16 * 60 + 5)


def test_optimizer_and_schedule_go_on_over_a_change(large, devices):
    schedule = optax.linear_schedule(1e-2, 0.0, 3 * 61)
    one = trainer(large, devices, tx=optax.adam(schedule), overlap=0)
    state, history = fit(one, large)
    assert {info.policy for info in history} == {"sync", "cadence"}
    adam, scheduled = state.opt_state[0], state.opt_state[1]
    assert np.asarray(scheduled.count).tolist() == [3 * 61] * 4
    assert len(set(np.asarray(adam.count).tolist())) == 1
    assert (np.asarray(adam.nu["w"]) == np.asarray(adam.nu["w"])[:1]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "parts"), [(0, {0.0}), (None, {0.0, 0.5})], ids=["waiting", "beside"])
def test_a_run_repeats_resumes_and_replays(large, devices, same, tmp_path, told, overlap, parts):
    one = trainer(large, devices, overlap=overlap)
    saves = {"checkpoint_every": jaxche.Every(epochs=1)}
    state, history = fit(one, large, epochs=2, checkpoints=Checkpoints(tmp_path / "whole"), **saves)
    assert {info.overlap for info in history} == parts
    replayed, _ = one.replay(one.init(large.params), large.data, history)
    same(one.params(state), one.params(replayed))
    fit(one, large, epochs=1, checkpoints=Checkpoints(tmp_path / "parts"), **saves)
    other = trainer(large, devices, overlap=overlap)
    resumed, whole = fit(other, large, epochs=2, checkpoints=Checkpoints(tmp_path / "parts"), **saves)
    same(one.params(state), other.params(resumed))
    assert told(whole) == told(history)


def test_merges_run_beside_steps_where_that_promises_more(large, devices):
    one = trainer(large, devices)
    state, history = fit(one, large)
    parts = [info.overlap for info in history]
    assert (parts[0], parts[-1], state.che.overlap) == (0.0, 0.5, 0.5)
    assert history[-2].overlapped
    assert "to merge beside the first 50% of the next round" in one.explain(state)
    assert state.opt_states_differ
    assert sum(info.examples for info in history) == 3 * (16 * 60 + 5)


def test_waiting_and_overlapped_rounds_have_the_same_compiled_steps(large, devices):
    one, waiting = trainer(large, devices, wire="int4"), trainer(large, devices, wire="int4", overlap=0)
    state = one.init(large.params)
    for overlap in (0.5, 0.0, 0.5):
        choice = jaxche.cadence.Choice(ApplyPolicy.CADENCE, overlap=overlap)
        state, info = one.round(replace(state, choice=choice), large.data, [2, 2, 1, 1])
        assert info.overlap == overlap
    assert list(map(id, one._local_engines[1].replicas)) == list(map(id, one._local_engines[0].replicas))
    waiting.round(waiting.init(large.params), large.data, [2, 2, 1, 1])
    assert one.compilations == waiting.compilations


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({"overlap": 0}, {}),
        ({"opt_state": "average"}, {}),
        ({"backend": "device"}, {}),
        ({"tx": optax.contrib.schedule_free_adamw(0.01)}, {}),
        ({"tx": optax.contrib.schedule_free_adamw(0.01), "wire": "int4"}, {}),
        ({"tx": optax.chain(optax.adam(0.01), optax.contrib.reduce_on_plateau())}, {}),
        ({"wire": "int4"}, {"donate": True}),
        ({}, {"checkpoints": 1}),
    ],
    ids=[
        "waits",
        "average",
        "on the devices",
        "schedule free",
        "its first choice",
        "a plateau",
        "donates",
        "saves each round",
    ],
)
def test_replicas_wait_for_merges_where_they_have_to(large, devices, tmp_path, options, runs):
    one = trainer(large, devices, **options)
    if every := runs.pop("checkpoints", None):
        runs["checkpoints"] = Checkpoints(tmp_path, every=every)
    _, history = fit(one, large, epochs=1, **runs)
    assert history[-1].policy == "cadence"
    assert {info.overlap for info in history} == {0.0}


def test_a_fit_that_has_to_wait_for_merges_measures_them_again(large, devices):
    """Those beside steps send no moments, and so take another time."""
    one = trainer(large, devices)
    state, history = fit(one, large)
    assert history[-1].overlap
    assert len(state.che.sync_samples) == 3
    seen = []
    one.fit(
        state,
        large.data,
        max_steps=40,
        progress=False,
        donate=True,
        callbacks=[lambda state, info: seen.append((info.overlap, len(state.che.sync_samples)))],
    )
    # The first merge that is reported is the last one of before.
    assert seen[:3] == [(0.0, 1), (0.0, 2), (0.0, 3)]


def test_islands_and_replicas_on_the_cpu_wait_for_merges(devices, monkeypatch):
    def ways(replicas, **options):
        one = jaxche.Trainer(lambda w, x: jnp.mean(w * x), optax.sgd(0.1), "auto", replicas=replicas, **options)
        return one._settings.overlaps

    meshes = [jaxche.FullShard().mesh(devices[:2]), jaxche.FullShard().mesh(devices[2:4])]
    assert ways(meshes, fleet=jaxche.VirtualFleet([20, 20])) == (0.0,)
    assert ways(devices[:2], fleet=jaxche.VirtualFleet([20, 20])) == (0.0, 0.5)
    # A merge beside steps would take cores from them.
    assert ways(devices[:2]) == (0.0,)
    # As where these are no CPU devices, and those that merge are others.
    others = devices[2:4]
    monkeypatch.setattr(jax, "devices", lambda backend=None: others)
    assert ways(devices[:2]) == (0.0, 0.5)


def alternate(monkeypatch):
    """Choose exact sync and local steps in turns, three rounds each."""

    def choose(now, shares, che, batch_rows, round, *rest):
        return replace(now, policy=ApplyPolicy.CADENCE if (round + 1) // 3 % 2 else ApplyPolicy.SYNC)

    monkeypatch.setattr(plan_module, "choose", choose)


def count_of_each(updates, counts, params=None):
    """The update of a transformation that divides each number of a gradient by how often it was not zero."""
    counts = jax.tree.map(lambda x, n: n + (x != 0), updates, counts)
    return jax.tree.map(lambda x, n: x / jnp.maximum(n, 1), updates, counts), counts


COUNTS = optax.GradientTransformation(
    lambda params: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int32), params), count_of_each
)


@pytest.mark.parametrize(
    ("tx", "options"),
    [
        (optax.MultiSteps(optax.adam(0.05), 4), {}),
        (optax.MultiSteps(optax.adam(0.05), 4), {"opt_state": "reset"}),
        (optax.adam(0.05), {"opt_state": "local"}),
        (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(0.05)), {}),
        (optax.chain(COUNTS, optax.sgd(0.05)), {}),
    ],
    ids=["accumulates", "accumulates, reset moments", "local moments", "random keys", "arrays of counts"],
)
def test_exact_sync_after_local_steps_has_one_optimizer_state(problem, devices, monkeypatch, same, tx, options):
    alternate(monkeypatch)
    one = trainer(problem, devices, ms=(20, 50), tx=tx, **options)
    state, policies = one.init(problem.params), []
    for _ in range(12):
        state, info = one.round(state, problem.data)
        policies.append(info.policy)
        for leaf in jax.tree.leaves(state.params):  # without the mean each replica updates its own parameters
            np.testing.assert_array_equal(leaf[0], leaf[1])
        assert state.opt_states_differ == (info.policy == "cadence")
    assert policies == 2 * (3 * ["sync"] + 3 * ["cadence"])


@pytest.mark.parametrize("options", [{"opt_state": "local"}, {"overlap": 0.5}], ids=lambda one: next(iter(one)))
def test_an_optimizer_without_state_has_no_mean(problem, devices, monkeypatch, options):
    alternate(monkeypatch)
    one = trainer(problem, devices, ms=(20, 50), tx=optax.sgd(0.05), **options)
    state, history = fit(one, problem, epochs=1)
    assert {info.policy for info in history} == {"sync", "cadence"}
    assert not state.opt_states_differ


@pytest.mark.parametrize("options", [{"policy": "sync"}, {"average": "gradients"}], ids=lambda one: next(iter(one)))
def test_so_does_another_trainer_that_averages_gradients(problem, devices, same, options):
    tx = optax.adam(0.05)
    one = jaxche.Trainer(problem.loss, tx, opt_state="local", replicas=devices[:2])
    state, _ = one.round(one.init(problem.params), problem.data, counts=(5, 2))
    moments = state.opt_state[0].mu["w"]
    assert state.opt_states_differ
    assert (moments[0] != moments[1]).any()
    other = jaxche.Trainer(problem.loss, tx, replicas=devices[:2], **options)
    after, _ = other.round(state, problem.data)
    assert not after.opt_states_differ
    for leaf in jax.tree.leaves(after.params):
        np.testing.assert_array_equal(leaf[0], leaf[1])
    # The same as from the mean, given by hand.
    adam, rest = state.opt_state
    by_hand = jax.tree.map(lambda x: x.mean(0).astype(x.dtype), adam), jax.tree.map(lambda x: x[0], rest)
    begun = replace(other.init(one.params(state), opt_state=by_hand), cursor=state.cursor, che=state.che)
    expected, _ = other.round(begun, problem.data)
    same(other.params(after), other.params(expected))


def test_a_replay_makes_the_choices_of_the_record(problem, devices, monkeypatch, same):
    with monkeypatch.context() as recorded:
        alternate(recorded)
        one = trainer(problem, devices, ms=(20, 50), tx=optax.MultiSteps(optax.adam(0.05), 4))
        state, history = fit(one, problem)
    assert [info.policy for info in history[:7]] == [*3 * ["sync"], *3 * ["cadence"], "sync"]
    # Devices that would train otherwise.
    other = trainer(problem, devices, ms=(50, 50), sync_ms=500.0, tx=optax.MultiSteps(optax.adam(0.05), 4))
    again, repeated = other.replay(other.init(problem.params), problem.data, history)
    assert [info.policy for info in repeated] == [info.policy for info in history]
    same(one.params(state), other.params(again))


def test_a_record_without_policies_is_replayed_in_exact_sync(problem, devices):
    """Records of older versions have none."""
    one = trainer(problem, devices, ms=(20, 50))
    state, info = one.round(one.init(problem.params), problem.data)
    again, (repeated,) = one.replay(one.init(problem.params), problem.data, [replace(info, policy="")])
    assert (repeated.policy, again.round) == ("sync", state.round)


def test_with_fewer_replicas_an_update_has_as_many_whole_batches(problem, devices):
    """As after a death in an elastic run: rows of joined batches would be compiled for."""
    one = trainer(problem, devices, ms=(20, 20, 40))
    state, _ = one.round(one.init(problem.params), problem.data)
    for engine in one._engines:
        engine.arrange([0, 2], state.local_states)
    fewer = replace(
        state, che=jaxche.ElChe(2, 1), row_shares=jaxche.cadence.RowShares(), choice=jaxche.cadence.Choice()
    )
    plan = one._plan(fewer, len(problem.data))
    assert (plan.counts, plan.shares) == ((1, 1), ())


def test_one_replica_trains_plainly(problem, devices, same):
    runs = []
    for policy in ("auto", "cadence"):
        one = jaxche.Trainer(problem.loss, optax.adam(0.05), policy=policy, replicas=devices[:1])
        runs.append(one.params(fit(one, problem)[0]))
    same(*runs)


@pytest.mark.parametrize(
    "options",
    [
        {"average": "gradients"},
        {"outer": optax.sgd(1.0)},
        {"scaling": jaxche.AdaScale()},
        {"che": jaxche.ElChe(2)},
        {"joined_batches": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_belongs_to_one_policy_is_refused(problem, devices, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}= is of one of them"):
        jaxche.Trainer(problem.loss, optax.adam(0.05), policy="auto", replicas=devices[:2], **options)


def test_stages_are_refused(devices):
    stages = [lambda p, batch: p * batch["x"], lambda p, x: p + x]
    model = jaxche.Partitioned(stages, lambda y, batch: jnp.mean(y), jaxche.Direct())
    with pytest.raises(ValueError, match="policy='auto' has no programs for a jaxche"):
        jaxche.Trainer(model, optax.adam(0.05), policy="auto", replicas=[devices[:2], devices[2:4]])


def test_other_policies_explain_themselves(problem, devices):
    one = jaxche.Trainer(problem.loss, optax.adam(0.05), replicas=devices[:2])
    assert one.explain(one.init(problem.params)).startswith("policy='cadence', as given")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"wire": "int4"}, {"tx": optax.sgd(0.01, momentum=0.9)}], ids=["float32", "int4", "momentum"]
)
def test_all_kinds_of_merges_in_turns(large, devices, monkeypatch, same, tmp_path, told, options):
    """Sync, local steps that wait, and those that do not: no example is lost, and a run repeats and resumes."""
    sync, waiting, beside = (ApplyPolicy.SYNC, 0.0), (ApplyPolicy.CADENCE, 0.0), (ApplyPolicy.CADENCE, 0.5)
    kinds = [sync, beside, waiting, beside]

    def choose(now, shares, che, batch_rows, round, *rest):
        policy, overlap = kinds[(round + 1) // 3 % 4]
        return replace(now, policy=policy, overlap=overlap)

    monkeypatch.setattr(plan_module, "choose", choose)
    one, saves = trainer(large, devices, **options), {"checkpoint_every": jaxche.Every(epochs=1)}
    state, history = fit(one, large, epochs=3, checkpoints=Checkpoints(tmp_path / "whole"), **saves)
    seen = [(info.policy, info.overlap) for info in history]
    changes = {pair for pair in itertools.pairwise(seen) if len(set(pair)) > 1}
    assert changes == {(sync, beside), (beside, waiting), (waiting, beside), (beside, sync)}
    assert sum(info.examples for info in history) == 3 * (16 * 60 + 5)
    for leaf in jax.tree.leaves(state.params):
        assert (np.asarray(leaf) == np.asarray(leaf)[:1]).all()
    replayed, _ = one.replay(one.init(large.params), large.data, history)
    same(one.params(state), one.params(replayed))
    for epochs in (1, 2):
        fit(one, large, epochs=epochs, checkpoints=Checkpoints(tmp_path / "parts"), **saves)
    other = trainer(large, devices, **options)
    resumed, whole = fit(other, large, epochs=3, checkpoints=Checkpoints(tmp_path / "parts"), **saves)
    same(one.params(state), other.params(resumed))
    assert told(whole) == told(history)


def test_an_interrupt_in_the_first_round_of_another_kind_leaves_a_whole_checkpoint(
    large, devices, monkeypatch, same, tmp_path
):
    """The state before that round has an optimizer state of each replica, and the engine of that round only one."""

    def choose(now, shares, che, batch_rows, round, *rest):
        return replace(now, policy=ApplyPolicy.SYNC if round else ApplyPolicy.CADENCE, overlap=0.0 if round else 0.5)

    def interrupt(planned):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_module, "choose", choose)
    whole = trainer(large, devices, ms=(20, 50))
    state, _ = fit(whole, large, epochs=1)
    one, saves = trainer(large, devices, ms=(20, 50)), {"checkpoints": Checkpoints(tmp_path, every=1000)}
    first, _ = one.round(one.init(large.params), large.data)  # in exact sync too
    monkeypatch.setattr(one._engines[-1], "start", interrupt)
    part, _ = one.fit(first, large.data, epochs=1, progress=False, **saves)
    assert (part.round, part.opt_states_differ, part.choice.is_local) == (2, True, False)
    rounds, other = [], trainer(large, devices, ms=(20, 50))
    resumed, _ = fit(other, large, epochs=1, callbacks=[lambda state, info: rounds.append(info.round)], **saves)
    assert rounds[0] == 2
    same((whole.params(state), whole.opt_state(state)), (other.params(resumed), other.opt_state(resumed)))


def test_replicas_that_drift_far_apart_beside_merges_wait_for_them(devices):
    # The mean of the examples is 0, so that the parameters become small, and noise moves them far at a high rate.
    data = jaxche.Batches(np.random.default_rng(0).normal(size=(16 * 200, 8)).astype(np.float32), batch_size=16)
    for rate, waits in ((0.3, True), (0.01, False)):
        fleet = jaxche.VirtualFleet([20, 50], sync_ms=11.0)
        one = jaxche.Trainer(
            lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(rate), "auto", fleet=fleet, replicas=devices[:2]
        )
        state, history = one.fit(one.init(jnp.ones(8)), data, epochs=1, progress=False)
        assert (history[-1].overlap == 0.0) == waits == ("drifted" in one.explain(state))
        drifts = [info.drift for info in history if info.overlap and not np.isnan(info.drift)]
        assert len(drifts) > 16
        assert (np.median(drifts[-16:]) > 0.1) == waits


@pytest.mark.parametrize(("overlap", "warns"), [(None, False), (0.5, True)], ids=["chosen", "given"])
def test_checkpoints_after_each_round_warn_where_overlap_was_given(problem, devices, tmp_path, caplog, overlap, warns):
    one = trainer(problem, devices, ms=(20, 50), overlap=overlap)
    choice = jaxche.cadence.Choice(ApplyPolicy.CADENCE, overlap=0.5)
    state, info = one.round(replace(one.init(problem.params), choice=choice), problem.data)
    assert info.overlap == 0.5
    one.fit(state, problem.data, epochs=1, progress=False, checkpoints=Checkpoints(tmp_path, every=1))
    assert ("overlap= hides nothing" in caplog.text) == warns
