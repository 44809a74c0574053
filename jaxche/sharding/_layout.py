"""The layout of a tree of parameters on a mesh under a strategy: the axis along which each leaf is cut."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.averaging import path_names
from jaxche.messages import brief

REPLICA, SHARD = "replica", "shard"


class Slicing(Protocol):
    """The attributes of a :class:`~jaxche.sharding.ShardingStrategy` that determine a layout."""

    @property
    def min_size(self) -> int: ...

    @property
    def scanned(self) -> tuple[str, ...]: ...

    axes: ClassVar[tuple[str, ...]]
    shards_params: ClassVar[bool]
    shards_state: ClassVar[bool]


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

    def __init__(self, strategy: Slicing, mesh: Mesh, params: Any):
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
