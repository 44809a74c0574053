"""The devices on which the processes of an elastic run meet, with connections that were made by those who are there."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

# Neither has a public name: the store in which the processes of a run met, and a second client of the CPU devices.
from jax._src import distributed as _jax_distributed
from jax._src import xla_bridge as _xla_bridge

# Where XLA's clients keep the addresses of gloo's sockets, and what process 0 found out about all devices.
_ADDRESSES, _TOPOLOGY = "cpu:gloo/", "cpu:global_topology/cpu"

# The CPU devices of all processes as the newest client has them, or None for those that jax.devices() lists.
_devices: dict[int, Any] | None = None


def connect_anew() -> None:
    """Let the next merges go over new connections; all that take part call this, and then wait for each other.

    XLA connects the processes of a collective once, for every order of their devices, and keeps the sockets as long as
    the client of the devices lives. Those that lead to a process that has been replaced, or that broke, are of no use
    for ever. So the processes meet on the devices of another client: the same devices, which JAX lists nowhere.
    """
    global _devices
    if jax.process_index() == 0:
        client: Any = _jax_distributed.global_state.client
        client.key_value_delete(_ADDRESSES)
        # The first client of process 0 wrote it, the next would not replace it. Others wait until it is there again.
        client.key_value_delete(_TOPOLOGY)
    _devices = {device.id: device for device in _xla_bridge.make_cpu_client().devices()}


def connected(devices: np.ndarray) -> np.ndarray:
    """The same CPU devices, with the newest connections; others as they are.

    Example:
      >>> import jax
      >>> here = np.array(jax.devices("cpu"))
      >>> connected(here) is here  # nobody has died
      True
    """
    if _devices is None or any(device.platform != "cpu" for device in devices.flat):
        return devices
    return np.array([_devices[device.id] for device in devices.flat], dtype=object).reshape(devices.shape)
