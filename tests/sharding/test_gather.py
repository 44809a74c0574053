"""All-gathers and reduce-scatters of trees in buckets of any size; gradients with parameters gathered twice."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxche.sharding import FullShard, HybridShard, Layout
from jaxche.sharding import _gather as gathers
from jaxche.sharding._gather import DeferredTranspose, deferred_gradients, gather_twice

# Leaves for one bucket, one that is too large for it, whole ones, two dtypes.
SHAPES = {"a": (8,), "b": (3, 12), "c": (4, 2, 5), "d": (16, 16), "e": (3,), "f": (), "g": (2, 8, 3)}


def make_tree():
    rng = np.random.default_rng(0)
    tree = {name: jnp.asarray(rng.integers(0, 50, shape), jnp.float32) for name, shape in SHAPES.items()}
    return tree | {"h": jnp.arange(8, dtype=jnp.bfloat16), "i": jnp.ones((2, 4), jnp.bfloat16)}


def collectives_of(fn, tree, name):
    return str(jax.make_jaxpr(fn)(tree)).count(f"{name}[")


@pytest.mark.parametrize(("small", "bucket", "expected"), [(10**6, 10**6, 2), (400, 200, 5), (0, 0, 7)])
@pytest.mark.parametrize("strategy", [FullShard(), HybridShard(4)], ids=str)
def test_all_gather_puts_small_slices_into_buckets(strategy, small, bucket, expected, devices, monkeypatch):
    monkeypatch.setattr(gathers, "_SMALL_BYTES", small)
    monkeypatch.setattr(gathers, "_BUCKET_BYTES", bucket)
    tree = make_tree()
    layout = Layout(strategy, strategy.mesh(devices[:4]), tree)
    fn = jax.shard_map(
        lambda t: gathers.all_gather(layout, t),
        mesh=layout.mesh,
        in_specs=(layout.params_specs,),
        out_specs=P(),
        check_vma=False,
    )
    got = jax.block_until_ready(jax.jit(fn)(jax.device_put(tree, layout.params)))
    chex.assert_trees_all_equal(jax.device_get(got), jax.device_get(tree))
    assert collectives_of(fn, tree, "all_gather") == expected


@pytest.mark.parametrize(("small", "bucket", "expected"), [(10**6, 10**6, 2), (400, 200, 5), (0, 0, 7)])
@pytest.mark.parametrize("is_deferred", [False, True])
def test_reduce_scatter_gives_slices_of_sums(is_deferred, small, bucket, expected, devices, monkeypatch):
    monkeypatch.setattr(gathers, "_SMALL_BYTES", small)
    monkeypatch.setattr(gathers, "_BUCKET_BYTES", bucket)
    tree, strategy = make_tree(), FullShard()
    layout = Layout(strategy, strategy.mesh(devices[:4]), tree)

    def scatter(tree):
        rank = jax.lax.axis_index("shard")

        def term(x):
            x = x * (rank + 1).astype(x.dtype)
            order = tuple(reversed(range(x.ndim)))
            return DeferredTranspose(x.transpose(order), order) if is_deferred else DeferredTranspose(x)

        return jax.tree.map(
            lambda x: x.transposed(),
            gathers.reduce_scatter(layout, jax.tree.map(term, tree)),
            is_leaf=lambda x: isinstance(x, DeferredTranspose),
        )

    fn = jax.shard_map(scatter, mesh=layout.mesh, in_specs=P(), out_specs=layout.grads_specs, check_vma=False)
    got = jax.device_get(jax.block_until_ready(jax.jit(fn)(tree)))
    cut = {leaf.path[0] for leaf in layout.leaves if leaf.axis is not None}
    assert cut == set(tree) - {"e", "f"}
    for name in cut:  # 1 + 2 + 3 + 4; leaves that are whole are left as they are
        np.testing.assert_array_equal(np.float32(got[name]), 10 * np.float32(tree[name]), err_msg=name)
    assert collectives_of(fn, tree, "reduce_scatter") == expected


def test_buckets_are_filled_in_order_and_of_one_dtype():
    tree = make_tree()
    layout = Layout(FullShard(), FullShard().mesh(jax.devices()[:4]), tree)
    buckets = gathers._buckets(layout.leaves, jax.tree.leaves(tree), 1)
    names = [[layout.leaves[i].path[0] for i in bucket] for bucket in buckets]
    assert names == [["a", "b", "c", "d", "g"], ["h", "i"]]


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"].T + params["b"])
    heads = jnp.einsum("nd,dhe->nhe", hidden, params["heads"].astype(jnp.float32))
    return jnp.mean(heads.reshape(x.shape[0], -1) ** 2), {"mean": heads.mean()}


@pytest.fixture
def given():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {"w": draw(6, 4), "b": draw(6), "heads": draw(6, 2, 3).astype(jnp.bfloat16)}, draw(5, 4)


def differentiate(gather, params, x):
    def forward(p):
        return jax.vjp(lambda p: loss(p, x), p, has_aux=True)

    value, pullback, aux = gather_twice(forward, gather, params)
    return value, aux, deferred_gradients(pullback, jnp.ones_like(value)), pullback


def test_value_and_gradient_are_those_of_jax(given):
    params, x = given
    value, aux, grads = jax.jit(lambda p, x: differentiate(lambda p: p, p, x)[:3])(params, x)
    (expected, more), theirs = jax.value_and_grad(loss, has_aux=True)(params, x)
    transposed = jax.tree.map(lambda g: g.transposed(), grads, is_leaf=lambda g: isinstance(g, DeferredTranspose))
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert float(aux["mean"]) == pytest.approx(float(more["mean"]), rel=1e-5)
    assert jax.tree.map(lambda g: (g.shape, g.dtype), transposed) == jax.tree.map(lambda g: (g.shape, g.dtype), theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-2), transposed, theirs)


def test_what_is_kept_for_the_backward_pass_comes_from_the_second_gather(given):
    params, x = given
    gathered = []

    def gather(params):
        gathered.append(jax.tree.map(lambda p: p * (len(gathered) + 1), params))
        return gathered[-1]

    *_, pullback = differentiate(gather, params, x)
    assert len(gathered) == 2
    kept = [r for r in jax.tree.leaves(pullback) if r.size in (24, 36)]
    second = [np.float32(p).ravel() for p in jax.tree.leaves(gathered[1]) if p.size in (24, 36)]
    assert kept
    for residual in kept:  # in whatever shape and dtype
        assert any(sorted(np.float32(residual).ravel()) == sorted(s) for s in second)


def test_a_last_transposition_is_deferred():
    w, x = jnp.arange(6.0).reshape(2, 3), jnp.ones((4, 2))
    _, pullback = jax.vjp(lambda w: jnp.sum((x @ w) ** 2), w)
    deferred = deferred_gradients(pullback, jnp.ones(()))
    assert deferred.permutation == (1, 0)
    assert deferred.array.shape == (3, 2)
    assert deferred.axis(0) == 1
    np.testing.assert_allclose(deferred.transposed(), jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w))


def test_an_array_without_permutation_keeps_its_axes():
    assert DeferredTranspose(jnp.zeros((2, 3))).axis(1) == 1
    assert jax.tree.map(
        jnp.add, DeferredTranspose(jnp.ones(2), (0,)), DeferredTranspose(jnp.ones(2), (0,))
    ).array.tolist() == [2, 2]
