"""Which arrays in an optimizer's state are parameters: those that start as a copy of one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.replicas._opt_state import are_params, stepped_params

PARAMS = {"b": jnp.ones(3, jnp.bfloat16), "w": jnp.ones((4, 3)), "z": jnp.ones(())}


def float32_copies(tx):
    """The optimizer on float32 copies of parameters of fewer bits."""

    def init(params):
        copies = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return copies, tx.init(copies)

    def update(grads, state, params):
        copies, inner = state
        updates, inner = tx.update(jax.tree.map(lambda x: x.astype(jnp.float32), grads), inner, copies)
        copies = optax.apply_updates(copies, updates)
        return jax.tree.map(lambda new, x: new.astype(x.dtype) - x, copies, params), (copies, inner)

    return optax.GradientTransformation(init, update)


def averaging(decay):
    def update(updates, average, params):
        return updates, optax.incremental_update(optax.apply_updates(params, updates), average, 1 - decay)

    return optax.GradientTransformation(lambda params: params, update)


# With the part of the paths of the parameters in their states, and whether steps are made from them.
OPTIMIZERS = {
    "adam": (optax.adam(0.1), None, False),
    "a rate in the state": (optax.inject_hyperparams(optax.adam)(0.1), None, False),
    "adafactor": (optax.adafactor(0.1), None, False),
    "gradients of several steps": (optax.MultiSteps(optax.adam(0.1), 2), None, False),
    "the start, which stays": (optax.contrib.prodigy(0.1), "params0", False),
    "the start, and a norm": (optax.contrib.dog(0.1), "init_params", False),
    "an average, which no step reads": (optax.chain(optax.adam(0.1), averaging(0.9)), "[1]", False),
    "iterates": (optax.contrib.schedule_free_adamw(0.1), ".z[", True),
    "the start, with bets on sums of gradients": (optax.contrib.cocob(), "init_particles", True),
    "the start, with sums of gradients": (optax.contrib.madgrad(0.1), "x0", True),
    "copies": (float32_copies(optax.adam(0.1)), "[0]['", True),
    "copies made in a compiled function": (
        optax.GradientTransformation(
            jax.jit(float32_copies(optax.sgd(0.1)).init), float32_copies(optax.sgd(0.1)).update
        ),
        "[0]['",
        True,
    ),
    "iterates of some": (
        optax.partition(
            {"a": optax.adam(0.1), "z": optax.contrib.schedule_free_sgd(0.1)}, {"b": "a", "w": "z", "z": "z"}
        ),
        ".z[",
        True,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_in_the_state(name):
    tx, part, makes_steps = OPTIMIZERS[name]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tx.init(PARAMS))]
    found = [path for path, is_param in zip(paths, are_params(tx, PARAMS), strict=True) if is_param]
    assert found == [path for path in paths if part and part in path]
    assert bool(found) == (part is not None)
    assert stepped_params(tx, PARAMS) == (found if makes_steps else [])


STEPPED = {
    "copies": (float32_copies(optax.adam(0.1)), jnp.bfloat16, lambda opt_state: opt_state[0]),
    "iterates": (optax.contrib.schedule_free_sgd(0.1), jnp.float32, lambda opt_state: opt_state.z),
}


def make_trainer(devices, tx, dtype=jnp.float32, **options):
    def loss(w, x):
        return jnp.mean((x @ w.astype(jnp.float32) - 1) ** 2)

    trainer = jaxche.Trainer(loss, tx, replicas=devices, **options)
    return trainer, trainer.init(jnp.zeros((40, 5), dtype))


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", STEPPED)
def test_a_coded_merge_averages_them_as_they_are(name, replicas, devices):
    tx, dtype, copies_of = STEPPED[name]
    data = jaxche.Batches(np.random.default_rng(0).normal(size=(240, 40)).astype(np.float32), batch_size=4)
    means = {}
    for wire in ("float32", "int4"):
        trainer, state = make_trainer(devices[:replicas], tx, dtype, wire=wire)
        state, _ = trainer.round(state, data, counts=(5, 3, 2)[:replicas])
        copies = [copies_of(local.opt_state) for local in state.local_states]
        means[wire] = np.asarray(copies[0])
        for copy in copies:
            np.testing.assert_array_equal(np.asarray(copy), means[wire])
    np.testing.assert_allclose(means["int4"], means["float32"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"opt_state": "local"}, r"opt_state='local' does not merge them: leave opt_state= out"),
        ({"overlap": 0.5}, r"overlap=0\.5 implies opt_state='local', which does not merge them: leave overlap= out"),
    ],
)
def test_steps_from_them_need_a_merge(options, line, devices):
    copies = float32_copies(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"tx has parameters in its state, opt_state\[0\], and makes .*" + line):
        make_trainer(devices[:2], copies, jnp.bfloat16, **options)
    make_trainer(devices[:1], copies, jnp.bfloat16, **options)
    make_trainer(devices[:2], optax.chain(optax.sgd(0.1), averaging(0.9)), **options)
    if "overlap" not in options:
        make_trainer(devices[:2], copies, jnp.bfloat16, policy="sync", **options)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"outer": optax.sgd(0.7)}, "outer= moves the parameters .*: leave outer= out, or write opt_state='reset'"),
        (
            {"merge": "fednova"},
            "merge='fednova' moves the parameters .*: leave merge='fednova' out, or write opt_state='reset'",
        ),
    ],
)
def test_what_moves_the_parameters_alone_is_refused(options, line, devices):
    for tx, dtype in ((float32_copies(optax.sgd(0.1)), jnp.bfloat16), (optax.contrib.cocob(), jnp.float32)):
        with pytest.raises(ValueError, match=r"tx has parameters in its state, opt_state\[.*" + line):
            make_trainer(devices[:2], tx, dtype, **options)
        make_trainer(devices[:1], tx, dtype, **options)
        make_trainer(devices[:2], tx, dtype, opt_state="reset", **options)
    make_trainer(devices[:2], optax.contrib.prodigy(0.1), **options)
