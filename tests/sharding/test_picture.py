"""A strategy draws what it cuts."""

import itertools
from xml.etree import ElementTree

import pytest

from jaxche.sharding import FullShard, HybridShard, HybridShardGradOp, NoShard, ShardGradOp

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
        assert str(strategy).replace("<", "&lt;") in picture
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


def test_a_large_mesh_is_cut():
    class Place:
        platform = "gpu"

        def __init__(self, id):
            self.id = id

    picture = FullShard().draw(FullShard().mesh([Place(i) for i in range(64)]))
    assert "and 56 more" in picture
