"""Trees whose large arrays are taken by a round: what a program returns, what stands for them, and what follows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxche.replicas import marked, with_large, without_large
from jaxche.replicas._packing import revived
from jaxche.replicas._programs import stayed_finite

LARGE = (1, 128, 129)


def tree(**more):
    return {"large": jnp.ones(LARGE), "small": jnp.zeros((1, 3)), "key": jax.random.key(0)[None], **more}


def test_large_arrays_are_put_back_in_the_order_of_the_tree():
    given = tree(other=2 * jnp.ones(LARGE), none=None)
    made = jax.jit(lambda x: without_large(jax.tree.map(jnp.copy, x)))(given)
    assert len(jax.tree.leaves(made)) == 2
    filled = with_large(made, jax.tree.leaves(given))
    assert jax.tree.structure(filled) == jax.tree.structure(given)
    assert filled["large"] is given["large"]
    assert filled["other"] is given["other"]
    assert filled["small"] is not given["small"]


def test_what_is_large_follows_from_the_given_bytes():
    nbytes = 4 * 128 * 129
    assert not jax.tree.leaves(without_large({"x": jnp.ones(LARGE)}, nbytes - 1))
    assert jax.tree.leaves(without_large({"x": jnp.ones(LARGE)}, nbytes))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["large", "small"])
def test_a_marked_tree_tells_that_numbers_did_not_stay_finite(name, bad):
    before = tree()
    del before["key"]
    known = marked(before)
    assert known["large"].shape == ()
    assert bool(stayed_finite(known, before))
    after = before | {name: before[name].at[0, 1].set(bad)}
    assert not bool(stayed_finite(known, after))
    # An array that had such a number is left out, and others are not.
    assert bool(stayed_finite(marked(after), after))
    both = after | {"small": jnp.full((1, 3), np.nan), "large": jnp.full(LARGE, np.nan)}
    assert not bool(stayed_finite(marked(after), both))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_])
def test_a_large_array_of_other_numbers_is_not_copied_as_its_mark(dtype):
    large = {"x": jnp.ones((1, 1 << 17), dtype)}
    known = jax.jit(marked)(large)
    assert (known["x"].shape, known["x"].dtype) == ((), dtype)
    assert bool(stayed_finite(known, large))


def test_deleted_arrays_become_zeros_where_they_were(devices):
    given = jax.device_put(tree(half=jnp.ones(LARGE, jnp.bfloat16)), devices[1])
    given["large"].delete()
    given["half"].delete()
    alive = revived(given)
    for name in ("large", "half"):
        np.testing.assert_array_equal(alive[name], np.zeros(LARGE))
        assert alive[name].dtype == given[name].dtype
        assert alive[name].devices() == {devices[1]}
    assert alive["small"] is given["small"]


def test_large_keys_are_not_taken():
    keys = jax.random.split(jax.random.key(0), 1 << 14)[None]
    (kept,) = jax.tree.leaves(without_large({"keys": keys}))
    assert kept is keys
