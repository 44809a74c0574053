"""Leaves of trees: their dtypes, sums against NumPy, and names."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.averaging import add_weighted, escape_name, is_float, path_names, split_like, sum_dtype, weighted, zero_sums


def test_leaves_that_are_averaged():
    leaves = (1.0, jnp.ones(2), jnp.ones(2, jnp.complex64), jnp.arange(2), jnp.ones(2, bool), jax.random.key(0))
    assert [is_float(leaf) for leaf in leaves] == [True, True, True, False, False, False]


def test_a_vector_is_split_into_arrays():
    arrays = [np.ones((2, 3), np.int8), np.ones(()), np.ones((0, 4)), np.ones(5)]
    found = split_like(jnp.arange(12.0), arrays)
    assert [(x.shape, x.dtype.name) for x in found] == [(x.shape, "float32") for x in arrays]
    assert np.concatenate([np.ravel(x) for x in found]).tolist() == list(range(12))


def test_names_of_leaves_stay_different_when_joined():
    tree = {"layers": [{"w": 1.0}], "a.b": 2.0}
    assert [path_names(path) for path, _ in jax.tree.leaves_with_path(tree)] == [("a.b",), ("layers", "0", "w")]
    assert path_names(()) == ()
    assert [escape_name(name, ".") for name in ("w", "a.b", "a%2Eb")] == ["w", "a%2Eb", "a%252Eb"]


def test_sums_are_wide_enough():
    assert sum_dtype(jnp.bfloat16) == sum_dtype(jnp.float16) == jnp.float32
    assert sum_dtype(jnp.float32) == jnp.float32
    assert sum_dtype(jnp.complex64) == jnp.complex64
    zeros = zero_sums({"half": jnp.ones((2, 3), jnp.bfloat16), "complex": jnp.ones(4, jnp.complex64)})
    assert {name: (x.shape, x.dtype.name) for name, x in zeros.items()} == {
        "half": ((2, 3), "float32"),
        "complex": ((4,), "complex64"),
    }
    assert not any(x.any() for x in zeros.values())


def test_no_term_is_lost():
    """256 + 1 is 256 in bfloat16."""
    one, sums = {"x": jnp.ones(2, jnp.bfloat16)}, {"x": jnp.full(2, 256, jnp.float32)}
    for _ in range(7):
        sums = add_weighted(sums, one, jnp.int32(1))
    assert sums["x"].tolist() == [263.0, 263.0]


def test_terms_count_as_much_as_they_weigh():
    rng = np.random.default_rng(0)
    terms, weights = rng.normal(size=(3, 5)).astype(np.float32), np.array([8, 8, 3], np.float32)
    add, sums = jax.jit(add_weighted), zero_sums(terms[0])
    for term, weight in zip(terms, weights, strict=True):
        sums = add(sums, term, weight)
    np.testing.assert_allclose(sums, weights @ terms, rtol=1e-6, atol=1e-6)


def test_a_term_of_weight_zero_adds_nothing_also_where_it_is_not_finite():
    bad = {"x": jnp.array([np.nan, np.inf, -np.inf, 1.0], jnp.bfloat16)}
    assert weighted(bad, jnp.float32(0))["x"].tolist() == [0.0] * 4
    sums = add_weighted({"x": jnp.arange(4.0)}, bad, jnp.int32(0))
    assert sums["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert np.isnan(add_weighted(sums, bad, jnp.int32(1))["x"][0])


def test_weights_are_not_rounded_to_the_precision_of_the_terms():
    sums = add_weighted({"x": jnp.zeros(1)}, {"x": jnp.ones(1, jnp.bfloat16)}, jnp.int32(257))
    assert sums["x"].tolist() == [257.0]
