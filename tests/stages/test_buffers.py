"""Buffers: all of them are written, and what is aligned becomes an array without a copy."""

import jax
import numpy as np
import pytest

from jaxche.distributed import aligned
from jaxche.stages import _buffers as buffers


def test_aligned_bytes_become_an_array_without_a_copy():
    for nbytes in (4, 4096):
        data = aligned(nbytes)
        assert data.shape == (nbytes,)
        assert data.ctypes.data % 64 == 0
    array = buffers.on_device(data.view(np.float32), jax.devices()[0])
    assert array.unsafe_buffer_pointer() == data.ctypes.data


def test_only_few_bytes_are_small():
    leaves = [np.zeros(8, np.float32), jax.block_until_ready(jax.numpy.zeros(8)), 3.0]
    assert buffers.are_small_and_ready(leaves, 64)
    assert not buffers.are_small_and_ready(leaves, 63)


@pytest.mark.parametrize("most", [1, 3, 7, 10_000])
def test_all_is_written_once_and_in_order_however_little_a_call_takes(most):
    parts = [b"one", b"", np.arange(5, dtype=np.int32), bytearray(b"two"), *[b"x"] * 600, b"end"]
    whole, written, calls = b"".join(bytes(part) for part in parts), bytearray(), []

    def write(buffers):
        assert len(written) < len(whole)  # and not on and on
        calls.append(len(buffers))
        taken = b"".join(buffers)[:most]
        written.extend(taken)
        return len(taken)

    buffers.write_all(write, parts)
    assert bytes(written) == whole
    assert max(calls) <= 512  # a system takes 1024 at most
    assert len(calls) == max(2, -(-len(written) // most))
