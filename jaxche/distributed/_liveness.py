"""Reports that this process of an elastic run is alive, and waits for others as long as they are."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxche.distributed._group import PeerLostError, numbered, suppress_timeout
from jaxche.distributed._listener import connect
from jaxche.distributed._liveness_server import ALIVE, INTERVAL_S, RUN_LOST, Incarnation
from jaxche.distributed._watchdog import Watchdog
from jaxche.messages import format_ranks

# The number of processes that have had each index.
_INCARNATIONS = "jaxche/incarnations/"
# How long to wait for a key before checking whether its writer is alive.
_SLICE_MS = 100
_POLL_S, _RETRY_S, _CONNECT_S, _JOIN_S = 0.05, 0.2, 10.0, 10.0


def is_alive(address: list[Any], process: int) -> bool:
    """Whether a process is alive, from the :class:`LivenessServer` at this address; OSError without an answer."""
    with connect(address, f"{process} 0", _CONNECT_S) as sock:
        sock.settimeout(_CONNECT_S)
        return sock.recv(1) == ALIVE


class Liveness:
    """The connection of this process to the :class:`LivenessServer` of its run, and what it has received from there.

    jaxlib ends a stopped process when it continues; with this connection it can join again.
    """

    def __init__(self, state: Any, address: list[Any], watchdog: Watchdog):
        self._state, self._address, self._watchdog = state, address, watchdog
        self._ended: set[Incarnation] = set()
        self._begin()

    def _begin(self) -> None:
        own = self._state.process_id
        # The number of processes that have had this index, with this one.
        self.incarnation = self._state.client.key_value_increment(f"{_INCARNATIONS}{own}", 1)
        self._closed, self._sock = threading.Event(), self._connect()
        self._thread = threading.Thread(target=self._run, name="jaxche-heartbeats", daemon=True)
        self._thread.start()

    def _connect(self) -> socket.socket:
        return connect(self._address, f"{self._state.process_id} {self.incarnation}", _CONNECT_S)

    def restart(self) -> None:
        """Begin a new incarnation of this process, after the others took the previous one for dead."""
        self.stop()
        self._begin()

    def stop(self) -> None:
        """Close the connection: from now on this incarnation counts as ended."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(_JOIN_S)

    def end_run(self) -> None:
        """End the coordinator, because no process is left that this one could join."""
        with contextlib.suppress(OSError):
            self._sock.sendall(RUN_LOST)

    @property
    def is_connected(self) -> bool:
        """Whether the server, and so the coordination service beside it, can be reached."""
        try:
            with self._connect():
                return True
        except OSError:
            return False

    def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError), self._sock:  # closes it, also if this process stopped while it connected
                self._exchange(self._sock)
            while not self._closed.wait(_RETRY_S):
                with contextlib.suppress(OSError):
                    self._sock = self._connect()
                    break
            else:
                return

    def _exchange(self, sock: socket.socket) -> None:
        """Send heartbeats and read which incarnations have ended, until the connection breaks."""
        sock.settimeout(INTERVAL_S)
        received = b""
        while not self._closed.is_set():
            sock.sendall(b".")
            with contextlib.suppress(TimeoutError):
                read = sock.recv(4096)
                if not read:
                    return
                *lines, received = (received + read).split(b"\n")
                self._ended |= {Incarnation(*map(int, line.split())) for line in lines}

    def lost(self, expected: Mapping[int, int]) -> list[int]:
        """The processes whose incarnations have ended."""
        ended = self._ended
        return [process for process, number in expected.items() if (process, number) in ended]

    def wait_for_loss(self, expected: Mapping[int, int], place: str, unless: Callable[[], bool]) -> list[int] | None:
        """The processes that died, once all others have written a key in ``place``; None once ``unless`` is true."""
        # A broken connection is seen before a death. If all have written there, none has died.
        while not unless():
            # Read first: if a process has written its key and then dies, the others detect it later.
            lost = self.lost(expected)
            if numbered(self._state.client, place).keys() >= expected.keys() - lost:
                return lost
            self._watchdog.heartbeat_while_waiting()
            time.sleep(_POLL_S)
        return None

    def wait_for_key(self, key: str, expected: Mapping[int, int], failures: str, timeout_ms: float = math.inf) -> str:
        """Wait for a key; PeerLostError if one of ``expected`` died before, or there are keys in ``failures``."""
        client = self._state.client
        deadline = time.monotonic() + timeout_ms / 1e3
        while True:
            with suppress_timeout():
                return client.blocking_key_value_get(key, _SLICE_MS)
            if lost := self.lost(expected):
                # A value set before the death counts for all that wait.
                with suppress_timeout():
                    return client.blocking_key_value_get(key, 1)
                raise PeerLostError(f"process {format_ranks(lost)} died while others waited for it")
            if client.key_value_dir_get(failures):
                raise PeerLostError("a merge failed in another process")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no process set {key} within {timeout_ms / 1e3:g} s")
            self._watchdog.heartbeat_while_waiting()  # a process that waits does not hang
