"""weighted_mean against NumPy, over every way to bind an axis."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxche.averaging import exchange, in_buckets, measure_drift, psum_buckets, weighted_mean
from jaxche.averaging._mean import _BUCKET_BYTES, _EXCHANGED_BYTES


@jax.jit
def over_shard_map(tree, weights):
    mesh = Mesh(np.array(jax.devices()[: len(weights)]), ("r",), axis_types=(AxisType.Auto,))

    def body(t, w):
        mean = weighted_mean(jax.tree.map(lambda x: x[0], t), w[0], "r")
        return jax.tree.map(lambda x: x[None], mean)

    return jax.shard_map(body, mesh=mesh, in_specs=(P("r"), P("r")), out_specs=P("r"))(tree, weights)


def over_pmap(tree, weights):
    return jax.pmap(lambda t, w: weighted_mean(t, w, "r"), axis_name="r")(tree, weights)


@jax.jit
def over_vmap(tree, weights):
    return jax.vmap(lambda t, w: weighted_mean(t, w, "r"), axis_name="r")(tree, weights)


AXES = pytest.mark.parametrize("bind", [over_shard_map, over_pmap, over_vmap])


@AXES
def test_published_case(bind):
    assert bind(jnp.array([1.0, 5.0]), jnp.array([1, 3])).tolist() == [4.0, 4.0]


@AXES
def test_matches_numpy_and_leaves_integers_and_keys_alone(bind):
    rng = np.random.default_rng(0)
    tree = {
        "w": rng.normal(size=(4, 3, 5)).astype(np.float32),
        "half": jnp.asarray(rng.normal(size=(4, 7)), jnp.bfloat16),
        "count": np.arange(4, dtype=np.int32),
        "flag": np.array([True, False, True, False]),
        "key": jax.random.split(jax.random.key(0), 4),
    }
    weights = np.array([10.0, 23.0, 0.0, 7.0], np.float32)
    mean = bind(tree, weights)
    wanted = np.einsum("r,r...->...", weights / weights.sum(), np.asarray(tree["w"], np.float64))
    np.testing.assert_allclose(mean["w"], np.broadcast_to(wanted, (4, 3, 5)), rtol=1e-5, atol=1e-6)
    assert mean["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(mean["count"], tree["count"])
    np.testing.assert_array_equal(mean["flag"], tree["flag"])
    np.testing.assert_array_equal(jax.random.key_data(mean["key"]), jax.random.key_data(tree["key"]))


def test_low_precision_is_summed_in_float32():
    """256 + 1 is 256 in bfloat16: a sum in bfloat16 of 256 and seven ones would lose every one of them."""
    x = jnp.array([256.0] + [1.0] * 7, jnp.bfloat16)
    assert over_vmap(x, jnp.ones(8))[0] == jnp.asarray(263 / 8, jnp.bfloat16)


@AXES
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_of_zero_adds_nothing_also_of_what_is_not_finite(bind, bad):
    tree = {"w": jnp.array([[1.0, 2.0], [bad, bad], [3.0, 6.0]]), "half": jnp.array([2.0, bad, 6.0], jnp.bfloat16)}
    mean = bind(tree, jnp.array([1.0, 0.0, 3.0]))
    assert np.asarray(mean["w"]).tolist() == [[2.5, 5.0]] * 3
    assert np.asarray(mean["half"], np.float32).tolist() == [5.0] * 3


def test_the_mean_of_equal_numbers_is_that_number():
    """The weights are not exact in float32, nor is their sum."""
    with jax.enable_x64(True):
        mean = over_vmap({"wide": jnp.ones(2), "narrow": jnp.ones(2, jnp.float32)}, jnp.array([0.1, 0.2]))
    assert mean["wide"].dtype == jnp.float64
    assert [x.tolist() for x in jax.tree.leaves(mean)] == [[1.0, 1.0], [1.0, 1.0]]


def test_what_is_not_finite_counts_where_the_weight_is_not_zero():
    assert np.isnan(over_vmap(jnp.array([1.0, np.nan]), jnp.array([1.0, 1e-3]))).all()
    assert np.isnan(over_vmap(jnp.array([1.0, 1.0]), jnp.array([1.0, np.nan]))).all()


@settings(max_examples=30)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=6),
    st.floats(0.125, 64, width=32),
    st.integers(0, 2**31 - 1),
)
def test_scaling_all_weights_changes_nothing(values, factor, seed):
    weights = np.random.default_rng(seed).integers(1, 50, len(values)).astype(np.float32)
    x = jnp.array(values, jnp.float32)
    np.testing.assert_allclose(over_vmap(x, weights), over_vmap(x, weights * np.float32(factor)), rtol=1e-5, atol=1e-4)


def test_a_small_tree_takes_one_all_reduce():
    """One collective per dtype is what makes a merge cheap on a slow link."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("r",), axis_types=(AxisType.Auto,))
    tree = {f"leaf{i}": jnp.ones((2, i + 1)) for i in range(12)}
    mean = jax.jit(
        jax.shard_map(lambda t: weighted_mean(t, jnp.float32(1), "r"), mesh=mesh, in_specs=P("r"), out_specs=P())
    )
    assert mean.lower(tree).as_text().count("stablehlo.all_reduce") == 1


def test_buckets_hold_every_leaf_once_and_stay_small():
    leaf = jax.ShapeDtypeStruct
    sizes = [1, _BUCKET_BYTES // 4 - 1, 5, 3 * _BUCKET_BYTES // 4, 7]
    leaves = [leaf((s,), jnp.float32) for s in sizes] + [leaf((3,), jnp.float16)]
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
    buckets = in_buckets([leaf.dtype for leaf in leaves], sizes, _BUCKET_BYTES)
    assert sorted(i for b in buckets for i in b) == list(range(6))
    for bucket in buckets:
        assert len({leaves[i].dtype for i in bucket}) == 1
        assert len(bucket) == 1 or sum(leaves[i].size * 4 for i in bucket) <= _BUCKET_BYTES


def test_psum_buckets_keeps_shapes():
    tree = {"a": jnp.ones((4, 2, 3)), "b": (jnp.full((4, 1), 2.0), jnp.ones(4))}
    total = jax.vmap(lambda t: psum_buckets(t, "r"), axis_name="r")(tree)
    assert jax.tree.map(jnp.shape, total) == jax.tree.map(jnp.shape, tree)
    np.testing.assert_array_equal(total["b"][0], np.full((4, 1), 8.0))


def test_small_arrays_are_exchanged_and_their_sums_are_equal():
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(4, 2, 3)).astype(np.float32), "b": np.arange(4, dtype=np.int32)}
    tree["large"] = np.ones((4, _EXCHANGED_BYTES // 4), np.float32)  # with a, too many for an exchange
    tree["alone"] = np.arange(4, dtype=np.float16)

    def total(exchanges):
        return jax.jit(jax.vmap(lambda t: psum_buckets(t, "r", exchanges), axis_name="r"))

    for one in (tree, {name: x for name, x in tree.items() if name != "large"}):
        exchanged, summed = (total(exchanges)(one) for exchanges in (True, False))
        chex.assert_trees_all_close(exchanged, summed, rtol=1e-5, atol=1e-6)
        chex.assert_trees_all_equal_dtypes(exchanged, one)
    np.testing.assert_array_equal(jax.vmap(lambda x: exchange(x, "r"), axis_name="r")(tree["b"])[2], tree["b"])


def test_an_unbound_axis_is_refused():
    with pytest.raises(NameError, match="replica"):
        weighted_mean(jnp.ones(3), 1.0, "replica")


def test_a_weight_may_have_the_axis_of_a_shard_map():
    tree, weights = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.array([1.0, 4.0])}, jnp.array([1.0, 3.0])
    mean = jax.vmap(lambda t, w: weighted_mean(t, w, "r"), axis_name="r")
    chex.assert_trees_all_equal(mean(tree, weights[:, None]), mean(tree, weights))


def test_several_weights_on_one_device_are_refused():
    """They would weight the columns."""
    message = r"weight has shape \(3,\), .*the one number of this device.*in_specs=P\('r'\)"
    with pytest.raises(ValueError, match=message):
        jax.vmap(lambda x: weighted_mean(x, jnp.arange(3.0), "r"), axis_name="r")(jnp.ones((2, 3)))


@settings(max_examples=25)
@given(st.integers(2, 6), st.integers(0, 10_000))
def test_drift_is_that_of_its_definition(replicas, seed):
    rng = np.random.default_rng(seed)
    x0, deltas, w = rng.normal(size=20), rng.normal(size=(replicas, 20)) + 0.5, rng.uniform(0.1, 1.0, replicas)
    w /= w.sum()
    mean = w @ deltas
    merged, spread = x0 - mean, w @ np.sum((deltas - mean) ** 2, axis=1)
    sums = np.float32([w @ np.sum(deltas**2, axis=1), mean @ mean, merged @ merged])
    rel, direction = measure_drift(*map(jnp.asarray, sums))
    np.testing.assert_allclose(direction, spread / (mean @ mean), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(rel, np.sqrt(spread) / np.linalg.norm(merged), rtol=1e-3)


def test_rounding_is_no_drift():
    one = jnp.float32(1)
    above = jnp.nextafter(one, 2 * one)
    for sums in ((one, above), (above, one)):
        assert [float(x) for x in measure_drift(*sums, one)] == [0.0, 0.0]
    assert measure_drift(one + 1e-5, one, one)[1] == pytest.approx(1e-5, rel=0.02)
    assert all(jnp.isnan(x) for x in measure_drift(one * jnp.nan, one, one))


def test_a_round_in_which_nothing_moved_has_no_drift():
    zero, one = jnp.float32(0), jnp.float32(1)
    for norm in (zero, one):
        assert [float(x) for x in measure_drift(zero, zero, norm)] == [0.0, 0.0]
    # Replicas that cancelled, around parameters of zero: large, but a number.
    assert all(np.isfinite(x) and x > 1e18 for x in measure_drift(one, zero, zero))
