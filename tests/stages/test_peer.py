"""Wires of two processes in this one, over real sockets, and the messages on a socket."""

import gc
import socket
import struct
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxche.stages import Tag
from jaxche.stages import _peer as module
from jaxche.stages._peer import Outgoing, read_arrays, write_arrays

TAG = Tag(3, 1, "forward", 0)
LIKE = jax.ShapeDtypeStruct((64,), np.float32)


@pytest.fixture
def wires(monkeypatch, store, coordinator, devices):
    for name, value in {"client": store, "coordinator_address": coordinator}.items():
        monkeypatch.setattr(module._jax_distributed.global_state, name, value)
    made = {}
    # Each process counts its own wires, and these are the first of both.
    monkeypatch.setattr(store, "key_value_increment", lambda key, amount: 1, raising=False)
    other = threading.Thread(target=make_wire, args=(made, 1, devices))
    other.start()
    make_wire(made, 0, devices)
    other.join()
    yield made
    for wire in made.values():
        wire.close()


def make_wire(made, stage, devices):
    places = [devices[stage] if i == stage else None for i in range(2)]
    made[stage] = module.PeerWire([stage], 2, places, 60.0)


def there_and_back(wires, devices, step):
    forward, backward = Tag(step, 0, "forward", 0), Tag(step, 0, "backward", 1)
    x = jax.device_put(np.full(64, step, np.float32), devices[0])
    wires[0].send(forward, x)
    wires[1].send(backward, wires[1].receive(forward, LIKE, devices[1]) + 1)
    assert (wires[0].receive(backward, LIKE, devices[0]) == step + 1).all()


def test_numbers_of_64_bits_stay_such_between_processes(wires, devices):
    like = jax.ShapeDtypeStruct((1,), np.float64)
    with jax.enable_x64(True):
        wires[0].send(TAG, jax.device_put(np.array([1 + 2**-40]), devices[0]))
        assert wires[1].receive(TAG, like, devices[1]).tolist() == [1 + 2**-40]


def test_a_stage_listens_at_the_address_of_the_run(wires):
    for wire in wires.values():
        assert wire._listener.address[0] == "127.0.0.1"
        assert wire._listener._servers[0].getsockname()[0] == "127.0.0.1"


def test_nothing_keeps_a_closed_wire(wires, until):
    wire = wires.pop(0)
    wire.close()
    closed = weakref.ref(wire)
    del wire
    assert until(lambda: closed() is None or (gc.collect() and closed() is None))  # a collection takes long in a suite


@pytest.mark.parametrize("stage", [0, 1])
def test_strangers_do_not_disturb_a_pipeline(wires, devices, strangers, stage):
    there_and_back(wires, devices, 0)
    done, steps = threading.Event(), [1]

    def train():
        while not done.is_set():
            there_and_back(wires, devices, steps[0])
            steps[0] += 1
            done.wait(0.01)

    training = threading.Thread(target=train)
    training.start()
    used = strangers(wires[stage]._listener.address, hellos=2_000, seed=stage)
    done.set()
    training.join()
    assert steps[0] > 10
    assert used["threads"] <= 1  # the one that trains
    assert used["files"] <= 100
    assert used["kib"] < 30_000
    there_and_back(wires, devices, steps[0])
    assert [len(wire._incoming) for wire in wires.values()] == [1, 1]


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


def test_truncated_and_invalid_messages_are_errors(pair):
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


def test_outgoing_reports_a_closed_connection_once(pair):
    errors = []
    outgoing = Outgoing(pair[0], errors.append)
    pair[1].close()
    for i in range(3):
        outgoing.put(Tag(i, 0, "forward", 0), jnp.ones(1 << 19))
    outgoing.flush()
    outgoing.close()
    assert [isinstance(error, OSError) for error in errors] == [True]


class Slow:
    """A socket that takes its first message in two parts, and in between waits for another writer to come."""

    def __init__(self, sock):
        self._sock, self.begun, self.another = sock, threading.Event(), threading.Event()
        self.disturbed = False

    def sendmsg(self, parts):
        if self.begun.is_set():
            if not self.another.is_set():
                self.disturbed = True
                self.another.set()
            return self._sock.sendmsg(parts)
        taken = self._sock.send(parts[0][:10])
        self.begun.set()
        assert self.another.wait(20)
        return taken

    def __getattr__(self, name):
        return getattr(self._sock, name)


class Watched:
    """A lock that says when a thread comes while another one holds it."""

    def __init__(self, came):
        self._lock, self._came = threading.Lock(), came

    def __enter__(self):
        if self._lock.locked():
            self._came.set()
        self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()


def test_stages_that_send_to_the_same_process_do_not_mix_their_messages(pair):
    slow, errors = Slow(pair[0]), []
    outgoing = Outgoing(slow, errors.append)
    outgoing._writing = Watched(slow.another)
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


def test_a_process_sends_no_longer_than_it_waits(wires):
    assert {outgoing._sock.gettimeout() for wire in wires.values() for outgoing in wire._outgoing.values()} == {60.0}


def test_a_send_that_takes_too_long_is_an_error(pair):
    errors = []
    pair[0].settimeout(0.2)
    outgoing = Outgoing(pair[0], errors.append)
    outgoing.put(TAG, jnp.ones(1 << 22))  # without a reader
    outgoing.flush()
    outgoing.close()
    assert [type(error) for error in errors] == [TimeoutError]
