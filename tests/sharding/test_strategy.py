"""Strategies are values, and each has its mesh."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxche.sharding import FullShard, HybridShard, HybridShardGradOp, NoShard, ShardGradOp

FLAT = [FullShard, ShardGradOp, NoShard]
HYBRID = [HybridShard, HybridShardGradOp]


@pytest.mark.parametrize("strategy", [cls() for cls in FLAT + HYBRID], ids=str)
def test_strategies_are_frozen_values(strategy):
    assert strategy == type(strategy)()
    assert len({strategy, type(strategy)(), type(strategy)(min_size=8)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.min_size = 3


def test_sizes_may_be_whole_numbers_of_numpy():
    assert repr(HybridShard(np.int64(2), min_size=np.int64(8))) == repr(HybridShard(2, min_size=8))


def test_what_they_are_called():
    assert str(FullShard()) == "FullShard()"
    assert str(HybridShard(2, scanned=("layers",))) == "HybridShard(2, scanned=('layers',))"
    assert str(ShardGradOp(min_size=8)) == "ShardGradOp(min_size=8)"


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("cls", FLAT)
def test_flat_meshes_have_one_axis(cls, world, devices):
    mesh = cls().mesh(devices[:world])
    assert mesh.shape_tuple == (("shard", world),)
    assert list(mesh.devices) == devices[:world]


@pytest.mark.parametrize("node", [1, 2, 4, 8])
@pytest.mark.parametrize("cls", HYBRID)
def test_neighbours_share_a_node(cls, node, devices):
    mesh = cls(intra_node_size=node).mesh(devices)
    assert mesh.shape_tuple == (("replica", 8 // node), ("shard", node))
    assert mesh.devices[0].tolist() == devices[:node]


def test_all_devices_are_the_default(devices):
    assert FullShard().mesh().size == len(devices)


@pytest.mark.parametrize(
    ("strategy", "share"),
    [
        (FullShard(), 8),
        (ShardGradOp(), 1),
        (NoShard(), 1),
        (HybridShard(4), 4),
        (HybridShardGradOp(4), 1),
    ],
    ids=str,
)
def test_shardings_of_parameters(strategy, share, devices):
    params = {"w": jnp.zeros((16, 8)), "b": jax.ShapeDtypeStruct((8,), jnp.float32)}
    shardings = strategy.shardings(params, strategy.mesh(devices))
    assert jax.tree.structure(shardings) == jax.tree.structure(params)
    sizes = jax.tree.map(lambda x, s: math.prod(x.shape) // math.prod(s.shard_shape(x.shape)), params, shardings)
    assert sizes == {"w": share, "b": share}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda d: HybridShard(0), r"intra_node_size=0.*write e.g. HybridShard\(intra_node_size=8\)"),
        (lambda d: HybridShard(3).mesh(d), r"=3 does not divide the 8 devices; write HybridShard\(intra_node_size=2\)"),
        (lambda d: HybridShardGradOp(16).mesh(d), r"=16 does not divide the 8.*HybridShardGradOp\(intra_node_size=8\)"),
        (lambda d: HybridShard("2"), r"intra_node_size='2'.*write e.g. HybridShard\(intra_node_size=8\)"),
        (lambda d: HybridShard(2.0), r"intra_node_size=2\.0"),
        (lambda d: FullShard(min_size=-1), "min_size=-1.*write e.g. min_size=0"),
        (lambda d: FullShard(min_size=1.5), "min_size=1.5 must be a whole number"),
        (lambda d: FullShard(min_size="1MB"), "min_size='1MB'.*write e.g. min_size=0"),
        (lambda d: FullShard().shardings({"w": "a"}, FullShard().mesh(d)), r"params=.* must be a tree of arrays"),
        (lambda d: FullShard().shardings(jnp.zeros(8), d), r"mesh=\[.* is not a mesh; write mesh = strategy.mesh"),
        (lambda d: FullShard(scanned="layers"), r'scanned=\'layers\'.*write scanned=\("layers",\)'),
        (lambda d: FullShard().mesh([]), r"devices=\[\].*write strategy.mesh\(jax.devices\(\)\)"),
        (lambda d: FullShard().mesh(2), r"devices=2 must be devices; write strategy.mesh\(jax.devices\(\)\)"),
        (
            lambda d: HybridShard(4).shardings(jnp.zeros(8), HybridShard(2).mesh(d)),
            r"has 2 devices along 'shard', but HybridShard\(4\) has intra_node_size=4; write mesh = strategy.mesh",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, named, devices):
    with pytest.raises(ValueError, match=named):
        make(devices)


def test_a_strategy_may_be_made_before_the_processes_of_a_run_meet(run_forked):
    program = """
import jaxche
for cls in (jaxche.NoShard, jaxche.FullShard, jaxche.ShardGradOp, jaxche.HybridShard):
    cls()
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    assert run_forked("-c", program).returncode == 0


@pytest.mark.parametrize("options", [{}, {"min_size": 8, "scanned": ("layers",)}])
def test_a_strategy_across_nodes_is_itself_within_one(options):
    pairs = [(FullShard, HybridShard), (ShardGradOp, HybridShardGradOp)]
    for inside, hybrid in pairs:
        assert inside(**options).across_nodes(2) == hybrid(4, **options).across_nodes(2) == hybrid(2, **options)
        assert hybrid(2, **options).within_node() == inside(**options).within_node() == inside(**options)
    assert NoShard(**options).across_nodes(2) == NoShard(**options).within_node() == NoShard(**options)
