"""The tensor format: what goes in comes out, and what was damaged is refused and does nothing else."""

import json
import struct
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxche.protocols import DamagedObjectError
from jaxche.protocols import _checksum as checksums
from jaxche.protocols import _tensors as tensors

DTYPES = ["bool", "int8", "uint16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]
DTYPES += ["float8_e4m3fn", "int4"]


def joined(tree):
    return b"".join(bytes(part) for part in tensors.encode(tree))


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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trees)
def test_what_goes_in_comes_out(tree):
    data = joined(tree)
    assert len(data) == tensors.object_size(tree)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    same(tensors.decode(data, like, "key"), tree)


def test_arrays_of_jax_views_and_foreign_byte_orders():
    tree = (jnp.arange(6, dtype="bfloat16").reshape(2, 3), np.arange(6).reshape(2, 3).T, np.arange(3, dtype=">f4"), 7)
    found = tensors.decode(joined(tree), tree, "key")
    same(found[:2], tree[:2])
    np.testing.assert_array_equal(found[2], [0, 1, 2])
    assert int(found[3]) == 7


def test_leaves_are_views_of_the_object_and_of_what_was_given():
    array = np.arange(1000.0)
    assert np.shares_memory(tensors.encode(array)[1], array)
    data = np.frombuffer(joined(array), np.uint8)
    found = tensors.decode(data, array, "key")
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
            tensors.decode(data, other, "key")
        if tensors.object_size(other) != len(data):
            assert "holds" in str(tensors.explain(data[:4096], len(data), other, "key"))


TREE = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "n": np.int32(5), "m": np.array([True, False])}
DATA = joined(TREE)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_a_damaged_object_is_refused_and_an_equal_one_is_not(data):
    damaged = bytearray(DATA)
    for _ in range(data.draw(st.integers(0, 3))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] ^= data.draw(st.integers(1, 255))
    keep = data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))
    damaged = bytes(damaged[:keep]) + data.draw(st.binary(max_size=2))
    if damaged == DATA:
        same(tensors.decode(damaged, TREE, "the key"), TREE)
    else:
        with pytest.raises(DamagedObjectError, match="the key"):
            tensors.decode(damaged, TREE, "the key")
    error = tensors.explain(damaged, len(damaged), TREE, "the key")
    assert "the key" in str(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


def forged(header, payload, announce=None):
    """An object with right checksums and a header of somebody else's."""
    check = checksums.checksum(np.frombuffer(payload, np.uint8))
    prefix = struct.pack("<8sIIQI", b"jaxchetr", 1, len(header), announce or len(payload), check)
    return prefix + struct.pack("<I", zlib.crc32(header, zlib.crc32(prefix))) + header + payload


@settings(max_examples=200, deadline=None, derandomize=True)
@given(json_values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40), st.binary(max_size=200))
def test_a_hostile_header_is_only_ever_refused(header, payload):
    with pytest.raises(ValueError, match="the key"):
        tensors.decode(forged(header, payload), TREE, "the key")


@pytest.mark.parametrize(
    "header", [b"[" * 1_000_000, b"9" * 10_000, b'[["a","O",[1]]]', b'[["a","float32",[1e999]]]', b"\xff\xfe", b""]
)
def test_chosen_hostile_headers(header):
    with pytest.raises(ValueError, match="the key"):
        tensors.decode(forged(header, b""), TREE, "the key")


def test_a_size_that_is_only_announced_allocates_nothing():
    data = forged(b"[]", b"", announce=2**62)
    with pytest.raises(DamagedObjectError, match="announces"):
        tensors.decode(data, TREE, "key")
    assert isinstance(tensors.explain(data, 2**62 + 38, TREE, "key"), ValueError)
    prefix = struct.pack("<8sIIQI", b"jaxchetr", 1, 2**32 - 1, 0, 0) + bytes(4)
    with pytest.raises(DamagedObjectError):
        tensors.decode(prefix, TREE, "key")
    assert isinstance(tensors.explain(prefix, len(prefix) + 2**32 - 1, TREE, "key"), DamagedObjectError)


def test_the_right_header_over_other_bytes_is_refused():
    head = bytes(tensors.encode(TREE)[0])[32:]
    with pytest.raises(DamagedObjectError, match="altered"):
        tensors.decode(forged(head, b"x" * 64), TREE, "key")


def test_other_versions_and_other_files_are_named():
    with pytest.raises(DamagedObjectError, match="version 7"):
        tensors.decode(DATA[:8] + b"\x07" + DATA[9:], TREE, "key")
    with pytest.raises(DamagedObjectError, match="no tensor object"):
        tensors.decode(b"PK\x03\x04" + bytes(100), TREE, "key")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_the_checksum_is_that_of_a_slow_twin_and_sees_every_changed_byte(data):
    size = data.draw(st.sampled_from([0, 1, 63, 64, 65, 32 * 1024 - 8, 32 * 1024, 80_001]))
    seed = data.draw(st.integers(0, 99))
    array = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    padded = bytes(array) + bytes(-size % 64)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    weights = list(map(int, checksums._WEIGHTS))
    chunks = [words[i : i + 4096] for i in range(0, len(words), 4096)]
    sums = [sum(w * x for w, x in zip(weights, chunk, strict=False)) % 2**64 for chunk in chunks]
    wanted = zlib.crc32(b"".join(s.to_bytes(8, "little") for s in sums), 7)
    assert checksums.checksum(array, 7) == wanted
    assert checksums.checksum(np.frombuffer(padded, np.uint8), 7) == wanted
    if size:
        array[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
        assert checksums.checksum(array, 7) != wanted


def test_the_weights_are_part_of_the_format():
    assert [hex(w) for w in map(int, checksums._WEIGHTS[:2])] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f5"]
    assert all(w % 2 == 1 for w in map(int, checksums._WEIGHTS))
    assert len(set(map(int, checksums._WEIGHTS))) == 4096
