"""Trees through a socket: any dtype and shape, in order, and nothing but numbers."""

import socket
import struct
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jaxche.stages import Tag
from jaxche.stages._socket import Outgoing, read_arrays, write_arrays

TAG = Tag(3, 1, "forward", 0)


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_every_dtype_and_shape_arrives_as_it_was(pair):
    names = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint32", "bool", "complex64")
    arrays = [np.asarray(jnp.arange(6).reshape(2, 3).astype(name)) for name in names]
    arrays += [np.zeros((0, 4), np.float32), np.float32(2.5).reshape(()), np.arange(12.0).reshape(3, 4).T]
    write_arrays(pair[0], TAG, arrays)
    tag, got = read_arrays(pair[1])
    assert tag == TAG
    for sent, read in zip(arrays, got, strict=True):
        assert (sent.dtype, sent.shape) == (read.dtype, read.shape)
        np.testing.assert_array_equal(sent, read)


def test_many_and_large_leaves(pair):
    arrays = [np.full(n, n, np.float32) for n in (*range(1500), 1 << 20)]
    writer = threading.Thread(target=write_arrays, args=(pair[0], TAG, arrays))
    writer.start()
    _, got = read_arrays(pair[1])
    writer.join()
    assert all(np.array_equal(sent, read) for sent, read in zip(arrays, got, strict=True))


def test_an_end_in_mid_message_and_nonsense_are_errors(pair):
    pair[0].sendall(struct.pack(">I", 1 << 31))
    with pytest.raises(ValueError, match="a header of 2147483648 bytes"):
        read_arrays(pair[1])
    pair[0].sendall(struct.pack(">I", 10) + b"[1,")
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError, match="closed the connection"):
        read_arrays(pair[1])


def test_outgoing_keeps_the_order_of_small_and_large(pair):
    errors = []
    outgoing = Outgoing(pair[0], errors.append)
    sizes = [10, 1 << 20, 10, 1 << 19, 1]
    for i, size in enumerate(sizes):
        outgoing.put(Tag(i, 0, "backward", 1), {"x": jnp.full(size, i, jnp.float32)})
    for i, size in enumerate(sizes):
        tag, (x,) = read_arrays(pair[1])
        assert tag.step == i
        assert x.shape == (size,)
        assert (x == i).all()
    outgoing.flush()
    outgoing.close()
    assert errors == []


def test_outgoing_tells_once_that_the_other_end_is_gone(pair):
    errors = []
    outgoing = Outgoing(pair[0], errors.append)
    pair[1].close()
    for i in range(3):
        outgoing.put(Tag(i, 0, "forward", 0), jnp.ones(1 << 19))
    outgoing.flush()
    outgoing.close()
    assert [isinstance(error, OSError) for error in errors] == [True]


class Slow:
    """A socket that takes its first message in two parts, and in between waits for another writer to come in."""

    def __init__(self, sock):
        self._sock, self.begun, self.another = sock, threading.Event(), threading.Event()
        self.disturbed = None

    def sendmsg(self, parts):
        if self.begun.is_set():
            self.another.set()
            return self._sock.sendmsg(parts)
        taken = self._sock.send(parts[0][:10])
        self.begun.set()
        self.disturbed = self.another.wait(0.5)
        return taken

    def __getattr__(self, name):
        return getattr(self._sock, name)


def test_stages_that_send_to_the_same_process_do_not_mix_their_messages(pair):
    slow, errors = Slow(pair[0]), []
    outgoing = Outgoing(slow, errors.append)
    trees = [jnp.full(10_000, i, jnp.float32) for i in range(2)]
    threads = [threading.Thread(target=outgoing.put, args=(Tag(i, 0, "forward", 0), trees[i])) for i in range(2)]
    threads[0].start()
    assert slow.begun.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert slow.disturbed is False
    for i in range(2):
        tag, (x,) = read_arrays(pair[1])
        assert tag.step == i
        assert (x == i).all()
    outgoing.close()
    assert errors == []
