"""Detects which processes of an elastic run are alive: by connections to process 0, and by heartbeats in the store.

The operating system closes the sockets of a process that ends, so its end is detected at once. A process that is
stopped and a machine that is lost close nothing; they are detected by the absence of heartbeats.
"""

from __future__ import annotations

import contextlib
import json
import queue
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxche.distributed._group import PeerLostError
from jaxche.distributed._listener import Listener, connect, own_address
from jaxche.distributed._watchdog import Watchdog

# The number of processes that have had each index, their numbers of heartbeats, the incarnations that have ended, and
# the address of process 0 for connections.
_INCARNATIONS, _HEARTBEATS, _ENDED, _ADDRESS = (
    "jaxche/incarnations/",
    "jaxche/heartbeats/",
    "jaxche/ended/",
    "jaxche/connect",
)
# Seconds between heartbeats, and without one until a process counts as dead. A shorter stop only delays the others: a
# swap storm, or a virtual machine that moves to another host.
_INTERVAL_S, _TIMEOUT_S = 1.0, 15.0
# How long to wait for a key before checking whether its writer is alive.
_SLICE_MS = 500
_POLL_S, _CONNECT_S, _JOIN_S = 0.2, 5.0, 10.0
# Seconds for a live process to connect again: something between the machines may close connections too.
_GRACE_S, _RETRY_S = 1.0, 0.2
# Failures in a row after which process 0 is unreachable or gone, and only heartbeats remain.
_FAILURES = 50


class Liveness:
    """Reports that this process is alive, and waits for others as long as they are; process 0 detects deaths.

    A process that jaxlib's own heartbeat takes for dead is ended by jaxlib as soon as it continues. This one is not.

    Args:
      state: of ``jax.distributed``.
      watchdog: gets a heartbeat while this process waits.

    Attributes:
      incarnation: the number of processes that have had this index, with this one.
    """

    def __init__(self, state: Any, watchdog: Watchdog):
        self._state, self._watchdog = state, watchdog
        # The client of now: the thread may still run when jax.distributed.shutdown() has taken it from the state.
        self._client: Any = state.client
        self._begin()
        # Of each process: its incarnation, its heartbeats, and when a change of either was seen.
        self._seen: dict[int, tuple[int, str, float]] = {}
        self._checked, self._stopped = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxche-heartbeats", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        own = self._state.process_id
        self.incarnation = self._client.key_value_increment(f"{_INCARNATIONS}{own}", 1)
        address = self._state.coordinator_address or ""
        self._connection = open_connection(self._client, own, self.incarnation, address)

    def restart(self) -> None:
        """Begin a new incarnation of this process, after the others took the previous one for dead."""
        self._connection.close()
        self._begin()

    def stop(self) -> None:
        """Leave the run. A thread inside the store's client at Python's exit would crash the process."""
        self._stopped.set()
        self._thread.join(_JOIN_S)
        if self.alive():  # jaxlib ends a process that shuts down when the store is gone
            jax.distributed.shutdown()
        self._connection.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            # Whoever waits for the store will see its failure.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_increment(f"{_HEARTBEATS}{self._state.process_id}", 1)
                if self._state.process_id == 0:
                    self._check()
            self._stopped.wait(_INTERVAL_S)

    def _check(self) -> None:
        now = time.monotonic()
        paused = now - self._checked if now - self._checked > 3 * _INTERVAL_S else 0.0
        self._checked = now
        # Read first: a process with a heartbeat has registered, perhaps just now.
        heartbeats = _by_process(self._client, _HEARTBEATS)
        incarnations = _by_process(self._client, _INCARNATIONS)
        for process, count in heartbeats.items():
            incarnation, seen = int(incarnations[process]), self._seen.get(process)
            if seen is None or seen[:2] != (incarnation, count):
                self._seen[process] = incarnation, count, now
            elif paused:  # process 0 itself was stopped, and saw no heartbeats
                self._seen[process] = incarnation, count, seen[2] + paused
            elif now - seen[2] > _TIMEOUT_S:
                set_ended(self._client, process, incarnation)

    def alive(self) -> dict[int, int]:
        """The processes that are alive and their incarnations; none if the store is gone."""
        client = self._state.client
        try:
            over = ended(client)
            found = {process: int(text) for process, text in _by_process(client, _INCARNATIONS).items()}
        except jax.errors.JaxRuntimeError:
            return {}
        return {process: incarnation for process, incarnation in found.items() if (process, incarnation) not in over}

    def lost(self, expected: Mapping[int, int]) -> list[int]:
        """The processes whose incarnations have ended."""
        alive = self.alive()
        return [process for process, incarnation in expected.items() if alive.get(process) != incarnation]

    def wait_for_loss(self, expected: Mapping[int, int], place: str) -> list[int]:
        """The processes whose incarnations have ended, once all others have written a key in ``place``.

        A broken connection is seen before a death; if all have written there, none has died.
        """
        while True:
            # Read first: if a process has written its key and then dies, the others detect it later.
            lost = self.lost(expected)
            here = {int(key.rpartition("/")[2]) for key, _ in self._state.client.key_value_dir_get(place)}
            if here.issuperset(expected.keys() - lost):
                return lost
            self._watchdog.heartbeat_while_waiting()
            time.sleep(_POLL_S)

    def wait_for_key(
        self, key: str, expected: Mapping[int, int], timeout_ms: float = float("inf"), unless: str | None = None
    ) -> str:
        """The value of a key of the store, once it is set.

        Args:
          key: to wait for.
          expected: the incarnations that must be alive to set it.
          timeout_ms: how long to wait.
          unless: a key prefix; a key that begins with it says that the awaited one will not be set.

        Raises:
          PeerLostError: one of them died without setting it, or a key with the prefix is set.
          TimeoutError: it was not set in time.
        """
        client = self._state.client
        deadline = time.monotonic() + timeout_ms / 1e3
        while True:
            with _unless_late():
                return client.blocking_key_value_get(key, _SLICE_MS)
            if lost := self.lost(expected):
                # A value set before the death counts for all that wait.
                with _unless_late():
                    return client.blocking_key_value_get(key, 1)
                raise PeerLostError(f"process {', '.join(map(str, lost))} died while others waited for it")
            if unless is not None and client.key_value_dir_get(unless):
                raise PeerLostError("a merge broke off in another process")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no process set {key} within {timeout_ms / 1e3:g} s")
            self._watchdog.heartbeat_while_waiting()  # a process that waits does not hang


@contextlib.contextmanager
def _unless_late() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise


def _by_process(client: Any, place: str) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(place)}


def set_ended(client: Any, process: int, incarnation: int) -> None:
    """Record, on process 0, that an incarnation has ended."""
    client.key_value_set(f"{_ENDED}{process}/{incarnation}", "", allow_overwrite=True)


def ended(client: Any) -> set[tuple[int, int]]:
    """The processes and incarnations that have ended."""
    places = [key.split("/")[-2:] for key, _ in client.key_value_dir_get(_ENDED)]
    return {(int(process), int(incarnation)) for process, incarnation in places}


def open_connection(client: Any, process: int, incarnation: int, coordinator: str) -> Connection:
    """Connect this process to process 0, which accepts the connections of all, at the host of ``coordinator``."""
    if process == 0:
        return ConnectionServer(client, own_address(coordinator))
    return ConnectionClient(client, process, incarnation)


class Connection(ABC):
    """One side of the connections to process 0, with its thread."""

    def __init__(self, client: Any):
        self._client, self._closed = client, threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxche-connections", daemon=True)

    @abstractmethod
    def _run(self) -> None: ...

    def close(self) -> None:
        """Close it: from now on this incarnation counts as ended."""
        self._closed.set()
        self._thread.join(_JOIN_S)


class ConnectionClient(Connection):
    """The connection of one process to process 0."""

    def __init__(self, client: Any, process: int, incarnation: int):
        super().__init__(client)
        self._name = f"{process} {incarnation}"
        self._thread.start()

    def _run(self) -> None:
        failures = 0
        while failures < _FAILURES and not self._closed.is_set():
            try:
                address = json.loads(self._client.blocking_key_value_get(_ADDRESS, 1000))
                with connect(address, self._name, _CONNECT_S) as sock:
                    sock.settimeout(_POLL_S)
                    failures = 0
                    while not self._closed.is_set():
                        with contextlib.suppress(TimeoutError):
                            sock.recv(1)  # process 0 sends nothing, so it has closed the connection
                            break
            except (OSError, jax.errors.JaxRuntimeError):
                failures += 1
            self._closed.wait(_RETRY_S)


class ConnectionServer(Connection):
    """The connections of all processes, on process 0."""

    def __init__(self, client: Any, host: str):
        super().__init__(client)
        self._accepted: queue.SimpleQueue[tuple[socket.socket, tuple[int, int]]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        # The process and incarnation of each connection, and when those without one lost it.
        self._peers: dict[socket.socket, tuple[int, int]] = {}
        self._disconnected: dict[tuple[int, int], float] = {}
        self._listener = Listener(host, self._accept)
        client.key_value_set(_ADDRESS, json.dumps(self._listener.address))
        self._thread.start()

    def _accept(self, sock: socket.socket, text: str) -> None:
        process, incarnation = map(int, text.split())
        self._accepted.put((sock, (process, incarnation)))

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._selector)
            stack.callback(lambda: [sock.close() for sock in self._peers])
            stack.callback(self._register_accepted)
            stack.callback(self._listener.close)
            while not self._closed.is_set():
                for key, _ in self._selector.select(_POLL_S):
                    self._read(key.fileobj)
                self._register_accepted()
                # Without the store no process can read this.
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._set_ended()

    def _register_accepted(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                sock, peer = self._accepted.get_nowait()
                self._selector.register(sock, selectors.EVENT_READ)
                self._peers[sock] = peer
                self._disconnected.pop(peer, None)

    def _read(self, sock: Any) -> None:
        try:
            is_closed = not sock.recv(256)
        except OSError:
            is_closed = True
        if is_closed:
            self._selector.unregister(sock)
            sock.close()
            peer = self._peers.pop(sock)
            if peer not in self._peers.values():
                self._disconnected[peer] = time.monotonic()

    def _set_ended(self) -> None:
        for peer, since in list(self._disconnected.items()):
            if time.monotonic() - since > _GRACE_S:
                del self._disconnected[peer]
                set_ended(self._client, *peer)
