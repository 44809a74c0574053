"""What a prompt shows of a trainer and of what it gives: one line each."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import jaxche
from jaxche.cadence import RowShares
from jaxche.training._explain import _replicas_text

LINE = 110


def texts(trainer, problem, rounds=1):
    state = trainer.init(problem.params)
    for _ in range(rounds):
        state, info = trainer.round(state, problem.data)
    # Each metric makes the text of a round longer by its name and value.
    return repr(trainer), repr(state), repr(dataclasses.replace(info, metrics={})), state


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "policy='cadence', average='parameters', merge='steps'"),
        ({"policy": "sync"}, "policy='sync', average='gradients'"),
        ({"policy": "sync", "rows": "equal"}, "policy='sync', average='gradients', rows='equal'"),
        ({"rows": "speed", "merge": "batch"}, "policy='cadence', average='parameters', merge='batch', rows='speed'"),
        ({"policy": "auto"}, "policy='auto'"),
        ({"scaling": jaxche.AdaScale()}, "policy='cadence', average='parameters', merge='steps', scaling=AdaScale()"),
    ],
)
def test_trainer(options, shown, problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], **options)
    assert repr(trainer) == f"Trainer(2 replicas on 2 x cpu, {shown})"


def test_trainer_of_one_replica_of_islands_and_of_a_fleet(problem, devices):
    one = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    assert repr(one) == "Trainer(1 replica on 1 x cpu, a plain training loop)"
    strategy = jaxche.FullShard()
    meshes = [strategy.mesh(devices[:4]), strategy.mesh(devices[4:6])]
    islands = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=meshes, strategy=strategy)
    assert repr(islands).startswith("Trainer(2 replicas of 2 or 4 devices on 6 x cpu, policy=")
    assert repr(islands).endswith(", strategy=FullShard())")
    fleet = jaxche.VirtualFleet(range(20, 60))
    virtual = jaxche.Trainer(problem.loss, optax.sgd(0.1), fleet=fleet, replicas=list(devices) * 5)
    assert repr(virtual).startswith("Trainer(40 replicas on a virtual clock, 20..59 ms a batch, policy=")


def test_replicas_on_several_kinds():
    kinds = [SimpleNamespace(device_kind=kind) for kind in ("H100", "L4", "H100")]
    rows = [np.array([[device]], dtype=object) for device in kinds]
    assert _replicas_text(rows, None) == "3 replicas on 2 x H100 and 1 x L4"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cadence", "sync", "auto"])
def test_each_value_is_one_line(policy, problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.1), replicas=devices[:4], policy=policy)
    *shown, state = texts(trainer, problem, rounds=3)
    shown += [repr(value) for value in (state.row_shares, state.choice, state.correction, problem.data)]
    for text in shown:
        assert "\n" not in text
        assert "array" not in text.lower()
        assert len(text) <= LINE, text


def test_state_counts_examples_and_pending_batches(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(problem.params)
    size = sum(x.size for x in jax.tree.leaves(problem.params))
    text = f"TrainerState(round=0, epoch=0, cursor=0, examples=0, parameters={size}, local_replicas=2)"
    assert repr(state) == text
    behind = dataclasses.replace(state, examples=1234, pending_batches=((0, 3, 5), (1, 0, 4)))
    assert "cursor=0, pending=6, examples=1,234, " in repr(behind)


def test_explain_counts_the_batches_of_the_policy(problem, devices):
    sync = jaxche.Trainer(problem.loss, optax.sgd(0.1), policy="sync", rows="equal", replicas=devices[:3])
    state, _ = sync.round(sync.init(problem.params), problem.data)
    rounds, _, merge = sync.explain(state).partition("; ")
    assert rounds == "policy='sync', as given: 3 batches in a round"
    assert merge.startswith("a merge sends ")
    assert merge.endswith(" of each replica, wire='float32'")
    cadence = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    assert cadence.explain(cadence.init(problem.params)) == "policy='cadence', as given: (1, 1) batches in a round"
    with pytest.raises(ValueError, match=r"state=5 is not a state of this trainer; .* then trainer\.explain\(state"):
        cadence.explain(5)


def test_explain_has_no_advice_on_the_merges_of_a_single_replica(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    state, _ = trainer.round(trainer.init(problem.params), problem.data)
    assert trainer.explain(state) == "policy='cadence', as given"


@pytest.mark.parametrize(
    ("options", "is_advised"),
    [
        ({}, True),
        ({"policy": "async"}, False),
        ({"rows": "speed"}, False),
        ({"average": "gradients"}, False),
        ({"outer": optax.sgd(1.0)}, False),
        ({"groups": [[0, 1]]}, False),
        # As by default, but "auto" refuses them.
        ({"average": "parameters"}, False),
        ({"rows": "equal"}, False),
        ({"che": jaxche.ElChe(4, 1, tuner="progress")}, False),
        ({"groups": "process"}, False),
        ({"scaling": jaxche.AdaScale()}, False),
    ],
)
def test_explain_has_what_auto_expects_more_progress_of(problem, devices, options, is_advised):
    fleet = jaxche.VirtualFleet([20.0, 20.0, 40.0, 80.0], sync_ms=0.2)
    trainer = jaxche.Trainer(problem.loss, optax.adam(1e-3), replicas=devices[:4], fleet=fleet, **options)
    state, _ = trainer.fit(trainer.init(problem.params), problem.data, epochs=3, progress=False)
    line = r"; policy='auto' expects 1\.\d\d times the progress of exact sync of 2 batches in 15 ms$"
    assert bool(re.search(line, trainer.explain(state))) == is_advised
    # Not before a round has measured anything.
    assert "auto" not in trainer.explain(trainer.init(problem.params))


def test_explain_cuts_batches_into_rows_for_all_devices_of_a_replica(problem, devices):
    fleet = jaxche.VirtualFleet([20.0, 20.0, 40.0, 80.0], sync_ms=0.2)
    meshes = [jax.sharding.Mesh(np.array(devices[i : i + 2]), "shard") for i in (0, 2, 4, 6)]
    trainer = jaxche.Trainer(problem.loss, optax.adam(1e-3), replicas=meshes, fleet=fleet, strategy=jaxche.FullShard())
    state, _ = trainer.fit(trainer.init(problem.params), problem.data, epochs=3, progress=False)
    # With shares in multiples of two rows exact sync of two batches is hardly better.
    assert "policy='auto'" not in trainer.explain(state)


def measured(ms):
    """The times of replicas for a batch, measured in exact sync."""
    shares = RowShares()
    for _ in range(3):
        shares = shares.report([1] * len(ms), [16] * len(ms), ms)
    return shares


@pytest.mark.parametrize(
    ("ms", "policy", "options", "is_advised"),
    [
        ((20.0, 21.0), "sync", {}, True),
        ((20.0, 23.0), "sync", {}, False),
        ((20.0, 21.0), "auto", {}, True),
        ((20.0, 21.0), "cadence", {}, False),
        ((20.0, 21.0), "sync", {"pace_ms": 1.0}, False),
        ((20.0, 21.0, 20.0), "sync", {}, False),  # of another trainer
        ((20.0, 21.0), "sync", {"fleet": jaxche.VirtualFleet([20.0, 21.0])}, False),
    ],
)
def test_explain_makes_equally_fast_devices_one_replica(problem, devices, ms, policy, options, is_advised):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), policy, replicas=devices[:2], **options)
    state, _ = trainer.round(trainer.init(problem.params), problem.data)
    assert "replicas=" not in trainer.explain(dataclasses.replace(state, row_shares=RowShares()))
    assert ("replicas='process'" in trainer.explain(dataclasses.replace(state, row_shares=measured(ms)))) == is_advised


def test_explain_makes_them_one_replica_also_under_local_steps_of_auto(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), "auto", replicas=devices[:2])
    state, _ = trainer.round(trainer.init(problem.params), problem.data)
    local = dataclasses.replace(state.choice, policy=jaxche.ApplyPolicy.CADENCE, reason="local steps")
    text = trainer.explain(dataclasses.replace(state, row_shares=measured((20.0, 20.0)), choice=local))
    assert text.startswith("local steps; the replicas of a process are equally fast: replicas='process'")


def test_explain_leaves_islands_as_they_are(problem, devices):
    islands = [jaxche.NoShard().mesh(devices[:2]), jaxche.NoShard().mesh(devices[2:4])]
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), "sync", replicas=islands)
    state, _ = trainer.round(trainer.init(problem.params), problem.data)
    assert "replicas=" not in trainer.explain(dataclasses.replace(state, row_shares=measured((20.0, 20.0))))
