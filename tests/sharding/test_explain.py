"""What a step costs each device: the collectives a strategy promises, its bytes kept and sent."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxche.sharding import (
    FullShard,
    HybridShard,
    HybridShardGradOp,
    Layout,
    NoShard,
    ShardGradOp,
    as_bytes,
    nbytes,
    nbytes_per_device,
)
from jaxche.sharding import sharded_step as make_step
from jaxche.sharding._explain import bytes_in_theory, show_bytes

ALL = [FullShard(), ShardGradOp(), NoShard(), HybridShard(4), HybridShardGradOp(4)]
# Of even sizes; one is used twice, once transposed.
SHAPES = {"a": (64, 256), "b": (256,), "c": (96, 256)}
SIZE = 4 * (64 * 256 + 256 + 96 * 256)


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["a"] * params["b"])
    return jnp.mean((hidden @ params["c"].T) ** 2) + jnp.mean((hidden @ params["a"].T) ** 2)


PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
BATCH = jax.ShapeDtypeStruct((32, 64), jnp.float32)


@pytest.fixture(scope="module")
def costs(devices):
    """What each strategy costs on 8 devices with Adam; compiled once."""
    return {
        type(s).__name__: make_step(loss_fn, optax.adam(0.1), s, s.mesh(devices)).explain(PARAMS, BATCH) for s in ALL
    }


def shares_sent(explanation):
    """What is sent over groups of a size, in parts of the parameters' bytes; the mean of losses is next to nothing."""
    sums = {}
    for c in explanation.collectives:
        key = c.kind, max(len(g) for g in c.groups)
        sums[key] = sums.get(key, 0) + c.sent / SIZE
    return {key: pytest.approx(share, rel=0.01) for key, share in sums.items() if share > 1e-3}


@pytest.mark.parametrize(
    ("name", "promised"),
    [
        ("FullShard", {("all-gather", 8): 2 * 7 / 8, ("reduce-scatter", 8): 7 / 8}),
        ("ShardGradOp", {("all-gather", 8): 7 / 8, ("reduce-scatter", 8): 7 / 8}),
        ("NoShard", {("all-reduce", 8): 2 * 7 / 8}),
        (
            "HybridShard",
            {("all-gather", 4): 2 * 3 / 4, ("reduce-scatter", 4): 3 / 4, ("all-reduce", 2): 2 * 1 / 2 / 4},
        ),
        (
            "HybridShardGradOp",
            {("all-gather", 4): 3 / 4, ("reduce-scatter", 4): 3 / 4, ("all-reduce", 2): 2 * 1 / 2 / 4},
        ),
    ],
)
def test_the_compiled_step_has_the_collectives_promised(name, promised, costs):
    """Nothing else, and over no other groups."""
    assert shares_sent(costs[name]) == promised
    assert costs[name].theory == sum(promised.values()) * SIZE
    assert costs[name].sent == pytest.approx(costs[name].theory, rel=0.01)


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("FullShard", (8, 8, 8)),
        ("ShardGradOp", (1, 8, 8)),
        ("NoShard", (1, 1, 1)),
        ("HybridShard", (4, 4, 4)),
        ("HybridShardGradOp", (1, 4, 4)),
    ],
)
def test_bytes_a_device_keeps(name, shares, costs):
    params, gradients, state = shares
    assert costs[name].per_device["params"] == SIZE // params
    assert costs[name].per_device["gradients"] == SIZE // gradients
    assert costs[name].per_device["opt_state"] == 2 * SIZE // state + 4  # and a counter
    assert costs[name].per_device["inputs"] == costs[name].whole["inputs"] // 8
    assert costs[name].whole["opt_state"] == 2 * SIZE + 4


def test_in_all_it_is_what_the_compiler_plans(costs):
    for explanation in costs.values():
        kept = sum(explanation.per_device[what] for what in ("params", "opt_state", "inputs"))
        assert explanation.peak >= kept + explanation.per_device["temporaries"]
    assert costs["FullShard"].peak < costs["NoShard"].peak
    assert costs["ShardGradOp"].peak < costs["NoShard"].peak


def deep(params, x):
    for w in params:
        x = jnp.tanh(x @ w.T)
    return jnp.mean(x**2)


def test_whole_parameters_and_whole_gradients_are_never_there_together(devices):
    params = [jax.ShapeDtypeStruct((512, 512), jnp.float32) for _ in range(8)]
    batch = jax.ShapeDtypeStruct((8, 512), jnp.float32)
    steps = (make_step(deep, optax.sgd(0.1), s, s.mesh(devices)) for s in (FullShard(), ShardGradOp(), NoShard()))
    full, grad_op, none = (step.explain(params, batch) for step in steps)
    whole = full.whole["params"]
    gathered = sum(c.nbytes for c in full.collectives if c.kind == "all-gather")
    assert gathered == 2 * whole - whole // 8  # the backward pass does not need the first

    def needed(e):
        return e.per_device["temporaries"] + e.per_device["gradients"]

    assert needed(full) < 1.1 * whole
    assert needed(grad_op) < 0.4 * whole  # whole parameters are there anyway; of gradients one or two
    assert none.per_device["params"] + needed(none) > 1.9 * whole


def test_micro_batches_gather_each_time_and_scatter_each_time(devices):
    step = make_step(loss_fn, optax.adam(0.1), FullShard(), FullShard().mesh(devices[:4]), accumulate=2)
    explanation = step.explain(PARAMS, BATCH)
    assert shares_sent(explanation) == {("all-gather", 4): 4 * 3 / 4, ("reduce-scatter", 4): 2 * 3 / 4}
    assert explanation.theory == 6 * 3 / 4 * SIZE


def test_computing_in_half_precision_halves_the_gathers(devices):
    strategy = FullShard()
    step = make_step(loss_fn, optax.adam(0.1), strategy, strategy.mesh(devices[:4]), compute_dtype=jnp.bfloat16)
    # In theory 2 bytes an element gathered twice, 4 scattered. CPUs gather bfloat16 as float32.
    assert step.explain(PARAMS, BATCH).theory == (2 * 0.5 + 1) * 3 / 4 * SIZE


def test_leaves_that_stay_whole_are_named_with_the_reason(devices):
    params = {"w": jnp.zeros((8, 4)), "odd": jnp.zeros((3, 5)), "s": jnp.zeros(())}
    step = make_step(
        lambda p, x: jnp.mean(x @ p["w"]) * p["s"] + p["odd"].sum(),
        optax.sgd(0.1),
        FullShard(),
        FullShard().mesh(devices[:4]),
    )
    explanation = step.explain(params, jnp.zeros((4, 8)))
    text = str(explanation)
    assert "2 of 3 parameters stay whole on every device, 64 B:" in text
    assert "odd: no axis of (3, 5) is divisible by 4" in text
    assert "s: a scalar" in text
    assert [leaf.path for leaf in explanation.replicated] == [("odd",), ("s",)]


def test_many_whole_leaves_are_not_all_listed(devices):
    params = {f"leaf{i:02}": jnp.zeros(3) for i in range(20)}
    step = make_step(
        lambda p, x: sum(leaf.sum() for leaf in p.values()) * x.mean(),
        optax.sgd(0.1),
        FullShard(),
        FullShard().mesh(devices[:2]),
    )
    lines = str(step.explain(params, jnp.zeros(4))).splitlines()
    assert lines[-1] == "  and 8 more"
    assert all(len(line) <= 100 for line in lines)


def test_tables_for_people_and_for_programs(costs):
    explanation = costs["HybridShard"]
    lines = str(explanation).splitlines()
    assert lines[0] == "HybridShard(4) on 8 devices: replica 2 x shard 4"
    assert lines[2].split() == ["parameters", "161.0", "KiB", "40.2", "KiB", "0.250"]
    assert "reduce-scatter" in str(explanation)
    assert [row["what"] for row in explanation.rows][-1] == "peak"
    page = explanation._repr_html_()
    assert page.startswith("<b>HybridShard(4) on 8 devices")
    assert page.count("<tr>") == 1 + len(explanation.rows)


def test_theory_counts_whole_leaves_as_all_reduced(devices):
    params = {"w": jnp.zeros((8, 4)), "odd": jnp.zeros(3)}
    layout = Layout(FullShard(), FullShard().mesh(devices[:4]), params)
    assert bytes_in_theory(layout) == 3 * 3 / 4 * 128 + 2 * 3 / 4 * 12


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16GiB", 16 * 2**30), ("1.5 kb", 1500), ("500", 500), (".5KiB", 512), (7, 7), (2.0, 2), ("3 TB", 3 * 10**12)],
)
def test_sizes_as_people_write_them(text, expected):
    assert as_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 2", "3 PiB", "0", 0, "nan", None])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size; write bytes"):
        as_bytes(text)


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**40, "3.0 TiB"), (1e16, "9094.9 TiB")]
)
def test_sizes_as_tables_print_them(size, shown):
    assert show_bytes(size) == shown


def test_bytes_of_trees(devices):
    tree = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}
    layout = Layout(FullShard(), FullShard().mesh(devices[:4]), tree)
    assert nbytes(tree) == 128 + 6
    assert nbytes_per_device(tree, layout.params) == 32 + 6
    placed = jax.device_put(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree), layout.params)
    assert nbytes_per_device(placed) == 32 + 6
    assert nbytes(placed) == 128 + 6
