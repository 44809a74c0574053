"""Replicas that are islands: whatever the strategy and the size, they train as replicas of one device do."""

import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxche
from jaxche.replicas import Carry, Constants, LocalState
from jaxche.replicas import _placement as placement
from jaxche.replicas import _replica_mesh as replica_mesh
from jaxche.replicas._placement import (
    TREES,
    DevicePlacement,
    ShardedPlacement,
    check_local_devices,
    make_placements,
    merges_on_host,
)
from jaxche.replicas._table import HOST_COLUMNS
from jaxche.sharding import (
    FullShard,
    HybridShard,
    HybridShardGradOp,
    NoShard,
    RemoteDevice,
    ShardGradOp,
    collectives,
    set_devices,
)
from jaxche.sharding import _devices as sharding_devices

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


@pytest.fixture(scope="module")
def train(train_rounds):
    def run(replicas, rounds=ROUNDS, **knobs):
        return train_rounds(*make_problem(), replicas, rounds, **knobs)

    return run


@pytest.fixture(scope="module")
def alone(train, devices):
    """What replicas of one device do."""
    return train(devices[:2])


@pytest.fixture
def as_devices(trained_alike, close):
    """Islands trained as devices did, and their optimizers are where those of the devices are."""

    def check(islands, alone):
        trained_alike(islands, alone)
        close(islands[1].opt_state, alone[1].opt_state, rtol=2e-5)

    return check


STRATEGIES = [FullShard(), ShardGradOp(), NoShard()]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("sizes", [(4, 4), (2, 4)], ids=str)
def test_islands_train_as_devices_do(devices, train, as_devices, alone, strategy, sizes):
    first, second = sizes
    meshes = [strategy.mesh(devices[:first]), strategy.mesh(devices[first : first + second])]
    as_devices(train(meshes, strategy=strategy), alone)


SIZES = [(1, 1), (2, 1), (3, 1), (3, 2), (4, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_islands_that_meet_on_one_device_train_as_devices_do(devices, train, as_devices, close, alone, sizes):
    strategy, (first, second) = FullShard(), sizes
    meshes = [strategy.mesh(devices[:first]), strategy.mesh(devices[first : first + second])]
    islands = train(meshes, strategy=strategy)
    as_devices(islands, alone)
    close(islands[1].params, alone[1].params, rtol=2e-5)


SETTINGS = {
    "gradients": {"average": "gradients"},
    "averaged moments": {"opt_state": "average"},
    "new moments": {"opt_state": "reset"},
    "outer": {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True)},
    "scaled": {"scaling": jaxche.AdamScale()},
    "scaled gradients": {"scaling": jaxche.AdaScale(), "average": "gradients"},
    "clipped": {"tx": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.5, momentum=0.9))},
}


@pytest.fixture(scope="module")
def plain(train, devices):
    """What replicas of one device do under a setting; every size and strategy is compared with the same."""
    return functools.cache(lambda setting: train(devices[:2], ROUNDS[:3], **SETTINGS[setting]))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_islands_that_meet_on_one_device_average_gradients(devices, train, as_devices, plain, sizes):
    strategy, (first, second) = ShardGradOp(), sizes
    meshes = [strategy.mesh(devices[:first]), strategy.mesh(devices[first : first + second])]
    as_devices(train(meshes, ROUNDS[:3], strategy=strategy, **SETTINGS["gradients"]), plain("gradients"))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_right_on_shards(devices, setting, train, as_devices, plain, sizes):
    strategy, alone = FullShard(), plain(setting)
    meshes = [strategy.mesh(devices[: sizes[0]]), strategy.mesh(devices[sizes[0] : sum(sizes)])]
    islands = train(meshes, ROUNDS[:3], strategy=strategy, **SETTINGS[setting])
    as_devices(islands, alone)
    assert islands[2][-1].noise == pytest.approx(alone[2][-1].noise, rel=1e-3, nan_ok=True)
    assert islands[2][-1].lr_factor == pytest.approx(alone[2][-1].lr_factor, rel=1e-3)


@pytest.fixture
def all_cut(monkeypatch):
    """Arrays of any size are cut for a sum over islands whose devices hold them whole."""
    monkeypatch.setattr(replica_mesh, "_CUT_BYTES", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("all_cut")
@pytest.mark.parametrize(
    ("setting", "sizes"),
    [
        *((setting, (4, 4)) for setting in SETTINGS),
        *((setting, sizes) for setting in ("gradients", "averaged moments") for sizes in ((2, 4), (3, 3))),
    ],
    ids=str,
)
def test_every_setting_is_right_where_whole_copies_are_cut_for_the_sum(
    devices, setting, train, as_devices, plain, sizes
):
    strategy, alone = NoShard(), plain(setting)
    meshes = [strategy.mesh(devices[: sizes[0]]), strategy.mesh(devices[sizes[0] : sum(sizes)])]
    islands = train(meshes, ROUNDS[:3], **SETTINGS[setting])
    as_devices(islands, alone)
    assert islands[2][-1].noise == pytest.approx(alone[2][-1].noise, rel=1e-3, nan_ok=True)
    assert islands[2][-1].drift == pytest.approx(alone[2][-1].drift, rel=1e-3)


@pytest.mark.usefixtures("all_cut")
@pytest.mark.parametrize("wire", ["bfloat16", "int4"])
def test_codes_of_whole_copies_are_cut_too(devices, train, alone, same, wire):
    strategy = NoShard()
    meshes = [strategy.mesh(devices[:4]), strategy.mesh(devices[4:])]
    (_, state, _), (_, exact, _) = train(meshes, wire=wire), alone
    first, second = (local.params for local in state.local_states)
    same(first, second)
    for one in jax.tree.leaves(first):
        assert one.sharding.is_fully_replicated
        same([shard.data for shard in one.addressable_shards], [one] * 4)
    near = {"bfloat16": 1e-3, "int4": 0.05}[wire]
    chex.assert_trees_all_close(first, exact.local_states[0].params, atol=near)


@pytest.mark.parametrize("wire", ["float32", "int4"])
def test_an_island_with_whole_copies_sends_the_bytes_of_one_device(devices, wire):
    data, params = [np.ones((4, 512), np.float32)] * 8, jnp.ones((512, 128))

    def sent(replicas):
        trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w) ** 2), optax.adam(0.1), replicas=replicas, wire=wire)
        trainer.round(trainer.init(params), data, counts=(1, 1))
        return trainer._engine.sent_bytes

    islands = [NoShard().mesh(devices[:4]), NoShard().mesh(devices[4:])]
    assert sent(islands) == pytest.approx(sent(devices[:2]), rel=0.05)


def test_what_an_island_keeps_is_cut_and_the_view_is_no_copy(devices, train):
    strategy = FullShard()
    meshes = [strategy.mesh(devices[:4]), strategy.mesh(devices[4:])]
    _, state, _ = train(meshes, ROUNDS[:1], strategy=strategy)
    params, adam = state.local_states[1].params, state.local_states[1].opt_state[0]
    for tree in (params, adam.mu, adam.nu):
        assert tree["a"].sharding.spec == P(None, None, "shard")
        assert tree["a"].sharding.device_set == set(devices[4:])
        assert tree["c"].sharding.is_fully_replicated
    view = state.params["a"]
    assert view.shape == (2, 8, 12)
    assert view.sharding.spec == P("replica", None, "shard")
    pieces = {s.device: s.data.unsafe_buffer_pointer() for s in view.addressable_shards}
    for local in state.local_states:
        for shard in local.params["a"].addressable_shards:
            assert shard.data.unsafe_buffer_pointer() == pieces[shard.device]


@pytest.mark.usefixtures("all_cut")
@pytest.mark.parametrize("strategy", [FullShard(), NoShard()], ids=str)
def test_the_merge_sends_pieces_between_islands_only(devices, train, merge_arguments, strategy):
    meshes = [strategy.mesh(devices[:4]), strategy.mesh(devices[4:])]
    trainer, state, _ = train(meshes, ROUNDS[:1], strategy=strategy, opt_state="local")
    text = trainer._engine._merge._program.lower(*merge_arguments(trainer, state)).compile().as_text()
    found = collectives(text, 8)
    within, across = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    assert {one.groups for one in found} == {within, across}
    # Between islands the pieces of a and b (a quarter each), c and scale whole, and the table with its few scalars.
    pieces, columns = (8 * 12 + 12 * 3) // 4 + 3 + 1, len(HOST_COLUMNS) + 4
    assert {one.kind for one in found if one.groups == across} == {"all-reduce"}
    assert pieces < sum(one.nbytes for one in found if one.groups == across) // 4 < pieces + 2 * 4 * columns + 10
    # Inside them a few sums of scalars, and gathers of the table, one row a device, and of what each device has whole.
    inside = [one for one in found if one.groups == within]
    whole = [4 * 8 * 12, 4 * 12 * 3] if isinstance(strategy, NoShard) else []
    gathered = [one.nbytes for one in inside if one.kind == "all-gather"]
    assert sorted(gathered) == sorted([4 * 2 * 4 * columns, *whole])
    assert sum(one.nbytes for one in inside if one.kind != "all-gather") < 4 * 10


@pytest.mark.slow
def test_nodes_of_one_device_are_islands_too(devices, train, as_devices):
    rounds = ((1,) * 8, (2, 0, 1, 1, 0, 1, 2, 1))
    as_devices(train(None, rounds, strategy=HybridShard(1)), train(devices, rounds))


def test_one_island_of_one_device_shows_its_state(devices, train):
    strategy = FullShard()
    _, state, _ = train([strategy.mesh(devices[:1])], ((2,),), strategy=strategy)
    assert {name: x.shape for name, x in state.params.items()} == {
        "a": (1, 8, 12),
        "b": (1, 12, 3),
        "c": (1, 3),
        "scale": (1,),
    }


@pytest.mark.parametrize("strategy", [HybridShard(4), HybridShardGradOp(4)], ids=str)
def test_nodes_are_islands_by_default(strategy, devices, train, as_devices):
    nodes = train(None, ROUNDS[:2], strategy=strategy)
    assert nodes[0].world_size == 2
    as_devices(nodes, train(devices[:2], ROUNDS[:2]))


def test_a_process_is_an_island_by_default(devices, train, as_devices):
    island = train(None, ((3,), (2,)), strategy=FullShard())
    assert island[0].world_size == 1
    as_devices(island, train(devices[:1], ((3,), (2,))))
    assert len(island[1].local_states[0].params["a"].sharding.device_set) == 8


def test_the_devices_of_a_process_are_one_replica_by_name(devices, train, as_devices):
    island = train("process", ((3,), (2,)))
    assert island[0].world_size == 1
    assert len(island[1].local_states[0].params["a"].sharding.device_set) == 8
    as_devices(island, train(devices[:1], ((3,), (2,))))


def test_parameters_made_on_the_island_are_never_whole(devices):
    strategy = FullShard()
    loss, params, data = make_problem()
    trainer = jaxche.Trainer(loss, optax.adam(0.05), strategy=strategy, replicas=[strategy.mesh(devices[:4])])

    def make():
        return {name: jax.random.normal(jax.random.key(0), np.shape(x)) for name, x in params.items()}

    state = trainer.init(make)
    assert state.local_states[0].params["a"].sharding.spec == P(None, None, "shard")
    chex.assert_trees_all_close(trainer.params(state), make(), rtol=1e-6)
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


def test_what_gradients_are_divided_by_is_cut_like_them(problem, devices):
    strategy = jaxche.FullShard(min_size=1)
    trainer = jaxche.Trainer(
        problem.loss,
        optax.adam(0.1),
        replicas=[strategy.mesh(devices[:2])],
        strategy=strategy,
        scaling=jaxche.AdamScale(),
    )
    state = trainer.init(problem.params)
    trainer.round(state, problem.data)
    seen = trainer._engine._replicas[0].begin(state.local_states[0], 0)[0].preconditioner
    for factor, params in zip(
        jax.tree.leaves(seen.factors), jax.tree.leaves(state.local_states[0].params), strict=True
    ):
        assert factor.sharding.shard_shape(factor.shape) == params.sharding.shard_shape(params.shape) != params.shape


def gpu(kind, process=0):
    return SimpleNamespace(device_kind=kind, process_index=process)


def test_replicas_are_the_given_devices_or_all(devices):
    assert [p.devices.item() for p in make_placements(None, NoShard())] == list(jax.devices())
    assert [p.devices.item() for p in make_placements(devices[2:4], NoShard())] == devices[2:4]
    check_local_devices([gpu("A"), gpu("B", process=1), gpu("A")])


@pytest.mark.parametrize(
    ("sizes", "strategy", "kind"),
    [
        ((3, 2), NoShard(), ShardedPlacement),
        ((3, 1), NoShard(), ShardedPlacement),  # all of one kind
        ((1, 1), NoShard(), DevicePlacement),
        ((1, 1), FullShard(), ShardedPlacement),
    ],
)
def test_a_replica_has_the_devices_of_its_process(devices, monkeypatch, sizes, strategy, kind):
    found = {process: devices[4 * process :][:size] for process, size in enumerate(sizes)}
    monkeypatch.setattr(placement, "devices_by_process", lambda: found)
    made = make_placements("process", strategy)
    assert [list(one.devices.flat) for one in made] == list(found.values())
    assert {type(one) for one in made} == {kind}


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda d: make_placements("node", NoShard()), "replicas='node' is neither 'process' nor a list"),
        (lambda d: make_placements([d[0], d[0]], NoShard()), "different devices"),
        (lambda d: check_local_devices([gpu("A", process=1)]), "no device of this process"),
        (lambda d: check_local_devices([gpu("B"), gpu("A"), gpu("B")]), r"kinds \(A, B\).*per kind.*launch -n 3"),
    ],
)
def test_devices_that_cannot_be_replicas_are_named(devices, call, named):
    with pytest.raises(ValueError, match=named):
        call(devices)


def test_accelerators_that_no_program_can_reach_together_meet_on_the_host(devices, monkeypatch):
    same = make_placements(devices[:2], NoShard())
    assert [merges_on_host(backend, same) for backend in ("auto", "device", "host")] == [False, False, True]
    monkeypatch.setattr(sharding_devices, "_devices_of_run", functools.cache(dict))
    # Of the same kind, as two processes on one GPU have them.
    set_devices([devices[0], RemoteDevice(1, "cpu", devices[0].device_kind, 0)])
    placements = make_placements(None, NoShard())
    assert len(placements) == 2
    assert merges_on_host("auto", placements)
    assert merges_on_host("host", placements)
    with pytest.raises(ValueError, match=r"backend='device' runs one program.*write backend='host'"):
        merges_on_host("device", placements)
    strategy = FullShard()
    with pytest.raises(ValueError, match=r"no program can span the accelerators.*islands whose devices are of one"):
        make_placements([strategy.mesh(jaxche.devices())], strategy)
    assert not merges_on_host("device", placements[1:])  # a single replica does not merge
    assert not merges_on_host("device", same)


def test_accelerators_of_an_elastic_run_meet_on_the_host(devices):
    gpus = [RemoteDevice(process, "gpu", "NVIDIA L4", process) for process in range(2)]
    on_gpus = [SimpleNamespace(devices=np.array([[gpu]], dtype=object)) for gpu in gpus]
    on_cpus = make_placements(devices[:2], NoShard())
    assert not merges_on_host("auto", on_gpus)
    assert merges_on_host("auto", on_gpus, elastic=True)
    with pytest.raises(ValueError, match=r"collectives do not return after a process.*write backend='host'"):
        merges_on_host("device", on_gpus, elastic=True)
    assert not merges_on_host("auto", on_cpus, elastic=True)
    assert not merges_on_host("device", on_gpus[:1], elastic=True)


def test_leaving_the_accelerators_out_is_told(devices, monkeypatch, caplog):
    monkeypatch.setattr(sharding_devices, "_devices_of_run", functools.cache(dict))
    set_devices([RemoteDevice(0, "gpu", "NVIDIA L4", 0), devices[0]])
    make_placements(devices[:2], NoShard())
    assert "replicas=jaxche.devices()" in caplog.text


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_arrays_of_a_mesh_with_explicit_axes_start_a_run(devices, spec):
    loss, params, data = make_problem()

    def loss_fn(params, batch, model_state):
        return loss(params, batch)[0], ({}, model_state)

    on_mesh = jax.sharding.NamedSharding(jax.make_mesh((2,), ("data",), devices=devices[:2]), spec)
    params = {name: x for name, x in params.items() if name != "scale"} | {"scale": np.ones(1, np.float32)}
    tx, model_state = optax.adam(1e-2), {"key": jax.random.split(jax.random.key(0), 2), "mean": np.ones(2, np.float32)}
    placed = {name: jax.device_put(x, on_mesh if len(x) % 2 == 0 else devices[0]) for name, x in params.items()}
    trainer = jaxche.Trainer(loss_fn, tx, replicas=devices[:2], policy="sync", rows="equal")
    given = [
        trainer.init(params, model_state, tx.init(params)),
        trainer.init(placed, jax.device_put(model_state, on_mesh), jax.tree.map(jnp.asarray, tx.init(placed))),
    ]
    ends = [trainer.fit(state, data, max_steps=4, progress=False)[0] for state in given]
    chex.assert_trees_all_equal(*(trainer.params(state) for state in ends))
    chex.assert_trees_all_equal(*(trainer.model_state(state)["mean"] for state in ends))


def test_frozen_arrays_of_a_mesh_with_explicit_axes_are_those_of_their_values(devices):
    _, params, data = make_problem()
    on_mesh = jax.sharding.NamedSharding(jax.make_mesh((2,), ("data",), devices=devices[:2]), P())
    offset, key = np.float32([0.5]), jax.random.key(0)

    def loss_fn(params, batch, offset, key):
        noise = jax.random.normal(key)
        return sum(jnp.sum((x - offset - noise) ** 2) for x in params.values()) + 0 * jnp.sum(batch["x"])

    def end(**frozen):
        loss = jax.tree_util.Partial(loss_fn, **frozen)
        trainer = jaxche.Trainer(loss, optax.adam(1e-2), replicas=devices[:2], policy="sync", rows="equal")
        return trainer.params(trainer.fit(trainer.init(params), data, max_steps=4, progress=False)[0])

    placed = end(offset=jax.device_put(offset, on_mesh), key=jax.device_put(key, on_mesh))
    chex.assert_trees_all_equal(placed, end(offset=offset, key=key))


def test_every_tree_of_a_replica_says_how_it_lies_on_devices():
    fields = {*LocalState._fields, *Constants._fields, *Carry._fields}
    assert fields == TREES.keys(), "TREES in replicas/_placement.py has a line for each field of these classes"


def test_a_merge_gets_every_field_of_a_carry_or_only_steps_need_it():
    carry = Carry(*Carry._fields)
    averaged, of_steps = {"params", "opt_state", "grads", "model_state"}, {"index", "noise"}
    assert {*carry.measured} | averaged | of_steps == {*Carry._fields}, (
        "add the new field to Carry.measured, or, if no merge reads it, to this test"
    )


def test_islands_over_processes_have_one_shape(devices, monkeypatch):
    strategy = NoShard()
    meshes = [strategy.mesh(devices[:4]), strategy.mesh(devices[4:6])]
    make_placements(meshes, strategy)
    monkeypatch.setattr(placement, "spans_processes", lambda one: one.devices.size == 4)
    with pytest.raises(ValueError, match=r"islands of \[2, 4\] devices, and one of them spans .* have the same shape"):
        make_placements(meshes, strategy)
