"""Training on the clock of a virtual fleet: real steps, the fleet's times, the same run every time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche

FLEET = jaxche.VirtualFleet([20, 50], sync_ms=5.0)


def trainer(problem, devices, fleet=FLEET, **options):
    world = len(fleet.ms_per_batch)
    return jaxche.Trainer(problem.loss, optax.adam(0.05), replicas=devices[:world], fleet=fleet, **options)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_times_are_the_fleets_and_runs_repeat(problem, devices, policy, told, same):
    def run():
        one = trainer(problem, devices, policy=policy)
        state, history = one.fit(one.init(problem.params), problem.data, epochs=3, progress=False)
        return one.params(state), history

    (params, history), (again, repeated) = run(), run()
    same(params, again)
    assert told(history) == told(repeated)
    clock = 0.0
    for info in history:
        assert info.wall_ms == pytest.approx([20 * info.rows[0] / 8, 50 * info.rows[1] / 8])
        assert info.sync_ms == 5.0
        clock += info.period_ms
        assert info.clock_ms == pytest.approx(clock)


def test_the_cadence_finds_the_speeds(problem, devices):
    one = trainer(problem, devices)
    state, _ = one.fit(one.init(problem.params), problem.data, epochs=8, progress=False)
    assert state.che.ms_per_batch == pytest.approx((20.0, 50.0))
    assert one.measure_rates(state, problem.data) == pytest.approx((50.0, 20.0))


def test_small_batches_take_the_fixed_part_and_their_rows(make_problem, devices):
    problem = make_problem(examples=20, batch_size=8)  # 8, 8 and 4 rows
    fleet = jaxche.VirtualFleet([20, 50], sync_ms=0.0, fixed_ms=10.0)
    one = trainer(problem, devices, fleet)
    _, info = one.round(one.init(problem.params), problem.data, counts=(2, 1))
    rows = [8 + 8, 4]
    assert info.wall_ms == pytest.approx([2 * 10 + rows[0] / 8 * 10, 10 + rows[1] / 8 * 40])


def test_a_single_replica_has_no_merge(problem, devices):
    one = trainer(problem, devices, jaxche.VirtualFleet([20.0], sync_ms=5.0))
    _, info = one.round(one.init(problem.params), problem.data)
    assert (info.sync_ms, info.clock_ms) == (0.0, pytest.approx(20.0 * info.counts[0]))


def test_the_clock_goes_on_after_a_resume(problem, devices, tmp_path):
    options = {"epochs": 2, "progress": False, "checkpoints": tmp_path}
    one = trainer(problem, devices)
    one.fit(one.init(problem.params), problem.data, callbacks=[lambda *_: True], **options)
    other = trainer(problem, devices)
    state, history = other.fit(other.init(problem.params), problem.data, **options)
    assert history[-1].clock_ms == state.clock_ms == pytest.approx(sum(info.period_ms for info in history))


@pytest.mark.parametrize("replicas", [[0, 0, 0], [0, 1, 0]])
def test_replicas_share_devices(problem, devices, replicas, close):
    fleet = jaxche.VirtualFleet([20, 20, 40], sync_ms=5.0)
    runs = []
    for placed in ([devices[i] for i in replicas], devices[:3]):
        one = jaxche.Trainer(problem.loss, optax.adam(0.05), replicas=placed, fleet=fleet)
        state, history = one.fit(one.init(problem.params), problem.data, epochs=3, progress=False)
        runs.append((one.params(state), [(info.counts, info.clock_ms) for info in history]))
    (params, rounds), (alone, others) = runs
    close(params, alone, rtol=1e-6)
    assert rounds == others
    with pytest.raises(ValueError, match="backend='device' runs one program over all replicas, but some of these"):
        jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=[devices[0]] * 3, fleet=fleet, backend="device")


def test_replicas_are_dealt_out_over_the_devices_at_hand(problem, devices):
    one = jaxche.Trainer(problem.loss, optax.sgd(0.1), fleet=jaxche.VirtualFleet([20.0] * 10))
    assert [place.devices.item() for place in one._engine._placements] == [*devices, devices[0], devices[1]]


@pytest.mark.slow
def test_jitter_and_slowdowns_reach_the_cadence(problem, devices):
    fleet = jaxche.VirtualFleet([20, 50], jitter=0.05, slowdown=jaxche.cadence.Slowdown(rank=0, round=4, factor=5.0))
    one = trainer(problem, devices, fleet)
    state, history = one.fit(one.init(problem.params), problem.data, epochs=12, progress=False)
    assert history[0].counts[0] / max(history[0].counts[1], 1) != history[-1].counts[0] / max(history[-1].counts[1], 1)
    assert state.che.ms_per_batch[0] == pytest.approx(100, rel=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fleet": [20, 50]}, r"write fleet=jaxche.VirtualFleet"),
        ({"fleet": jaxche.VirtualFleet([20.0])}, "fleet has 1 ranks, and there are 2 replicas"),
        ({"fleet": FLEET, "pace_ms": 20.0}, "leave one of them out"),
    ],
)
def test_what_cannot_be_a_clock_is_refused(problem, devices, options, message):
    with pytest.raises(ValueError, match=message):
        jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], **options)


def test_a_fixed_part_longer_than_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"fixed_ms=30.0 is more than a batch takes, 20 ms"):
        jaxche.VirtualFleet([20, 50], fixed_ms=30.0)
    assert jax.process_count() == 1
    assert np.isfinite(FLEET.timings((1, 1), 0)[0]).all()


def test_a_limit_that_keeps_rounds_short_is_logged_once(problem, devices, caplog):
    che = jaxche.ElChe(2, 1, 0.05, max_anchor=2, tuner="steady")
    one = trainer(problem, devices, jaxche.VirtualFleet([20, 50], sync_ms=100.0), che=che)
    state, _ = one.fit(one.init(problem.params), problem.data, epochs=2, progress=False)
    line = "max_anchor=2 limits rounds to 0.1 s; merges of 0.1 s ask for 2 s, max_anchor=40"
    assert [line in record.getMessage() for record in caplog.records].count(True) == 1
    assert one.explain(state).endswith(line)


def test_exact_sync_has_no_such_limit(problem, devices, caplog):
    che = jaxche.ElChe(2, 1, 0.05, max_anchor=2, tuner="steady")
    one = trainer(problem, devices, jaxche.VirtualFleet([20, 50], sync_ms=100.0), che=che, policy="sync")
    state, _ = one.fit(one.init(problem.params), problem.data, epochs=2, progress=False)
    assert state.che.limit
    assert "max_anchor" not in caplog.text + one.explain(state)


ON_ONE_DEVICE = """
import json, sys

import jax, jax.numpy as jnp, numpy as np, optax

import jaxche
from tests.training.test_fleet import SETTINGS, trained

assert len(jax.devices()) == 1  # which has made arrays already
print(json.dumps([trained(settings, sys.argv[1]) for settings in SETTINGS]))
"""
SETTINGS = [{"policy": "auto"}, {"overlap": 0.5, "wire": "int4"}]


def trained(settings, folder):
    """Losses and parameters of a run of four replicas that is resumed, replayed and evaluated."""
    x = np.random.default_rng(0).normal(size=(320, 4)).astype(np.float32)
    data, fleet = (
        jaxche.Batches({"x": x, "y": np.tanh(x[:, :1])}, 16),
        jaxche.VirtualFleet([20, 20, 40, 80], sync_ms=11.0),
    )
    saves = {"checkpoints": Path(folder) / "-".join(map(str, settings)), "checkpoint_every": jaxche.Every(epochs=1)}
    one = jaxche.Trainer(
        lambda w, b: jnp.mean((jnp.tanh(b["x"] @ w) - b["y"]) ** 2), optax.adam(0.01), fleet=fleet, **settings
    )
    for epochs in (1, 2):
        state, history = one.fit(one.init(jnp.zeros((4, 1))), data, epochs, progress=False, **saves)
    replayed, _ = one.replay(one.init(jnp.zeros((4, 1))), data, history)
    assert (one.params(state) == one.params(replayed)).all()
    losses = [info.loss for info in history]
    return losses, one.params(state).tolist(), np.asarray(state.params).sum().item(), one.evaluate(state, data)["loss"]


@pytest.mark.slow
def test_it_trains_on_one_device_what_it_trains_on_many(tmp_path):
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_ONE_DEVICE, str(tmp_path / "one")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    found = [trained(settings, tmp_path / "many") for settings in SETTINGS]
    alone = json.loads(done.stdout.splitlines()[-1])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), alone, [list(one) for one in found]
    )
