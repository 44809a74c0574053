"""The noise scale in a round: estimates that replicas make of their own gradients, and a single replica."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxche.scaling import local_estimates, noise_scale, update_from_estimates, update_from_one

pytestmark = pytest.mark.usefixtures("strict_promotion")

DIM = 20


@pytest.mark.parametrize("preconditioned", [False, True])
def test_one_contributor_alone_learns_what_one_of_several_would(preconditioned):
    params = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(4), "n": jnp.zeros(2, jnp.int32)}
    tx = optax.adam(0.1)
    opt_state = tx.init({"a": params["a"], "b": params["b"]}) if preconditioned else None
    labels = {"a": "x", "b": "y", "n": "y"}
    alone = noise_scale.init(params, groups=labels, base_batch_size=4, differenced=True)
    one = jax.jit(lambda n, g, b, s: update_from_one(n, g, b, opt_state=s))
    several = jax.jit(lambda n, g, b, s: noise_scale.update(n, g, b[None], opt_state=s))
    stacked = alone
    for step, size in enumerate((4, 8, 3, 4, 4, 16, 4, 4)):
        keys = jax.random.split(jax.random.key(step), 2)
        grads = {"a": jax.random.normal(keys[0], (3, 2)), "b": 1 + jax.random.normal(keys[1], (4,)), "n": params["n"]}
        if step == 2:
            grads["b"] = grads["b"].at[1].set(jnp.nan)
        size = jnp.int32(size)
        alone = one(alone, grads, size, opt_state)
        stacked = several(stacked, jax.tree.map(lambda g: g[None], grads), size, opt_state)
        chex.assert_trees_all_close(alone, stacked, rtol=1e-4, atol=1e-5)
        if preconditioned and step != 2:
            with jax.numpy_dtype_promotion("standard"):
                _, opt_state = tx.update({"a": grads["a"], "b": grads["b"]}, opt_state)
    assert bool(alone.preconditioned) == preconditioned
    assert bool(alone.biased)
    with pytest.raises(ValueError, match="differenced=True"):
        update_from_one(noise_scale.init(params), grads, 4)
    with pytest.raises(ValueError, match=r"batch_size=0\.0 must be finite and greater than 0"):
        update_from_one(alone, grads, 0)


def test_the_gradient_before_is_kept_in_the_dtype_of_the_parameters():
    """A loop carries the state: what an update returns has the dtypes of what it was given."""
    noise = noise_scale.init(jnp.zeros(2, jnp.bfloat16), base_batch_size=8, differenced=True)
    after = update_from_one(noise, jnp.array([1.0, 2.0]), 8)
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(noise)]
    assert after.previous.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("make", [float, np.float64, jnp.float32])
def test_numbers_of_python_and_numpy_are_measured_as_arrays(make):
    states = [optax.ScaleByAdamState(jnp.int32(1000), {"w": jnp.zeros(())}, {"w": jnp.float32(4)})]
    for options in ({}, {"opt_state": states}):
        noise = noise_scale.init({"w": make(0)}, differenced=True)
        for gradient in (2, 1):
            noise = update_from_one(noise, {"w": make(gradient)}, 16, **options)
        stacked = noise_scale.update(noise, {"w": np.array([1, 3], np.dtype(make))}, [16, 16], **options)
        scale = 6.323 if options else 1  # 4 / (1 - 0.999**1000)
        np.testing.assert_allclose([noise.sqr * scale, stacked.var * scale], [2, 2], rtol=1e-3)


def apart(noise, grads, sizes, opt_state=None):
    """One replica's estimates from its gradients ``[n, DIM]`` of batches ``sizes``."""
    parts = [noise_scale.local_sums(noise, g, b, opt_state=opt_state) for g, b in zip(grads, sizes, strict=True)]
    mean = sum(b * g for g, b in zip(grads, sizes, strict=True)) / sum(sizes)
    return local_estimates(noise, jax.tree.map(lambda *x: sum(x), *parts), mean, opt_state=opt_state)


def add(*parts):
    return jax.tree.map(lambda *x: sum(x), *parts)


@pytest.mark.parametrize("sizes", [([8, 8], [8, 8, 8]), ([8, 8, 8, 8], [8]), ([8, 32, 4], [16, 2])])
def test_unbiased_at_unequal_counts_batches_and_places(sizes):
    """Replicas whose true gradients differ: what separates them is not noise."""
    truth = [jnp.full(DIM, 0.2), jnp.full(DIM, 0.2) * jnp.where(jnp.arange(DIM) % 2, 1.0, -1.0)]
    noise = noise_scale.init(jnp.zeros(DIM), base_batch_size=8)

    def once(key):
        parts = []
        for rank, (mean, own) in enumerate(zip(truth, sizes, strict=True)):
            keys = jax.random.split(jax.random.fold_in(key, rank), len(own))
            grads = [mean + jax.random.normal(k, (DIM,)) / jnp.sqrt(b) for k, b in zip(keys, own, strict=True)]
            parts.append(apart(noise, grads, own))
        total = add(*parts)
        return total.sqr[0] / total.weight, total.trace[0] / total.weight

    samples = jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(0), 20_000))
    for values, wanted in zip(samples, (DIM * 0.04, DIM), strict=True):
        error = np.std(values) / np.sqrt(len(values))
        assert abs(np.mean(values) - wanted) < 4 * error
        assert error < 0.02 * wanted


def test_replicas_are_pooled_by_their_degrees_of_freedom():
    """Three batches tell twice as much of the noise as two, each replica around its own mean."""
    grads, noise = np.random.default_rng(0).normal(size=(5, DIM)), noise_scale.init(jnp.zeros(DIM))
    parts = [jnp.asarray(part, jnp.float32) for part in np.split(grads, [3])]
    total = add(*(apart(noise, list(part), [8] * len(part)) for part in parts))
    squares = sum(np.sum((part - part.mean(0)) ** 2) for part in np.split(grads, [3]))
    assert float(total.weight) == 3
    np.testing.assert_allclose(total.trace[0] / total.weight, 8 * squares / 3, rtol=1e-4)


def test_one_replica_of_equal_batches_is_the_plain_update():
    grads = jax.random.normal(jax.random.key(0), (4, DIM)) + 1
    noise = noise_scale.init(jnp.zeros(DIM))
    ours = update_from_estimates(noise, apart(noise, list(grads), [8] * 4))
    plain = noise_scale.update(noise, grads, [8] * 4)
    for name in ("sqr", "var", "critical_batch_size", "base_batch_size", "unbias"):
        np.testing.assert_allclose(getattr(ours, name), getattr(plain, name), rtol=1e-4)


def test_nothing_to_compare_and_nothing_finite_change_nothing():
    noise = noise_scale.init(jnp.zeros(DIM), base_batch_size=8)
    grads = jax.random.normal(jax.random.key(0), (2, DIM))
    single, several = apart(noise, grads[:1], [8]), apart(noise, grads, [8, 8])
    broken = apart(noise, grads.at[0, 0].set(jnp.nan), [8, 8])
    for bad in (single, add(several, broken)):
        after = update_from_estimates(noise, bad)
        assert float(after.unbias) == 0
    idle = apart(noise, jnp.full((1, DIM), jnp.nan), [8])
    with_idle = update_from_estimates(noise, add(several, idle))
    alone = update_from_estimates(noise, several)
    chex.assert_trees_all_equal(with_idle, alone)


def test_averages_begin_anew_once_when_one_contributor_becomes_several():
    noise = noise_scale.init(jnp.zeros(DIM), base_batch_size=8, differenced=True)
    grads = np.random.default_rng(0).normal(size=(4, 2, DIM)).astype(np.float32)
    for g in grads[0]:
        noise = update_from_one(noise, jnp.asarray(g), 8)
    assert noise.biased
    for several in grads[1:]:
        noise = update_from_estimates(noise, apart(noise, list(jnp.asarray(several)), [8, 8]))
        assert not noise.biased
    # Two batches in each of three updates.
    assert float(noise.unbias) == pytest.approx(1 - 0.999**6, rel=1e-4)


def test_raw_and_preconditioned_estimates_do_not_mix():
    params = jnp.zeros(DIM)
    tx = optax.adam(0.1)
    young = old = tx.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(6):
            _, old = tx.update(jnp.full(DIM, 0.1), old, params)
    noise = noise_scale.init(params, base_batch_size=8)
    grads = list(jax.random.normal(jax.random.key(0), (2, DIM)))
    raw, seen = apart(noise, grads, [8, 8], young), apart(noise, grads, [8, 8], old)
    assert float(update_from_estimates(noise, add(raw, seen)).unbias) == 0
    noise = update_from_estimates(noise, raw)
    assert not noise.preconditioned
    noise = update_from_estimates(noise, add(seen, seen))
    assert noise.preconditioned
    # The averages began again: only the second estimate is in them.
    np.testing.assert_allclose(noise.var, seen.trace[0] / seen.weight / 8, rtol=1e-4)
