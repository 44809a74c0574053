"""Detects which processes of an elastic run have ended, from one connection of each.

The operating system closes the sockets of a process that ends, so its end is detected at once. A process that is
stopped and a machine that is lost close nothing; they are detected by the absence of heartbeats.
"""

from __future__ import annotations

import contextlib
import math
import queue
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxche.distributed._listener import Listener

# Seconds between the heartbeats of a process, and the default of those without one until it counts as dead. A shorter
# stop only delays the others: a swap storm, or a virtual machine that moves to another host.
INTERVAL_S, TIMEOUT_S = 0.5, 15.0
# The least timeout: some heartbeats may be late.
LEAST_TIMEOUT_S = 4 * INTERVAL_S
# Seconds for a live process to connect again: something between the machines may close connections too. A local socket
# closes only if its process ends, or connects again after this one was stopped for long.
_GRACE_S, _LOCAL_GRACE_S = 1.0, 0.1
_POLL_S = 0.1
# A process is alive if a heartbeat comes more than _ALIVE_S seconds after the question, and dead if none has come
# _SILENT_S seconds after it.
_ALIVE_S, _SILENT_S = 2 * INTERVAL_S, LEAST_TIMEOUT_S
# The answers.
ALIVE, NOT_ALIVE = b"1", b"0"
# What a process sends in place of a heartbeat if no process is left that it could join.
RUN_LOST = b"!"
# If two steps are further apart than this (in seconds, or as a part of the timeout), this process itself was stopped,
# and its clock with it: what the others sent meanwhile is read after that.
_PAUSE_S, _PAUSE_PART = 3.0, 0.25


class Incarnation(NamedTuple):
    """A process, and how many processes have had its index so far, with this one."""

    process: int
    number: int


class LivenessServer:
    """Accepts a connection of each process, and sends to all of them which processes have ended.

    A process greets with its incarnation and sends a byte per heartbeat. It receives a line, ``process incarnation``,
    for each incarnation that has ended. Who greets with number 0 asks whether the process is alive, and gets a byte.
    """

    def __init__(self, host: str, timeout_s: float = TIMEOUT_S, port: int = 0, token: str | None = None):
        self._timeout_s, self._pause_s = timeout_s, min(_PAUSE_S, _PAUSE_PART * timeout_s)
        self.ended: set[Incarnation] = set()
        self._accepted: queue.SimpleQueue[tuple[socket.socket, Incarnation]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        # The clock of all times below, and when it was read last.
        self._clock = self._looked = time.monotonic()
        # The incarnation of each connection, the last heartbeat of each, and until when those without one may return.
        self._peers: dict[socket.socket, Incarnation] = {}
        self._heartbeats: dict[Incarnation, float] = {}
        self._missing: dict[Incarnation, float] = {}
        # The process that each question is about, and when it came.
        self._questions: dict[socket.socket, tuple[int, float]] = {}
        self._listener = Listener(host, self._accept, port=port, token=token)
        self.is_run_lost = False  # whether a process came when all others had died
        self.address = self._listener.address

    @property
    def alive(self) -> set[Incarnation]:
        """The incarnations that have connected and have not ended."""
        return self._heartbeats.keys() - self.ended

    def serve(
        self, empty_s: float, start_s: float = math.inf, has_launcher: Callable[[], bool] = lambda: False
    ) -> None:
        """Serve until no process has been alive for ``empty_s`` seconds, or none has connected within ``start_s``."""
        end, has_started = time.monotonic() + start_s, False
        while not self.is_run_lost and time.monotonic() < end:
            self.step()
            if has_launcher():  # without it dead processes are not replaced, so the end of the last one is the end
                end, has_started, empty_s = math.inf, True, 0.0
            elif self.alive:
                end = math.inf
            elif self._heartbeats or has_started:
                end = min(end, time.monotonic() + empty_s)

    def step(self) -> None:
        """Read heartbeats, or wait a moment for them, and send the incarnations that have ended."""
        ready = self._selector.select(_POLL_S)
        looked, self._looked = self._looked, time.monotonic()
        if self._looked - looked <= self._pause_s:
            self._clock += self._looked - looked
        for key, _ in ready:
            self._read(key.fileobj)
        self._register_accepted()
        silent = [one for one in self.alive if self._clock - self._heartbeats[one] > self._timeout_s]
        gone = [one for one, until in self._missing.items() if self._clock > until]
        for one in (*silent, *gone):
            self._missing.pop(one, None)
            self._end(one)
        for sock in list(self._questions):
            self._answer(sock)

    def close(self) -> None:
        """Close the listener and all connections."""
        self._listener.close()
        self._register_accepted()
        for sock in list(self._peers):
            self._drop(sock)
        for sock in self._questions:
            sock.close()
        self._selector.close()

    def _accept(self, sock: socket.socket, text: str) -> None:
        process, number = map(int, text.split())
        self._accepted.put((sock, Incarnation(process, number)))

    def _register_accepted(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                sock, peer = self._accepted.get_nowait()
                sock.setblocking(False)
                if not peer.number:
                    self._questions[sock] = peer.process, self._clock
                    continue
                self._selector.register(sock, selectors.EVENT_READ)
                self._peers[sock], self._heartbeats[peer] = peer, self._clock
                self._missing.pop(peer, None)
                self._send(sock, *sorted(self.ended))  # which drops it if it is gone again
                for earlier in [one for one in self.alive if one.process == peer.process and one.number < peer.number]:
                    self._end(earlier)

    def _answer(self, sock: socket.socket) -> None:
        """Answer whether a process is alive, once that is known."""
        process, asked = self._questions[sock]
        beats = [self._heartbeats[one] for one in self.alive if one.process == process]
        last = max(beats, default=-math.inf)
        # What a process sent before its death may be read somewhat later.
        is_alive = last > asked + _ALIVE_S
        if beats and not is_alive and self._clock - max(last, asked) <= _SILENT_S:
            return
        del self._questions[sock]
        with sock, contextlib.suppress(OSError):
            sock.send(ALIVE if is_alive else NOT_ALIVE)

    def _read(self, sock: Any) -> None:
        try:
            read = sock.recv(256)
        except OSError:
            read = b""
        self.is_run_lost |= RUN_LOST in read
        if not read:
            self._drop(sock)
        else:
            self._heartbeats[self._peers[sock]] = self._clock

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()
        peer = self._peers.pop(sock)
        if peer not in self._peers.values() and peer not in self.ended:
            grace_s = _LOCAL_GRACE_S if sock.family == socket.AF_UNIX else _GRACE_S
            self._missing[peer] = self._clock + grace_s

    def _end(self, one: Incarnation) -> None:
        self.ended.add(one)
        for sock in list(self._peers):
            self._send(sock, one)

    def _send(self, sock: socket.socket, *ended: Incarnation) -> None:
        lines = "".join(f"{process} {number}\n" for process, number in ended).encode()
        try:
            is_sent = sock.send(lines) == len(lines)
        except OSError:
            is_sent = False
        if not is_sent:  # it reads nothing; when it connects again it gets all lines
            self._drop(sock)
