"""Trees with their small arrays in one vector for each dtype: nothing is lost, and merges give the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxche
from jaxche.replicas import LocalState, _packing
from jaxche.replicas._opt_state import counts_of, is_count, with_counts
from jaxche.replicas._packing import Deferred, Packed, Packing, packings
from jaxche.replicas._placement import DevicePlacement, add_replica_axis
from jaxche.replicas._programs import FrozenArrays, LocalPrograms
from jaxche.replicas._scaling import MergeScale
from jaxche.replicas._table import Columns

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64"])


def array(shape, dtype, seed=0):
    numbers = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, (1, *shape))
    return jnp.asarray(numbers, dtype)


def same_types(a, b):
    assert jax.tree.map(jax.typeof, a) == jax.tree.map(jax.typeof, b)


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=8))
@settings(max_examples=40)
def test_a_tree_is_unpacked_as_it_was(kinds):
    tree = {f"{i}": (array(shape, dtype, i), None) for i, (shape, dtype) in enumerate(kinds)}
    packing = Packing(tree)
    packed = packing.pack(tree)
    counts = sum(dtype == "int32" and np.prod(shape) == 1 for shape, dtype in kinds)
    assert len(packed.others) == counts
    assert len(packed.vectors) == len({x.dtype for x, _ in tree.values() if not is_count(x)})
    jax.tree.map(np.testing.assert_array_equal, packing.unpack(packed), tree)
    again = packing.unpack_now(packed)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, again, tree)
    same_types(again, tree)


def test_large_arrays_keys_and_weak_types_stay_as_they_are(same):
    large = jnp.ones((1, 128, 129))
    tree = [large, jax.random.key(0)[None], jnp.broadcast_to(jnp.asarray(1.0), (1,)), jnp.ones((1, 128, 128))]
    assert tree[2].weak_type
    packing = Packing(tree)
    packed = packing.pack(tree)
    assert [x.shape for x in packed.vectors] == [(1, 128 * 128)]
    assert all(a is b for a, b in zip(packed.others, tree[:3], strict=True))
    again = packing.unpack_now(packed)
    assert jax.random.key_data(again[1]).tolist() == jax.random.key_data(tree[1]).tolist()
    same([again[0], *again[2:]], [tree[0], *tree[2:]])
    same_types(again, tree)


def test_rows_of_all_replicas_are_unpacked_as_one_is(same):
    one = [array((2,), "float32", i) for i in range(3)]
    packing = Packing(one)
    vector = jnp.concatenate([packing.pack(one).vectors[0], 1 + packing.pack(one).vectors[0]])
    for unpack in (packing.unpack, packing.unpack_now):
        same(unpack(Packed([vector], [])), [jnp.concatenate([x, x + 1]) for x in one])


def test_trees_of_few_arrays_are_not_packed():
    few, many = ([jnp.ones((1, 2))] * n for n in (15, 16))
    assert list(packings({"few": few, "many": many, "large": [jnp.ones((1, 1 << 15))] * 20})) == ["many"]


def test_larger_arrays_are_joined_on_their_way_from_accelerators_to_the_host(same):
    tree = {f"w{i}": array((1 << 15,), "float32", i) for i in range(20)}
    (packing,) = packings({"params": tree}, _packing.SMALL_BYTES_TO_HOST).values()
    packed = packing.pack(tree)
    assert [x.shape for x in packed.vectors] == [(1, 20 << 15)]
    assert not packed.others
    same(packing.unpack_now(packed), tree)
    assert not packings({"params": {name: jnp.ones((1, (1 << 19) + 1)) for name in tree}}, 1 << 21)


def test_a_state_that_was_packed_for_other_merges_is_packed_again(same):
    tree = {f"w{i}": array((1 << 15,) if i % 2 else (2,), "float32", i) for i in range(40)}
    small, large = (Packing(tree, size) for size in (_packing.SMALL_BYTES, _packing.SMALL_BYTES_TO_HOST))
    local = LocalState(Deferred.of(small, small.pack(tree)), (), (), ())
    assert local.packed({"params": small})["params"] is local[0].packed
    same(local.packed({"params": large})["params"], large.pack(tree))


def test_counts_of_a_packed_state_are_those_of_the_state(same):
    tx = optax.chain(optax.adam(optax.linear_schedule(0.1, 0.0, 5)), optax.ema(0.9))
    state = jax.tree.map(lambda x: x[None], tx.init({f"w{i}": jnp.ones(2) for i in range(20)}))
    packing = Packing(state)
    packed = packing.pack(state)
    assert len(counts_of(packed)) == len(counts_of(state)) == 3
    new = [jnp.full((1,), i, jnp.int32) for i in (7, 8, 9)]
    same(packing.unpack_now(with_counts(packed, new)), with_counts(state, new))


def test_a_deferred_tree_of_a_local_state_is_made_once_and_is_no_leaf(same):
    tree, made = [jnp.full((1, 2), i) for i in range(3)], []
    deferred = Deferred(lambda: made.append(1) or tree)
    local = LocalState(tree, deferred, None, ())
    assert local.packed({}) == {}
    assert made == []
    assert jax.tree.structure(local) == jax.tree.structure(LocalState(tree, tree, None, ()))
    same(jax.tree.leaves(local), [*tree, *tree])
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(local)][3] == ".opt_state[0]"
    assert local._asdict()["opt_state"] is local._replace(model_state={}).opt_state is tree
    assert made == [1]
    packing = Packing(tree)
    packed = packing.pack(tree)
    local = LocalState(Deferred.of(packing, packed), tree, None, ())
    assert local.packed({"params": packing})["params"] is packed
    same(local.params, tree)


@pytest.fixture
def packs_few(monkeypatch):
    """Trees of as few arrays as :func:`initial` has are packed."""
    monkeypatch.setattr(_packing, "_FEWEST", 4)


@pytest.mark.usefixtures("packs_few")
@pytest.mark.parametrize("arguments", [{}, {"policy": "sync"}], ids=["cadence", "sync"])
def test_arrays_that_no_round_reads_are_not_made(devices, arguments):
    data = [{"x": np.ones((4, 1), "f"), "y": np.ones((4, 1), "f")}] * 8
    trainer = jaxche.Trainer(loss, optax.adam(0.1), replicas=devices[:2], **arguments)
    state = trainer.init(initial("float32"), model_state={"m": jnp.zeros(2)})
    compiled = []
    for _ in range(3):
        before, (state, _) = state, trainer.round(state, data, counts=(1, 1))
        programs = trainer._engine._replicas[0]._programs
        compiled.append([one._cache_size() for one in (programs._begin_program, programs._finish_program)])
    assert compiled[1:] == compiled[:-1]
    deferred = [tree for local in before.local_states for tree in local if isinstance(tree, Deferred)]
    assert len(deferred) == (2 if arguments else 4)
    assert not any("tree" in vars(one) for one in deferred)
    assert state.opt_state[0].mu["w0"].shape == (2, 1, 1)


@pytest.mark.usefixtures("packs_few")
def test_a_packed_number_that_is_not_finite_is_found(devices):
    data = [{"x": np.ones((4, 1), "f"), "y": np.ones((4, 1), "f")}] * 4
    trainer = jaxche.Trainer(
        lambda params, batch: loss(params, batch, {})[0] + jnp.sqrt(params["w3"]).sum(),  # no gradient at 0
        optax.sgd(0.1),
        replicas=devices[:2],
    )
    state = trainer.init(initial("float32") | {"w3": jnp.zeros(1)})
    with pytest.raises(jaxche.NonFiniteLossError, match="a gradient, a parameter or a state of rank 0"):
        trainer.round(state, data, counts=(1, 1))


def initial(dtype):
    rng = np.random.default_rng(0)
    return {f"w{i}": jnp.asarray(rng.normal(size=(i % 3 + 1, 1)), dtype) for i in range(5)}


def loss(params, batch, model_state):
    x = batch["x"] + sum(jnp.sum(w.astype(jnp.float32) * (1 + i)) for i, w in enumerate(params.values())) / 100
    means = jax.tree.map(lambda old: 0.9 * old + 0.1 * x.mean(), model_state)
    norm = sum(jnp.sum(w.astype(jnp.float32) ** 2) for w in params.values())
    return jnp.mean((x - batch["y"]) ** 2) + norm, ({}, means)


# The arguments of the trainer, and the trees that are packed.
CASES = {
    "averaged": ({}, {"params", "opt_state"}),
    "local": ({"opt_state": "local"}, {"params"}),
    "host": ({"backend": "host"}, {"params", "opt_state"}),
    "gradients": ({"average": "gradients"}, {"grads"}),
    "scaled gradients": ({"average": "gradients", "scaling": jaxche.AdamScale()}, {"grads"}),
}


@pytest.mark.usefixtures("packs_few")
@pytest.mark.parametrize("arguments", [{"wire": "int8"}, {"outer": optax.sgd(0.7)}, {"opt_state": "reset"}])
def test_rules_that_need_whole_arrays_get_them(devices, arguments):
    data = [{"x": np.ones((4, 1), "f"), "y": np.ones((4, 1), "f")}] * 4
    trainer = jaxche.Trainer(loss, optax.adam(0.1), replicas=devices[:2], **arguments)
    state = trainer.init(initial("float32"), model_state={"m": jnp.zeros(2)})
    trainer.round(state, data, counts=(1, 1))
    assert not trainer._engine._merge._packings


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_merges_give_the_same_numbers(devices, monkeypatch, close, case):
    rng = np.random.default_rng(1)
    data = [{"x": rng.normal(size=(4, 1)).astype("f"), "y": rng.normal(size=(4, 1)).astype("f")} for _ in range(12)]
    dtype, found = "bfloat16" if case in ("averaged", "gradients") else "float32", []
    arguments, names = CASES[case]
    for fewest in (4, 10**6):
        monkeypatch.setattr(_packing, "_FEWEST", fewest)
        tx = optax.adam(optax.linear_schedule(0.1, 0.01, 20))
        trainer = jaxche.Trainer(loss, tx, replicas=devices[:2], **arguments)
        state = trainer.init(initial(dtype), model_state={f"m{i}": jnp.zeros(2) for i in range(3)})
        for _ in range(2):
            state, _ = trainer.round(state, data, counts=(1, 3))
        assert set(trainer._engine._merge._packings) == (names if fewest < 10**6 else set())
        found.append([[local._asdict() for local in state.local_states], trainer.params(state)])
    wide = jax.tree.map(lambda x: np.asarray(x, "f") if x.dtype == jnp.bfloat16 else x, found)
    # Compilers join the arithmetic of other programs in another way.
    close(*wide, rtol=1e-5 if dtype == "float32" else 1e-2)


def test_the_end_of_a_round_copies_no_large_array_of_a_packed_tree(devices):
    params = {f"p{i}": jnp.zeros(2) for i in range(20)} | {"w": jnp.ones((128, 129))}
    tx = optax.adam(0.1)
    local = jax.device_put(add_replica_axis(LocalState(params, tx.init(params), None, None)), devices[1])
    packed = packings({"params": local.params, "opt_state": local.opt_state})
    loss = FrozenArrays(lambda params, batch: jnp.sum(params["w"]) * jnp.mean(batch))
    programs = LocalPrograms(DevicePlacement(devices[1]), loss, tx, "parameters", 0, Columns(), None, False, packed)
    _, carry = programs.begin(local, np.uint32(0), MergeScale())
    ended = programs.finish(local, carry)
    assert [x.shape for x in ended.params.vectors] == [(1, 40)]
    assert ended.params.others[0] is carry.params["w"]
    moments = carry.opt_state[0]
    assert {id(x) for x in ended.opt_state.others} == {id(x) for x in (moments.count, moments.mu["w"], moments.nu["w"])}
    assert float(ended.not_finite[0, 0]) == 0
