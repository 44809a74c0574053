"""Lines from the processes of an elastic run to process 0: one that ends is known at once, by the end of its line."""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

import jax

# Where process 0 can be reached, and which lives have ended.
_ADDRESS, _ENDED = "jaxche/lines", "jaxche/ended/"
# Something between the machines may end a line too. A process that lives has a new one by then.
_GRACE_S = 1.0
_LOOK_S, _AGAIN_S, _JOIN_S = 0.2, 0.2, 10.0
# After so many failures in a row process 0 is gone, or cannot be reached: then silence has to do.
_FAILURES = 50
_LOOPBACK = ("127.0.0.1", "localhost")


def keep_line(client: Any, process: int, life: int, coordinator: str) -> Line:
    """Let the others know at once when this process ends.

    The operating system closes the sockets of a process that ends, however it does. One that is stopped, and a machine
    that is lost, close nothing: those are missed by their silence.

    Args:
      client: of the store of the run.
      process: the number of this process.
      life: which the store knows it by.
      coordinator: ``host:port`` at which the others reach process 0.
    """
    return _Exchange(client, coordinator.rpartition(":")[0]) if process == 0 else _Single(client, process, life)


def declare_ended(client: Any, process: int, life: int) -> None:
    """Let all know, on process 0, that a life is over."""
    client.key_value_set(f"{_ENDED}{process}/{life}", "", allow_overwrite=True)


def ended(client: Any) -> set[tuple[int, int]]:
    """Processes and lives of theirs that are over."""
    places = [key.split("/")[-2:] for key, _ in client.key_value_dir_get(_ENDED)]
    return {(int(process), int(life)) for process, life in places}


class Line(ABC):
    """One end of lines, on a thread of its own."""

    def __init__(self, client: Any):
        self._client, self._over = client, threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxche-lines", daemon=True)

    @abstractmethod
    def _run(self) -> None:
        """What the thread does."""

    def end(self) -> None:
        """Let go: from now on this process counts as ended."""
        self._over.set()
        self._thread.join(_JOIN_S)


class _Single(Line):
    """The line of one process."""

    def __init__(self, client: Any, process: int, life: int):
        super().__init__(client)
        self._name = f"{process} {life}"
        self._thread.start()

    def _run(self) -> None:
        failures = 0
        while failures < _FAILURES and not self._over.is_set():
            try:
                host, port, password = json.loads(self._client.blocking_key_value_get(_ADDRESS, 1000))
                with socket.create_connection((host, port), timeout=5.0) as line:
                    line.sendall(f"{password} {self._name}\n".encode())
                    line.settimeout(_LOOK_S)
                    failures = 0
                    while not self._over.is_set():
                        with contextlib.suppress(TimeoutError):
                            line.recv(1)  # nothing is ever said
                            break
            except (OSError, jax.errors.JaxRuntimeError):
                failures += 1
            self._over.wait(_AGAIN_S)


class _Exchange(Line):
    """Where the lines come together."""

    def __init__(self, client: Any, host: str):
        super().__init__(client)
        # Anybody may connect; only who reads the store knows what to say.
        self._password = secrets.token_hex(8)
        if host in _LOOPBACK:
            self._server = socket.create_server(("127.0.0.1", 0))
        elif socket.has_dualstack_ipv6():
            self._server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self._server = socket.create_server(("", 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        # What came over each line, who is at its other end, and when those who have none lost it.
        self._heard: dict[socket.socket, bytes] = {}
        self._who: dict[socket.socket, tuple[int, int]] = {}
        self._since: dict[tuple[int, int], float] = {}
        port = self._server.getsockname()[1]
        client.key_value_set(_ADDRESS, json.dumps([host.strip("[]"), port, self._password]))
        self._thread.start()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._server)
            stack.enter_context(self._selector)
            stack.callback(lambda: [line.close() for line in self._heard])
            while not self._over.is_set():
                for key, _ in self._selector.select(_LOOK_S):
                    if key.fileobj is self._server:
                        line = self._server.accept()[0]
                        self._heard[line] = b""
                        self._selector.register(line, selectors.EVENT_READ)
                    else:
                        self._read(key.fileobj)
                # Where the store is gone, so are those who would read this.
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._tell()

    def _read(self, line: Any) -> None:
        try:
            text = line.recv(256)
        except OSError:
            text = b""
        self._heard[line] += text
        if line not in self._who and self._heard[line].endswith(b"\n"):
            password, _, who = self._heard[line].decode(errors="replace").strip().partition(" ")
            if password == self._password:
                process, _, life = who.partition(" ")
                self._who[line] = int(process), int(life)
                self._since.pop(self._who[line], None)
        if not text or (line not in self._who and len(self._heard[line]) > 256):
            self._selector.unregister(line)
            line.close()
            del self._heard[line]
            who = self._who.pop(line, None)
            if who is not None and who not in self._who.values():
                self._since[who] = time.monotonic()

    def _tell(self) -> None:
        for who, since in list(self._since.items()):
            if time.monotonic() - since > _GRACE_S:
                del self._since[who]
                declare_ended(self._client, *who)
