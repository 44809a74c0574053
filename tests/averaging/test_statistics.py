"""Pooled batch statistics equal those of all examples in one place."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxche.averaging import from_moments, to_moments, weighted_mean


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.floats(-1e3, 1e3), st.integers(0, 10_000))
def test_pooling_equals_the_joined_sample(sizes, centre, seed):
    rng = np.random.default_rng(seed)
    samples = [rng.normal(centre + i, 1 + i, size=(n, 3)) for i, n in enumerate(sizes)]
    stats = [{"bn": {"mean": jnp.float32(s.mean(0)), "var": jnp.float32(s.var(0))}} for s in samples]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *stats)
    reference = {"bn": {"mean": jnp.full(3, centre, jnp.float32), "var": jnp.ones(3)}}

    def pool(own, weight):
        return from_moments(weighted_mean(to_moments(own, reference), weight, "r"), reference)

    pooled = jax.vmap(pool, axis_name="r")(stacked, jnp.array(sizes, jnp.float32))
    joined = np.concatenate(samples)
    np.testing.assert_allclose(pooled["bn"]["mean"][0], joined.mean(0), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(pooled["bn"]["var"][0], joined.var(0), rtol=2e-3, atol=2e-3)


def test_only_a_var_with_a_mean_beside_it_changes():
    tree = {"var": jnp.ones(2), "ema": {"mean": jnp.zeros(2)}, "n": jnp.array(3)}
    moved = to_moments(tree, jax.tree.map(lambda x: x + 1, tree))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), tree, moved))


def test_the_way_back_undoes_the_way_there():
    tree = {"mean": jnp.array([1.0, -2.0]), "var": jnp.array([0.5, 3.0])}
    reference = {"mean": jnp.array([0.5, 0.0]), "var": jnp.ones(2)}
    back = from_moments(to_moments(tree, reference), reference)
    np.testing.assert_allclose(back["var"], tree["var"], rtol=1e-6)
