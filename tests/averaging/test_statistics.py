"""Pooled batch statistics equal those of all examples in one place."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxche.averaging import from_moments, to_moments, weighted_mean


@jax.jit
def pool(stacked, weights):
    def one(tree, weight):
        means = weighted_mean(tree, weight, "r")
        return from_moments(weighted_mean(to_moments(tree, means), weight, "r"), means)

    return jax.tree.map(lambda x: x[0], jax.vmap(one, axis_name="r")(stacked, jnp.asarray(weights, jnp.float32)))


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.floats(-1e3, 1e3), st.integers(0, 10_000))
def test_pooling_equals_the_joined_sample(sizes, centre, seed):
    rng = np.random.default_rng(seed)
    samples = [rng.normal(centre + i, 1 + i, size=(n, 3)) for i, n in enumerate(sizes)]
    stats = [{"bn": {"mean": jnp.float32(s.mean(0)), "var": jnp.float32(s.var(0))}} for s in samples]
    pooled = pool(jax.tree.map(lambda *x: jnp.stack(x), *stats), sizes)
    joined = np.concatenate(samples)
    np.testing.assert_allclose(pooled["bn"]["mean"], joined.mean(0), rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(pooled["bn"]["var"], joined.var(0), rtol=1e-4, atol=1e-4)


@settings(max_examples=100)
@given(
    st.sampled_from([2, 3, 8]),
    st.floats(-1e4, 1e4, width=32, allow_subnormal=False),
    st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 1e3]),
    st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 1e3]),
    st.integers(0, 10_000),
)
def test_variances_are_those_of_a_float64_twin_however_large_the_means(replicas, centre, spread, scale, seed):
    rng = np.random.default_rng(seed)
    mean = np.float32(centre + spread * rng.normal(size=(replicas, 5)))
    var = np.float32(scale * rng.random(size=(replicas, 5)))
    weights = np.float32(rng.integers(0, 100, replicas))
    weights[rng.integers(replicas)] += 1
    pooled = pool({"mean": mean, "var": var}, weights)
    m, v, w = (np.asarray(x, np.float64) for x in (mean, var, weights / np.float64(weights.sum())))
    centre = w @ m
    wanted = w @ (v + (m - centre) ** 2)
    assert (np.asarray(pooled["var"]) >= 0).all()
    # The second term: a millionth of the square of the rounding error of a float32 mean.
    rounding = np.abs(m).max() * np.finfo(np.float32).eps
    np.testing.assert_allclose(pooled["var"], wanted, rtol=3e-6, atol=1e-6 * (replicas * rounding) ** 2)
    np.testing.assert_allclose(pooled["mean"], centre, rtol=3e-7, atol=rounding)


def test_only_a_var_with_a_mean_of_its_shape_beside_it_is_pooled():
    tree = {
        "alone": {"var": jnp.ones(2)},
        "ema": {"mean": jnp.zeros(2)},
        "counts": {"mean": jnp.array(2), "var": jnp.array(1.0)},
        "matrix": {"mean": jnp.zeros(2), "var": jnp.ones((2, 2))},
    }
    assert to_moments(tree, tree) == []
    assert from_moments([], tree) == tree


def test_low_precision_is_pooled_in_float32():
    """256 + 1 is 256 in bfloat16."""
    stats = {"mean": jnp.zeros((2, 1), jnp.bfloat16), "var": jnp.array([[256.0], [258.0]], jnp.bfloat16)}
    pooled = pool(stats, [1, 1])
    assert to_moments(stats, stats)[0][1].dtype == jnp.float32
    assert pooled["var"].tolist() == [257.0]


def test_one_replica_keeps_its_statistics():
    tree = {"mean": jnp.array([[1.0, -2.0]]), "var": jnp.array([[0.5, 3.0]])}
    pooled = pool(tree, [3])
    assert (pooled["mean"].tolist(), pooled["var"].tolist()) == ([1.0, -2.0], [0.5, 3.0])


def test_low_precision_statistics_are_shifted_in_float32():
    """258 - 1 is 256 in bfloat16."""
    tree = {"mean": jnp.full(1, 258, jnp.bfloat16), "var": jnp.zeros(1, jnp.bfloat16)}
    [(shift, moment)] = to_moments(tree, {"mean": jnp.ones(1, jnp.bfloat16), "var": jnp.zeros(1, jnp.bfloat16)})
    assert (shift.dtype, moment.dtype) == (jnp.float32, jnp.float32)
    assert moment.tolist() == [257.0**2]


def test_statistics_in_variables_of_nnx_and_boxes_of_linen():
    plain = {"bn": {"mean": jnp.array([[0.0], [2.0]]), "var": jnp.ones((2, 1))}}
    for kind in (nnx.BatchStat, lambda x: linen.Partitioned(x, (None,))):
        pooled = pool(jax.tree.map(kind, plain), [1, 1])
        assert [x.tolist() for x in jax.tree.leaves(pooled)] == [[1.0], [2.0]]
