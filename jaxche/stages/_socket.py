"""Trees of arrays through a socket: a JSON header with shapes and dtypes, then their bytes. No code travels."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.stages._base import Tag
from jaxche.stages._gather import write_all

_LENGTH = struct.Struct(">I")
_MOST_HEADER = 1 << 20
# What is ready and not larger is sent from the caller's thread: sooner by the time it takes to wake another.
_INLINE_BYTES = 1 << 20
# XLA on CPU takes a NumPy array over without a copy if it begins at such an address.
_ALIGNMENT = 64


def write_arrays(sock: socket.socket, tag: Tag, arrays: Sequence[np.ndarray]) -> None:
    """Write the leaves of a tree under a tag."""
    text = json.dumps([*tag, [[array.dtype.name, array.shape] for array in arrays]]).encode()
    # As bytes, because bfloat16 and its kin have no buffer of their own.
    payload = (np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays)
    write_all(sock.sendmsg, [_LENGTH.pack(len(text)) + text, *payload])


def read_arrays(sock: socket.socket) -> tuple[Tag, list[np.ndarray]]:
    """Read what :func:`write_arrays` wrote.

    Raises:
      EOFError: the other end is gone.
      ValueError: that is not one of our messages.
    """
    length = _LENGTH.unpack(_read_few(sock, _LENGTH.size))[0]
    if length > _MOST_HEADER:
        raise ValueError(f"a header of {length} bytes; at most {_MOST_HEADER} are read")
    *tag, leaves = json.loads(_read_few(sock, length))
    arrays = []
    for name, shape in leaves:
        dtype = jnp.dtype(name)
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        arrays.append(_read(sock, count).view(dtype).reshape(shape))
    return Tag(*tag), arrays


def _read_few(sock: socket.socket, count: int) -> bytes:
    taken = b""
    while len(taken) < count:
        got = sock.recv(count - len(taken), socket.MSG_WAITALL)
        if not got:
            raise EOFError("the other end closed the connection")
        taken += got
    return taken


def _read(sock: socket.socket, count: int) -> np.ndarray:
    room = np.empty(count + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    taken = room[start : start + count]
    view, done = taken.data, 0
    while done < count:
        got = sock.recv_into(view[done:], count - done, socket.MSG_WAITALL)
        if got == 0:
            raise EOFError("the other end closed the connection")
        done += got
    return taken


class Outgoing:
    """Sends trees in a thread of its own, so that nobody waits for the network or for what is still computing.

    Args:
      sock: a connection.
      on_error: called with what went wrong, once.
    """

    def __init__(self, sock: socket.socket, on_error: Any):
        self._sock, self._on_error = sock, on_error
        self._queue: queue.Queue[tuple[Tag, list[Any]] | None] = queue.Queue()
        self._writing = threading.Lock()
        self._broken = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, tag: Tag, tree: Any) -> None:
        """Send a tree when it is there."""
        leaves = jax.tree.leaves(tree)
        small = sum(leaf.nbytes for leaf in leaves) <= _INLINE_BYTES
        if small and self._queue.unfinished_tasks == 0 and all(leaf.is_ready() for leaf in leaves):
            self._write(tag, leaves)
            return
        for leaf in leaves:
            leaf.copy_to_host_async()
        self._queue.put((tag, leaves))

    def flush(self) -> None:
        """Wait until all is with the network."""
        self._queue.join()

    def close(self) -> None:
        """Let go, whatever is still to be sent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._queue.put(None)
        self._thread.join()
        self._sock.close()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._write(*item)
            del item
            self._queue.task_done()

    def _write(self, tag: Tag, leaves: Sequence[Any]) -> None:
        with self._writing:
            if self._broken:
                return
            try:
                write_arrays(self._sock, tag, [np.asarray(leaf) for leaf in leaves])
            except Exception as error:  # also what computing the arrays raised
                self._broken = True
                self._on_error(error)
