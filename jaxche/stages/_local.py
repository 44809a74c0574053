"""The wire between stages of one process: from device to device, never through the host."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax

from jaxche.sharding import Device
from jaxche.stages._base import Tag, WireClosedError

_NOTHING = object()


class Mailbox:
    """Holds what has arrived until the stage it is for takes it."""

    def __init__(self) -> None:
        self._arrived: dict[Tag, Any] = {}
        self._changed = threading.Condition()
        self._error: Exception | None = None

    def put(self, tag: Tag, tree: Any) -> None:
        """Something has arrived."""
        with self._changed:
            self._arrived[tag] = tree
            self._changed.notify_all()

    def take(self, tag: Tag, timeout_s: float | None = None) -> Any:
        """Wait for something, and take it out.

        Raises:
          TimeoutError: it did not come in time.
          Exception: what :meth:`fail` was given, if it did not come before.
        """
        # What is there already is taken without the lock: a dict gives each entry out once.
        if (tree := self._arrived.pop(tag, _NOTHING)) is not _NOTHING:
            return tree
        with self._changed:
            in_time = self._changed.wait_for(lambda: tag in self._arrived or self._error is not None, timeout_s)
            if tag in self._arrived:
                return self._arrived.pop(tag)
            if self._error is not None:
                raise self._error
            assert not in_time
            raise TimeoutError(f"stage {tag.target} waited {timeout_s:g} s for {tag}, which did not come")

    def fail(self, error: Exception) -> None:
        """Nothing more will come: whoever waits gets this error, the first that was given."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


class LocalWire:
    """Moves trees between devices of this process as soon as they are sent.

    Args:
      devices: the device of each stage.
    """

    def __init__(self, devices: Sequence[Device]):
        self._devices = tuple(devices)
        self._mailbox = Mailbox()

    def send(self, tag: Tag, tree: Any) -> None:
        # The copy starts here and not where it is received: it runs while the receiver still computes.
        self._mailbox.put(tag, jax.device_put(tree, self._devices[tag.target]))

    def receive(self, tag: Tag, like: Any, device: Device) -> Any:
        del like, device  # sender and receiver were traced together, and the sender knows the device
        # No deadline: a stage of this process that fails closes the wire, and a slow one is not an error.
        return self._mailbox.take(tag)

    def publish(self, step: int, loss: Any) -> None:
        """Nobody else has to be told."""

    def read_loss(self, step: int) -> float:
        raise RuntimeError(f"the loss of step {step} is in this process: its last stage returned it")

    def finish(self, step: int, state: Any = None) -> None:
        """What was received is with the stages alone."""

    def rejoin(self, like_state: Any) -> None:
        """Nothing outlives the process."""

    def close(self) -> None:
        self._mailbox.fail(WireClosedError("the wire was closed while a stage waited on it"))
