"""Point to point: activations and gradients straight from one stage to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxche.sharding import Device
from jaxche.stages._base import Wire
from jaxche.stages._checks import check_micro_batching, check_timeout
from jaxche.stages._local import LocalWire
from jaxche.stages._peer import PeerWire


@dataclasses.dataclass(frozen=True)
class Direct:
    """Stages give their output straight to the next one, the whole batch at a time.

    One stage computes while the others wait: what it buys is memory, not time. For overlap see
    :class:`~jaxche.Pipeline`, which goes by the same wires.

    Between devices of one process arrays are copied by ``jax.device_put``, started when the stage has dispatched its
    work and not when it is done. Between processes of a ``jax.distributed`` run (``local_stages=``) they go through
    sockets, which work between any two kinds of device: local ones on one machine of Linux, TCP otherwise.

    Args:
      timeout_s: how long a stage waits for one of another process before that is an error.

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

    @property
    def micro_batch_size(self) -> None:
        """The batch stays whole."""
        return None

    @property
    def schedule(self) -> str:
        """With one micro-batch all schedules are the same."""
        return "1f1b"

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)

    def wire(self, stages: Sequence[int], n_stages: int, devices: Sequence[Device | None]) -> Wire:
        """The wire between the stages of this process and of all others."""
        return LocalWire(devices) if len(stages) == n_stages else PeerWire(stages, n_stages, devices, self.timeout_s)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Micro-batches go through the stages one behind the other, so that stages compute at the same time.

    M micro-batches through S equal stages take (M + S - 1)/M times the work of one stage: the more micro-batches, the
    smaller the share of time in which stages wait, (S - 1)/(M + S - 1).

    Args:
      micro_batch_size: examples in a micro-batch; must divide the batch.
      schedule: ``"1f1b"``: stage s keeps the activations of at most S - s micro-batches; ``"gpipe"``: of all M. Both
        take the same time.
      timeout_s: how long a stage waits for one of another process before that is an error.

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
        check_micro_batching(self.micro_batch_size, self.schedule)

    def wire(self, stages: Sequence[int], n_stages: int, devices: Sequence[Device | None]) -> Wire:
        """The same wire as that of :class:`~jaxche.Direct`."""
        return Direct(self.timeout_s).wire(stages, n_stages, devices)
