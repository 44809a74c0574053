"""Point to point: activations and gradients straight from one stage to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxche.protocols._base import Device, Wire
from jaxche.protocols._checks import check_micro_batching
from jaxche.protocols._local import LocalWire


@dataclasses.dataclass(frozen=True)
class Direct:
    """Stages give their output straight to the next one, the whole batch at a time.

    One stage computes while the others wait: what it buys is memory, not time. For overlap see
    :class:`~jaxche.Pipeline`, which goes by the same wires.

    Example:
      >>> import jax.numpy as jnp, jaxche
      >>> double = lambda params, batch: batch * params
      >>> add = lambda params, x: x + params
      >>> model = jaxche.Partitioned([double, add], lambda y, batch: y.mean(), jaxche.Direct())
      >>> loss, grads = model.value_and_grad([2.0, 10.0], jnp.array([1.0, 2.0, 3.0]))
      >>> float(loss), [float(g) for g in grads]
      (14.0, [2.0, 1.0])
    """

    micro_batch_size = None
    schedule = "1f1b"

    def wire(self, stages: Sequence[int], n_stages: int, devices: Sequence[Device | None]) -> Wire:
        """The wire between the stages of this process and of all others."""
        return LocalWire(devices)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Micro-batches go through the stages one behind the other, so that stages compute at the same time.

    M micro-batches through S equal stages take (M + S - 1)/M times the work of one stage: the more micro-batches, the
    smaller the share of time in which stages wait, (S - 1)/(M + S - 1).

    Args:
      micro_batch_size: examples in a micro-batch; must divide the batch.
      schedule: ``"1f1b"``: stage s keeps the activations of at most S - s micro-batches; ``"gpipe"``: of all M. Both
        take the same time.

    Raises:
      ValueError: a size below 1 or an unknown schedule.

    References:
      Huang et al., *GPipe*, NeurIPS 2019; Narayanan et al., *PipeDream*, SOSP 2019.

    Example:
      >>> import jaxche
      >>> jaxche.Pipeline(micro_batch_size=8)
      Pipeline(micro_batch_size=8, schedule='1f1b')
    """

    micro_batch_size: int
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        check_micro_batching(self.micro_batch_size, self.schedule)

    def wire(self, stages: Sequence[int], n_stages: int, devices: Sequence[Device | None]) -> Wire:
        """The same wire as that of :class:`~jaxche.Direct`."""
        return Direct().wire(stages, n_stages, devices)
