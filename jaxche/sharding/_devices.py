"""The devices that replicas live on, also where JAX lists only those of this process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxche.sharding._strategy import Device


@dataclass(frozen=True)
class RemoteDevice:
    """An accelerator that only the JAX of its own process knows, as all others know it.

    Args:
      process_index: the process that has it.
      platform: as JAX names it, e.g. ``"gpu"``.
      device_kind: e.g. ``"NVIDIA L4"``.
      id: its number there.

    Example:
      >>> RemoteDevice(process_index=1, platform="gpu", device_kind="NVIDIA L4", id=0)
      RemoteDevice(process_index=1, platform='gpu', device_kind='NVIDIA L4', id=0)
    """

    process_index: int
    platform: str
    device_kind: str
    id: int


@dataclass
class _LocalBackends:
    """The devices of a run whose accelerators JAX lists in their own process only; empty for other runs."""

    everywhere: tuple[Device, ...] = ()
    private: frozenset[Device] = frozenset()


@functools.cache
def _local_backends() -> _LocalBackends:
    """Those of this process."""
    return _LocalBackends()


def devices() -> list[Device]:
    """The devices that are replicas by default, of all processes, in the same order everywhere.

    They are ``jax.devices()``, but for runs in which some processes train on accelerators and others on the CPU, or
    several on one GPU. There the accelerators are known to JAX in their own process only, and ``jax.devices()`` lists
    the CPU devices of all. This lists the accelerators of the processes that have some (those of other processes as
    :class:`~jaxche.sharding.RemoteDevice`) and the CPU devices of the others.

    Returns:
      Devices, e.g. for ``jaxche.Trainer(replicas=)``.

    Example:
      >>> import jax, jaxche
      >>> jaxche.devices() == jax.devices()
      True
    """
    return list(_local_backends().everywhere or jax.devices())


def local_devices() -> list[Device]:
    """Those of :func:`devices` that this process has.

    Returns:
      Devices.

    Example:
      >>> import jax
      >>> local_devices() == jax.local_devices()
      True
    """
    return [device for device in devices() if device.process_index == jax.process_index()]


def is_private(device: Device) -> bool:
    """Whether no program over it can span processes, because JAX knows it in its own process only.

    Args:
      device: of :func:`devices`, or any of JAX's.

    Returns:
      Whether it is an accelerator of a run that keeps them apart.

    Example:
      >>> is_private(devices()[0])
      False
    """
    return device in _local_backends().private


def know_devices(everywhere: Sequence[Device]) -> None:
    """Say what :func:`devices` lists from now on; ``jaxche.initialize`` does, where accelerators are kept apart.

    Args:
      everywhere: the devices of all processes, in the same order on each.

    Example:
      >>> know_devices(jax.devices())
      >>> devices() == jax.devices()
      True
    """
    private, backends = frozenset(everywhere) - frozenset(jax.devices()), _local_backends()
    backends.everywhere, backends.private = tuple(everywhere) if private else (), private
