"""Sends the state of a run over a socket to a process that joins it: in pieces, with checksums.

CRC-32 finds every wrong bit, and costs less than the copy; a cryptographic digest costs four times as much as the copy.
"""

from __future__ import annotations

import json
import socket
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxche.distributed._group import PeerLostError

# The lengths of the text and of the arrays in bytes, and their checksum: a wrong length would reserve any memory.
_LENGTHS, _CHECKSUM = struct.Struct(">QQ"), struct.Struct(">I")
# A piece that was read for the checksum is still in the cache of the core when it is sent.
_PIECE_BYTES = 1 << 18
# XLA on CPU uses a NumPy array without a copy if its address is a multiple of this.
_ALIGNMENT = 64
# How long to wait for bytes to move before asking whether the peer is alive.
_SLICE_S = 0.5


def padded(size: int) -> int:
    """The bytes that an array of this size takes among others, so that the next one is aligned too."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def aligned(size: int) -> np.ndarray:
    """Uninitialized bytes that become an array on the CPU backend without a copy."""
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size]


def send_state(sock: socket.socket, message: Any, arrays: Sequence[np.ndarray], waiting: Callable[[], None]) -> None:
    """Send JSON, then the bytes of arrays; ``waiting`` is called while nothing moves, and may raise."""
    text = json.dumps(message).encode()
    views = [array.reshape(-1).view(np.uint8) for array in arrays]
    lengths = _LENGTHS.pack(len(text), sum(padded(view.nbytes) for view in views))
    sock.settimeout(_SLICE_S)
    _send(sock, lengths + _CHECKSUM.pack(zlib.crc32(lengths)), 0, waiting)
    _send(sock, _CHECKSUM.pack(_send(sock, text, 0, waiting)), 0, waiting)
    checksum = 0
    for view in views:
        checksum = _send(sock, view.data, checksum, waiting)
        checksum = _send(sock, bytes(padded(view.nbytes) - view.nbytes), checksum, waiting)
    _send(sock, _CHECKSUM.pack(checksum), 0, waiting)


def receive_message(sock: socket.socket, waiting: Callable[[], None]) -> tuple[Any, int]:
    """The JSON that :func:`send_state` sends first, and the size of the arrays that follow it in bytes."""
    sock.settimeout(_SLICE_S)
    text_bytes, state_bytes = _LENGTHS.unpack(receive_bytes(sock, _LENGTHS.size, waiting).data)
    return json.loads(receive_bytes(sock, text_bytes, waiting).tobytes()), state_bytes


def receive_bytes(sock: socket.socket, size: int, waiting: Callable[[], None]) -> np.ndarray:
    """So many bytes; PeerLostError if the connection failed, or the checksum that follows them is wrong."""
    data, checksum = _receive(sock, size, waiting)
    if _CHECKSUM.unpack(_receive(sock, _CHECKSUM.size, waiting)[0].data) != (checksum,):
        raise PeerLostError("the state that a member sent has a wrong checksum")
    return data


def _send(sock: socket.socket, data: Any, checksum: int, waiting: Callable[[], None]) -> int:
    """Send bytes, and return the checksum of those before and of these."""
    view = memoryview(data)
    while view:
        piece, view = view[:_PIECE_BYTES], view[_PIECE_BYTES:]
        checksum = zlib.crc32(piece, checksum)
        while piece:
            try:
                piece = piece[sock.send(piece) :]
            except TimeoutError:
                waiting()
    return checksum


def _receive(sock: socket.socket, size: int, waiting: Callable[[], None]) -> tuple[np.ndarray, int]:
    """So many bytes, and their checksum."""
    data, checksum = aligned(size), 0
    view, since = data.data, time.monotonic()
    while view:
        if time.monotonic() - since > _SLICE_S:
            since = time.monotonic()
            waiting()
        try:
            read = sock.recv_into(view[:_PIECE_BYTES])
        except TimeoutError:
            waiting()
            continue
        except OSError as error:
            raise PeerLostError(f"the member that sent its state is gone: {error}") from None
        if not read:
            raise PeerLostError("the member that sent its state closed the connection")
        checksum = zlib.crc32(view[:read], checksum)
        view = view[read:]
    return data, checksum
