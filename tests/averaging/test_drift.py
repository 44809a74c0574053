"""Drift: the Gram matrix's answers and the one-collective form, against plain NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxche.averaging import drift_from_gram, gram_matrix, measure_drift


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.integers(0, 10_000))
def test_all_measures_match_their_definitions(replicas, seed):
    rng = np.random.default_rng(seed)
    x0 = rng.normal(size=20)
    deltas = rng.normal(size=(replicas, 20)) + 0.5
    w = rng.uniform(0.1, 1.0, replicas)
    w /= w.sum()
    mean = w @ deltas
    merged = x0 - mean
    distances = np.linalg.norm(deltas - mean, axis=1)
    tree = {
        "a": jnp.float32(deltas[:, :12]).reshape(replicas, 3, 4),
        "b": jnp.float32(deltas[:, 12:]),
        "n": jnp.arange(replicas),
    }

    drift = drift_from_gram(gram_matrix(tree), w, np.linalg.norm(merged))
    assert drift.rel == pytest.approx(distances.max() / np.linalg.norm(merged), rel=1e-3)
    assert drift.dir == pytest.approx(w @ distances**2 / (mean @ mean), rel=1e-3)
    norms = np.linalg.norm(deltas, axis=1)
    np.testing.assert_allclose(drift.cosines, deltas @ deltas.T / np.outer(norms, norms), atol=1e-4)

    rel, direction = measure_drift(jnp.float32(w @ norms**2), jnp.float32(mean @ mean), jnp.float32(merged @ merged))
    assert float(direction) == pytest.approx(drift.dir, rel=1e-3, abs=1e-5)
    assert np.sqrt(w.min()) * drift.rel <= float(rel) * 1.001
    assert float(rel) <= drift.rel * 1.001


def test_replicas_that_agree_do_not_drift():
    drift = drift_from_gram(gram_matrix(jnp.ones((3, 5))), [1 / 3] * 3, 1.0)
    assert drift.rel == pytest.approx(0.0, abs=1e-3)
    assert drift.dir == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_rounding_makes_no_distance_negative(seed):
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.1, 1.0, 4)
    drift = drift_from_gram(np.full((4, 4), 0.1), weights / weights.sum(), 1.0)
    assert 0 <= drift.rel < 1e-7
    assert 0 <= drift.dir < 1e-12
    one = jnp.float32(1)
    assert [float(x) for x in measure_drift(one, jnp.nextafter(one, 2 * one), one)] == [0.0, 0.0]


def test_a_round_in_which_nothing_moved_has_no_drift():
    zero, one = jnp.float32(0), jnp.float32(1)
    for norm in (zero, one):
        assert [float(x) for x in measure_drift(zero, zero, norm)] == [0.0, 0.0]
    # Replicas that cancelled, around parameters of zero: large, but a number.
    assert all(np.isfinite(x) and x > 1e18 for x in measure_drift(one, zero, zero))


def test_low_precision_deltas_are_multiplied_in_float32():
    """257 is 256 in bfloat16."""
    gram = gram_matrix(jnp.ones((2, 257), jnp.bfloat16))
    assert gram.dtype == jnp.float32
    assert gram.tolist() == [[257.0] * 2] * 2


def test_weights_must_fit_the_matrix():
    with pytest.raises(ValueError, match=r"shape \(2, 2\) for 3 weights"):
        drift_from_gram(np.eye(2), [0.2, 0.3, 0.5], 1.0)
