"""The contract between what runs the stages of a model and what carries their activations and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jaxche.sharding import Device


class Tag(NamedTuple):
    """Names one activation or one gradient in a run.

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
    """Carries what the stages of one process exchange with all others, in its own process or elsewhere.

    Each tag is sent once and received once. Stages of one process call it from a thread each, so it is thread-safe.
    Trees hold arrays of any dtype; gradients have ``None`` where the activation has no float leaf.

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
        """Give a tree to the stage ``tag.target``; does not wait for it. The arrays may still be computing."""

    def receive(self, tag: Tag, like: Any, device: Device) -> Any:
        """The tree sent under ``tag``, on ``device``.

        Args:
          tag: what to wait for.
          like: pytree of ``jax.ShapeDtypeStruct`` that it must match.
          device: where the arrays are wanted.

        Raises:
          TimeoutError: it did not come before the wire's deadline; names the tag.
          WireClosedError: the wire was closed meanwhile.
        """

    def publish(self, step: int, loss: Any) -> None:
        """The process of the last stage tells all others the loss of a step."""

    def read_loss(self, step: int) -> float:
        """The loss of a step as the process of the last stage published it; waits like :meth:`receive`."""
        ...

    def finish(self, step: int, state: Any = None) -> None:
        """The stages of this process have applied ``step``: what they received for it is no longer needed.

        A wire with durable storage first saves ``state``, so that a process started again can rejoin after it.

        Args:
          step: number of the step.
          state: pytree of arrays to go on from, or None where the caller keeps it.
        """

    def rejoin(self, like_state: Any) -> tuple[int, Any] | None:
        """Where a process that was started again goes on.

        Args:
          like_state: pytree of ``jax.ShapeDtypeStruct`` that the saved state must match.

        Returns:
          The next step and the state saved by :meth:`finish`, or None at a fresh start.
        """

    def close(self) -> None:
        """Let go of everything. Whoever waits in :meth:`receive` gets a :class:`WireClosedError`."""


class WireClosedError(ConnectionError):
    """A wire was closed while a stage waited on it.

    Example:
      >>> issubclass(WireClosedError, ConnectionError)
      True
    """


class Protocol_(Protocol):
    """How partitions communicate: how a batch is cut, in which order it is worked off, and by which wire.

    Attributes:
      micro_batch_size: examples in a micro-batch; None for the whole batch at once.
      schedule: name of the order of tasks, one of ``SCHEDULES``.

    Example:
      >>> from jaxche.stages import Pipeline
      >>> protocol: Protocol_ = Pipeline(micro_batch_size=8)
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
          stages: the stages this process holds, ascending.
          n_stages: how many there are in all processes together.
          devices: one entry a stage: its device, or None for a stage of another process.
        """
        ...
