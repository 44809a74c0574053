"""The picture of a strategy: slices as wide as they are, devices by name, and what a large mesh leaves out."""

import itertools
from xml.etree import ElementTree

import pytest

from jaxche.sharding import FullShard, HybridShard, HybridShardGradOp, NoShard, ShardGradOp

SVG = "{http://www.w3.org/2000/svg}"


def widths(picture):
    """Widths of the coloured bars, by what is written on them."""
    root = ElementTree.fromstring(picture)
    found = {"params": set(), "grads": set(), "opt": set()}
    for bar, text in itertools.pairwise(root.iter()):
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
