"""The line on the number of updates: the numbers of real runs, the choices, and when it is logged."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.training._hooks import Run
from jaxche.training._plan import End
from jaxche.training._updates import expected_updates, updates_line

EXAMPLES = 96


def loss_fn(w, batch):
    return jnp.mean((batch @ w - 1.0) ** 2)


def batches(batch_size=4):
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 2)).astype(np.float32)
    return jaxche.Batches(x, batch_size)


def make(devices, replicas=3, tx=None, **options):
    fleet = jaxche.VirtualFleet(ms_per_batch=[20.0, 30.0, 50.0][:replicas], sync_ms=2.0)
    return jaxche.Trainer(loss_fn, tx or optax.sgd(0.01), replicas=devices[:replicas], fleet=fleet, **options)


def line_of(trainer, data=None, epochs=2, max_steps=None, max_time=None):
    """The line of a fit that begins, without its rounds."""
    state, data = trainer.init(jnp.zeros(2)), data or batches()
    end = End.of_fit(state, epochs, max_steps, None, max_time)
    return updates_line(trainer, Run(state, data, len(data), end))


def fit(caplog, devices, replicas=3, epochs=2, data=None, tx=None, checkpoints=None, **options):
    """The state and history of a fit, the trainer, and the lines on updates."""
    caplog.clear()
    trainer = make(devices, replicas, tx, **options)
    state = trainer.init(jnp.zeros(2))
    state, history = trainer.fit(state, data or batches(), epochs, progress=False, checkpoints=checkpoints)
    return state, history, trainer, lines(caplog)


def lines(caplog):
    return [record.getMessage() for record in caplog.records if " of each in " in record.getMessage()]


def numbers(line):
    """The updates of each replica, and those of one device."""
    found = re.search(
        r"([\d,]+) (?:update|mini-step)s? of each in (?:this fit|an epoch), against ([\d,]+) on one device", line
    )
    return tuple(int(n.replace(",", "")) for n in found.groups())


@pytest.mark.parametrize(("joined", "examples"), [(None, 4), (2, 4), (4, 7), (None, 7)])
def test_under_sync_the_number_is_that_of_the_rounds(joined, examples, devices, caplog):
    data = batches(examples)
    _, history, _, (line,) = fit(caplog, devices, data=data, policy="sync", joined_batches=joined)
    assert numbers(line) == (len(history), 2 * len(data))
    assert "about" not in line
    assert "joined_batches=1 (the updates of one device" in line
    assert 'policy="sync"' not in line


@pytest.mark.parametrize("chained", [False, True])
def test_of_an_optimizer_that_accumulates_gradients_it_is_of_mini_steps(chained, devices, caplog):
    """In 48 batches three replicas take 16 steps of one gradient, and make eight updates."""
    tx = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2).gradient_transformation()
    _, history, _, (line,) = fit(caplog, devices, policy="sync", tx=optax.chain(tx) if chained else tx)
    assert len(history) == 16
    assert numbers(line) == (16, 48)
    assert "16 mini-steps of each in this fit" in line
    assert "joined_batches=1 (the mini-steps of one device" in line
    assert "scaling=" not in line


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_averaging_parameters_it_is_the_mean_over_the_replicas(policy, devices, caplog):
    _, history, _, (line,) = fit(caplog, devices, policy=policy)
    assert numbers(line) == (16, 48)
    assert "about 16 updates" in line
    assert 'policy="sync", joined_batches=1' in line
    assert sum(sum(info.counts) for info in history) / 3 == 16


def test_averaging_gradients_a_round_is_an_update(devices, caplog):
    che = jaxche.ElChe(3, anchor=2, max_anchor=2)
    _, history, _, (line,) = fit(caplog, devices, replicas=3, average="gradients", che=che)
    assert numbers(line) == (8, 48)
    assert len(history) == 6  # rounds become longer once fast replicas take more
    assert "batch_size=" not in line


def test_the_choices_have_numbers(devices):
    line = line_of(make(devices), batches(12), epochs=3)
    assert numbers(line) == (8, 24)
    assert "batch_size=4, if 12 is not yet divided" in line
    assert "epochs=9," in line
    assert "scaling=jaxche.AdaScale(), if the loss is a mean over examples" in line
    line = line_of(make(devices, tx=optax.adam(1e-3)), batches(2))
    assert "batch_size" not in line
    assert "scaling=jaxche.AdamScale()" in line
    line = line_of(make(devices, tx=optax.rmsprop(1e-3)))  # whose second moments are not those of Adam
    assert "scaling=jaxche.AdaScale()" in line
    line = line_of(make(devices), [np.ones((4, 2), np.float32)] * 12)
    assert "batches of 1/3 of the size" in line
    line = line_of(make(devices, policy="sync", joined_batches=2, tx=optax.MultiSteps(optax.sgd(0.1), 2)))
    assert "batch_size=2, if 4 is not yet divided" in line
    assert "scaling=" not in line


def test_under_sync_parameters_can_be_averaged_too(devices, caplog):
    *_, (line,) = fit(caplog, devices, policy="sync", average="parameters", rows="equal")
    assert numbers(line) == (16, 48)
    assert 'For as many: average="gradients", joined_batches=1' in line


@pytest.mark.parametrize("choice", [{"policy": "sync", "joined_batches": 1}, {"data": batches(1)}, {"epochs": 6}])
def test_a_choice_of_the_line_makes_as_many_updates(choice, devices, caplog):
    """Those of one device: batches of 4 for 2 epochs."""
    _, history, trainer, _ = fit(caplog, devices, **choice)
    updates = [len(history)] * 3 if trainer.policy == "sync" else np.sum([info.counts for info in history], axis=0)
    assert np.mean(updates) == pytest.approx(48, rel=0.4)
    assert np.mean(updates) >= 48


@pytest.mark.parametrize(
    ("options", "run"),
    [
        ({"policy": "sync", "joined_batches": 1}, {}),
        ({"rows": "speed"}, {}),
        ({"policy": "auto"}, {}),
        ({"scaling": jaxche.AdaScale()}, {}),
        ({}, {"data": [np.ones((4, 2), np.float32)], "epochs": 1}),
    ],
)
def test_as_many_updates_or_a_scaling_rule_need_no_line(options, run, devices):
    assert line_of(make(devices, **options), **run) is None


def test_rows_by_speed_make_as_many_updates_only_in_rounds_of_a_chosen_length(devices):
    assert line_of(make(devices, rows="speed", che=jaxche.ElChe(3, 1, tuner="steady"))) is not None


def test_limits_in_steps_and_in_time(devices):
    trainer = make(devices)
    for limit, wanted in (({"max_steps": 36}, (12, 36)), ({"max_time": 1.0}, (8, 24))):
        line = line_of(trainer, epochs=None, **limit)
        assert numbers(line) == wanted
        assert ("max_steps=108," in line) == ("max_steps" in limit)
        assert ("in an epoch," in line) == ("max_time" in limit)


def test_one_replica_needs_no_line(devices, caplog):
    trainer = jaxche.Trainer(loss_fn, optax.sgd(0.01), replicas=devices[:1])
    trainer.fit(trainer.init(jnp.zeros(2)), batches(), progress=False)
    assert lines(caplog) == []
    assert expected_updates(trainer, 48, 24) == (48, True)


def test_once_per_trainer_and_not_in_a_resumed_run(devices, caplog, tmp_path):
    state, _, trainer, (line,) = fit(caplog, devices, epochs=1, checkpoints=tmp_path)
    assert numbers(line) == (8, 24)
    trainer.fit(state, batches(), progress=False)
    trainer.fit(trainer.init(jnp.zeros(2)), batches(), progress=False)
    assert len(lines(caplog)) == 1
    # A new trainer continues from the checkpoint.
    state, _, _, found = fit(caplog, devices, epochs=2, checkpoints=tmp_path)
    assert state.epoch == 2
    assert found == []
    # And from a state of its own later rounds.
    other = fit(caplog, devices, epochs=1)[0]
    caplog.clear()
    trainer = jaxche.Trainer(loss_fn, optax.sgd(0.01), replicas=devices[:3])
    trainer.fit(other, batches(), progress=False)
    assert lines(caplog) == []


def test_a_dry_run_leaves_the_line_to_the_run(devices, caplog):
    trainer = jaxche.Trainer(loss_fn, optax.sgd(0.01), replicas=devices[:2])
    state = trainer.init(jnp.zeros(2))
    trainer.fit(state, batches(), progress=False, dry_run=True)
    assert lines(caplog) == []
    trainer.fit(state, batches(), progress=False)
    (line,) = lines(caplog)
    assert numbers(line) == (12, 24)


def test_a_limit_in_steps_counts_as_well(devices, caplog):
    trainer = make(devices, replicas=2)
    for epochs, expected in ((None, (15, 30)), (1, (12, 24))):
        line = line_of(trainer, epochs=epochs, max_steps=30)
        assert numbers(line) == expected
        assert ("epochs=2" if epochs else "max_steps=60") in line
    trainer.fit(trainer.init(jnp.zeros(2)), iter(list(batches())), progress=False)
    assert not lines(caplog)  # the length of a stream is not known
