"""Sockets between the processes of a run: a listener that accepts only connections that begin with its token.

A greeting is ``token | length of the text, one byte | text``. From a connection without the token at most 33 bytes are
read, and they are compared and never parsed. On Linux, processes of one machine use a local socket instead of TCP: it
transfers a megabyte in a third of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("jaxche")

# Seconds for a greeting, and the number of connections that may wait for theirs. One more replaces the oldest: peers
# send their greeting at once, and connect again if they were replaced.
_GREETING_S, _MAX_GREETINGS = 5.0, 64
# Connections that the system queues; it may allow fewer.
_BACKLOG = 1024
# Pause after `accept` has failed, e.g. because the process has too many open files, and between attempts to connect.
_PAUSE_S, _RETRY_S = 0.1, 0.05
_TOKEN_BYTES, _MAX_TEXT = 32, 255
_ACCEPTED = b"\x06"
# Only Linux has local sockets with names that are not files.
_LOCAL = sys.platform == "linux"
# Size of the buffer of a local socket; the system may allow less.
_BUFFER_BYTES = 1 << 20


class Listener:
    """Accepts connections that begin with its token, in its own thread, and closes all others."""

    def __init__(
        self,
        host: str,
        # Gets each accepted socket, which blocks, and the text of its greeting; the socket is closed if it raises.
        on_connection: Callable[[socket.socket, str], None],
        *,
        port: int = 0,  # 0: a free one
        token: str | None = None,  # 32 characters; None for random ones
    ):
        self._on_connection, self._token = on_connection, token or secrets.token_hex(_TOKEN_BYTES // 2)
        family, both = (socket.AF_INET6 if ":" in host else socket.AF_INET), host == "::"
        server = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        self._servers, name = [server], None
        if _LOCAL:
            # No secret: the system lists it.
            name = f"jaxche-{secrets.token_hex(16)}"
            self._servers.append(socket.socket(socket.AF_UNIX))
            self._servers[1].bind(f"\0{name}")
            self._servers[1].listen(_BACKLOG)
        # The argument of `connect`, as a JSON value. Any process that can read it can connect.
        self.address: list[Any] = [*self._servers[0].getsockname()[:2], name, self._token]
        # The sockets of those that wait for their greeting, the oldest first.
        self._greetings: dict[Any, socket.socket] = {}
        self._loop, self._closing = asyncio.SelectorEventLoop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="jaxche-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; accepted connections stay."""
        with contextlib.suppress(RuntimeError):  # it was closed before
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())
        for sock in (*self._servers, *self._greetings.values()):
            sock.close()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._accept(server)) for server in self._servers]
            await self._closing.wait()
            for task in tasks:
                task.cancel()

    async def _accept(self, server: socket.socket) -> None:
        server.setblocking(False)
        while True:
            try:
                sock = (await self._loop.sock_accept(server))[0]
            except OSError:  # the system refused, e.g. because the process has too many open files
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._greetings) >= _MAX_GREETINGS:
                oldest = next(iter(self._greetings))
                del self._greetings[oldest]
                oldest.cancel()
            self._greetings[self._loop.create_task(self._greet(sock))] = sock
            await asyncio.sleep(0)  # to read the greeting, which has usually arrived

    async def _greet(self, sock: socket.socket) -> None:
        """Read a greeting and hand its connection over; close one with a wrong token, or that comes too late."""
        received, is_handed_over = bytearray(), False
        try:
            async with asyncio.timeout(_GREETING_S):
                while (missing := _missing(received)) > 0:
                    read = await self._loop.sock_recv(sock, missing)
                    received += read
                    is_valid = len(received) < _TOKEN_BYTES or hmac.compare_digest(
                        received[:_TOKEN_BYTES], self._token.encode()
                    )
                    if not read or not is_valid:
                        return
            sock.send(_ACCEPTED)
            sock.setblocking(True)
            self._on_connection(sock, received[_TOKEN_BYTES + 1 :].decode())
            is_handed_over = True
        except Exception as error:
            if not _missing(received):
                _log.debug("a connection with the right token was refused: %s", error)
        finally:
            self._greetings.pop(asyncio.current_task(), None)
            if not is_handed_over:
                sock.close()


def _missing(received: bytearray) -> int:
    """The number of bytes to read next: the rest of the token and the length, then the rest of the text."""
    head = _TOKEN_BYTES + 1
    return (head if len(received) < head else head + received[_TOKEN_BYTES]) - len(received)


def connect(address: list[Any], text: str, timeout_s: float) -> socket.socket:
    """A blocking socket to the :class:`Listener` at ``address``, a local one if possible; OSError if none answers."""
    host, port, name, token = address
    greeting = text.encode()
    assert len(greeting) <= _MAX_TEXT, "a greeting is short"
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        sock = _open(host, port, name, left_s)
        # A listener closes no accepted connection, so try again after a close, but not after a timeout.
        with contextlib.suppress(ConnectionResetError, BrokenPipeError), contextlib.ExitStack() as stack:
            stack.enter_context(sock)
            try:
                sock.settimeout(left_s)
                sock.sendall(token.encode() + bytes([len(greeting)]) + greeting)
                if sock.recv(1) == _ACCEPTED:
                    sock.settimeout(None)
                    stack.pop_all()
                    return sock
            except TimeoutError:
                break
        time.sleep(_RETRY_S)
    raise TimeoutError(f"{host}:{port} did not accept a connection within {timeout_s:g} s")


def _open(host: str, port: int, name: str | None, timeout_s: float) -> socket.socket:
    if _LOCAL and name is not None:
        sock = socket.socket(socket.AF_UNIX)
        # With a timeout it is an error, and no wait, if too many connections wait for a listener that is stopped.
        sock.settimeout(timeout_s)
        with contextlib.suppress(OSError):  # or it is on another machine or in another container
            sock.connect(f"\0{name}")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            return sock
        sock.close()
    sock = socket.create_connection((host, port), timeout=timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def own_address(coordinator: str) -> str:
    """The IP address of this machine for the others: the one from which it reaches ``host:port`` of process 0."""
    host, port = host_and_port(coordinator)
    with socket.create_connection((host, int(port)), timeout=10.0) as probe:
        own = probe.getsockname()[0]
    if is_loopback(own) and not is_loopback(host):
        # Debian's /etc/hosts resolves a machine's own name to 127.0.1.1, which other machines cannot reach. Take the
        # address of the default route. Connecting a datagram socket sends nothing.
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect(("192.0.2.1", 9))
            own = route.getsockname()[0]
    return own


def host_and_port(address: str) -> tuple[str, str]:
    """The parts of ``host:port``, an IPv6 address without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def is_loopback(host: str) -> bool:
    """Whether a host is ``localhost`` or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
