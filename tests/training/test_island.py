"""Replicas that are islands: whatever the strategy and the size, they train as replicas of one device do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxche
from jaxche.sharding import FullShard, HybridShard, HybridShardGradOp, NoShard, ShardGradOp

# Even, odd and scalar leaves; 8 rows a batch.
ROUNDS = ((2, 3), (1, 4), (3, 3), (2, 1))


def make_problem(seed=0, examples=18 * 8 + 3):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, 8)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(8, 3))).astype(np.float32)
    params = {
        "a": rng.normal(size=(8, 12)).astype(np.float32) * 0.3,
        "b": rng.normal(size=(12, 3)).astype(np.float32) * 0.3,
        "c": np.zeros(3, np.float32),
        "scale": np.float32(1.0),
    }

    def loss(p, batch):
        error = p["scale"] * jnp.tanh(batch["x"] @ p["a"]) @ p["b"] + p["c"] - batch["y"]
        return jnp.mean(error**2), {"mae": jnp.mean(jnp.abs(error))}

    return loss, params, jaxche.Batches({"x": x, "y": y}, 8, seed=1)


def train(replicas, rounds=ROUNDS, tx=None, **knobs):
    loss, params, data = make_problem()
    trainer = jaxche.Trainer(loss, tx or optax.adam(0.05), replicas=replicas, **knobs)
    state = trainer.init(params)
    infos = []
    for counts in rounds:
        state, info = trainer.round(state, data, counts=counts)
        infos.append(info)
    return trainer, state, infos


@pytest.fixture(scope="module")
def alone():
    """What replicas of one device do, per setting."""
    known = {}

    def get(**knobs):
        key = repr(sorted(knobs.items()))
        if key not in known:
            known[key] = train(jax.devices()[:2], **knobs)
        return known[key]

    return get


def assert_like(one, other):
    (a, sa, ia), (b, sb, ib) = one, other
    for x, y in ((a.params(sa), b.params(sb)), (sa.opt_state, sb.opt_state)):
        jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=2e-5, atol=1e-6), x, y)
    for u, v in zip(ia, ib, strict=True):
        assert u.loss == pytest.approx(v.loss, rel=1e-5)
        assert u.metrics["mae"] == pytest.approx(v.metrics["mae"], rel=1e-5)
        assert u.drift == pytest.approx(v.drift, rel=1e-3, abs=1e-7)
        assert u.counts == v.counts


STRATEGIES = [FullShard(), ShardGradOp(), NoShard()]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("sizes", [(4, 4), (2, 4)], ids=str)
def test_islands_train_as_devices_do(devices, alone, strategy, sizes):
    first, second = sizes
    meshes = [strategy.mesh(devices[:first]), strategy.mesh(devices[first : first + second])]
    assert_like(train(meshes, strategy=strategy), alone())


SETTINGS = {
    "gradients": {"average": "gradients"},
    "averaged moments": {"opt_state": "average"},
    "new moments": {"opt_state": "reset"},
    "outer": {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True)},
    "scaled": {"scaling": jaxche.AdamScale()},
    "scaled gradients": {"scaling": jaxche.AdaScale(), "average": "gradients"},
    "clipped": {"tx": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.5, momentum=0.9))},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_right_on_shards(devices, setting):
    strategy, knobs = FullShard(), SETTINGS[setting]
    meshes = [strategy.mesh(devices[:2]), strategy.mesh(devices[2:4])]
    islands, plain = (train(r, ROUNDS[:3], strategy=s, **knobs) for r, s in ((meshes, strategy), (devices[:2], None)))
    assert_like(islands, plain)
    assert islands[2][-1].noise == pytest.approx(plain[2][-1].noise, rel=1e-3, nan_ok=True)
    assert islands[2][-1].lr_factor == pytest.approx(plain[2][-1].lr_factor, rel=1e-3)


def test_what_an_island_keeps_is_cut_and_the_view_is_no_copy(devices):
    strategy = FullShard()
    meshes = [strategy.mesh(devices[:4]), strategy.mesh(devices[4:])]
    _, state, _ = train(meshes, ROUNDS[:1], strategy=strategy)
    params, adam = state.locals[1].params, state.locals[1].opt_state[0]
    for tree in (params, adam.mu, adam.nu):
        assert tree["a"].sharding.spec == P(None, None, "shard")
        assert tree["a"].sharding.device_set == set(devices[4:])
        assert tree["c"].sharding.is_fully_replicated
    view = state.params["a"]
    assert view.shape == (2, 8, 12)
    assert view.sharding.spec == P("replica", None, "shard")
    pieces = {s.device: s.data.unsafe_buffer_pointer() for s in view.addressable_shards}
    for local in state.locals:
        for shard in local.params["a"].addressable_shards:
            assert shard.data.unsafe_buffer_pointer() == pieces[shard.device]


def test_the_merge_sends_pieces_between_islands_only(devices):
    strategy = FullShard()
    meshes = [strategy.mesh(devices[:4]), strategy.mesh(devices[4:])]
    trainer, state, _ = train(meshes, ROUNDS[:1], strategy=strategy)
    engine = trainer._engine
    carries = [r.begin(local, 0) for r, local in zip(engine._replicas, state.locals, strict=True)]
    arguments = engine._merge.arguments(state.locals, carries, np.zeros((2, 7), np.float32))
    text = engine._merge._program.lower(*arguments).compile().as_text()
    groups = re.findall(r"= (.*?) all-reduce\(.*?replica_groups=(\S+?),? ", text)
    across = [sizes for sizes, group in groups if group.startswith("{{0,4},{1,5},{2,6},{3,7}}")]
    sent = sum(np.prod([int(n) for n in dims.split(",") if n]) for dims in re.findall(r"f32\[([\d,]*)\]", str(across)))
    # The pieces of a and b (a quarter each), c and scale whole, and the table with its few scalars.
    pieces = (8 * 12 + 12 * 3) // 4 + 3 + 1
    assert pieces < sent < pieces + 2 * 4 * 10 + 10
    # Nothing the size of a leaf is gathered: only the table's rows are.
    gathered = [
        int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"f32\[([\d,]+)\]\S* all-gather\(", text)
    ]
    assert all(size <= 2 * 4 * 10 for size in gathered)


@pytest.mark.parametrize("strategy", [HybridShard(4), HybridShardGradOp(4)], ids=str)
def test_nodes_are_islands_by_default(strategy):
    nodes = train(None, ROUNDS[:2], strategy=strategy)
    assert nodes[0].world_size == 2
    assert_like(nodes, train(jax.devices()[:2], ROUNDS[:2]))


def test_a_process_is_an_island_by_default(devices):
    alone = train(None, ((3,), (2,)), strategy=FullShard())
    assert alone[0].world_size == 1
    assert_like(alone, train(devices[:1], ((3,), (2,))))
    assert len(alone[1].locals[0].params["a"].sharding.device_set) == 8


def test_parameters_made_on_the_island_are_never_whole(devices):
    strategy = FullShard()
    loss, params, data = make_problem()
    trainer = jaxche.Trainer(loss, optax.adam(0.05), strategy=strategy, replicas=[strategy.mesh(devices[:4])])

    def make():
        return {name: jax.random.normal(jax.random.key(0), np.shape(x)) for name, x in params.items()}

    state = trainer.init(make)
    assert state.locals[0].params["a"].sharding.spec == P(None, None, "shard")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), trainer.params(state), make())
    state, info = trainer.round(state, data)
    assert np.isfinite(info.loss)


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        (lambda d: {"strategy": HybridShard(3)}, "intra_node_size=3"),
        (lambda d: {"strategy": "full"}, "strategy='full'"),
        (lambda d: {"strategy": FullShard(), "replicas": [NoShard().mesh(d[:2]), NoShard().mesh(d[1:3])]}, "different"),
        (
            lambda d: {"strategy": FullShard(), "replicas": [jax.make_mesh((2,), ("x",), devices=d[:2])]},
            "strategy.mesh",
        ),
    ],
)
def test_islands_that_cannot_be_are_refused(devices, knobs, named):
    with pytest.raises(ValueError, match=named):
        jaxche.Trainer(make_problem()[0], optax.sgd(0.1), **knobs(devices))
