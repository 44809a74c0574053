"""The state of a run on its way to a process that joins, over real sockets."""

import contextlib
import socket
import threading

import numpy as np
import pytest

from jaxche.distributed import PeerLostError
from jaxche.distributed import _transfer as module

ARRAYS = [
    np.arange(300_001, dtype=np.float32),
    np.array(7, np.int32),
    np.zeros((0, 3), np.float32),
    np.ones((2, 3), bool),
]
MESSAGE = {"order": [0, 2], "name": "ä"}


class Faulty:
    """A socket that sends one bit wrong, or only a part."""

    def __init__(self, sock, flip=None, stop=None):
        self._sock, self._flip, self._stop, self._sent = sock, flip, stop, 0

    def __getattr__(self, name):
        return getattr(self._sock, name)

    def send(self, data):
        data = bytearray(data)
        at, bit = self._flip or (-1, 0)
        if 0 <= at - self._sent < len(data):
            data[at - self._sent] ^= 1 << bit
        if self._stop is not None and self._sent + len(data) > self._stop:
            self._sock.shutdown(socket.SHUT_WR)
            raise BrokenPipeError
        sent = self._sock.send(data)
        self._sent += sent
        return sent


def transfer(**faults):
    """What arrives, and how many bytes were sent."""
    here, there = socket.socketpair()
    sock = Faulty(here, **faults)

    def send():
        with contextlib.suppress(OSError):
            module.send_state(sock, MESSAGE, ARRAYS, lambda: None)
        here.close()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with there:
            message, size = module.receive_message(there, lambda: None)
            return message, module.receive_bytes(there, size, lambda: None), sock._sent
    finally:
        thread.join()


def test_what_is_sent_arrives_and_arrays_begin_where_jax_needs_no_copy():
    message, state, sent = transfer()
    assert message == MESSAGE
    assert state.ctypes.data % 64 == 0
    start = 0
    for array in ARRAYS:
        there = np.frombuffer(state, array.dtype, count=array.size, offset=start).reshape(array.shape)
        np.testing.assert_array_equal(there, array)
        start += -(-array.nbytes // 64) * 64
    assert start == state.nbytes
    assert sent < start + 200


@pytest.mark.parametrize(
    "part", ["lengths", "checksum of lengths", "text", "checksum of text", "array", "padding", "checksum"]
)
@pytest.mark.parametrize("bit", [0, 7])
def test_one_wrong_bit_is_found(part, bit):
    """A wrong length would otherwise reserve 2 ** 63 bytes: MemoryError, which ends the process."""
    text = len(module.json.dumps(MESSAGE).encode())
    head = module._LENGTHS.size + module._CHECKSUM.size
    first = head + text + module._CHECKSUM.size
    size = sum(module.padded(array.nbytes) for array in ARRAYS)
    at = {"lengths": 0, "checksum of lengths": 17, "text": head + 3}
    at |= {"checksum of text": head + text, "array": first + 600_000}
    at |= {"padding": first + ARRAYS[0].nbytes + 1, "checksum": first + size + 2}
    with pytest.raises(PeerLostError, match="wrong checksum"):
        transfer(flip=(at[part], bit))


@pytest.mark.parametrize("stop", [0, 10, 40, 500_000])
def test_a_connection_that_fails_is_a_lost_peer(stop):
    with pytest.raises(PeerLostError, match="closed the connection"):
        transfer(stop=stop)


def test_while_nothing_moves_it_asks_whether_the_peer_is_alive(monkeypatch):
    monkeypatch.setattr(module, "_SLICE_S", 0.01)

    def lost():
        raise PeerLostError("process 0 died while it sent its state")

    here, there = socket.socketpair()
    with here, there:
        with pytest.raises(PeerLostError, match="process 0 died"):
            module.receive_message(there, lost)
        with pytest.raises(PeerLostError, match="process 0 died"):
            module.send_state(here, MESSAGE, [np.zeros(10_000_000, np.uint8)], lost)


def test_a_member_that_is_slow_is_waited_for_and_one_that_is_gone_is_lost(monkeypatch):
    class Slow:
        def __init__(self, *events):
            self._events = list(events)

        def recv_into(self, view):
            event = self._events.pop(0)
            if isinstance(event, Exception):
                raise event
            view[: len(event)] = event
            return len(event)

    waited = []
    monkeypatch.setattr(module, "_SLICE_S", 60)
    data, _ = module._receive(Slow(b"ab", TimeoutError(), b"cd"), 4, lambda: waited.append(1))
    assert (bytes(data), waited) == (b"abcd", [1])
    monkeypatch.setattr(module, "_SLICE_S", -1)  # also while bytes move: the launcher waits for a heartbeat
    module._receive(Slow(b"ab", b"cd"), 4, lambda: waited.append(2))
    assert waited == [1, 2, 2]
    with pytest.raises(PeerLostError, match="the member that sent its state is gone: reset"):
        module._receive(Slow(b"ab", ConnectionResetError("reset")), 4, lambda: None)
