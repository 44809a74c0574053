"""Which slice of which leaf lives where."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxche.sharding import FullShard, HybridShard, Layout, NoShard, ShardGradOp

SHAPE = jax.ShapeDtypeStruct


def layout_of(params, devices, strategy=None):
    strategy = strategy or FullShard()
    return Layout(strategy, strategy.mesh(devices), params)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((4, 8), 1),
        ((8, 4), 0),
        ((8, 8), 0),
        ((4, 12, 8), 1),
        ((4, 13, 8), 2),
        ((3, 5), None),
        ((3,), None),
        ((), None),
        ((0, 4), 1),
        ((1, 1), None),
    ],
)
def test_the_largest_axis_the_devices_divide_is_cut(shape, axis, devices):
    layout = layout_of(jnp.zeros(shape), devices[:4])
    assert layout.leaves[0].axis == axis
    assert layout.params.spec == (P() if axis is None else P(*[None] * axis, "shard"))
    assert bool(layout.leaves[0].why) == (axis is None)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((), "a scalar"),
        ((3, 5), "no axis of (3, 5) is divisible by 4"),
        ((4, 2), "8 elements, fewer than min_size=16"),
    ],
)
def test_why_a_leaf_stays_whole(shape, why, devices):
    strategy = FullShard(min_size=16) if "min_size" in why else FullShard()
    assert layout_of(jnp.zeros(shape), devices[:4], strategy).leaves[0].why == why


def test_a_scanned_axis_is_never_cut(devices):
    params = {
        "layers": {"w": jnp.zeros((16, 4, 8)), "b": jnp.zeros((16, 3))},
        "layers_norm": jnp.zeros((16, 4)),
        "decoder": {"layers": {"w": jnp.zeros((16, 8, 8))}},
        "encoder": {"layers": {"w": jnp.zeros((16, 8, 8))}},
    }

    def by_path(strategy):
        leaves = layout_of(params, devices[:4], strategy).leaves
        return {"/".join(leaf.path): leaf.axis for leaf in leaves}

    assert set(by_path(FullShard()).values()) == {0}
    assert by_path(FullShard(scanned=("layers",))) == {
        "decoder/layers/w": 1,
        "encoder/layers/w": 1,
        "layers/b": None,
        "layers/w": 2,
        "layers_norm": 0,
    }
    assert by_path(FullShard(scanned=("decoder/layers",)))["encoder/layers/w"] == 0
    [whole] = [leaf for leaf in layout_of(params, devices[:4], FullShard(scanned=("layers",))).leaves if leaf.why]
    assert whole.why == "no axis of (16, 3) besides that of the layers is divisible by 4"


TRANSFORMS = {
    "adam": optax.adam(0.1),
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.0, 5)), optax.ema(0.9)
    ),
    "masked": optax.masked(optax.adam(0.1), {"a": {"w": True}, "w": False}),
    "multi_transform": optax.multi_transform(
        {"fast": optax.adam(0.1), "slow": optax.sgd(0.1, momentum=0.9)}, {"a": {"w": "fast"}, "w": "slow"}
    ),
    "lbfgs": optax.lbfgs(memory_size=3),
    "injected": optax.inject_hyperparams(optax.adam)(0.1),
    "multi_steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("strategy", [FullShard(), ShardGradOp(), HybridShard(4)], ids=str)
def test_optimizer_state_follows_the_parameters(name, strategy, devices):
    # Two leaves whose names end alike and whose axes differ: the longest ending of a path decides.
    params = {"a": {"w": SHAPE((8, 3), jnp.float32)}, "w": SHAPE((5, 12), jnp.float32)}
    layout = layout_of(params, devices[:4], strategy)
    state = jax.eval_shape(TRANSFORMS[name].init, params)
    seen = set()

    def check(leaf, sharding):
        spec, tail = sharding.spec, leaf.shape[-2:]
        if tail in ((8, 3), (5, 12)):
            expected = ("shard", None) if tail == (8, 3) else (None, "shard")
            padded = (*spec, *[None] * (leaf.ndim - len(spec)))
            assert padded == (*[None] * (leaf.ndim - 2), *expected)
            seen.add(tail)
        else:
            assert spec == P()

    jax.tree.map(check, state, layout.opt_state(TRANSFORMS[name]))
    assert seen == ({(8, 3)} if name == "masked" else {(8, 3), (5, 12)})


def test_what_has_the_name_of_a_parameter_and_another_shape_is_whole(devices):
    """Adafactor keeps a mean of rows and one of columns."""
    layout = layout_of({"w": SHAPE((8, 4), jnp.float32)}, devices[:4])
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9)
    shapes, specs = {}, {}
    for (path, leaf), (_, sharding) in zip(
        jax.tree.leaves_with_path(jax.eval_shape(tx.init, layout.shapes)),
        jax.tree.leaves_with_path(layout.opt_state(tx)),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        shapes[name], specs[name] = leaf.shape, sharding.spec
    assert {(8,), (4,), (8, 4)} <= set(shapes.values())
    assert all(spec == (P("shard") if shapes[name] == (8, 4) else P()) for name, spec in specs.items())


def test_without_sharding_all_is_whole_and_needs_no_reason(devices):
    layout = layout_of({"w": jnp.zeros((8, 8)), "s": jnp.zeros(())}, devices[:4], NoShard())
    assert {leaf.why for leaf in layout.leaves} == {""}
    assert all(s.is_fully_replicated for s in jax.tree.leaves((layout.params, layout.grads)))


def test_a_batch_lies_over_all_devices(devices):
    layout = layout_of(jnp.zeros(8), devices, HybridShard(4))
    assert layout.batch.spec == P(("replica", "shard"))
    assert layout.splits(16)
    assert not layout.splits(12)
    assert not layout.splits(16, accumulate=4)


def test_a_mesh_with_explicit_axes_is_taken_as_automatic(devices):
    mesh = jax.make_mesh((4,), ("shard",), devices=devices[:4])
    layout = Layout(FullShard(), mesh, jnp.zeros(8))
    assert layout.mesh == FullShard().mesh(devices[:4])
