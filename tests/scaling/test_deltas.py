"""Deltas of local SGD as gradients of larger batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxche.averaging import merge_weights
from jaxche.scaling import effective_replicas, noise_scale

MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])


def weights(n, momentum):
    """The weight of each of n gradients in a delta, by running the optimizer's own recurrence on unit impulses."""
    return np.array([sum(momentum**j for j in range(n - k)) for k in range(n)])


@MOMENTA
@pytest.mark.parametrize("n", [1, 2, 7, 60])
def test_lengths(n, momentum):
    a = weights(n, momentum)
    length, length_sq = noise_scale.delta_lengths(n, momentum)
    assert float(length) == pytest.approx(a.sum(), rel=1e-5)
    assert float(length_sq) == pytest.approx((a**2).sum(), rel=1e-5)


@MOMENTA
def test_exact_on_a_quadratic(momentum):
    """u_i is the weighted mean of the gradients met on the way, round after round with momentum carried over."""
    rng = np.random.default_rng(0)
    hessian = np.diag(rng.uniform(0.1, 2.0, 6))
    eta, counts, sizes = 0.05, [3, 11], [8, 32]
    tx = optax.sgd(eta, momentum=momentum or None)
    x0 = jnp.asarray(rng.normal(size=6), jnp.float32)
    states = [tx.init(x0) for _ in counts]
    for _ in range(3):
        ends, wanted, before = [], [], [s[0].trace if momentum else jnp.zeros(6) for s in states]
        for i, n in enumerate(counts):
            x, path = x0, []
            for _ in range(n):
                path.append(jnp.asarray(hessian @ np.asarray(x) + rng.normal(size=6), jnp.float32))
                updates, states[i] = tx.update(path[-1], states[i], x)
                x = optax.apply_updates(x, updates)
            ends.append(x)
            a = weights(n, momentum)
            wanted.append(a @ np.array(path) / a.sum())
        deltas = x0 - jnp.stack(ends)
        u, worth = noise_scale.pseudo_gradients(
            deltas, counts, sizes, eta, momentum=momentum, buffers=jnp.stack(before)
        )
        np.testing.assert_allclose(u, wanted, rtol=2e-3, atol=2e-3)
        x0 = x0 - jnp.mean(deltas, axis=0)
    a = [weights(n, momentum) for n in counts]
    np.testing.assert_allclose(
        worth, [b * w.sum() ** 2 / (w**2).sum() for b, w in zip(sizes, a, strict=True)], rtol=1e-4
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_noise_from_deltas_is_unbiased(momentum):
    """Against a known truth: gradients with independent noise, replicas of 3 and 10 steps."""
    rng = np.random.default_rng(1)
    draws, dim, counts, size, eta = 8000, 8, [3, 10], 16, 0.1
    mean, sigma = rng.normal(size=dim) * 0.3, rng.uniform(0.5, 2, dim)
    deltas = np.stack(
        [
            eta
            * np.einsum(
                "k,dkj->dj",
                weights(n, momentum),
                mean + rng.normal(size=(draws, n, dim)) * sigma / np.sqrt(size),
            )
            for n in counts
        ],
        axis=1,
    )
    noise = noise_scale.init(jnp.zeros(dim), base_batch_size=size)

    def one(delta):
        u, worth = noise_scale.pseudo_gradients(delta, counts, [size, size], eta, momentum=momentum)
        return noise_scale.update(noise, u, worth)

    got = jax.jit(jax.vmap(one))(jnp.asarray(deltas, jnp.float32))
    assert float(jnp.mean(got.var_sum[:, 0] / got.unbias)) * size == pytest.approx(np.sum(sigma**2), rel=0.03)
    assert float(jnp.mean(got.sqr_sum[:, 0] / got.unbias)) == pytest.approx(mean @ mean, rel=0.05)


def test_one_replica_alone_and_trees():
    deltas = {"w": jnp.ones((2, 3, 2)), "n": jnp.array([1, 2])}
    stacked, worth = noise_scale.pseudo_gradients(deltas, [2, 4], [8, 16], 0.5, momentum=0.5)
    for i, (n, b) in enumerate(((2, 8), (4, 16))):
        row = jax.tree.map(lambda x, i=i: x[i], deltas)
        alone, worth_alone = noise_scale.pseudo_gradients(row, n, b, 0.5, momentum=0.5)
        np.testing.assert_allclose(alone["w"], stacked["w"][i], rtol=1e-6)
        assert float(worth_alone) == pytest.approx(float(worth[i]))
    np.testing.assert_array_equal(stacked["n"], deltas["n"])


def test_an_idle_replica_is_worth_nothing():
    u, worth = jax.jit(lambda n: noise_scale.pseudo_gradients(jnp.zeros((2, 3)), n, [8, 8], 0.1))(jnp.array([0, 4]))
    assert worth.tolist() == [0.0, 32.0]
    assert bool(jnp.all(jnp.isfinite(u)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"counts": [0, 1]}, "counts="),
        ({"batch_sizes": [8, 0]}, "batch_sizes="),
        ({"learning_rate": 0.0}, "learning_rate="),
        ({"momentum": 1.0}, r"momentum=1\.0"),
    ],
)
def test_refused(change, match):
    arguments = {"deltas": jnp.ones((2, 2)), "counts": [1, 2], "batch_sizes": [8, 8], "learning_rate": 0.1} | change
    with pytest.raises(ValueError, match=match + r".*write e\.g\."):
        noise_scale.pseudo_gradients(**arguments)


@pytest.mark.parametrize(("rule", "wanted"), [("batch", 2.0), ("steps", 1.43), ("fednova", 1.6)])
def test_effective_replicas(rule, wanted):
    w, alpha = merge_weights(rule, [1, 3])
    assert effective_replicas(w, [1, 3], alpha) == pytest.approx(wanted, abs=0.005)


def test_effective_replicas_refuses():
    with pytest.raises(ValueError, match="2 entries for 1 counts"):
        effective_replicas([0.5, 0.5], [1])
    with pytest.raises(ValueError, match="make no progress"):
        effective_replicas([0.5, 0.5], [0, 0])
    with pytest.raises(ValueError, match="alpha="):
        effective_replicas([1.0], [1], alpha=0)
