"""The coordinator of an elastic run: a process with JAX's coordination service and the liveness server.

By default JAX starts its coordination service in process 0, and the service dies with it. The coordinator imports no
JAX. It ends some seconds after the last process of its run, but not before the launcher has closed its standard input,
as the system does when the launcher is killed. It ends at once, with code 1, if a process comes to replace another when
all have died: the run can only be started again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from jaxche.distributed._environment import HEARTBEAT_TIMEOUT
from jaxche.distributed._listener import host_and_port, is_loopback, own_address
from jaxche.distributed._liveness_server import INTERVAL_S, LEAST_TIMEOUT_S, TIMEOUT_S, LivenessServer

# JAX's variable for the ``host:port`` where its coordinator listens.
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
# Seconds without a heartbeat until jaxlib counts a process as dead; the liveness server detects it earlier.
JAX_HEARTBEAT_TIMEOUT_S = 100
# Seconds for a replacement of the last process to connect.
_EMPTY_S = 5.0
# Seconds for a coordinator of this machine to answer, and its pause after `accept` has failed.
_ANSWER_S, _PAUSE_S = 5.0, 0.1


class Coordinator(NamedTuple):
    """A coordinator that was started, and the address of its :class:`LivenessServer`."""

    process: subprocess.Popen[bytes]
    liveness: list[Any]


def start_coordinator(
    address: str,
    num_processes: int,
    bind: str | None = None,  # where it listens; default: at `address`
    start_s: float = math.inf,  # until it ends if no process has connected
    is_launcher: bool = False,  # whether it stays as long as this process
    env: Mapping[str, str] = os.environ,
) -> Coordinator:
    """Start the coordinator that is reached at ``address``, in a session of its own, and wait until it serves."""
    heartbeat_timeout_s(env)
    arguments = [address, bind or address, str(num_processes), str(start_s)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *arguments],
        # jaxlib logs what it does, and jaxche may be a checkout that is not installed, also in this folder ("").
        env={"TF_CPP_MIN_LOG_LEVEL": "2", **env, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        stdin=subprocess.PIPE if is_launcher else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        line = process.stdout.readline()
        if not line:
            errors = process.stderr.read().decode(errors="replace").strip()[-500:]
            process.communicate()
            raise RuntimeError(f"the coordinator of the run cannot serve at {address}: {errors}")
    return Coordinator(process, json.loads(line))


def heartbeat_timeout_s(env: Mapping[str, str]) -> float:
    """The seconds without a heartbeat until a process counts as dead: ``JAXCHE_HEARTBEAT_TIMEOUT``, or the default."""
    text = env.get(HEARTBEAT_TIMEOUT) or str(TIMEOUT_S)
    with contextlib.suppress(ValueError):
        if LEAST_TIMEOUT_S <= float(text) < math.inf:
            return float(text)
    raise ValueError(
        f"{HEARTBEAT_TIMEOUT}={text!r} must be seconds, at least {LEAST_TIMEOUT_S:g}: a process sends a "
        f"heartbeat every {INTERVAL_S:g} s. Write: {HEARTBEAT_TIMEOUT}={TIMEOUT_S:g}"
    )


def _is_input_open() -> bool:
    # Closed from the start, and the number 0 may be that of another file; or a terminal, which is no launcher, and
    # stops a process in the background that reads.
    if sys.stdin is None or os.isatty(0):
        return False
    return not select.select([0], [], [], 0)[0] or bool(os.read(0, 1))


def liveness_here(port: int) -> str | None:
    """The address in JSON of the :class:`LivenessServer` of the coordinator that serves at a port of this machine."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_ANSWER_S)
        sock.connect(_name(port))
        if not _is_of_this_user(sock):  # anybody may take a name
            return None
        with sock.makefile(encoding="utf8") as text:
            return text.read()
    return None


def _is_of_this_user(sock: socket.socket) -> bool:
    """Whether a process of this user is at the other end of a local socket."""
    ids = struct.Struct("3i")  # of the process, the user and the group
    return ids.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ids.size))[1] == os.geteuid()


def _name(port: int) -> str:
    return f"\0jaxche-coordinator-{port}"


def _serve_address(port: int, liveness: str) -> None:
    """Give the address of the :class:`LivenessServer` to the processes of this machine, on a thread."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(_name(port))
    server.listen()

    def serve() -> None:
        while True:
            try:
                with server.accept()[0] as sock:
                    if _is_of_this_user(sock):  # the address has the token
                        sock.sendall(liveness.encode())  # it fits into the buffer of the socket: no wait for a reader
            except OSError:
                time.sleep(_PAUSE_S)

    threading.Thread(target=serve, daemon=True).start()


def coordinator_bind(address: str, env: Mapping[str, str]) -> str:
    """``host:port`` where the coordinator that is reached at ``address`` listens."""
    host, port = host_and_port(address)
    bind = env.get(_BIND) or (address if is_loopback(host) else f"[::]:{port}")
    if not host_and_port(bind)[1].isdigit():
        raise ValueError(f"{_BIND}={bind!r} must be 'host:port'. Write: {_BIND}=0.0.0.0:{port}")
    return bind


def serve_coordinator(
    address: str, bind: str, num_processes: int, start_s: float = math.inf, liveness: str = ""
) -> NoReturn:
    """Serve until the run has ended; the address of the :class:`LivenessServer` is ``liveness``, or is printed."""
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the processes of the run may still write files
        signal.signal(number, signal.SIG_IGN)
    _service = _jax.get_distributed_runtime_service(  # ends with its last reference, which is this one
        bind, num_processes, heartbeat_timeout=JAX_HEARTBEAT_TIMEOUT_S, shutdown_timeout=1, recoverable=True
    )
    timeout_s = heartbeat_timeout_s(os.environ)
    if liveness:
        _, port, _, token = json.loads(liveness)
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
        host = own_address(address) if is_loopback(host_and_port(bind)[0]) else everywhere
        server = LivenessServer(host, timeout_s, port, token)
    else:
        server = LivenessServer(own_address(address), timeout_s)
    if sys.platform == "linux":  # only there a name of a local socket needs no file
        _serve_address(int(host_and_port(address)[1]), json.dumps(server.address))
    if not liveness:
        print(json.dumps(server.address), flush=True)
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # readers of the pipes do not wait for the end of this process
            os.dup2(null, stream.fileno())
    server.serve(_EMPTY_S, start_s, _is_input_open)
    os._exit(int(server.is_run_lost))  # without waiting for clients


if __name__ == "__main__":
    serve_coordinator(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
