"""The state of a run on its way to a replacement, beside a bare copy over the same link.

Two processes, one sends. *bare* is ``sendall`` and ``recv_into`` over TCP. *bytes* sends host arrays as an elastic run
does, with a checksum and over its own kind of socket. *state* begins and ends with arrays of JAX.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

TIMES, LEAVES = 5, 8
# Of the bare copy.
GOAL = 2.0


def benchmark(mb: float, link: Any) -> int:
    """Print the seconds of each way; the exit code says whether the goal is reached, or 77: no such link."""
    if link is None:
        return measure(mb, "127.0.0.1", [])
    import slow_link

    inside = ["ip", "netns", "exec"]
    try:
        with slow_link.machines(link, 2) as (here, there):
            command = [*inside, here, sys.executable, __file__, "measure", str(mb), slow_link.address(0)]
            return subprocess.run([*command, *inside, there], check=False).returncode
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(f"chaos: skipped: {error}")
        return slow_link.CANNOT


def measure(mb: float, host: str, sender: list[str]) -> int:
    """Receive at this address from a process that is started with these words before its own."""
    size = int(mb * 1e6 / 4 / LEAVES)
    print(f"{mb:g} MB in {LEAVES} float32 arrays, median of {TIMES}")
    took = {}
    for what in ("bare", "bytes", "state"):
        with socket.create_server((host, 0)) as server:
            port = server.getsockname()[1]
            command = [*sender, sys.executable, __file__, what, str(size), host, str(port)]
            with subprocess.Popen(command) as process:
                control = server.accept()[0]
                with control, control.makefile("rw") as lines:
                    took[what] = receive(what, size, host, lines)
            if process.returncode:
                return 1
        print(f"{what:6s} {took[what]:6.3f} s {took[what] / took['bare']:5.2f} of bare", flush=True)
    return 0 if took["state"] <= GOAL * took["bare"] else 1


def receive(what: str, size: int, host: str, lines: Any) -> float:
    """Receive as often, and return the median of the seconds from the request to the end."""
    import queue

    from jaxche.distributed import Listener

    accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    took = []
    listener = Listener(host, lambda sock, text: accepted.put(sock))
    with socket.create_server((host, 0)) as bare:
        lines.write(json.dumps({"bare": bare.getsockname()[1], "address": listener.address}) + "\n")
        lines.flush()
        for _ in range(TIMES + 1):
            lines.readline()  # the sender is ready
            began = time.perf_counter()
            lines.write("go\n")
            lines.flush()
            with bare.accept()[0] if what == "bare" else accepted.get() as sock:
                {"bare": receive_bare, "bytes": receive_bytes, "state": receive_state}[what](sock, size)
            took.append(time.perf_counter() - began)
    listener.close()
    return statistics.median(took[1:])


def receive_bare(sock: socket.socket, size: int) -> None:
    import numpy as np

    view = memoryview(np.empty(4 * size * LEAVES, np.uint8))
    while view:
        view = view[sock.recv_into(view) :]


def receive_bytes(sock: socket.socket, size: int) -> Any:
    from jaxche.distributed._transfer import receive_bytes, receive_message

    return receive_bytes(sock, receive_message(sock, lambda: None)[1], lambda: None)


def receive_state(sock: socket.socket, size: int) -> None:
    import jax
    import numpy as np

    from jaxche.training._membership import _arrays

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {str(i): jax.ShapeDtypeStruct((size,), np.float32, sharding=sharding) for i in range(LEAVES)}
    jax.block_until_ready(_arrays(wanted, receive_bytes(sock, size)))


def send(what: str, size: int, receiver: str, port: int) -> None:
    """The other process."""
    import jax
    import numpy as np

    from jaxche.distributed import connect
    from jaxche.distributed._transfer import send_state
    from jaxche.training._membership import _whole

    arrays = [np.random.default_rng(i).normal(size=size).astype(np.float32) for i in range(LEAVES)]
    leaves = [jax.device_put(array) for array in arrays] if what == "state" else arrays
    with socket.create_connection((receiver, port)) as control, control.makefile("rw") as lines:
        where = json.loads(lines.readline())
        for _ in range(TIMES + 1):
            lines.write("ready\n")
            lines.flush()
            lines.readline()
            if what == "bare":
                with socket.create_connection((receiver, where["bare"])) as sock:
                    for array in arrays:
                        sock.sendall(array.data)
                continue
            hosted = [_whole(leaf) for leaf in leaves] if what == "state" else leaves
            with connect(where["address"], "state", 10.0) as sock:
                send_state(sock, {}, hosted, lambda: None)


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        sys.exit(measure(float(sys.argv[2]), sys.argv[3], sys.argv[4:]))
    send(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
