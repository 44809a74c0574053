"""Second moments are found wherever optax keeps them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxche.scaling import noise_scale
from jaxche.scaling._second_moments import has_moments_of_magnitudes, preconditioner

PARAMS = {"dense": {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, "head": jnp.ones(4)}
LABELS = {"dense": "adam", "head": "sgd"}
ALL = {"dense", "head"}


def injected(b2):
    return optax.inject_hyperparams(optax.adam)(learning_rate=1e-3, b2=b2)


OPTIMIZERS = {
    "adam": (optax.adam(1e-3), ALL),
    "adamw": (optax.adamw(1e-3), ALL),
    "nadam": (optax.nadam(1e-3), ALL),
    "amsgrad": (optax.amsgrad(1e-3), ALL),
    "chain": (optax.chain(optax.clip_by_global_norm(1e6), optax.adam(1e-3)), ALL),
    "masked": (optax.masked(optax.adam(1e-3), {"dense": True, "head": False}), {"dense"}),
    "partition": (optax.partition({"adam": optax.adam(1e-3), "sgd": optax.sgd(0.1)}, LABELS), {"dense"}),
    "two Adams": (optax.partition({"adam": optax.adam(1e-3), "sgd": optax.adam(0.1)}, LABELS), ALL),
    "inject_hyperparams": (injected(0.999), ALL),
    "nested": (optax.chain(optax.apply_if_finite(injected(0.999), 3)), ALL),
    "MultiSteps": (optax.MultiSteps(optax.adam(1e-3), 1).gradient_transformation(), ALL),
}


def run(tx, steps, seed=0):
    rng = np.random.default_rng(seed)
    state = tx.init(PARAMS)
    history = []
    for _ in range(steps):
        grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), PARAMS)
        _, state = tx.update(grads, state, PARAMS)
        history.append(grads)
    return state, history


def wanted_factors(history, b2=0.999, eps=1e-8):
    def one(*gs):
        v = np.zeros(gs[0].shape)
        for g in gs:
            v = b2 * v + (1 - b2) * np.asarray(g, np.float64) ** 2
        return 1 / (np.sqrt(v / (1 - b2 ** len(gs))) + eps)

    return jax.tree.map(one, *history)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_found_in(name):
    tx, covered = OPTIMIZERS[name]
    state, history = run(tx, 6)
    found = preconditioner(state, PARAMS, 0.999, 1e-8)
    assert bool(found.active)
    by_path = dict(zip((path[0].key for path, _ in jax.tree.leaves_with_path(PARAMS)), found.of(PARAMS), strict=True))
    assert {key for key, factor in by_path.items() if factor is not None} == covered
    for factor, wanted in zip(found.of(PARAMS), jax.tree.leaves(wanted_factors(history)), strict=True):
        if factor is not None:
            np.testing.assert_allclose(factor, wanted, rtol=1e-4)


def test_b2_and_eps_are_read_from_injected_hyperparams():
    state, history = run(injected(0.9), 6)
    found = preconditioner(state, PARAMS, 0.999, 1e-8)
    wanted = jax.tree.leaves(wanted_factors(history, b2=0.9))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found.of(PARAMS), wanted)


def test_nothing_is_preconditioned_before_five_steps():
    for steps, active in ((0, False), (4, False), (5, True)):
        state, _ = run(optax.adam(1e-3), steps)
        found = preconditioner(state, PARAMS, 0.999, 1e-8)
        assert bool(found.active) == active
        if not active:
            assert all(bool(jnp.all(d == 1)) for d in found.of(PARAMS))


def test_the_youngest_moments_decide_whether_any_are_trusted():
    def state(*counts):
        nus = ({"w": jnp.ones(2)}, {"b": jnp.ones(3)})
        return tuple(optax.ScaleByAdamState(jnp.int32(n), nu, nu) for n, nu in zip(counts, nus, strict=True))

    grads = {"w": jnp.ones(2), "b": jnp.ones(3)}
    trusted = [bool(preconditioner(state(*counts), grads).active) for counts in ((9, 9), (9, 3), (3, 9))]
    assert trusted == [True, False, False]


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.rmsprop(0.1), optax.lion(1e-3)])
def test_an_optimizer_without_them_is_refused(tx):
    noise = noise_scale.init(PARAMS)
    grads = jax.tree.map(lambda x: jnp.ones((2, *x.shape)), PARAMS)
    with pytest.raises(ValueError, match=r"no second moments.*Pass the state.*e\.g\. of optax\.adam"):
        noise_scale.update(noise, grads, [8, 8], opt_state=tx.init(PARAMS))


def test_the_refusal_names_the_states_also_while_they_are_traced():
    opt_state = optax.sgd(optax.constant_schedule(0.1)).init(PARAMS)
    with pytest.raises(ValueError, match="opt_state has EmptyState, ScaleByScheduleState, but no second moments"):
        jax.jit(preconditioner)(opt_state, PARAMS)


def test_moments_of_another_shape_are_those_of_another_model():
    state = optax.ScaleByAdamState(jnp.int32(9), {"w": jnp.ones(3)}, {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="no second moments"):
        preconditioner(state, {"w": jnp.ones(2)})


@pytest.mark.slow
def test_measured_as_adam_sees_it_and_anew_when_that_begins():
    """Raw and divided gradients differ by orders of magnitude: their averages are not mixed."""
    tx = optax.adam(1e-3)
    state, noise = tx.init(PARAMS), noise_scale.init(PARAMS, base_batch_size=8)
    rng = np.random.default_rng(0)
    step = jax.jit(lambda n, g, s: noise_scale.update(n, g, [8, 8], opt_state=s))
    for i in range(7):
        grads = jax.tree.map(lambda x: 1e-4 * jnp.asarray(rng.normal(size=(2, *x.shape)), jnp.float32), PARAMS)
        noise = step(noise, grads, state)
        assert bool(noise.preconditioned) == (i >= 5)
        if i == 5:
            made = preconditioner(state, PARAMS)
            divided = jax.tree.map(lambda g, f: g * f, grads, made.factors)
            alone = noise_scale.update(noise_scale.init(PARAMS, base_batch_size=8), divided, [8, 8])
            np.testing.assert_allclose(noise.var, alone.var, rtol=1e-4)
            assert float(noise.var) > 1.0
            fresh = noise_scale.init(PARAMS, base_batch_size=8)
            # Made once, it serves for the state it was made of.
            once = noise_scale.update(fresh, grads, [8, 8], opt_state=noise_scale.preconditioner(state, PARAMS))
            np.testing.assert_array_equal(once.var, noise_scale.update(fresh, grads, [8, 8], opt_state=state).var)
        _, state = tx.update(jax.tree.map(lambda g: g.mean(0), grads), state, PARAMS)


def test_numbers_that_were_silent_have_the_weight_adam_would_give_them():
    nu = {"w": jnp.array([0.0, 1e-20, 3.0, 5.0]), "never": jnp.zeros(2)}
    found = preconditioner(optax.ScaleByAdamState(jnp.int32(100_000), nu, nu), nu, 0.9, 1e-8)
    by_name = found.factors
    np.testing.assert_allclose(by_name["w"], 1 / np.sqrt([0.2, 0.2, 3.0, 5.0]), rtol=1e-5)
    np.testing.assert_array_equal(by_name["never"], [0.0, 0.0])


def test_one_number_that_wakes_up_is_not_the_whole_estimate():
    """Units of a network do: with moments of before, their first gradient would be divided by epsilon alone."""
    rng = np.random.default_rng(0)
    params, gains = jnp.zeros(4000), {}
    step = jax.jit(lambda n, g, s: noise_scale.update(n, g, [8, 8], opt_state=s))
    draws = [np.asarray(rng.normal(size=(2, 4000)) + 0.5, np.float32) for _ in range(40)]
    for wakes_at in (0, 20):
        tx = optax.adam(1e-3)
        state, noise = tx.init(params), noise_scale.init(params, base_batch_size=8)
        for i, grads in enumerate(draws):
            grads = jnp.asarray(grads).at[:, 0].multiply(float(i >= wakes_at))
            noise = step(noise, grads, state)
            _, state = tx.update(grads.mean(0), state, params)
        gains[wakes_at] = float(noise.gain(16))
    assert gains[20] == pytest.approx(gains[0], rel=0.1)


SIZES = {"w": jnp.ones((30, 4)), "b": jnp.ones(4), "s": jnp.ones(())}
IN_CHAINS = {
    "alone": lambda tx: tx,
    "clipped": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "clipped in between": lambda tx: optax.chain(optax.clip_by_global_norm(3.0 * 2**-19), tx),
    "masked": lambda tx: optax.masked(tx, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "part": lambda tx: optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "b": "b", "s": "b"}),
    "plateau": lambda tx: optax.chain(tx, optax.contrib.reduce_on_plateau()),
}


@pytest.mark.parametrize("chain", IN_CHAINS)
def test_moments_that_are_no_squares_are_recognised(chain):
    def found(tx, params=SIZES):
        return has_moments_of_magnitudes(IN_CHAINS[chain](tx), params, value=jnp.float32(0))

    if chain != "clipped in between":
        assert found(optax.adamax(1e-3))
        assert found(optax.adamaxw(1e-3, weight_decay=0.1), jax.tree.map(jnp.bfloat16, SIZES))
    kinds = (
        optax.adam,
        optax.adamw,
        optax.radam,
        optax.yogi,
        optax.adabelief,
        optax.amsgrad,
        optax.novograd,
        optax.lamb,
    )
    assert not any(found(kind(1e-3)) for kind in kinds)
    assert not found(optax.adam(1e-3), jax.tree.map(jnp.bfloat16, SIZES))
    assert not found(optax.sgd(1e-3))
