"""The devices of replicas, including private ones, which JAX lists in their own process only."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxche.sharding._strategy import Device


@dataclass(frozen=True)
class RemoteDevice:
    """A private accelerator of another process, which JAX does not list in this one.

    Args:
      process_index: its process.
      platform: its platform in JAX, e.g. ``"gpu"``.
      device_kind: e.g. ``"NVIDIA L4"``.
      id: its id in that process.

    Example:
      >>> RemoteDevice(process_index=1, platform="gpu", device_kind="NVIDIA L4", id=0)
      RemoteDevice(process_index=1, platform='gpu', device_kind='NVIDIA L4', id=0)
    """

    process_index: int
    platform: str
    device_kind: str
    id: int


@functools.cache
def _devices_of_run() -> dict[Device, bool]:
    """The devices that :func:`set_devices` set, and whether each is private; none for runs without private devices."""
    return {}


def devices() -> list[Device]:
    """The devices of all processes that are replicas by default, in the same order everywhere.

    They are ``jax.devices()``, with one exception: runs in which some processes train on accelerators and others on the
    CPU, or several on one GPU. There JAX lists an accelerator in its own process only, and ``jax.devices()`` has the
    CPU devices of all processes. This function lists the accelerators of the processes that have some (those of other
    processes as :class:`~jaxche.sharding.RemoteDevice`) and the CPU devices of the other processes.

    Returns:
      Devices, e.g. for ``jaxche.Trainer(replicas=)``.

    Example:
      >>> import jax, jaxche
      >>> jaxche.devices() == jax.devices()
      True
    """
    return list(_devices_of_run() or jax.devices())


def local_devices() -> list[Device]:
    """The devices of :func:`devices` that belong to this process."""
    return [device for device in devices() if device.process_index == jax.process_index()]


def is_private(device: Device) -> bool:
    """Whether JAX lists a device in its own process only, so that no program over it can span processes."""
    return _devices_of_run().get(device, False)


def set_devices(everywhere: Sequence[Device]) -> None:
    """Set the list of :func:`devices`, equal on all processes; ``jaxche.initialize`` does, for private devices."""
    listed = frozenset(jax.devices())
    private = {device: device not in listed for device in everywhere}
    _devices_of_run().clear()
    if any(private.values()):
        _devices_of_run().update(private)


def without_axes(x: Any) -> Any:
    """An array without explicit axes of a mesh, which its type keeps when ``device_put`` moves it to one device."""
    if not isinstance(x, jax.Array) or AxisType.Explicit not in jax.typeof(x).sharding.mesh.axis_types:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(x))), impl=jax.random.key_impl(x))
    return np.asarray(x)
