"""Checksums of arrays, against the sum written out, and over shards on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.checkpoints import _checksums as module


def slow(host):
    """The same sum, element by element."""
    host = np.atleast_1d(host)
    unit = host.itemsize // (2 if np.iscomplexobj(host) else 1)
    bits = np.frombuffer(host.tobytes(), f"u{unit}")
    return sum(int(bit) * (2 * i + 1) for i, bit in enumerate(bits)) % 2**64


def checksum(array):
    return module.own_checksums([array])[0]


ARRAYS = [
    np.float32(1.5),
    np.arange(7, dtype=np.int32),
    np.random.default_rng(0).normal(size=(3, 5, 2)).astype(np.float32),
    np.random.default_rng(1).normal(size=(4, 3)).astype(jnp.bfloat16),
    np.array([[True, False], [True, True]]),
    np.array([1 + 2j, 3 - 4j], np.complex64),
    np.zeros((0, 4), np.float32),
    np.arange(12, dtype=np.uint8).reshape(2, 1, 6),
    np.float16([[1.5], [-2]]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_the_sum_of_all_elements_by_their_place(array):
    assert checksum(jnp.asarray(array)) == slow(array)


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_numbers_of_64_bits(dtype):
    array = np.random.default_rng(4).normal(scale=1e9, size=(3, 2)).astype(dtype)
    with jax.enable_x64(True):
        assert checksum(jnp.asarray(array)) == slow(array)


@pytest.mark.parametrize(("dtype", "bits"), [(jnp.int4, "uint4"), (jnp.uint4, "uint4"), (jnp.float8_e4m3fn, "uint8")])
def test_numbers_of_few_bits(dtype, bits):
    array = jnp.arange(16).reshape(4, 4).astype(dtype)
    assert checksum(array) == slow(np.asarray(jax.lax.bitcast_convert_type(array, bits).astype(jnp.uint8)))


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))])
def test_it_does_not_depend_on_shards(spec, devices):
    array = np.random.default_rng(2).normal(size=(8, 4)).astype(np.float32)
    sharding = NamedSharding(Mesh(np.array(devices[:4]).reshape(2, 2), ("a", "b")), spec)
    assert checksum(jax.device_put(array, sharding)) == slow(array)


def test_random_keys_have_the_sum_of_their_numbers(devices):
    keys = jax.random.split(jax.random.key(7), 4)
    wanted = slow(np.asarray(jax.random.key_data(keys)))
    assert checksum(keys) == wanted
    assert checksum(jax.device_put(keys, NamedSharding(Mesh(np.array(devices[:2]), ("a",)), P("a")))) == wanted


def test_every_wrong_bit_is_found():
    array = np.random.default_rng(3).normal(size=(2, 3)).astype(np.float32)
    right = checksum(jnp.asarray(array))
    for at in range(array.size):
        for bit in range(32):
            bits = array.view(np.uint32).copy()
            bits.flat[at] ^= np.uint32(1 << bit)
            assert checksum(jnp.asarray(bits.view(np.float32))) != right


def test_processes_add_their_shards_and_count_whole_arrays_once():
    class Two:
        is_first = False

        def all_gather(self, own):
            self.own = own
            return [dict.fromkeys(own, module._MODULUS - 1), own]

    group, array = Two(), jnp.arange(4.0)
    sharded = type("Sharded", (), {"is_fully_replicated": False, "addressable_shards": array.addressable_shards})()
    sharded.shape, sharded.dtype = array.shape, array.dtype
    found = module.checksums({"params": {"w": array, "rows": sharded}}, group)
    assert group.own == {"params/rows": slow(np.asarray(array)), "params/w": 0}
    assert found["params/rows"] == slow(np.asarray(array)) - 1
    assert module.checksums({"params": {"w": array}}, None) == {"params/w": slow(np.asarray(array))}
