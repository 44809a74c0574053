"""The contract between the runner of stages and what carries their activations and gradients."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jaxche.sharding import Device


class Tag(NamedTuple):
    """The name of one activation or one gradient in a run.

    Attributes:
      step: number of the step.
      micro: number of the micro-batch in the step, from 0.
      direction: ``"forward"`` for an activation, which goes to ``stage + 1``; ``"backward"`` for a gradient with
        respect to an activation, which goes to ``stage - 1``.
      stage: the stage that produced it.

    Example:
      >>> Tag(step=7, micro=0, direction="backward", stage=1).target
      0
    """

    step: int
    micro: int
    direction: str
    stage: int

    @property
    def target(self) -> int:
        """The stage that consumes it."""
        return self.stage + (1 if self.direction == "forward" else -1)

    def __str__(self) -> str:
        what = "activation" if self.direction == "forward" else "gradient"
        return f"the {what} of micro-batch {self.micro} in step {self.step} from stage {self.stage}"


class Wire(Protocol):
    """Send and receive of activations and gradients between the stages of one process and all other stages.

    Each tag is sent once and received once. Stages call the wire from one thread each, so it is thread-safe.
    Trees hold arrays of any dtype. Gradients have ``None`` where the leaf of the activation is not float. A wire that
    derives from this class inherits a :meth:`publish`, :meth:`finish` and :meth:`rejoin` that do nothing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxche.stages import Direct
      >>> devices = jax.devices()[:2]
      >>> wire = Direct().wire((0, 1), 2, devices)
      >>> wire.send(Tag(step=0, micro=0, direction="forward", stage=0), jnp.ones(2))
      >>> like = jax.ShapeDtypeStruct((2,), jnp.float32)
      >>> wire.receive(Tag(step=0, micro=0, direction="forward", stage=0), like, devices[1]).tolist()
      [1.0, 1.0]
      >>> wire.close()
    """

    def send(self, tag: Tag, tree: Any) -> None:
        """Send a tree to the stage ``tag.target`` without waiting for it. The arrays may still be computing."""

    def receive(self, tag: Tag, like: Any, device: Device) -> Any:
        """Wait for the tree sent under ``tag``.

        Args:
          tag: what to wait for.
          like: pytree of ``jax.ShapeDtypeStruct`` that it must match.
          device: the device of the returned arrays.

        Raises:
          TimeoutError: it did not arrive before the timeout of the wire; names the tag.
          WireClosedError: the wire was closed meanwhile.
        """

    def publish(self, step: int, loss: Any) -> None:
        """Send the loss of a step to all other processes; called by the process of the last stage."""

    def read_loss(self, step: int) -> float:
        """Wait for the published loss of a step, as :meth:`receive` does."""
        ...

    def finish(self, step: int, state: Any = None) -> None:
        """Release what was received for ``step``, which the stages of this process have applied.

        A wire with durable storage first saves ``state``, so that a restarted process can resume after the step.

        Args:
          step: number of the step.
          state: pytree of arrays to resume from, or None if the caller keeps it.
        """

    def rejoin(self, like_state: Any) -> tuple[int, Any] | None:
        """The point from which a restarted process resumes.

        Args:
          like_state: pytree of ``jax.ShapeDtypeStruct`` that the saved state must match.

        Returns:
          The next step and the state saved by :meth:`finish`, or None at a fresh start.
        """

    def close(self) -> None:
        """Release all resources. A stage that waits in :meth:`receive` gets a :class:`WireClosedError`."""


class WireClosedError(ConnectionError):
    """A wire was closed while a stage waited on it.

    Example:
      >>> issubclass(WireClosedError, ConnectionError)
      True
    """


class StageProtocol(Protocol):
    """How stages communicate: the size of micro-batches, the schedule of their tasks, and the wire.

    Attributes:
      micro_batch_size: examples in a micro-batch; None for the whole batch at once.
      schedule: name of the order of tasks, one of ``SCHEDULES``.

    Example:
      >>> from jaxche.stages import Pipeline
      >>> protocol: StageProtocol = Pipeline(micro_batch_size=8)
      >>> protocol.micro_batch_size, protocol.schedule
      (8, '1f1b')
    """

    @property
    def micro_batch_size(self) -> int | None: ...

    @property
    def schedule(self) -> str: ...

    def wire(self, stages: Sequence[int], n_stages: int, devices: Sequence[Device | None]) -> Wire:
        """Open the wire of one process.

        Args:
          stages: the stages of this process, ascending.
          n_stages: number of stages in all processes together.
          devices: one entry a stage: its device, or None for a stage of another process.
        """
        ...


class Mailbox:
    """Trees that have arrived and that their stage has not taken yet; for wires within a process and over sockets."""

    def __init__(self) -> None:
        self._arrived: dict[Tag, Any] = {}
        self._changed = threading.Condition()
        self._error: Exception | None = None

    def put(self, tag: Tag, tree: Any) -> None:
        """Deliver a tree."""
        with self._changed:
            self._arrived[tag] = tree
            self._changed.notify_all()

    def take(self, tag: Tag, timeout_s: float | None = None) -> Any:
        """Wait for a tree and remove it; raises TimeoutError, or the error given to :meth:`fail`."""
        with self._changed:
            self._changed.wait_for(lambda: tag in self._arrived or self._error is not None, timeout_s)
            if tag in self._arrived:
                return self._arrived.pop(tag)
            if self._error is not None:
                raise self._error
            raise TimeoutError(f"stage {tag.target} waited {timeout_s:g} s for {tag}, which did not come")

    def fail(self, error: Exception) -> None:
        """Raise an error in all present and later waits; the first error given stays."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Raise a :class:`WireClosedError` in all present and later waits."""
        self.fail(WireClosedError("the wire was closed while a stage waited on it"))


def check_timeout(timeout_s: Any) -> None:
    """Refuse a timeout that is not a positive number of seconds; sockets and conditions have no infinite one."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s!r} must be positive seconds; write timeout_s=600")
