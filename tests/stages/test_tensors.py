"""The tensor format: what goes in comes out, and what was damaged is refused and does nothing else."""

import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxche.stages import DamagedObjectError
from jaxche.stages import _tensors as tensors

DTYPES = ["bool", "int8", "uint16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]
DTYPES += ["float8_e4m3fn", "int4"]


def joined(tree):
    return b"".join(bytes(part) for part in tensors.encode(tree))


def decoded(data, like, key="key"):
    """The tree in an object, as a reader sees it that reads no more than it needs."""
    return tensors.decode(data[: tensors.read_limit(like)], len(data), like, key)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8)
    if dtype == np.bool_:
        raw = raw % 2
    elif dtype.name == "int4":
        raw = raw.astype(ml_dtypes.int4).view(np.uint8)
    return raw.view(dtype).reshape(shape)


trees = st.recursive(
    arrays() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, derandomize=True)
@given(trees)
def test_what_goes_in_comes_out(tree):
    data = joined(tree)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    same(decoded(data, like), tree)


def test_arrays_of_jax_views_and_foreign_byte_orders():
    tree = (jnp.arange(6, dtype="bfloat16").reshape(2, 3), np.arange(6).reshape(2, 3).T, np.arange(3, dtype=">f4"), 7)
    found = decoded(joined(tree), tree)
    same(found[:2], tree[:2])
    np.testing.assert_array_equal(found[2], [0, 1, 2])
    assert int(found[3]) == 7


def test_leaves_are_views_of_the_object_and_of_what_was_given():
    array = np.arange(1000.0)
    assert np.shares_memory(tensors.encode(array)[1], array)
    data = np.frombuffer(joined(array), np.uint8)
    found = decoded(data, array)
    assert np.shares_memory(found, data)
    assert (found.ctypes.data - data.ctypes.data) % 64 == 0


@pytest.mark.parametrize("leaf", [np.array(["text"]), np.array([object()]), jax.random.key(0)])
def test_what_cannot_be_stored_is_refused_by_its_name(leaf):
    with pytest.raises(ValueError, match=r"leaf \['x'\] has dtype .*cannot be stored"):
        tensors.encode({"x": leaf})


def test_another_tree_is_refused_by_its_first_differing_leaf():
    data = joined({"a": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.float32)})
    for other, message in [
        (
            {"a": np.zeros(3, np.float32), "b": np.zeros((2, 3), np.float32)},
            r"\['b'\]: float32\[2, 2\] where .*\[2, 3\]",
        ),
        ({"a": np.zeros(3, np.int32), "b": np.zeros((2, 2), np.float32)}, r"\['a'\]: float32\[3\] where .*int32\[3\]"),
        ({"a": np.zeros(3, np.float32)}, r"\['b'\]: float32\[2, 2\] where no further leaf"),
        ({"a": np.zeros(3, np.float32), "c": np.zeros((2, 2), np.float32)}, r"\['b'\].* where \['c'\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            decoded(data, other)


TREE = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "n": np.int32(5), "m": np.array([True, False])}
DATA = joined(TREE)


@settings(max_examples=500, derandomize=True)
@given(st.data())
def test_a_damaged_object_is_refused_and_an_equal_one_is_not(data):
    damaged = bytearray(DATA)
    for _ in range(data.draw(st.integers(0, 3))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] ^= data.draw(st.integers(1, 255))
    keep = data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))
    damaged = bytes(damaged[:keep]) + data.draw(st.binary(max_size=2))
    if damaged == DATA:
        same(decoded(damaged, TREE, "the key"), TREE)
    else:
        with pytest.raises(DamagedObjectError, match="the key"):
            decoded(damaged, TREE, "the key")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


def forged(header, payload, announce=None):
    """An object with valid checksums and this header, whatever the header says."""
    check = xxhash.xxh3_64_intdigest(payload)
    prefix = struct.pack("<8sIIQQ", b"jaxchetr", 2, len(header), announce or len(payload), check)
    return prefix + struct.pack("<Q", xxhash.xxh3_64_intdigest(prefix + header)) + header + payload


def test_the_form_is_the_one_described():
    leaves = [["['m']", "bool", [2]], ["['n']", "int32", []], ["['w']", "float32", [3, 4]]]
    header = json.dumps(leaves, separators=(",", ":")).encode()
    payload = b"".join(TREE[name].tobytes().ljust(64, b"\0") for name in "mnw")
    assert forged(header.ljust(128 - 40), payload) == DATA


@settings(max_examples=200, derandomize=True)
@given(json_values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40), st.binary(max_size=200))
def test_a_hostile_header_is_only_ever_refused(header, payload):
    with pytest.raises(ValueError, match="the key"):
        decoded(forged(header, payload), TREE, "the key")


@pytest.mark.parametrize(
    "header", [b"[" * 1_000_000, b"9" * 10_000, b'[["a","O",[1]]]', b'[["a","float32",[1e999]]]', b"\xff\xfe", b""]
)
def test_chosen_hostile_headers(header):
    with pytest.raises(ValueError, match="the key"):
        decoded(forged(header, b""), TREE, "the key")


def test_a_size_that_is_only_announced_allocates_nothing():
    data = forged(b"[]", b"", announce=2**62)
    with pytest.raises(DamagedObjectError, match="announces"):
        decoded(data, TREE)
    with pytest.raises(ValueError, match="key holds no further leaf"):
        tensors.decode(data, 2**62 + 42, TREE, "key")
    prefix = struct.pack("<8sIIQQ", b"jaxchetr", 2, 2**32 - 1, 0, 0) + bytes(8)
    with pytest.raises(DamagedObjectError):
        decoded(prefix, TREE)
    with pytest.raises(DamagedObjectError):
        tensors.decode(prefix, len(prefix) + 2**32 - 1, TREE, "key")


def test_the_right_header_over_other_bytes_is_refused():
    head = bytes(tensors.encode(TREE)[0])[40:]
    with pytest.raises(DamagedObjectError, match="altered"):
        decoded(forged(head, b"x" * 64), TREE)


def test_a_header_of_the_same_leaves_in_another_form_is_refused():
    head, *payload = map(bytes, tensors.encode(TREE))
    with pytest.raises(DamagedObjectError, match="its header is not in the form it was written in"):
        decoded(forged(head[40:] + b" " * 64, b"".join(payload)), TREE)


def test_a_tree_whose_names_are_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(tensors, "_HEADER_LIMIT", 1000)
    with pytest.raises(ValueError, match=r"whose leaves take .* bytes to name cannot be stored: stack its leaves"):
        tensors.encode({f"leaf {i} of a long name": np.zeros(1) for i in range(50)})


def test_other_versions_and_other_files_are_named():
    for version in (1, 7):
        with pytest.raises(DamagedObjectError, match=f"version {version} of the tensor format"):
            decoded(DATA[:8] + bytes([version]) + DATA[9:], TREE)
    with pytest.raises(DamagedObjectError, match="no tensor object"):
        decoded(b"PK\x03\x04" + bytes(100), TREE)


@settings(max_examples=60, derandomize=True)
@given(st.data())
def test_of_a_large_object_too_every_change_is_seen(data):
    size = data.draw(st.sampled_from([1025, 32 * 1024, 80_001]))
    array = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    altered = np.frombuffer(joined(array), np.uint8).copy()
    body = altered[-(-(-size // 64) * 64) :][:size].reshape(-1)
    first, second = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    if body[first] == body[second]:
        body[first] ^= data.draw(st.integers(1, 255))
    else:
        body[[first, second]] = body[[second, first]]
    with pytest.raises(DamagedObjectError, match="altered"):
        decoded(altered, array)
