"""Lines from the processes of an elastic run to process 0: one that ends is known at once, by the end of its line."""

from __future__ import annotations

import contextlib
import json
import queue
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

import jax

from jaxche.distributed._listener import Listener, connect, own_address

# Where process 0 can be reached, and which lives have ended.
_ADDRESS, _ENDED = "jaxche/lines", "jaxche/ended/"
# Something between the machines may end a line too. A process that lives has a new one by then.
_GRACE_S = 1.0
_LOOK_S, _AGAIN_S, _CONNECT_S, _JOIN_S = 0.2, 0.2, 5.0, 10.0
# After so many failures in a row process 0 is gone, or cannot be reached: then silence has to do.
_FAILURES = 50


def keep_line(client: Any, process: int, life: int, coordinator: str) -> Line:
    """Let the others know at once when this process ends.

    The operating system closes the sockets of a process that ends, however it does. One that is stopped, and a machine
    that is lost, close nothing: those are detected by their silence.

    Args:
      client: of the store of the run.
      process: the number of this process.
      life: which the store knows it by.
      coordinator: ``host:port`` at which the others reach process 0.
    """
    return _Exchange(client, own_address(coordinator)) if process == 0 else _Single(client, process, life)


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
                address = json.loads(self._client.blocking_key_value_get(_ADDRESS, 1000))
                with connect(address, self._name, _CONNECT_S) as line:
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
        self._accepted: queue.SimpleQueue[tuple[socket.socket, tuple[int, int]]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        # Who is at the other end of each line, and when those who have none lost it.
        self._who: dict[socket.socket, tuple[int, int]] = {}
        self._since: dict[tuple[int, int], float] = {}
        self._listener = Listener(host, self._begin)
        client.key_value_set(_ADDRESS, json.dumps(self._listener.address))
        self._thread.start()

    def _begin(self, line: socket.socket, text: str) -> None:
        process, life = map(int, text.split())
        self._accepted.put((line, (process, life)))

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._selector)
            stack.callback(lambda: [line.close() for line in self._who])
            stack.callback(self._take)
            stack.callback(self._listener.close)
            while not self._over.is_set():
                for key, _ in self._selector.select(_LOOK_S):
                    self._read(key.fileobj)
                self._take()
                # Where the store is gone, so are those who would read this.
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._tell()

    def _take(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                line, who = self._accepted.get_nowait()
                self._selector.register(line, selectors.EVENT_READ)
                self._who[line] = who
                self._since.pop(who, None)

    def _read(self, line: Any) -> None:
        try:
            ended = not line.recv(256)
        except OSError:
            ended = True
        if ended:
            self._selector.unregister(line)
            line.close()
            who = self._who.pop(line)
            if who not in self._who.values():
                self._since[who] = time.monotonic()

    def _tell(self) -> None:
        for who, since in list(self._since.items()):
            if time.monotonic() - since > _GRACE_S:
                del self._since[who]
                declare_ended(self._client, *who)
