"""Noise measured in some of the steps only: the averages of all of them, and no pair across a gap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxche.scaling import noise_scale

DIM, BATCH = 24, 8


def test_averages_decay_by_the_examples_of_training():
    """Each estimate weighs what it would if the steps between had been measured and had shown nothing new."""
    rng = np.random.default_rng(0)
    noise = noise_scale.init(jnp.zeros(DIM), base_batch_size=BATCH)
    estimates, ages = [], []
    for skipped in (0, 100, 3000, 40):
        grads = jnp.asarray(rng.normal(size=(3, DIM)), jnp.float32)
        noise = noise_scale.update(noise, grads, [BATCH] * 3)
        estimates.append(3 / 2 * float(jnp.sum(jnp.var(grads, axis=0))))
        ages = [age + 3 * BATCH + skipped for age in ages] + [skipped]
        if skipped:
            read = [float(x) for x in (noise.sqr, noise.var, noise.critical_batch_size)]
            noise = noise_scale.skip(noise, skipped)
            assert [float(x) for x in (noise.sqr, noise.var, noise.critical_batch_size)] == pytest.approx(read, 1e-6)
    weights = 0.999 ** (np.array(ages) / BATCH)
    assert float(noise.var) == pytest.approx(np.average(estimates, weights=weights), rel=1e-4)


def test_a_single_contributor_forgets_twice_as_fast_as_in_its_updates():
    noise = noise_scale.init(jnp.zeros(DIM), base_batch_size=BATCH, differenced=True)
    for k in range(3):
        noise = noise_scale.update(noise, jnp.full((1, DIM), float(k)), [BATCH])
    # Two estimates, each of two batches.
    assert float(noise.unbias) == pytest.approx(1 - 0.999**4, rel=1e-4)
    assert float(noise_scale.skip(noise, BATCH).unbias / noise.unbias) == pytest.approx(0.999**2, rel=1e-6)


@pytest.mark.parametrize("gap", [True, False], ids=["no pair across a gap", "pairs across gaps"])
def test_unbiased_while_the_gradient_moves(gap):
    """Of every 40 steps the first 8 are measured, and the gradient drifts: across 33 steps that looks like noise."""
    rounds, steps, measured, drift = 600, 40, 8, 0.3
    direction = jnp.ones(DIM) / jnp.sqrt(DIM)

    def step(noise, k):
        sway = jnp.sin(2 * jnp.pi * k / (4 * steps)) * 4 * steps / (2 * jnp.pi) * drift  # at most `drift` a step
        noisy = 2 * jnp.eye(DIM)[0] + sway * direction + jax.random.normal(jax.random.fold_in(key, k), (DIM,))
        seen = noise_scale.update_from_one(noise, noisy, BATCH)
        skipped = noise_scale.skip(noise, BATCH)
        if not gap:
            skipped = noise_scale.NoiseScale(**{**vars(skipped), "has_previous": noise.has_previous})
        noise = jax.tree.map(lambda a, b: jnp.where(k % steps < measured, a, b), seen, skipped)
        return noise, (noise.var_sum[0], noise.unbias)

    key, noise = jax.random.key(0), noise_scale.init(jnp.zeros(DIM), base_batch_size=BATCH, differenced=True)
    _, (total, unbias) = jax.jit(lambda noise: jax.lax.scan(step, noise, jnp.arange(rounds * steps)))(noise)
    values = np.asarray(total / unbias)[2000 :: steps * 4]
    # The averages reach over some 500 steps, so about a dozen of these means are independent of one another.
    error = np.std(values) / np.sqrt(len(values) / 3)
    off = np.mean(values) / DIM - 1
    if gap:
        assert abs(off) < 4 * error / DIM + drift**2 / 2 / DIM
        assert error < 0.01 * DIM
    else:
        assert off > 0.08


def test_nothing_skipped_changes_nothing_under_jit():
    noise = noise_scale.init(jnp.zeros(DIM), differenced=True)
    for k in range(3):
        noise = noise_scale.update(noise, jnp.full((1, DIM), float(k)), [BATCH])
    after = jax.jit(noise_scale.skip)(noise, jnp.float32(0))
    jax.tree.map(np.testing.assert_array_equal, after, noise)


@pytest.mark.parametrize("examples", [0, -8, np.nan])
def test_bad_numbers_are_named(examples):
    with pytest.raises(ValueError, match=f"examples={examples}.*examples=32"):
        noise_scale.skip(noise_scale.init(jnp.zeros(2)), examples)
