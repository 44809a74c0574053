"""Moving averages of a trainer: against NumPy under all policies, in checkpoints, on islands, in stages."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche

AGE = 0.1


def loss(params, batch, model_state, rng):
    """A statistic, a count and a key beside the loss."""
    out = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    out = out * jax.random.bernoulli(rng, 0.9, out.shape)
    key, _ = jax.random.split(model_state["key"])
    state = {"mean": 0.9 * model_state["mean"] + 0.1 * out.mean(), "count": model_state["count"] + 1, "key": key}
    return jnp.mean((out - batch["y"]) ** 2), ({}, state)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 6)).astype(np.float32)
    return jaxche.Batches({"x": x, "y": np.tanh(x @ rng.normal(size=(6, 4))).astype(np.float32)}, batch_size=8)


def start(trainer):
    params = {"w": np.full((6, 4), 0.1, np.float32), "b": np.zeros(4, np.float32)}
    return trainer.init(params, {"mean": np.float32(0), "count": np.int32(0), "key": jax.random.key(1)})


class Twin:
    """The averages in float64."""

    def __init__(self, trainer, state, taken=0):
        self._trainer, self._taken = trainer, taken
        self._mean = self._floats(state)

    def _floats(self, state):
        trees = self._trainer.params(state), self._trainer.model_state(state)
        return [np.float64(x) for x in jax.tree.leaves(trees) if jnp.issubdtype(x.dtype, jnp.floating)]

    def take(self, state):
        now = state.examples
        if now >= self._taken * (1 + AGE / 50):
            kept = (self._taken / now) ** (1 / AGE - 1)
            pairs = zip(self._mean, self._floats(state), strict=True)
            self._mean, self._taken = [kept * mean + (1 - kept) * x for mean, x in pairs], now

    def check(self, state):
        averaged = self._trainer.with_ema(state)
        for found, wanted in zip(self._floats(averaged), self._mean, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        own, newest = (self._trainer.model_state(one) for one in (averaged, state))
        if newest is not None:  # as that of stages
            assert int(own["count"]) == int(newest["count"]) > 0
            assert own["key"] == newest["key"]

    def follow(self, state, data):
        """One round more, and its average."""
        state, _ = self._trainer.round(state, data)
        self.take(state)
        self.check(state)
        return state


FLEET = {"fleet": jaxche.VirtualFleet([20, 30, 50], sync_ms=9.0)}
SETTINGS = {
    "sync": FLEET | {"policy": "sync"},
    "cadence": FLEET,
    "async": FLEET | {"policy": "async"},
    "auto": FLEET | {"policy": "auto"},
    "overlap": FLEET | {"overlap": 0.5},
    "codes": FLEET | {"wire": "int4"},
    "overlapped codes": FLEET | {"overlap": 0.5, "wire": "int8"},
    "outer": FLEET | {"outer": optax.sgd(0.7, momentum=0.9)},
    "groups": FLEET | {"groups": [[0, 1], [2]]},
    "one replica": {},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_average_is_that_of_the_merged_parameters(devices, data, name):
    devices = devices[: 3 if "fleet" in SETTINGS[name] else 1]
    trainer = jaxche.Trainer(loss, optax.adam(0.05), replicas=devices, ema=AGE, **SETTINGS[name])
    state = start(trainer)
    twin = Twin(trainer, state)
    for _ in range(15):
        state = twin.follow(state, data)
    assert trainer.compilations <= 3 * len(devices)  # for the rows of "speed"
    assert f"ema={AGE}" in repr(trainer)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize("strategy", [jaxche.FullShard(min_size=1), jaxche.ShardGradOp(min_size=1)], ids=repr)
def test_islands_share_the_average_as_their_gradients(devices, data, strategy, policy):
    islands = [strategy.mesh(devices[:2]), strategy.mesh(devices[2:4])]
    fleet = jaxche.VirtualFleet([20, 30])
    trainer = jaxche.Trainer(
        loss, optax.adam(0.05), policy, replicas=islands, strategy=strategy, fleet=fleet, ema=AGE, rows="equal"
    )
    state = start(trainer)
    twin = Twin(trainer, state)
    for _ in range(6):
        state = twin.follow(state, data)
        cut = state.local_states[0].ema[0]["w"]
        assert cut.addressable_shards[0].data.size * 2 == cut.size
    shards = [one.local_states[1].params["w"].addressable_shards for one in (state, trainer.with_ema(state))]
    assert len({tuple((str(x.index), x.device.id) for x in own) for own in shards}) == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_stages_have_averages_of_their_own(devices, data, replicas):
    model = jaxche.Partitioned(
        [lambda w, batch: jnp.tanh(batch["x"] @ w), lambda w, h: h @ w],
        lambda out, batch: jnp.mean((out - batch["y"]) ** 2),
        jaxche.Direct(),
        devices[:2],
    )
    places = [devices[:2], devices[2:4]][:replicas]
    trainer = jaxche.Trainer(model, optax.adam(0.05), replicas=places, ema=AGE, policy="sync")
    state = trainer.init([np.full((6, 5), 0.1, np.float32), np.full((5, 4), 0.1, np.float32)])
    twin = Twin(trainer, state)
    for _ in range(5):
        state = twin.follow(state, data)
    found = trainer.with_ema(state)
    assert trainer.evaluate(found, data)["loss"] != trainer.evaluate(state, data)["loss"]


def fit(trainer, data, **options):
    return trainer.fit(start(trainer), data, epochs=4, progress=False, **options)


CASES = {
    "cadence": {},
    "sync": {"policy": "sync"},
    "overlap": {"overlap": 0.5},
    "one replica": {"fleet": None},
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_same_average_bit_for_bit(devices, data, same, interrupted, case):
    options = FLEET | {"replicas": devices[: 3 if case != "one replica" else 1]} | CASES[case]

    def run(**more):
        trainer = jaxche.Trainer(loss, optax.adam(0.05), ema=AGE, **options)
        state, _ = fit(trainer, data, checkpoint_every=jaxche.Every(steps=16), **more)
        return state.ema_examples, trainer.params(trainer.with_ema(state)), trainer.params(state)

    (taken, *resumed), (wanted, *whole) = interrupted(run, 7)
    assert taken == wanted > 0
    same(resumed, whole)


def test_an_average_that_a_trainer_does_not_keep_is_refused_by_name(devices, data, tmp_path):
    plain, averaging = (jaxche.Trainer(loss, optax.adam(0.05), replicas=devices[:1], ema=ema) for ema in (None, AGE))
    state, _ = fit(averaging, data, checkpoints=jaxche.Checkpoints(tmp_path, every=1000))
    with pytest.raises(ValueError, match=r"a run with another ema=: ema/0/.*use the ema="):
        fit(plain, data, checkpoints=tmp_path)
    with pytest.raises(ValueError, match=r"state is of a trainer with ema="):
        plain.round(state, data)
    with pytest.raises(ValueError, match=r"state is of a trainer without ema="):
        averaging.round(start(plain), data)


def test_the_average_of_a_run_that_had_none_begins_with_its_parameters(devices, data, tmp_path):
    plain, averaging = (jaxche.Trainer(loss, optax.adam(0.05), replicas=devices[:1], ema=ema) for ema in (None, AGE))
    saves = {"checkpoints": jaxche.Checkpoints(tmp_path, every=1000)}  # the end alone
    fit(plain, data, **saves)
    state, history = fit(averaging, data, **saves)
    assert history[-1].steps_done == state.steps == 48  # nothing was left to train
    twin = Twin(averaging, state, taken=state.examples)
    twin.check(state)
    for _ in range(4):
        state = twin.follow(state, data)


def test_a_fit_evaluates_the_average(devices, data):
    trainer = jaxche.Trainer(loss, optax.adam(0.05), replicas=devices[:1], ema=AGE)
    seen = []
    state, history = fit(
        trainer,
        data,
        validation=data,
        eval_every=12,
        callbacks=[lambda state, info: seen.append((state, info.validation))],
    )
    found = [(trainer.with_ema(state), validation) for state, validation in seen if validation]
    assert len(found) == 4
    assert [trainer.evaluate(averaged, data) for averaged, _ in found] == [validation for _, validation in found]
    assert history[-1].validation != trainer.evaluate(state, data)
    dry = trainer.fit(state, data, validation=data, dry_run=True, progress=False)[1][0]
    assert dry.validation == trainer.evaluate(trainer.with_ema(state), [data[0]])


def test_rounds_of_one_replica_are_short_enough_for_the_average(devices, data):
    def lengths(**options):
        trainer = jaxche.Trainer(loss, optax.adam(0.05), replicas=devices[:1], **options)
        return [info.counts[0] for info in trainer.fit(start(trainer), data, epochs=24, progress=False)[1]]

    counts, done = lengths(ema=AGE), 0
    for n in counts:
        assert n <= min(50, max(1, int(AGE * done / 2)))
        done += n
    assert max(counts) == 12  # the epochs
    assert lengths()[0] == 12


def test_a_fit_that_takes_the_state_keeps_the_average(devices, data, same):
    ended = []
    for policy, donate in itertools.product(["sync", "cadence"], [False, True]):
        trainer = jaxche.Trainer(loss, optax.adam(0.05), policy, replicas=devices[:3], ema=AGE, **FLEET)
        state, _ = fit(trainer, data, donate=donate)
        ended.append(trainer.params(trainer.with_ema(state)))
    same(ended[::2], ended[1::2])


@pytest.mark.parametrize("ema", [0, 0.999, -0.1, True, "0.05", np.nan, jnp.ones(2)], ids=str)
def test_what_is_no_part_of_a_run_is_refused(ema):
    with pytest.raises(ValueError, match=r"ema=.* and no decay.*write ema=0\.05"):
        jaxche.Trainer(loss, optax.adam(0.05), ema=ema)


def test_without_an_average_there_is_no_state_of_it(devices, data):
    trainer = jaxche.Trainer(loss, optax.adam(0.05), replicas=devices[:1])
    with pytest.raises(ValueError, match=r"keeps no moving average; write jaxche\.Trainer\(loss_fn, tx, ema=0\.05\)"):
        trainer.with_ema(start(trainer))


def test_the_memory_of_a_round_names_the_average(devices, data):
    trainer = jaxche.Trainer(loss, optax.adam(0.05), replicas=devices[:1], ema=AGE)
    trainer.round(start(trainer), data)
    assert trainer.memory[0]["moving average"] == 4 * (6 * 4 + 4 + 1)


def test_the_merged_views_stay(devices, data):
    """A merge takes the views of the one before it, which are slow to make from rows."""
    trainer = jaxche.Trainer(loss, optax.adam(0.05), "sync", replicas=devices[:3], ema=AGE, **FLEET)
    state, _ = trainer.round(start(trainer), data)
    state, _ = trainer.round(state, data)
    views = {id(local.views) for local in state.local_states}
    assert len(views) == 1
    assert state.local_states[0].views is not None
    assert state.ema_examples == state.examples


def test_states_of_stages_without_an_average_are_refused(devices, data):
    def make(**options):
        model = jaxche.Partitioned(
            [lambda w, batch: batch["x"] @ w, lambda w, h: h * w],
            lambda out, batch: jnp.mean((out - batch["y"]) ** 2),
            jaxche.Direct(),
            devices[:2],
        )
        return jaxche.Trainer(model, optax.adam(0.05), replicas=[devices[:2]], **options)

    params = [np.full((6, 4), 0.1, np.float32), np.ones(4, np.float32)]
    with pytest.raises(ValueError, match=r"state is of a trainer without ema="):
        make(ema=AGE).round(make().init(params), data)


def test_the_fingerprint_of_a_run_names_it(devices):
    def fingerprint(**options):
        return jaxche.Trainer(loss, optax.adam(0.05), replicas=devices[:2], **options)._settings.fingerprint

    assert fingerprint(ema=0.25)["ema"] == "0.25"
    assert "ema" not in fingerprint()  # as in records of runs without one
