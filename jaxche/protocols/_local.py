"""The wire between stages of one process: from device to device, never through the host."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax

from jaxche.protocols._base import Device, Tag, WireClosedError


class LocalWire:
    """Moves trees between devices of this process as soon as they are sent.

    Args:
      devices: the device of each stage.
    """

    def __init__(self, devices: Sequence[Device]):
        self._devices = tuple(devices)
        self._arrived: dict[Tag, Any] = {}
        self._changed = threading.Condition()
        self._closed = False

    def send(self, tag: Tag, tree: Any) -> None:
        # The copy starts here and not where it is received: it runs while the receiver still computes.
        tree = jax.device_put(tree, self._devices[tag.target])
        with self._changed:
            self._arrived[tag] = tree
            self._changed.notify_all()

    def receive(self, tag: Tag, like: Any, device: Device) -> Any:
        del like, device  # sender and receiver were traced together, and the sender knows the device
        # No deadline: a stage of this process that fails closes the wire, and a slow one is not an error.
        with self._changed:
            self._changed.wait_for(lambda: tag in self._arrived or self._closed)
            if self._closed:
                raise WireClosedError(f"the wire was closed while stage {tag.target} waited for {tag}")
            return self._arrived.pop(tag)

    def publish(self, step: int, loss: Any) -> None:
        """Nobody else has to be told."""

    def read_loss(self, step: int) -> float:
        raise RuntimeError(f"the loss of step {step} is in this process: its last stage returned it")

    def finish(self, step: int, state: Any = None) -> None:
        """What was received is with the stages alone."""

    def rejoin(self, like_state: Any) -> None:
        """Nothing outlives the process."""

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._arrived.clear()
            self._changed.notify_all()
