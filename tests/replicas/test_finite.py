"""No round is kept that makes a number NaN or infinite: parameters, gradients, states, whatever the loss says."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.replicas._programs import all_finite, stayed_finite

BATCHES = 12


def loss(params, batch):
    """Finite for d = 0, where its gradient is NaN."""
    w = params["w"]
    return jnp.mean((w - 1) ** 2) + 0.1 * jnp.sqrt(jnp.sum((batch["d"] * w) ** 2))


def data(bad=None):
    return [{"d": np.full((4, 8), float(i != bad), np.float32)} for i in range(BATCHES)]


def params():
    return {"w": jnp.full(8, 0.5)}


def finite(state):
    trees = (state.params, state.opt_state, state.model_state, state.outer_state)
    return all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(trees)) if x.dtype.kind == "f")


SETTINGS = {
    "cadence": {},
    "async": {"policy": "async"},
    "sync": {"policy": "sync", "rows": "equal"},
    "gradients": {"average": "gradients"},
    "average": {"opt_state": "average"},
    "reset": {"opt_state": "reset"},
    "fednova": {"merge": "fednova"},
    "outer": {"outer": optax.sgd(0.7, momentum=0.9)},
    "scaled": {"scaling": jaxche.AdaScale()},
    "host": {"backend": "host"},
}


def replicas_of(kind, devices):
    if kind == "one":
        return {"replicas": devices[:1]}
    if kind == "islands":
        meshes = [jaxche.FullShard().mesh(devices[i : i + 2]) for i in (0, 2)]
        return {"replicas": meshes, "strategy": jaxche.FullShard()}
    return {"replicas": devices[:2]}


def refused(trainer, batches, **options):
    state = trainer.init(params())
    with pytest.raises(jaxche.NonFiniteLossError) as caught:
        trainer.fit(state, batches, progress=False, **options)
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("bad", [5, BATCHES - 1])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_gradient_that_is_nan_is_refused_wherever_it_comes(devices, lockstep, setting, bad):
    knobs = {"che": lockstep()} | SETTINGS[setting]
    trainer = jaxche.Trainer(loss, optax.adam(0.05), **knobs, **replicas_of("two", devices))
    error = refused(trainer, data(bad))
    assert (0, bad) in error.batches
    assert error.rank == (bad % 2 if setting == "sync" else 1 if bad == BATCHES - 1 else 0)
    assert finite(error.state)
    assert error.state is trainer.last_good_state
    assert error.state.round == error.round
    assert f"in round {error.round}" in str(error)
    assert "of epoch 0" in str(error)
    assert "although the loss is (sqrt or log at 0" in str(error)


@pytest.mark.parametrize("average", ["parameters", "gradients"])
@pytest.mark.parametrize("kind", ["one", "islands"])
def test_one_replica_and_islands_refuse_it_too(devices, lockstep, kind, average):
    che = None if kind == "one" else lockstep()
    trainer = jaxche.Trainer(loss, optax.adam(0.05), che=che, average=average, **replicas_of(kind, devices))
    error = refused(trainer, data(BATCHES - 1))
    assert (0, BATCHES - 1) in error.batches
    assert finite(error.state)


@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_stages_refuse_it_too(devices, lockstep, average):
    model = jaxche.Partitioned(
        [lambda p, batch: jnp.sum((batch["d"] * p["w"]) ** 2, axis=1), lambda p, x: jnp.sqrt(x) * p["scale"]],
        lambda y, batch: jnp.mean(y),
        jaxche.Direct(),
    )
    pipelines = [devices[:2], devices[2:4]]
    trainer = jaxche.Trainer(model, optax.sgd(0.01), che=lockstep(), average=average, replicas=pipelines)
    state = trainer.init([params(), {"scale": jnp.ones(())}])
    with pytest.raises(jaxche.NonFiniteLossError) as caught:
        trainer.fit(state, data(BATCHES - 1), progress=False)
    assert (0, BATCHES - 1) in caught.value.batches
    assert finite(caught.value.state)


def test_a_checkpoint_never_has_it_and_training_goes_on_from_there(devices, lockstep, tmp_path):
    def fresh():
        return jaxche.Trainer(loss, optax.adam(0.05), che=lockstep(), replicas=devices[:2])

    # The same beginning, so that data is taken for the same.
    batches = data(9)
    error = refused(fresh(), batches, checkpoints=tmp_path)
    batches[9] = batches[8]
    trainer = fresh()
    state, history = trainer.fit(trainer.init(params()), batches, progress=False, checkpoints=tmp_path)
    assert len(history) == BATCHES // 4
    assert error.round == 2
    assert finite(state)


def test_an_optimizer_state_alone_is_enough(devices, lockstep):
    # The square of such a gradient is infinite, the update is not.
    def steep(w, batch):
        return jnp.sum(w * batch["slope"].mean())

    batches = [{"slope": np.full(2, 1e25 if i == 3 else 1.0, np.float32)} for i in range(4)]
    for replicas in (devices[:1], devices[:2]):
        che = lockstep() if len(replicas) > 1 else None
        trainer = jaxche.Trainer(steep, optax.adam(0.1), che=che, replicas=replicas)
        with pytest.raises(jaxche.NonFiniteLossError, match="a state of rank"):
            trainer.fit(trainer.init(jnp.zeros(())), batches, progress=False)


def test_what_is_infinite_from_the_start_may_stay_so(devices, lockstep):
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())  # begins with an infinite best value
    for average in ("parameters", "gradients"):
        trainer = jaxche.Trainer(loss, tx, che=lockstep(), average=average, replicas=devices[:2])
        state, _ = trainer.fit(trainer.init(params()), data(), progress=False)
        assert np.isfinite(trainer.params(state)["w"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("tx", ["apply_if_finite", "zero_nans"])
@pytest.mark.parametrize("setting", ["sync", "cadence", "gradients", "scaled"])
def test_a_gradient_that_the_optimizer_skips_breaks_nothing(devices, lockstep, setting, tx):
    adam = optax.adam(0.05)
    tx = optax.apply_if_finite(adam, 5) if tx == "apply_if_finite" else optax.chain(optax.zero_nans(), adam)
    trainer = jaxche.Trainer(loss, tx, replicas=devices[:2], **{"che": lockstep()} | SETTINGS[setting])
    state, _ = trainer.fit(trainer.init(params()), data(5), progress=False)
    assert finite(state)
    assert state.epoch == 1


def test_a_merge_that_overflows_is_of_no_rank(devices, lockstep):
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), che=lockstep(), outer=optax.sgd(3e38), replicas=devices[:2])
    state = trainer.init({"w": jnp.full(8, -1e3)})
    with pytest.raises(jaxche.NonFiniteLossError, match="the merged parameters") as caught:
        trainer.round(state, data(), counts=(2, 2))
    assert caught.value.rank is None
    assert caught.value.batches == ((0, 0), (0, 1), (0, 2), (0, 3))


def test_only_what_was_finite_before_counts():
    infinite, key = jnp.array([1.0, jnp.inf]), jax.random.key(0)
    assert stayed_finite({"a": infinite, "key": key, "n": 3}, {"a": infinite, "key": key, "n": 3})
    assert not stayed_finite({"a": infinite}, {"a": jnp.array([jnp.nan, 1.0])})
    assert stayed_finite((), ())
    assert not all_finite({"a": jnp.ones(2), "b": jnp.array(1j * jnp.inf)})
    assert all_finite({"a": jnp.ones(2), "n": jnp.arange(2)})


@pytest.mark.parametrize("options", [{"policy": "sync"}, {"average": "gradients"}, {}], ids=["sync", "sums", "local"])
def test_no_nan_is_made_where_none_is_given(devices, options):
    def with_state(params, batch, model_state):
        return loss(params, batch), ({}, {"mean": model_state["mean"] + 1})

    trainer = jaxche.Trainer(with_state, optax.sgd(0.05), replicas=devices[:2], **options)
    state = trainer.init(params(), model_state={"mean": jnp.zeros(2)})
    with jax.debug_nans(True):
        state, _ = trainer.fit(state, data(), progress=False)
    assert finite(state)


@pytest.mark.parametrize("everywhere", [True, False], ids=["config", "context"])
@pytest.mark.parametrize("kind", ["one", "two"])
@pytest.mark.parametrize("setting", ["cadence", "sync", "gradients"])
def test_an_error_under_debug_nans_has_the_batch(devices, setting, kind, everywhere):
    trainer = jaxche.Trainer(loss, optax.sgd(0.05), **replicas_of(kind, devices), **SETTINGS[setting])
    broken = [batch if i != 5 else {"d": batch["d"] * np.nan} for i, batch in enumerate(data())]
    jax.config.update("jax_debug_nans", everywhere)
    try:
        with contextlib.nullcontext() if everywhere else jax.debug_nans(True):
            with pytest.raises(jaxche.NonFiniteLossError, match=r"has NaN in \['d'\].*of batch 5") as caught:
                trainer.fit(trainer.init(params()), broken, progress=False)
            assert (0, 5) in caught.value.batches
            assert jax.config.jax_debug_nans
            with pytest.raises(FloatingPointError, match="invalid value"):
                jax.value_and_grad(loss)(trainer.params(caught.value.state), broken[5])
    finally:
        jax.config.update("jax_debug_nans", False)
