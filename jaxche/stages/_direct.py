"""Direct and Pipeline: stages send activations and gradients straight to the next stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxche.sharding import Device
from jaxche.stages._peer import PeerWire
from jaxche.stages._schedule import checked_micro_batch_size
from jaxche.stages._wire import Mailbox, Tag, Wire, check_timeout


@dataclasses.dataclass(frozen=True)
class Direct:
    """Each stage sends its output straight to the next one, the whole batch at a time.

    One stage computes while the others wait, so it saves memory and not time. :class:`~jaxche.Pipeline` overlaps the
    stages over the same wires.

    Between devices of one process arrays are copied by ``jax.device_put``, which starts before they are computed.
    Between processes of a ``jax.distributed`` run (``local_stages=``) they go through sockets, which work between any
    two kinds of device: Unix sockets on one Linux machine, TCP otherwise.

    Args:
      timeout_s: seconds that a stage waits for a stage of another process, to receive or to send, before an error.

    Raises:
      ValueError: a ``timeout_s`` that is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxche
      >>> double = lambda params, batch: batch * params
      >>> add = lambda params, x: x + params
      >>> model = jaxche.Partitioned([double, add], lambda y, batch: y.mean(), jaxche.Direct())
      >>> loss, grads = model.value_and_grad([2.0, 10.0], jnp.array([1.0, 2.0, 3.0]))
      >>> float(loss), [float(g) for g in grads]
      (14.0, [2.0, 1.0])
    """

    timeout_s: float = 300.0
    micro_batch_size: None = dataclasses.field(default=None, init=False, repr=False)  # the batch stays whole
    schedule: str = dataclasses.field(default="1f1b", init=False, repr=False)  # all are equal with one micro-batch

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)

    def wire(self, stages: Sequence[int], n_stages: int, devices: Sequence[Device | None]) -> Wire:
        """The wire between the stages of this process and of all others."""
        return LocalWire(devices) if len(stages) == n_stages else PeerWire(stages, n_stages, devices, self.timeout_s)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Micro-batches follow each other through the stages, so that stages compute at the same time.

    M micro-batches through S equal stages take (M + S - 1)/M times the work of one stage. Stages are idle for the share
    (S - 1)/(M + S - 1) of the time, which is small with many micro-batches.

    Args:
      micro_batch_size: examples in a micro-batch; must divide the batch.
      schedule: with ``"1f1b"`` stage s keeps the activations of at most S - s micro-batches, with ``"gpipe"`` of all M.
        Both take the same time.
      timeout_s: seconds that a stage waits for a stage of another process, to receive or to send, before an error.

    Raises:
      ValueError: a size below 1, an unknown schedule, or a ``timeout_s`` that is not positive.

    References:
      Huang et al., *GPipe*, NeurIPS 2019; Narayanan et al., *PipeDream*, SOSP 2019.

    Example:
      >>> import jaxche
      >>> jaxche.Pipeline(micro_batch_size=8)
      Pipeline(micro_batch_size=8, schedule='1f1b', timeout_s=300.0)
    """

    micro_batch_size: int
    schedule: str = "1f1b"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        size = checked_micro_batch_size(self.micro_batch_size, self.schedule)
        object.__setattr__(self, "micro_batch_size", size)

    def wire(self, stages: Sequence[int], n_stages: int, devices: Sequence[Device | None]) -> Wire:
        """The same wire as that of :class:`~jaxche.Direct`."""
        return Direct(self.timeout_s).wire(stages, n_stages, devices)


class LocalWire(Wire):
    """The wire between stages of one process: trees are copied from device to device, never through the host."""

    def __init__(self, devices: Sequence[Device]):
        self._devices = tuple(devices)
        self._mailbox = Mailbox()

    def send(self, tag: Tag, tree: Any) -> None:
        # The sender starts the copy, so that it overlaps with the computation of the receiver.
        self._mailbox.put(tag, jax.device_put(tree, self._devices[tag.target]))

    def receive(self, tag: Tag, like: Any, device: Device) -> Any:
        del like, device  # the stages were traced together, and the sender knows the device
        # No timeout: a stage of this process that fails closes the wire, and a slow one is not an error.
        return self._mailbox.take(tag)

    def read_loss(self, step: int) -> float:
        raise RuntimeError(f"the loss of step {step} is in this process: its last stage returned it")

    def close(self) -> None:
        self._mailbox.close()
