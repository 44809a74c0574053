"""All strategies side by side, and the cheapest that fits."""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxche.sharding import (
    Comparison,
    FullShard,
    HybridShard,
    NoShard,
    ShardGradOp,
    compare_strategies,
    default_strategies,
)

PARAMS = {"w": jax.ShapeDtypeStruct((256, 128), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((8, 256), jnp.float32)
WHOLE = 256 * 128 * 4


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def compare(devices, **knobs):
    return compare_strategies(loss_fn, optax.adam(0.1), PARAMS, BATCH, devices=devices, **knobs)


@pytest.fixture(scope="module")
def costs(devices):
    return compare(devices)


def test_by_default_it_is_every_strategy(costs):
    assert [row["strategy"] for row in costs.rows] == [
        "NoShard()",
        "ShardGradOp()",
        "FullShard()",
        "HybridShardGradOp(4)",
        "HybridShard(4)",
    ]
    assert all(row["fits"] for row in costs.rows)


@pytest.mark.parametrize(
    ("processes", "node", "nodes"),
    [([0] * 8, None, 4), ([0] * 8, 2, 2), ([0, 0, 1, 1], None, 2), ([0] * 7, None, 0), ([0, 1], None, 0)],
)
def test_default_strategies(processes, node, nodes):
    found = default_strategies([SimpleNamespace(process_index=process) for process in processes], node)
    assert found[:3] == (NoShard(), ShardGradOp(), FullShard())
    assert [strategy.intra_node_size for strategy in found[3:]] == [nodes] * 2 * bool(nodes)


def test_two_devices_have_no_nodes(devices):
    assert len(compare(devices[:2]).rows) == 3


class Costs(NamedTuple):
    """The part of an explanation that a choice reads."""

    strategy: object
    sent: float
    peak: int


WHOLE_ONE, STATE, FULL, HYBRID = NoShard(), ShardGradOp(), FullShard(), HybridShard(2)


@pytest.mark.parametrize(
    ("memory", "costs", "cheapest", "advice"),
    [
        # At equal bytes the one that cuts nothing, though it needs more memory.
        (
            None,
            [(STATE, 100, 60), (WHOLE_ONE, 100.9, 90), (FULL, 150, 30)],
            WHOLE_ONE,
            "advice: NoShard(), the default of the trainer: no other strategy sends less",
        ),
        (
            1024,
            [(WHOLE_ONE, 100, 900), (STATE, 100, 60)],
            WHOLE_ONE,
            "advice: NoShard(), the default of the trainer: it fits 1.0 KiB, and no other strategy sends less",
        ),
        # It does not fit: the one with the least memory of those that send as much.
        (
            1024,
            [(WHOLE_ONE, 100, 2000), (HYBRID, 100.5, 700), (STATE, 100, 800), (FULL, 150, 30)],
            HYBRID,
            "advice: HybridShard(2): it fits 1.0 KiB and NoShard() does not, and no other that fits sends less",
        ),
        (
            1024,
            [(WHOLE_ONE, 102, 90), (STATE, 100, 60)],
            STATE,
            "advice: ShardGradOp(): it fits 1.0 KiB, and sends least",
        ),
        (None, [(FULL, 150, 60)], FULL, "advice: FullShard(): it sends least"),
        (
            1024,
            [(WHOLE_ONE, 100, 3072), (FULL, 150, 2048)],
            None,
            "nothing fits 1.0 KiB; FullShard() needs least, 2.0 KiB: take more devices, or accumulate=",
        ),
    ],
)
def test_advice(memory, costs, cheapest, advice):
    comparison = Comparison(tuple(Costs(*cost) for cost in costs), memory, 8)
    assert comparison.cheapest == cheapest
    assert comparison.advice == advice


def test_less_memory_leaves_fewer_and_then_none(devices, costs):
    flat = dataclasses.replace(costs, explanations=costs.explanations[:3])
    peaks = {row["strategy"]: row["peak"] for row in flat.rows}
    fits = {}
    for name in ("NoShard()", "ShardGradOp()", "FullShard()"):
        narrow = dataclasses.replace(flat, memory=peaks[name])
        fits[name] = {row["strategy"] for row in narrow.rows if row["fits"]}
        assert name in fits[name]
        cheapest = str(narrow.cheapest)
        assert cheapest in fits[name]
        assert str(narrow).splitlines()[-1].startswith(f"advice: {cheapest}")
    strategies = [NoShard(), ShardGradOp(), FullShard()]
    nothing = compare(devices, strategies=strategies, memory=min(peaks.values()) - 1)
    assert nothing.cheapest is None
    assert "nothing fits" in str(nothing)
    assert "accumulate=" in str(nothing)
    assert not any(row["fits"] for row in nothing.rows)


def test_tables_for_people(costs):
    lines = str(costs).splitlines()
    assert lines[1].split() == ["strategy", "params", "grads", "opt", "other", "in", "all", "counted", "theory", "fits"]
    assert lines[0].split("  ")[0] == "bytes a device"
    assert lines[0].endswith("  sent a step")
    assert len(lines[0]) == lines[1].index("theory") + len("theory")  # over what is sent, not over "fits"
    assert lines[4].split()[:3] == ["FullShard()", "16.0", "KiB"]
    assert lines[-1] == costs.advice
    assert repr(costs) == str(costs)
    assert all(len(line) <= 110 for line in lines)
    page = costs._repr_html_()
    assert page.count("<tr>") == 6
    assert "advice: NoShard()" in page


def test_what_the_step_is_given_is_compared(devices):
    def with_state(params, x, rng, model_state):
        return loss_fn(params, x) * model_state["m"].mean() + 0 * jax.random.uniform(rng), ({}, model_state)

    def make():
        return {"w": jnp.zeros((256, 128))}

    costs = compare_strategies(
        with_state,
        optax.sgd(0.1),
        make,
        BATCH,
        strategies=[FullShard()],
        devices=devices[:2],
        model_state={"m": jax.ShapeDtypeStruct((100,), jnp.float32)},
        accumulate=2,
        compute_dtype=jnp.bfloat16,
    )
    [explanation] = costs.explanations
    assert explanation.whole["inputs"] == 8 * 256 * 4 + 400
    assert explanation.theory == (2 * 2 * 0.5 + 2) / 2 * WHOLE


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"memory": "lots"}, "memory='lots' is not a size; write bytes or text such as \"16GiB\""),
        ({"memory": 0}, "memory=0"),
        ({"strategies": []}, r"strategies=\[\] has nothing to compare; write strategies=\[jaxche.NoShard"),
        ({"strategies": FullShard()}, r"strategies=FullShard\(.*write strategies=\[jaxche.NoShard"),
        ({"strategies": [FullShard]}, "strategy=.*FullShard.* is not a sharding strategy"),
        ({"strategies": [HybridShard(3)]}, "intra_node_size=3 does not divide the 8 devices"),
    ],
)
def test_what_cannot_be_is_refused(knobs, named, devices):
    with pytest.raises(ValueError, match=named):
        compare(devices, **knobs)
