"""The wire between stages of different processes of one ``jax.distributed`` run."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

import jax

# The client of the coordination service has no public name.
from jax._src import distributed as _jax_distributed

from jaxche.distributed import Listener, connect, own_address
from jaxche.sharding import Device
from jaxche.stages._base import Tag, WireClosedError
from jaxche.stages._local import Mailbox
from jaxche.stages._socket import Outgoing, read_arrays
from jaxche.stages._tensors import on_device
from jaxche.stages._trace import describe

# Processes open their wires in the same order, so the number of a wire is its name in all of them.
_NUMBER = itertools.count()


class PeerWire:
    """Sockets between neighbouring stages; between stages of one process the trees stay on the devices.

    The coordination service tells the processes each other's addresses, and the losses. Of the ways between
    processes, sockets are the one that asks for no common order of transfers and no common kind of device, and where
    it was measured they are, from a megabyte on, faster than ``ppermute`` over gloo and ``jax.experimental.transfer``;
    ``scripts/bench_partitions.py`` prints the comparison.

    Args:
      stages: the stages of this process.
      n_stages: how many there are.
      devices: the device of each stage, None for those of other processes.
      timeout_s: how long to wait for another process before that is an error.

    Raises:
      ValueError: no ``jax.distributed`` run, or a stage that another process holds too.
      TimeoutError: no process holds a neighbouring stage.
    """

    def __init__(self, stages: Sequence[int], n_stages: int, devices: Sequence[Device | None], timeout_s: float):
        client = _jax_distributed.global_state.client
        if client is None:
            others = sorted(set(range(n_stages)) - set(stages))
            raise ValueError(
                f"local_stages={list(stages)} leaves stages {others} to other processes, but this one is on its own; "
                "start one a stage with `jaxche launch -n ... script.py` and call jaxche.initialize() first, or write "
                "protocol=jaxche.DataStore(url) for processes that share storage alone"
            )
        self._client: Any = client
        self._devices, self._timeout_s, self._n_stages = tuple(devices), timeout_s, n_stages
        self._name = f"jaxche/wire/{next(_NUMBER)}"
        self._losses = 0
        self._mailbox = Mailbox()
        self._closing = False
        self._incoming: list[socket.socket] = []
        self._outgoing: dict[int, Outgoing] = {}
        host = own_address(str(_jax_distributed.global_state.coordinator_address))
        self._listener = Listener(host, self._begin, local=True)
        try:
            self._meet(stages)
        except BaseException:
            self.close()
            raise

    def send(self, tag: Tag, tree: Any) -> None:
        if (device := self._devices[tag.target]) is not None:
            self._mailbox.put(tag, jax.device_put(tree, device))
        else:
            self._outgoing[tag.target].put(tag, tree)

    def receive(self, tag: Tag, like: Any, device: Device) -> Any:
        del device  # arrays are put where their stage is as soon as they come
        tree = self._mailbox.take(tag, self._timeout_s)
        if self._devices[tag.stage] is not None:
            return tree
        wanted, structure = jax.tree.flatten(like)
        if [(x.dtype, x.shape) for x in tree] != [(x.dtype, x.shape) for x in wanted]:
            raise ValueError(
                f"stage {tag.target} waited for {tag} as {describe(like)}, and got {describe(tree)}; run the same "
                "script with the same batch in every process"
            )
        return jax.tree.unflatten(structure, tree)

    def publish(self, step: int, loss: Any) -> None:
        del step  # a caller may take a step twice, so losses are counted
        self._client.key_value_set(f"{self._name}/loss/{self._losses}", repr(float(loss)))
        # Who takes part in this step has read the loss of the one before.
        if self._losses:
            self._client.key_value_delete(f"{self._name}/loss/{self._losses - 1}")
        self._losses += 1

    def read_loss(self, step: int) -> float:
        loss = self._look_up(f"loss/{self._losses}", f"the loss of step {step} from stage {self._n_stages - 1}")
        self._losses += 1
        return float(loss)

    def finish(self, step: int, state: Any = None) -> None:
        """Wait until all is sent: a process may end after its last step."""
        for outgoing in self._outgoing.values():
            outgoing.flush()

    def rejoin(self, like_state: Any) -> None:
        """Nothing outlives the processes."""

    def close(self) -> None:
        self._closing = True
        self._mailbox.fail(WireClosedError("the wire was closed while a stage waited on it"))
        for outgoing in self._outgoing.values():
            outgoing.close()
        self._listener.close()
        for sock in self._incoming:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _meet(self, stages: Sequence[int]) -> None:
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
            address = json.loads(self._look_up(str(target), f"the address of stage {target}"))
            sock = connect(address, str(stages[0]), self._timeout_s)
            self._outgoing[target] = Outgoing(sock, lambda error, target=target: self._lost(target, error))

    def _look_up(self, key: str, what: str) -> str:
        try:
            return self._client.blocking_key_value_get(f"{self._name}/{key}", round(self._timeout_s * 1e3))
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(
                f"waited {self._timeout_s:g} s for {what}, which did not come; does a process hold it in its "
                "local_stages, and does it still run?"
            ) from error

    def _begin(self, sock: socket.socket, text: str) -> None:
        stage = int(text)
        self._incoming.append(sock)
        threading.Thread(target=self._read, args=(sock, stage), daemon=True).start()

    def _read(self, sock: socket.socket, stage: int) -> None:
        try:
            while True:
                tag, arrays = read_arrays(sock)
                self._mailbox.put(tag, on_device(arrays, self._devices[tag.target]))
        except Exception as error:
            self._lost(stage, error)

    def _lost(self, stage: int, error: Exception) -> None:
        if not self._closing:
            what = f"{type(error).__name__}: {error}"
            self._mailbox.fail(ConnectionError(f"the connection to the process of stage {stage} is lost ({what})"))
