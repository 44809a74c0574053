"""Strategies are values, and each has its mesh."""

import dataclasses
import itertools
import math
from xml.etree import ElementTree

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
            lambda d: FullShard().shardings(jnp.zeros(8), jax.make_mesh((8,), ("data",))),
            r"\('data',\), but FullShard needs \('shard',\); write mesh = strategy.mesh",
        ),
        (
            lambda d: HybridShard(4).shardings(jnp.zeros(8), HybridShard(2).mesh(d)),
            r"has 2 devices along 'shard', but HybridShard\(4\) has intra_node_size=4; write mesh = strategy.mesh",
        ),
        (
            lambda d: FullShard().shardings(jnp.zeros(8), HybridShard(2).mesh(d)),
            r"\('replica', 'shard'\), but FullShard needs \('shard',\)",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, named, devices):
    with pytest.raises(ValueError, match=named):
        make(devices)


SVG = "{http://www.w3.org/2000/svg}"


def widths(picture):
    """Widths of the coloured bars, by what is written on them."""
    root = ElementTree.fromstring(picture)
    found = {"params": set(), "grads": set(), "opt": set()}
    for bar, text in itertools.pairwise(root):
        if text.tag == f"{SVG}text" and text.text in found and bar.tag == f"{SVG}rect":
            found[text.text].add(float(bar.get("width")))
    return found


@pytest.mark.parametrize("strategy", [NoShard(), ShardGradOp(), FullShard(), HybridShard(2), HybridShardGradOp(8)])
def test_slices_are_as_wide_as_they_are(strategy, devices):
    for picture in (strategy._repr_html_(), strategy.draw(strategy.mesh(devices))):
        assert str(strategy) in picture
        bars = {name: found.pop() for name, found in widths(picture).items()}
        assert (bars["params"] < 60) == strategy.shards_params
        assert (bars["opt"] < 60) == strategy.shards_state
        assert bars["grads"] == bars["opt"]


def test_devices_are_named(devices):
    strategy = HybridShard(4)
    picture = strategy.draw(strategy.mesh(devices))
    assert "replica 2 x shard 4" in picture
    assert "cpu 7" in picture
    assert "copy 1 of 2" in picture
    # Without devices it is of two nodes.
    assert "replica 2 x shard 4" in strategy.draw()


class Place:
    platform = "gpu"

    def __init__(self, id):
        self.id = id


@pytest.mark.parametrize(
    ("strategy", "left_out"),
    [
        (FullShard(), {"and 64 more"}),
        (HybridShard(2), {"and 28 more copies"}),
        (HybridShard(8), {"and 1 more copy"}),
        (HybridShard(9), {"and 1 more"}),
    ],
    ids=str,
)
def test_what_a_large_mesh_leaves_out_is_told(strategy, left_out):
    root = ElementTree.fromstring(strategy.draw(strategy.mesh([Place(i) for i in range(72)])))
    told = [text for text in root.iter(f"{SVG}text") if "more" in (text.text or "")]
    assert {text.text for text in told} == left_out
    _, _, _, height = map(float, root.get("viewBox").split())
    assert all(float(text.get("y")) < height for text in root.iter(f"{SVG}text"))
