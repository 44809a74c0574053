"""Sharding strategies: which trees are cut into slices, and over which axes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxche.cadence import whole_number
from jaxche.messages import brief
from jaxche.sharding._layout import REPLICA, SHARD, Layout
from jaxche.sharding._picture import devices_svg

Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable


@dataclass(frozen=True)
class ShardingStrategy:
    """Base of the strategies: a mesh, and a sharding on it for each leaf of a tree of parameters.

    A leaf is cut along its largest axis that the number of devices divides. Of several equal axes it is the first,
    whose slices are contiguous in memory. A leaf without such an axis stays whole on every device.

    Args:
      min_size: leaves of fewer elements stay whole on every device: gathering them costs more than it saves.
      scanned: names of subtrees whose leaves have a leading axis of layers that a ``lax.scan`` runs over, such as
        ``("layers",)`` or ``("decoder/layers",)``. That axis is never cut: a scan takes one layer at a time, and
        would have to gather all layers for each.

    Raises:
      ValueError: ``min_size`` is below 0, or ``scanned`` is not a tuple of names.

    Example:
      >>> from jaxche.sharding import FullShard
      >>> isinstance(FullShard(), ShardingStrategy), str(FullShard(min_size=1024))
      (True, 'FullShard(min_size=1024)')
    """

    min_size: int = field(default=0, kw_only=True)
    scanned: tuple[str, ...] = field(default=(), kw_only=True)

    axes: ClassVar[tuple[str, ...]] = (SHARD,)
    # Whether each device keeps only its slice of the parameters; of the gradients and the optimizer state.
    shards_params: ClassVar[bool] = True
    shards_state: ClassVar[bool] = True

    def __post_init__(self):
        object.__setattr__(self, "min_size", whole_number("min_size", self.min_size, 0, "min_size=0"))
        if not isinstance(self.scanned, tuple) or not all(isinstance(name, str) for name in self.scanned):
            raise ValueError(f'scanned={self.scanned!r} is not a tuple of names; write scanned=("layers",)')

    def __str__(self) -> str:
        own = [repr(getattr(self, f.name)) for f in fields(self) if not f.kw_only]
        common = [f for f in fields(self) if f.kw_only and getattr(self, f.name) != f.default]
        named = own + [f"{f.name}={getattr(self, f.name)!r}" for f in common]
        return f"{type(self).__name__}({', '.join(named)})"

    def _repr_html_(self) -> str:
        return self.draw()

    def draw(self, mesh: Mesh | None = None) -> str:
        """A picture of the slices on each device; notebooks show it as the value of a cell.

        Args:
          mesh: from :meth:`mesh`; default: a few example devices.

        Returns:
          An ``<svg>`` element; in a notebook: ``IPython.display.SVG(strategy.draw(mesh))``.
        """
        if mesh is None:
            axes = dict(zip(self.axes, self._shape(self._example_devices), strict=True))
            return devices_svg(self, axes, [f"device {i}" for i in range(self._example_devices)])
        return devices_svg(self, dict(mesh.shape), [f"{d.platform} {d.id}" for d in mesh.devices.flat])

    @property
    def _example_devices(self) -> int:
        return 4

    def mesh(self, devices: Sequence[Device] | None = None) -> Mesh:
        """The mesh of the strategy.

        Args:
          devices: the devices in order, those of a node next to each other. Default: ``jax.devices()``.

        Returns:
          A mesh with the automatic axis ``shard``; for the hybrid strategies ``replica`` and ``shard``.

        Raises:
          ValueError: no devices, or a number of devices that ``intra_node_size`` does not divide.
        """
        flat = np.array(jax.devices() if devices is None else devices, dtype=object).ravel()
        if flat.size == 0:
            raise ValueError("devices=[] has no devices; write strategy.mesh(jax.devices())")
        if not all(hasattr(device, "id") for device in flat):
            raise ValueError(f"devices={brief(devices)} must be devices; write strategy.mesh(jax.devices())")
        shape = self._shape(flat.size)
        return Mesh(flat.reshape(shape), self.axes, axis_types=(AxisType.Auto,) * len(shape))

    def shardings(self, params: Any, mesh: Mesh) -> Any:
        """The sharding of each parameter between steps.

        Args:
          params: pytree of arrays or ``jax.ShapeDtypeStruct``.
          mesh: from :meth:`mesh`.

        Returns:
          A pytree of ``NamedSharding``, structured as ``params``.

        Raises:
          ValueError: a mesh of other axes.
        """
        return Layout(self, mesh, params).params

    def _shape(self, devices: int) -> tuple[int, ...]:
        return (devices,)


@dataclass(frozen=True)
class FullShard(ShardingStrategy):
    """Every device keeps a slice of parameters, gradients and optimizer state (ZeRO-3, PyTorch's ``FULL_SHARD``).

    Parameters are gathered for the forward pass and again for the backward pass, and gradients are reduce-scattered.
    For parameters of ``P`` bytes on ``W`` devices, a device sends :math:`3 (W - 1) / W \\cdot P` bytes a step.

    Args:
      min_size: leaves of fewer elements stay whole on every device.
      scanned: names of subtrees whose first axis is never cut, see :class:`ShardingStrategy`.

    References:
      Rajbhandari et al., *ZeRO: memory optimizations toward training trillion parameter models*, SC 2020;
      Zhao et al., *PyTorch FSDP*, VLDB 2023.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> strategy = FullShard()
      >>> mesh = strategy.mesh(jax.devices()[:2])
      >>> p = jax.device_put(jnp.array([10.0, 20.0, 30.0, 40.0]), strategy.shardings(jnp.zeros(4), mesh))
      >>> [shard.data.tolist() for shard in p.addressable_shards]
      [[10.0, 20.0], [30.0, 40.0]]
    """


@dataclass(frozen=True)
class ShardGradOp(ShardingStrategy):
    """Parameters whole on every device, gradients and optimizer state in slices (ZeRO-2, ``SHARD_GRAD_OP``).

    Gradients are reduce-scattered, each device updates its slice, and the updated parameters are gathered:
    :math:`2 (W - 1) / W \\cdot P` bytes a step.

    Args:
      min_size: leaves of fewer elements stay whole on every device.
      scanned: names of subtrees whose first axis is never cut, see :class:`ShardingStrategy`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> strategy = ShardGradOp()
      >>> strategy.shardings(jnp.zeros((4, 3)), strategy.mesh(jax.devices()[:2])).is_fully_replicated
      True
    """

    shards_params: ClassVar[bool] = False


@dataclass(frozen=True)
class NoShard(ShardingStrategy):
    """Everything whole on every device, gradients all-reduced (plain data parallelism, ``NO_SHARD``).

    :math:`2 (W - 1) / W \\cdot P` bytes a step.

    Args:
      min_size: leaves of fewer elements stay whole on every device.
      scanned: names of subtrees whose first axis is never cut, see :class:`ShardingStrategy`.

    Example:
      >>> import jax
      >>> NoShard().mesh(jax.devices()[:4]).axis_names
      ('shard',)
    """

    shards_params: ClassVar[bool] = False
    shards_state: ClassVar[bool] = False


@dataclass(frozen=True)
class _Hybrid(ShardingStrategy):
    intra_node_size: int = 4

    axes: ClassVar[tuple[str, ...]] = (REPLICA, SHARD)

    def __post_init__(self):
        super().__post_init__()
        write = f"{type(self).__name__}(intra_node_size={jax.local_device_count()})"
        size = whole_number("intra_node_size", self.intra_node_size, 1, write)
        object.__setattr__(self, "intra_node_size", size)

    @property
    def _example_devices(self) -> int:
        return 2 * self.intra_node_size

    def _shape(self, devices: int) -> tuple[int, ...]:
        if devices % self.intra_node_size:
            fitting = max(n for n in range(1, min(devices, self.intra_node_size) + 1) if devices % n == 0)
            raise ValueError(
                f"intra_node_size={self.intra_node_size} does not divide the {devices} devices; "
                f"write {type(self).__name__}(intra_node_size={fitting})"
            )
        return (devices // self.intra_node_size, self.intra_node_size)


@dataclass(frozen=True)
class HybridShard(_Hybrid):
    """:class:`FullShard` inside a node, copies of it across nodes (PyTorch's ``HYBRID_SHARD``).

    Gathers and reduce-scatters stay on the fast links of a node; across nodes only slices of gradients are
    all-reduced. For parameters of ``P`` bytes on ``R`` nodes of ``n`` devices, a device sends
    :math:`3 (n - 1) / n \\cdot P + 2 (R - 1) / R \\cdot P / n` bytes a step.

    Args:
      intra_node_size: devices in a node; must divide the devices of the mesh.

    Raises:
      ValueError: ``intra_node_size`` below 1; in :meth:`mesh`: not dividing the devices.

    Example:
      >>> import jax
      >>> HybridShard(intra_node_size=2).mesh(jax.devices()[:4]).shape_tuple
      (('replica', 2), ('shard', 2))
    """


@dataclass(frozen=True)
class HybridShardGradOp(_Hybrid):
    """:class:`ShardGradOp` inside a node, copies of it across nodes (PyTorch's ``_HYBRID_SHARD_ZERO2``).

    :math:`2 (n - 1) / n \\cdot P + 2 (R - 1) / R \\cdot P / n` bytes a step on ``R`` nodes of ``n`` devices.

    Args:
      intra_node_size: devices in a node; must divide the devices of the mesh.

    Raises:
      ValueError: ``intra_node_size`` below 1; in :meth:`mesh`: not dividing the devices.

    Example:
      >>> HybridShardGradOp(2).shards_params, HybridShardGradOp(2).shards_state
      (False, True)
    """

    shards_params: ClassVar[bool] = False
