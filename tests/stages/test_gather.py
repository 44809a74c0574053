"""Many buffers in few calls, of which each may write a part only."""

import numpy as np
import pytest

from jaxche.stages._gather import write_all


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

    write_all(write, parts)
    assert bytes(written) == whole
    assert max(calls) <= 512  # a system takes 1024 at most
    assert len(calls) == max(2, -(-len(written) // most))
