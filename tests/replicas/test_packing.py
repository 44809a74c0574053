"""Trees with their small arrays in one vector for each dtype: nothing is lost, and merges give the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxche
from jaxche.replicas import _packing
from jaxche.replicas._packing import Packed, Packing, packings

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64"])


def array(shape, dtype, seed=0):
    numbers = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, (1, *shape))
    return jnp.asarray(numbers, dtype)


def same_types(a, b):
    assert jax.tree.map(jax.typeof, a) == jax.tree.map(jax.typeof, b)


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=8))
@settings(max_examples=40, deadline=None)
def test_a_tree_is_unpacked_as_it_was(kinds):
    tree = {f"{i}": (array(shape, dtype, i), None) for i, (shape, dtype) in enumerate(kinds)}
    packing = Packing(tree)
    packed = packing.pack(tree)
    assert len(packed.vectors) == len({dtype for _, dtype in kinds})
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


def initial(dtype):
    rng = np.random.default_rng(0)
    return {f"w{i:02}": jnp.asarray(rng.normal(size=(i % 4 + 1, 1)), dtype) for i in range(16)}


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
    for fewest in (_packing._FEWEST, 10**6):
        monkeypatch.setattr(_packing, "_FEWEST", fewest)
        tx = optax.adam(optax.linear_schedule(0.1, 0.01, 20))
        trainer = jaxche.Trainer(loss, tx, replicas=devices[:2], **arguments)
        state = trainer.init(initial(dtype), model_state={f"m{i}": jnp.zeros(2) for i in range(17)})
        for _ in range(2):
            state, _ = trainer.round(state, data, counts=(1, 3))
        assert set(trainer._engine._merge._packings) == (names if fewest < 10**6 else set())
        found.append([[local[:] for local in state.local_states], trainer.params(state)])
    wide = jax.tree.map(lambda x: np.asarray(x, "f") if x.dtype == jnp.bfloat16 else x, found)
    # Compilers join the arithmetic of other programs in another way.
    close(*wide, rtol=1e-5 if dtype == "float32" else 1e-2)
