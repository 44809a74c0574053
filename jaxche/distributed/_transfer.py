"""Sends the state of a run over a socket to a process that joins it: in pieces, with a checksum."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxche.distributed._group import PeerLostError

_LENGTHS = struct.Struct(">QQ")
HEAD_BYTES = _LENGTHS.size
_PIECE_BYTES = 1 << 20
# How long to wait for bytes to move before asking whether the peer is alive.
_SLICE_S = 0.5


def send_state(sock: socket.socket, message: Any, arrays: Sequence[np.ndarray], waiting: Callable[[], None]) -> None:
    """Send JSON and the bytes of arrays; ``waiting`` is called while nothing moves, and may raise.

    Raises:
      OSError: the peer has closed the connection.
    """
    text = json.dumps(message).encode()
    views = [array.reshape(-1).view(np.uint8) for array in arrays]
    digest = hashlib.blake2b(text)
    sock.settimeout(_SLICE_S)
    _send(sock, _LENGTHS.pack(len(text), sum(view.nbytes for view in views)) + text, waiting)
    for view in views:
        digest.update(view.data)
        _send(sock, view.data, waiting)
    _send(sock, digest.digest(), waiting)


def receive_state(sock: socket.socket, waiting: Callable[[], None]) -> tuple[Any, bytearray]:
    """The JSON and the bytes that :func:`send_state` sends.

    Raises:
      PeerLostError: the connection broke off, or the checksum is wrong.
    """
    sock.settimeout(_SLICE_S)
    digest = hashlib.blake2b()
    text_bytes, state_bytes = _LENGTHS.unpack(_receive(sock, _LENGTHS.size, waiting))
    text = _receive(sock, text_bytes, waiting)
    state = _receive(sock, state_bytes, waiting)
    digest.update(text)
    digest.update(state)
    if _receive(sock, digest.digest_size, waiting) != digest.digest():
        raise PeerLostError("the state that a member sent has a wrong checksum")
    return json.loads(text), state


def _send(sock: socket.socket, data: Any, waiting: Callable[[], None]) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view[:_PIECE_BYTES]) :]
        except TimeoutError:
            waiting()


def _receive(sock: socket.socket, size: int, waiting: Callable[[], None]) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            read = sock.recv_into(view[:_PIECE_BYTES])
        except TimeoutError:
            waiting()
            continue
        except OSError as error:
            raise PeerLostError(f"the member that sent its state is gone: {error}") from None
        if not read:
            raise PeerLostError("the member that sent its state closed the connection")
        view = view[read:]
    return data
