"""Replicas that are pipelines: they train as replicas of one device do, each on devices of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.sharding import RemoteDevice

# 7 batches of 8 and one of 3, which micro-batches of 2 do not divide, in each of two epochs.
EXAMPLES = 7 * 8 + 3
ROUNDS = ((2, 3), (1, 2), (3, 1), (0, 4))
PROTOCOLS = {"direct": jaxche.Direct(), "1f1b": jaxche.Pipeline(2), "gpipe": jaxche.Pipeline(4, schedule="gpipe")}


def hidden(params, batch):
    return {"h": jnp.tanh(batch["x"] @ params["w"] + params["b"]), "kept": batch["x"][:, :1] > 0}


def output(params, x):
    return jnp.where(x["kept"], x["h"], 0.5 * x["h"]) @ params["w"] * params["scale"]


def loss(y, batch):
    return jnp.mean((jnp.tanh(y) - batch["y"]) ** 2)


def whole(params, batch):
    return loss(output(params[1], hidden(params[0], batch)), batch)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Nearly all the time here would be spent on optimising programs that run once."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 5)).astype(np.float32)
    return jaxche.Batches({"x": x, "y": np.tanh(x @ rng.normal(size=(5, 2))).astype(np.float32)}, 8, seed=1)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(1)
    return [
        {"w": rng.normal(size=(5, 6)).astype(np.float32) * 0.3, "b": np.zeros(6, np.float32)},
        {"w": rng.normal(size=(6, 2)).astype(np.float32) * 0.3, "scale": np.float32(1)},
    ]


def in_stages(protocol=None, stages=(hidden, output), **options):
    return jaxche.Partitioned(list(stages), loss, protocol or jaxche.Pipeline(2), **options)


@pytest.fixture(scope="module")
def train(train_rounds, data):
    def run(model, params, replicas, rounds=ROUNDS, **knobs):
        return train_rounds(model, params, data, replicas, rounds, **knobs)

    return run


@pytest.fixture(scope="module")
def alone(train, params, devices):
    """What replicas of one device do, per setting."""
    known = {}

    def get(name="adam", **knobs):
        if name not in known:
            known[name] = train(whole, params, devices[:2], **knobs)
        return known[name]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", PROTOCOLS)
def test_pipelines_train_as_devices_do(devices, params, alone, name, train, trained_alike):
    staged = train(in_stages(PROTOCOLS[name]), params, [devices[:2], devices[2:4]])
    trained_alike(staged, alone())
    trainer, state, _ = staged
    for rank, local in enumerate(state.local_states):
        for stage, (tree, adam) in enumerate(zip(local.params, local.opt_state, strict=True)):
            assert all(leaf.devices() == {devices[2 * rank + stage]} for leaf in jax.tree.leaves((tree, adam)))
    # The moments are each replica's own, row by row those of the replicas of one device.
    plain = alone()[1].opt_state[0]
    for stage, view in enumerate(state.opt_state):
        assert view[0].mu["w"].shape[0] == 2
        np.testing.assert_allclose(view[0].mu["w"], plain.mu[stage]["w"], rtol=2e-5, atol=1e-6)
    assert [leaf.devices() for leaf in jax.tree.leaves(trainer.params(state))] == [{devices[i // 2]} for i in range(4)]


SETTINGS = {
    "gradients": {"average": "gradients"},
    "averaged moments": {"opt_state": "average", "merge": "fednova"},
    "new moments": {"opt_state": "reset"},
    "outer": {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True)},
    "host": {"backend": "host"},
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_right_on_stages(devices, params, alone, setting, train, trained_alike):
    staged = train(in_stages(), params, [devices[:2], devices[2:4]], **SETTINGS[setting])
    trained_alike(staged, alone(setting, **SETTINGS[setting]))


def test_a_replica_may_hold_all_its_stages_on_one_device(devices, params, alone, train, trained_alike):
    trained_alike(train(in_stages(), params, [[devices[0]] * 2, devices[1:3]]), alone())


def test_one_pipeline_is_a_plain_training_loop(devices, params, train, trained_alike):
    staged = train(in_stages(), params, [devices[:2]], ((3,), (5,)))
    trained_alike(staged, train(whole, params, devices[:1], ((3,), (5,))))


def test_the_cadence_follows_the_speeds_and_an_epoch_is_read_once(devices, data, params):
    model = in_stages()
    trainer = jaxche.Trainer(
        model, optax.adam(0.05), jaxche.ApplyPolicy.CADENCE, jaxche.ElChe(2, anchor=1).with_speed_ratio(1, 3.0),
        replicas=[devices[:2], devices[2:4]],
    )  # fmt: skip
    state, history = trainer.fit(trainer.init(params), data, epochs=2, progress=False)
    assert history[0].counts == (3, 1)
    assert sum(info.examples for info in history) == 2 * EXAMPLES
    assert history[-1].loss < history[0].loss
    compiled = trainer.compilations
    trainer.round(state, data, counts=(1, 4))
    assert trainer.compilations == compiled
    assert trainer.measure_rates(state, data, seconds=0.05)[1] > 0


def test_rounds_follow_the_movement_of_the_stages(devices, data, params):
    def fit(model, replicas):
        fleet = jaxche.VirtualFleet([20, 50], sync_ms=3.0)
        trainer = jaxche.Trainer(model, optax.adam(0.02), replicas=replicas, fleet=fleet)
        state, history = trainer.fit(trainer.init(params), data, epochs=6, progress=False)
        return state.che.travel_samples, [info.counts for info in history]

    travel, counts = fit(in_stages(), [devices[:2], devices[2:4]])
    wanted, counts_of_devices = fit(whole, devices[:2])
    assert travel
    np.testing.assert_allclose(travel, wanted, rtol=1e-3)
    assert counts == counts_of_devices


@pytest.mark.slow
def test_a_round_leaves_its_state_valid_and_repeats_bit_for_bit(devices, data, params, same, train):
    def noisy(params, batch, rng):
        kept = jax.random.bernoulli(rng, 0.7, batch["x"].shape)
        return hidden(params, batch | {"x": batch["x"] * kept})

    model = in_stages(stages=(noisy, output), remat=True)
    trainer, start, _ = train(model, params, [devices[:2], devices[2:4]], ROUNDS[:1])
    ends = [trainer.round(start, data, counts=(2, 1)) for _ in range(2)]
    same(ends[0][0].params, ends[1][0].params)
    assert ends[0][1].loss == ends[1][1].loss
    # The seeds of both act, and every batch draws keys of its own.
    others = [
        train(in_stages(stages=(noisy, output), **of_model), params, [devices[:2]], ((1,),), **of_trainer)[2][0]
        for of_model, of_trainer in (({}, {}), ({"seed": 1}, {}), ({}, {"seed": 2}))
    ]
    assert len({info.loss for info in others}) == 3


def test_stages_without_parameters_are_carried_along(devices, params, train, trained_alike):
    model = in_stages(stages=(hidden, lambda nothing, x: x, output))
    placements = [devices[:3], devices[3:6]]
    staged = train(model, [params[0], {}, params[1]], placements, ROUNDS[:2])
    trained_alike(staged, train(whole, params, devices[:2], ROUNDS[:2]))
    assert staged[0].params(staged[1])[1] == {}


def test_replicas_are_the_devices_in_a_row_by_default(data, params):
    trainer = jaxche.Trainer(in_stages(), optax.sgd(0.1))
    assert trainer.world_size == 4
    state, _ = trainer.round(trainer.init(params), data, counts=(1, 1, 1, 1))
    assert state.params[1]["w"].shape == (4, 6, 2)


def three(devices):
    return {"loss_fn": in_stages(stages=(hidden, hidden, output))}


REFUSED = {
    r"strategy=FullShard.*leave strategy= out": lambda d: {"strategy": jaxche.FullShard()},
    r"scaling=AdaScale.*leave scaling= out": lambda d: {"scaling": jaxche.AdaScale()},
    r"protocol=DataStore.*write jaxche.Partitioned\(stages, loss, jaxche.Pipeline\(micro_batch_size=8\)\)": lambda d: {
        "loss_fn": in_stages(jaxche.DataStore("memory://refused"))
    },
    r"local_stages=, but all stages of a replica are in one process": lambda d: {
        "loss_fn": in_stages(jaxche.DataStore("memory://local"), local_stages=[0])
    },
    r"for 2 stages each replica is a list of 2 devices, e.g. replicas=\[devices\[:2\], devices\[2:4\]\]": lambda d: {
        "replicas": d[:2]
    },
    r"for 2 stages each replica is a list of 2 devices, ": lambda d: {"replicas": [d[:2], d[2:5]]},
    r"replicas='process': a replica of 2 stages has 2 devices; leave replicas= out, for as many": lambda d: {
        "replicas": "process"
    },
    r"rows='speed' and joined_batches= cut batches, .*; leave them out": lambda d: {
        "policy": "sync",
        "joined_batches": 2,
    },
    r"devices of several processes; give each replica devices of one": lambda d: {
        "replicas": [[d[0], RemoteDevice(1, "cpu", d[0].device_kind, 0)]]
    },
    r"in two replicas; give each devices of its own": lambda d: {"replicas": [d[:2], d[1:3]]},
    r"process 0 has 8 devices, which do not make whole replicas of 3 stages": three,
    r"replicas has no device of this process": lambda d: {"replicas": []},
    r"che is for world_size=3": lambda d: {"che": jaxche.ElChe(3)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(devices, message):
    given = {"loss_fn": None, "tx": optax.sgd(0.1)} | REFUSED[message](devices)
    given["loss_fn"] = given["loss_fn"] or in_stages()
    with pytest.raises(ValueError, match=message):
        jaxche.Trainer(**given)


def test_refused_later(devices, data, params):
    trainer = jaxche.Trainer(in_stages(jaxche.Pipeline(3)), optax.sgd(0.1), replicas=[devices[:2]])
    with pytest.raises(ValueError, match="params: 1 entries for 2 stages"):
        trainer.init(params[:1])
    for tree in ({"w": np.ones(3, np.float32)}, lambda: {"w": np.ones(3, np.float32)}):
        with pytest.raises(ValueError, match="params: dict for 2 stages; give a list"):
            trainer.init(tree)
    with pytest.raises(ValueError, match=r"model_state: stages of a .*Partitioned have none"):
        trainer.init(params, {"mean": np.zeros(2)})
    state = trainer.init(params)
    with pytest.raises(ValueError, match="micro_batch_size=3 does not divide the batch of 8 examples"):
        trainer.round(state, data)
    trainer = jaxche.Trainer(in_stages(), optax.sgd(0.1), replicas=[devices[:2]])
    state = trainer.init([params[0], {"w": np.ones((5, 2), np.float32), "scale": np.float32(1)}])
    with pytest.raises(ValueError, match=r"stage 1 \(output\) does not accept what stage 0 gives"):
        trainer.round(state, data)
    with pytest.raises(ValueError, match="must be different devices or meshes of them"):
        jaxche.Trainer(whole, optax.sgd(0.1), replicas=[devices[:2], devices[2:4]])


def test_other_values_of_the_stages_are_a_list_as_at_the_start(devices, data, params, same):
    trainer = jaxche.Trainer(in_stages(), optax.adam(1e-2), replicas=[devices[:2], devices[2:4]])
    state, _ = trainer.round(trainer.init(params), data)
    again = trainer.replace(state, params)
    same(list(trainer.params(again)), params)
    same(trainer.opt_state(again), trainer.opt_state(state))
    assert again.cursor == state.cursor > 0


def test_an_error_in_mid_round_leaves_the_last_good_state(devices, data, params):
    nan = [jax.tree.map(lambda x, i=i: x * np.float32(np.nan if i == 3 else 1), data[i]) for i in range(7)]
    trainer = jaxche.Trainer(in_stages(), optax.adam(0.05), replicas=[devices[:2], devices[2:4]])
    state = trainer.init(params)
    with pytest.raises(jaxche.NonFiniteLossError, match="the loss of rank 1 became nan in round 0"):
        trainer.round(state, nan, counts=(2, 2))
    state, info = trainer.round(state, nan, counts=(1, 2))
    assert np.isfinite(info.loss)


@pytest.mark.slow
def test_pipelines_go_on_from_a_checkpoint_bit_for_bit(data, params, devices, lockstep, tmp_path):
    replicas = [devices[:2], devices[2:4]]

    def make():
        return jaxche.Trainer(in_stages(), optax.adam(0.05), che=lockstep(), replicas=replicas)

    def run(trainer, callbacks=(), **options):
        return trainer.fit(trainer.init(params), data, 2, callbacks=callbacks, progress=False, **options)

    first, second = make(), make()
    state, _ = run(first)
    left, _ = run(first, [lambda state, info: state.round == 2], checkpoints=tmp_path)
    resumed, history = run(second, checkpoints=tmp_path)
    assert left.round == 2
    assert [info.round for info in history] == list(range(state.round))
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.device_get((one.params, one.opt_state)) for one in (state, resumed)),
    )
    assert resumed.params[1]["w"].devices() == {devices[1], devices[3]}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [jaxche.Direct(), jaxche.Pipeline(2)], ids=["direct", "pipeline"])
@pytest.mark.parametrize(
    ("stages", "objective"),
    [
        ((lambda params, x: jnp.tanh(x @ params["w"]), lambda params, h: h @ params["w"]), lambda y, x: jnp.mean(y**2)),
        ((lambda params, x: jnp.tanh(params["b"])[None], lambda params, h: h @ params["w"]), lambda y, x: jnp.mean(y)),
        ((lambda params, x: x, lambda params, h: params["w"]), lambda y, x: jnp.mean(y**2)),
    ],
    ids=["loss", "stage and loss", "last stage and loss"],
)
def test_stages_and_the_loss_may_ignore_the_batch(devices, params, data, stages, objective, protocol):
    arrays = jaxche.Batches(np.asarray(data.arrays["x"])[:11], batch_size=4)
    trainer = jaxche.Trainer(
        jaxche.Partitioned(list(stages), objective, protocol),
        optax.sgd(0.1),
        replicas=[devices[:2], devices[2:4]],
    )
    state, history = trainer.fit(trainer.init(params), arrays, epochs=2, progress=False)
    assert sum(info.examples for info in history) == 22
    assert np.isfinite(history[-1].loss)
    assert not np.array_equal(trainer.params(state)[1]["w"], params[1]["w"])
