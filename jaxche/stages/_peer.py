"""The wire between stages of different processes of one ``jax.distributed`` run: trees of arrays over sockets.

A message is a JSON header with tag, dtypes and shapes, then the bytes of the arrays. Nothing in it is executed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The client of the coordination service has no public name.
from jax._src import distributed as _jax_distributed

from jaxche.distributed import Listener, aligned, connect, own_address
from jaxche.sharding import Device
from jaxche.stages._buffers import are_small_and_ready, on_device, write_all
from jaxche.stages._stage import describe
from jaxche.stages._wire import Mailbox, Tag, Wire

_LENGTH = struct.Struct(">I")
_MAX_HEADER_BYTES = 1 << 20
# Ready trees up to this size are sent from the caller's thread, which saves the time to wake another one.
_INLINE_BYTES = 1 << 20


class PeerWire(Wire):
    """Sockets between neighbouring stages; between stages of one process trees stay on the devices."""

    # Sockets need no common order of transfers and no common kind of device. From 1 MiB on they were at least as fast
    # as ppermute over gloo and jax.experimental.transfer: scripts/bench_partitions.py compares them. The coordination
    # service carries addresses and losses.

    def __init__(self, stages: Sequence[int], n_stages: int, devices: Sequence[Device | None], timeout_s: float):
        run = _jax_distributed.global_state
        client: Any = run.client
        if client is None:
            others = sorted(set(range(n_stages)) - set(stages))
            raise ValueError(
                f"local_stages={list(stages)} leaves stages {others} to other processes, but this one is on its own; "
                "start one a stage with `jaxche launch -n ... script.py` and call jaxche.initialize() first, or write "
                "protocol=jaxche.DataStore(url) for processes that share storage alone"
            )
        self._client = client
        self._devices, self._timeout_s, self._n_stages = tuple(devices), timeout_s, n_stages
        # Processes open their wires in the same order, so the number of a wire is its name in all of them.
        self._name = f"jaxche/wire/{client.key_value_increment(f'jaxche/wires/{run.process_id}', 1)}"
        self._losses = 0
        self._mailbox = Mailbox()
        self._closing = False
        self._incoming: list[socket.socket] = []
        self._outgoing: dict[int, Outgoing] = {}
        self._listener = Listener(own_address(str(run.coordinator_address)), self._accept)
        try:
            self._connect(stages)
        except BaseException:
            self.close()
            raise
        # Before JAX waits for the other processes at exit, which may wait for a tree of this one.
        atexit.register(self.close)

    def send(self, tag: Tag, tree: Any) -> None:
        if (device := self._devices[tag.target]) is not None:
            self._mailbox.put(tag, jax.device_put(tree, device))
        else:
            self._outgoing[tag.target].put(tag, tree)

    def receive(self, tag: Tag, like: Any, device: Device) -> Any:
        del device  # arrays are put on the device of their stage when they arrive
        tree = self._mailbox.take(tag, self._timeout_s)
        if self._devices[tag.stage] is not None:
            return tree
        expected, structure = jax.tree.flatten(like)
        if [(x.dtype, x.shape) for x in tree] != [(x.dtype, x.shape) for x in expected]:
            raise ValueError(
                f"stage {tag.target} waited for {tag} as {describe(like)}, and got {describe(tree)}; run the same "
                "script with the same batch in every process"
            )
        return jax.tree.unflatten(structure, tree)

    def publish(self, step: int, loss: Any) -> None:
        del step  # a caller may repeat a step, so losses are counted
        self._client.key_value_set(f"{self._name}/loss/{self._losses}", repr(float(loss)))
        # All processes have read the previous loss, because they take part in this step.
        if self._losses:
            self._client.key_value_delete(f"{self._name}/loss/{self._losses - 1}")
        self._losses += 1

    def read_loss(self, step: int) -> float:
        loss = self._get(f"loss/{self._losses}", f"the loss of step {step} from stage {self._n_stages - 1}")
        self._losses += 1
        return float(loss)

    def finish(self, step: int, state: Any = None) -> None:
        """Wait until everything is sent: the process may end after its last step."""
        for outgoing in self._outgoing.values():
            outgoing.flush()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._closing = True
        self._mailbox.close()
        for outgoing in self._outgoing.values():
            outgoing.close()
        self._listener.close()
        for sock in self._incoming:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _connect(self, stages: Sequence[int]) -> None:
        """Publish the address of this process, and connect to the neighbours of its stages."""
        for stage in stages:
            try:
                self._client.key_value_set(f"{self._name}/{stage}", json.dumps(self._listener.address))
            except jax.errors.JaxRuntimeError as error:
                raise ValueError(
                    f"local_stages={list(stages)}: stage {stage} is in another process already; give each stage to "
                    "one process, e.g. local_stages=[jax.process_index()]"
                ) from error
        for target in sorted({stage + side for stage in stages for side in (-1, 1)}):
            if not 0 <= target < self._n_stages or target in stages:
                continue
            address = json.loads(self._get(str(target), f"the address of stage {target}"))
            sock = connect(address, str(stages[0]), self._timeout_s)
            sock.settimeout(self._timeout_s)
            self._outgoing[target] = Outgoing(sock, lambda error, target=target: self._fail(target, error))

    def _get(self, key: str, what: str) -> str:
        try:
            return self._client.blocking_key_value_get(f"{self._name}/{key}", round(self._timeout_s * 1e3))
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(
                f"waited {self._timeout_s:g} s for {what}, which did not come; does a process hold it in its "
                "local_stages, and does it still run?"
            ) from error

    def _accept(self, sock: socket.socket, text: str) -> None:
        self._incoming.append(sock)
        threading.Thread(target=self._read, args=(sock, int(text)), daemon=True).start()

    def _read(self, sock: socket.socket, stage: int) -> None:
        try:
            with jax.enable_x64(True):  # numbers of 64 bits stay such, whatever this thread's own setting
                while True:
                    tag, arrays = read_arrays(sock)
                    self._mailbox.put(tag, on_device(arrays, self._devices[tag.target]))
        except Exception as error:
            self._fail(stage, error)

    def _fail(self, stage: int, error: Exception) -> None:
        if not self._closing:
            what = f"{type(error).__name__}: {error}"
            self._mailbox.fail(
                ConnectionError(
                    f"the connection to the process of stage {stage} is lost ({what}); has it ended before this one? "
                    "All processes must take the same steps"
                )
            )


class Outgoing:
    """The sending end of a connection, with a thread; ``on_error`` is called once, with the first error."""

    def __init__(self, sock: socket.socket, on_error: Callable[[Exception], None]):
        self._sock, self._on_error = sock, on_error
        self._queue: queue.Queue[tuple[Tag, list[Any]] | None] = queue.Queue()
        self._writing = threading.Lock()
        self._failed = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, tag: Tag, tree: Any) -> None:
        """Send a tree as soon as it is computed."""
        leaves = jax.tree.leaves(tree)
        if self._queue.unfinished_tasks == 0 and are_small_and_ready(leaves, _INLINE_BYTES):
            self._write(tag, leaves)
            return
        for leaf in leaves:
            leaf.copy_to_host_async()
        self._queue.put((tag, leaves))

    def flush(self) -> None:
        """Wait until everything is written to the socket."""
        self._queue.join()

    def close(self) -> None:
        """Close the connection, without sending what is in the queue."""
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
            if self._failed:
                return
            try:
                write_arrays(self._sock, tag, [np.asarray(leaf) for leaf in leaves])
            except Exception as error:  # also errors of the computation of the arrays
                self._failed = True
                self._on_error(error)


def write_arrays(sock: socket.socket, tag: Tag, arrays: Sequence[np.ndarray]) -> None:
    """Write one message: the leaves of a tree under a tag."""
    text = json.dumps([*tag, [[array.dtype.name, array.shape] for array in arrays]]).encode()
    # As bytes, because bfloat16 and the like do not support the buffer protocol.
    payload = (np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays)
    write_all(sock.sendmsg, [_LENGTH.pack(len(text)) + text, *payload])


def read_arrays(sock: socket.socket) -> tuple[Tag, list[np.ndarray]]:
    """Read one message of :func:`write_arrays`; EOFError at the end of the stream, ValueError for anything else."""
    length = _LENGTH.unpack(_read_bytes(sock, _LENGTH.size).tobytes())[0]
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes; at most {_MAX_HEADER_BYTES} are read")
    *tag, leaves = json.loads(_read_bytes(sock, length).tobytes())
    arrays = []
    for name, shape in leaves:
        dtype = jnp.dtype(name)
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        arrays.append(_read_bytes(sock, count).view(dtype).reshape(shape))
    return Tag(*tag), arrays


def _read_bytes(sock: socket.socket, count: int) -> np.ndarray:
    taken = aligned(count)
    view, done = taken.data, 0
    while done < count:
        got = sock.recv_into(view[done:], count - done, socket.MSG_WAITALL)
        if got == 0:
            raise EOFError("the other end closed the connection")
        done += got
    return taken
