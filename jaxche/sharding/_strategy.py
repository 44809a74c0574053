"""Sharding strategies: which trees are cut into slices, over which axes of a mesh, and how a tree lies under one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.averaging import path_names
from jaxche.messages import brief, whole_number
from jaxche.sharding._picture import devices_svg

REPLICA, SHARD = "replica", "shard"
Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable


@dataclass(frozen=True)
class ShardingStrategy:
    """Base of the strategies: a mesh, and a sharding on it for each leaf of a tree of parameters.

    A leaf is cut along its largest axis that the number of devices divides. Of several equal axes it is the first,
    whose slices are contiguous in memory. A leaf without such an axis stays whole on every device.

    Args:
      min_size: leaves of fewer elements stay whole on every device: gathering them costs more than it saves.
      scanned: names of subtrees whose leaves have a leading axis of layers that a ``lax.scan`` runs over, such as
        ``("layers",)`` or ``("decoder/layers",)``. That axis is never cut, so that each layer can be gathered in its
        turn, see the page on sharding.

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
            names = [f"device {i}" for i in range(self._example_devices)]
        else:
            axes, names = dict(mesh.shape), [f"{d.platform} {d.id}" for d in mesh.devices.flat]
        cut = {"params": self.shards_params, "grads": self.shards_state, "opt": self.shards_state}
        return devices_svg(str(self), cut, axes, names)

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

    def within_node(self) -> ShardingStrategy:
        """The strategy of the devices of one node: a hybrid strategy is another one there."""
        return self

    def across_nodes(self, intra_node_size: int) -> ShardingStrategy:
        """The same slices over nodes of so many devices, each node with a copy of them."""
        return self

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

    def across_nodes(self, intra_node_size: int) -> ShardingStrategy:
        return HybridShard(intra_node_size, min_size=self.min_size, scanned=self.scanned)


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

    def across_nodes(self, intra_node_size: int) -> ShardingStrategy:
        return HybridShardGradOp(intra_node_size, min_size=self.min_size, scanned=self.scanned)


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
        write = f"{type(self).__name__}(intra_node_size=8)"  # no number of devices: that would start JAX's backend
        size = whole_number("intra_node_size", self.intra_node_size, 1, write)
        object.__setattr__(self, "intra_node_size", size)

    def within_node(self) -> ShardingStrategy:
        inside = FullShard if self.shards_params else ShardGradOp
        return inside(min_size=self.min_size, scanned=self.scanned)

    def across_nodes(self, intra_node_size: int) -> ShardingStrategy:
        return replace(self, intra_node_size=intra_node_size)

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


class Leaf(NamedTuple):
    """The layout of one leaf.

    Attributes:
      path: its names from the root, e.g. ``("dense", "kernel")``.
      shape: of the whole leaf.
      dtype: its dtype.
      axis: the axis that is cut over ``shard``; None if the leaf is whole on every device.
      why: the reason why it is whole under a strategy that cuts, else empty.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxche.sharding import FullShard, Layout
      >>> Layout(FullShard(), FullShard().mesh(jax.devices()[:2]), {"w": jnp.zeros((3, 4))}).leaves[0].axis
      1
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    axis: int | None
    why: str = ""


class Layout:
    """Shardings of parameters, gradients, optimizer state and batch.

    Args:
      strategy: a strategy, e.g. ``FullShard()``.
      mesh: from ``strategy.mesh()``.
      params: pytree of arrays or ``jax.ShapeDtypeStruct``; only shapes and dtypes are read.

    Attributes:
      strategy: as given.
      mesh: the mesh, its axes automatic.
      leaves: a :class:`Leaf` for each leaf of ``params``, in order.
      shapes: ``params`` as ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: a mesh without the axes of the strategy, or with others.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxche.sharding import FullShard, Layout
      >>> layout = Layout(FullShard(), FullShard().mesh(jax.devices()[:2]), {"b": jnp.zeros(3), "w": jnp.zeros((3, 4))})
      >>> tuple(layout.params["w"].spec), tuple(layout.params["b"].spec)
      ((None, 'shard'), ())
      >>> layout.leaves[0].why
      'no axis of (3,) is divisible by 2'
    """

    def __init__(self, strategy: ShardingStrategy, mesh: Mesh, params: Any):
        if not isinstance(mesh, Mesh):
            raise ValueError(f"mesh={brief(mesh)} is not a mesh; write mesh = strategy.mesh(devices)")
        if mesh.axis_names != strategy.axes:
            raise ValueError(
                f"the mesh has the axes {mesh.axis_names}, but {type(strategy).__name__} needs {strategy.axes}; "
                "write mesh = strategy.mesh(devices)"
            )
        nodes = getattr(strategy, "intra_node_size", None)
        if nodes is not None and mesh.shape[SHARD] != nodes:
            raise ValueError(
                f"the mesh has {mesh.shape[SHARD]} devices along {SHARD!r}, but {strategy} has "
                f"intra_node_size={nodes}; write mesh = strategy.mesh(devices)"
            )
        # With explicit axes, jax.make_mesh's default, every operation of a loss function would need a sharding.
        self.mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        self.strategy = strategy
        try:
            shapes = jax.eval_shape(lambda tree: tree, params)
        except TypeError:
            raise ValueError(f"params={brief(params)} must be a tree of arrays or of jax.ShapeDtypeStruct") from None
        self.shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
        paths, self._treedef = jax.tree.flatten_with_path(self.shapes)
        self.leaves = tuple(self._leaf(path_names(path), leaf.shape, leaf.dtype) for path, leaf in paths)

    @property
    def devices(self) -> int:
        """Number of devices of the mesh; a batch is cut over all of them."""
        return self.mesh.size

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh; a batch is cut over all of them."""
        return self.mesh.axis_names

    @property
    def gathers(self) -> bool:
        """Whether a forward pass gathers parameters; none may have an axis that the devices divide."""
        return self.strategy.shards_params and any(leaf.axis is not None for leaf in self.leaves)

    @property
    def params_specs(self) -> Any:
        """A ``PartitionSpec`` for each parameter."""
        return self._specs(self.strategy.shards_params)

    @property
    def grads_specs(self) -> Any:
        """A ``PartitionSpec`` for each gradient, and for the leaves of the optimizer state that mirror it."""
        return self._specs(self.strategy.shards_state)

    @property
    def params(self) -> Any:
        """A ``NamedSharding`` for each parameter."""
        return self._on_mesh(self.params_specs)

    @property
    def grads(self) -> Any:
        """A ``NamedSharding`` for each gradient."""
        return self._on_mesh(self.grads_specs)

    @property
    def batch(self) -> NamedSharding:
        """The ``NamedSharding`` of every array of a batch: its leading axis over all devices."""
        return NamedSharding(self.mesh, P(self.axes))

    @property
    def replicated(self) -> NamedSharding:
        """The ``NamedSharding`` of scalars, model state and metrics: whole on every device."""
        return NamedSharding(self.mesh, P())

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """Options of ``jax.jit`` for programs with this layout.

        The CPU compiler removes optimization barriers early, and then merges the second gather of a parameter with the
        first, which keeps whole parameters from the forward to the backward pass. Other compilers do not.
        """
        if self.strategy.shards_params and self.mesh.devices.flat[0].platform == "cpu":
            return {"xla_disable_hlo_passes": "cse_barrier_expander"}
        return None

    def opt_state(self, tx: Any) -> Any:
        """A ``NamedSharding`` for each leaf of an optimizer's state.

        A leaf mirrors a parameter if its path ends in the parameter's path and its shape in the parameter's shape
        (stacked copies, as in L-BFGS, have axes in front); it is cut as that parameter's gradient. All other leaves,
        such as counters, are whole on every device. Updates are computed on global arrays, so they are correct under
        every layout; only memory depends on it.

        Args:
          tx: any ``optax.GradientTransformation``.
        """
        return self._on_mesh(self.mirrored(jax.eval_shape(tx.init, self.shapes)))

    def mirrored(self, tree: Any) -> Any:
        """A ``PartitionSpec`` for each leaf of any tree: that of the gradient it mirrors, as for :meth:`opt_state`."""
        by_path = {leaf.path: leaf for leaf in self.leaves}

        def spec(path: Any, x: Any) -> P:
            names = path_names(path)
            # The longest ending wins: {"w": ..., "a": {"w": ...}} has two parameters whose paths end in w.
            found = next((by_path[names[i:]] for i in range(len(names) + 1) if names[i:] in by_path), None)
            if found is None or found.axis is None or x.shape[-len(found.shape) :] != found.shape:
                return P()
            return _spec(found.axis + len(x.shape) - len(found.shape))

        return jax.tree.map_with_path(spec, tree)

    def splits(self, rows: int, accumulate: int = 1) -> bool:
        """Whether the number of devices, times that of micro-batches, divides ``rows``."""
        return rows % (self.devices * accumulate) == 0

    def _leaf(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> Leaf:
        strategy, count = self.strategy, self.mesh.shape[SHARD]
        if not strategy.shards_state:
            return Leaf(path, shape, dtype, None)
        if not shape:
            return Leaf(path, shape, dtype, None, "a scalar")
        elements = math.prod(shape)
        if elements < strategy.min_size:
            return Leaf(path, shape, dtype, None, f"{elements} elements, fewer than min_size={strategy.min_size}")
        scanned = any(_contains(path, tuple(name.split("/"))) for name in strategy.scanned)
        fitting = [i for i, n in enumerate(shape) if n and n % count == 0 and not (scanned and i == 0)]
        if not fitting:
            besides = " besides that of the layers" if scanned else ""
            return Leaf(path, shape, dtype, None, f"no axis of {shape}{besides} is divisible by {count}")
        return Leaf(path, shape, dtype, max(fitting, key=lambda i: shape[i]))

    def _specs(self, cut: bool) -> Any:
        return self._treedef.unflatten([_spec(leaf.axis if cut else None) for leaf in self.leaves])

    def _on_mesh(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def _spec(axis: int | None) -> P:
    return P() if axis is None else P(*[None] * axis, SHARD)


def _contains(path: tuple[str, ...], names: tuple[str, ...]) -> bool:
    return any(path[i : i + len(names)] == names for i in range(len(path) - len(names) + 1))
