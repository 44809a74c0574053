"""Two ways to a process: a local socket for those on its machine, TCP for all others.

A local socket moves a megabyte in a third of the time that TCP takes to the same machine.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from typing import Any

# Only Linux has names for local sockets that leave no file behind.
_LOCAL = sys.platform == "linux"
# What waits in a local socket for its reader; a system may allow less.
_BUFFER_BYTES = 1 << 20


def listen(host: str) -> tuple[list[socket.socket], list[Any]]:
    """Listen at an address of this machine.

    Returns:
      The sockets to accept on, and what :func:`connect` needs to know, as a JSON value.
    """
    servers, name = [socket.create_server((host, 0))], None
    where = servers[0].getsockname()[:2]
    if _LOCAL:
        # Nobody else has this name, so whoever finds it is on this machine. It is no secret: the system lists it.
        name = f"jaxche-{secrets.token_hex(16)}"
        servers.append(socket.socket(socket.AF_UNIX))
        servers[1].bind(f"\0{name}")
        servers[1].listen()
    return servers, [*where, name]


def connect(where: list[Any], timeout_s: float) -> socket.socket:
    """Connect to who listens there, by the shorter way.

    Args:
      where: what :func:`listen` gave.
      timeout_s: how long to wait for another machine.

    Raises:
      OSError: nobody listens.
    """
    host, port, name = where
    if _LOCAL and name is not None:
        sock = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # it is on another machine, or in a container of its own
            sock.connect(f"\0{name}")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            return sock
        sock.close()
    sock = socket.create_connection((host, port), timeout=timeout_s)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
