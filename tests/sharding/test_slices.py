"""Gathers and reduce-scatters of trees, with small leaves together: the same values however they travel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxche.sharding import FullShard, HybridShard, Layout
from jaxche.sharding import _slices as slices
from jaxche.sharding._pullback import Turned

# Small enough together, one too large to join, some whole, two dtypes.
SHAPES = {"a": (8,), "b": (3, 12), "c": (4, 2, 5), "d": (16, 16), "e": (3,), "f": (), "g": (2, 8, 3)}


def make_tree():
    rng = np.random.default_rng(0)
    tree = {name: jnp.asarray(rng.integers(0, 50, shape), jnp.float32) for name, shape in SHAPES.items()}
    return tree | {"h": jnp.arange(8, dtype=jnp.bfloat16), "i": jnp.ones((2, 4), jnp.bfloat16)}


def collectives_of(fn, tree, name):
    return str(jax.make_jaxpr(fn)(tree)).count(f"{name}[")


@pytest.mark.parametrize(("small", "bucket", "travels"), [(10**6, 10**6, 2), (400, 200, 5), (0, 0, 7)])
@pytest.mark.parametrize("strategy", [FullShard(), HybridShard(4)], ids=str)
def test_gathers_put_slices_together(strategy, small, bucket, travels, devices, monkeypatch):
    monkeypatch.setattr(slices, "_SMALL_BYTES", small)
    monkeypatch.setattr(slices, "_BUCKET_BYTES", bucket)
    tree = make_tree()
    layout = Layout(strategy, strategy.mesh(devices[:4]), tree)
    fn = jax.shard_map(
        lambda t: slices.gather(layout, t),
        mesh=layout.mesh,
        in_specs=(layout.params_specs,),
        out_specs=P(),
        check_vma=False,
    )
    got = jax.block_until_ready(jax.jit(fn)(jax.device_put(tree, layout.params)))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(tree))
    assert collectives_of(fn, tree, "all_gather") == travels


@pytest.mark.parametrize(("small", "bucket", "travels"), [(10**6, 10**6, 2), (400, 200, 5), (0, 0, 7)])
@pytest.mark.parametrize("is_turned", [False, True])
def test_scatters_give_slices_of_sums(is_turned, small, bucket, travels, devices, monkeypatch):
    monkeypatch.setattr(slices, "_SMALL_BYTES", small)
    monkeypatch.setattr(slices, "_BUCKET_BYTES", bucket)
    tree, strategy = make_tree(), FullShard()
    layout = Layout(strategy, strategy.mesh(devices[:4]), tree)

    def scatter(tree):
        rank = jax.lax.axis_index("shard")

        def turn(x):
            x = x * (rank + 1).astype(x.dtype)
            order = tuple(reversed(range(x.ndim)))
            return Turned(x.transpose(order), order) if is_turned else Turned(x)

        return jax.tree.map(
            lambda x: x.upright(),
            slices.scatter(layout, jax.tree.map(turn, tree)),
            is_leaf=lambda x: isinstance(x, Turned),
        )

    fn = jax.shard_map(scatter, mesh=layout.mesh, in_specs=P(), out_specs=layout.grads_specs, check_vma=False)
    got = jax.device_get(jax.block_until_ready(jax.jit(fn)(tree)))
    cut = {leaf.path[0] for leaf in layout.leaves if leaf.axis is not None}
    assert cut == set(tree) - {"e", "f"}
    for name in cut:  # 1 + 2 + 3 + 4; leaves that are whole are left as they are
        np.testing.assert_array_equal(np.float32(got[name]), 10 * np.float32(tree[name]), err_msg=name)
    assert collectives_of(fn, tree, "reduce_scatter") == travels


def test_buckets_are_filled_in_order_and_of_one_dtype():
    tree = make_tree()
    layout = Layout(FullShard(), FullShard().mesh(jax.devices()[:4]), tree)
    buckets = slices._buckets(layout.leaves, jax.tree.leaves(tree), 1)
    names = [[layout.leaves[i].path[0] for i in bucket] for bucket in buckets]
    assert names == [["a", "b", "c", "d", "g"], ["h", "i"]]
