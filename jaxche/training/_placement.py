"""Where a replica lives: the contract, one device, and a sharded replica on several devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.sharding import (
    Device,
    FullShard,
    HybridShard,
    HybridShardGradOp,
    Layout,
    NoShard,
    ShardGradOp,
    ShardingStrategy,
    batch_size,
    devices,
    sharded_update,
    value_and_grad,
)

# ``begin(params, model_state, opt_state)`` makes what a replica keeps, under the names of its trees.
Begin: TypeAlias = Callable[[Any, Any, Any], dict[str, Any]]


class BatchPlacement(Protocol):
    """What the clock needs to know of a replica's devices.

    Attributes:
      devices: all of them, in two axes.
    """

    devices: np.ndarray

    def put(self, batch: Any) -> Any:
        """A batch as the compiled step takes it."""
        ...


class Placement(BatchPlacement, Protocol):
    """What local programs and the merge need to know of a replica's devices.

    Trees of arrays have a leading axis of 1, the replica's row of the ``[R, ...]`` view; trees inside programs do not,
    unless they are called named trees.

    Attributes:
      devices: ``[copies, shards]``: what is sharded is cut along a row, and rows hold the same.
      compiler_options: of its programs.
      makes_pieces: whether parameters that a function makes are made where they belong, piece by piece.
    """

    compiler_options: Any
    makes_pieces: bool

    def with_layout(self, params: Any) -> Placement:
        """This place, with the layout of parameters of these shapes decided."""
        ...

    def resized(self, width: int) -> Placement:
        """The same devices as rows of ``width``."""
        ...

    def specs(self, name: str, tree: Any) -> Any:
        """How a named tree is cut: a PartitionSpec (without the replica axis) a leaf, or one for all."""
        ...

    def value_and_grad(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``(params, model_state, batch, rng) -> ((loss, (metrics, model_state)), grads)``, for use inside ``jit``."""
        ...

    def update(self, tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """One optimizer step inside ``jit``: ``(params, opt_state)``."""
        ...

    def constrain(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Keep named trees where :meth:`specs` says, inside ``jit``."""
        ...

    def start(self, begin: Begin, params: Any, model_state: Any, opt_state: Any) -> dict[str, Any]:
        """Named trees made here from parameters (a tree; for an island also a function that makes it) and states."""
        ...

    def move(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Named trees that lie on these devices in another way, laid out as :meth:`specs` says."""
        ...

    def assemble(self, name: str, tree: Any, pieces: Sequence[Any]) -> Any:
        """A named tree from its pieces, a sequence over this process's devices for each leaf of ``tree``."""
        ...


def is_local(placement: BatchPlacement) -> bool:
    """Whether some of its devices belong to this process."""
    return any(d.process_index == jax.process_index() for d in placement.devices.flat)


def spans_processes(placement: BatchPlacement) -> bool:
    """Whether several processes drive it together."""
    return len({d.process_index for d in placement.devices.flat}) > 1


def devices_by_process() -> dict[int, list[Device]]:
    """All devices, in order, by the number of the process that has them."""
    found: dict[int, list[Device]] = {}
    for device in sorted(devices(), key=lambda d: d.process_index):
        found.setdefault(device.process_index, []).append(device)
    return found


def drop_replica_axis(tree: Any) -> Any:
    """Drop the leading replica axis inside a compiled program (no copy there)."""
    return jax.tree.map(lambda x: x[0], tree)


def add_replica_axis(tree: Any) -> Any:
    """Put the leading replica axis back."""
    return jax.tree.map(lambda x: x[None], tree)


def without_replica_axis(tree: Any) -> Any:
    """Shapes and dtypes of one replica's arrays, without their leading axis of 1."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


class DevicePlacement:
    """A replica on one device: programs as they are, arrays where they are."""

    def __init__(self, device: Device):
        self._device, self.compiler_options, self.makes_pieces = device, None, False
        self.devices = np.array([[device]], dtype=object)

    def with_layout(self, params: Any) -> DevicePlacement:
        return self

    def resized(self, width: int) -> DevicePlacement:
        return self

    def specs(self, name: str, tree: Any) -> Any:
        return P()

    def value_and_grad(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(call, has_aux=True)

    def update(self, tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    def constrain(self, trees: dict[str, Any]) -> dict[str, Any]:
        return trees

    def start(self, begin: Begin, params: Any, model_state: Any, opt_state: Any) -> dict[str, Any]:
        host = jax.tree.map(jnp.asarray, (params, model_state, opt_state))
        return jax.jit(begin)(*jax.device_put(host, self._device))

    def move(self, trees: dict[str, Any]) -> dict[str, Any]:
        return trees

    def assemble(self, name: str, tree: Any, pieces: Sequence[Any]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), [piece for (piece,) in pieces])

    def put(self, batch: Any) -> Any:
        # NumPy arrays travel with the call itself, several times faster than by device_put.
        numpy = all(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch))
        return batch if numpy else jax.device_put(batch, self._device)


# Small enough, or of a kind, to be whole on every device.
_WHOLE = ("model_state", "progress", "sums", "scaled", "index", "worth", "stride", "counts", "not_finite")


class ShardedPlacement:
    """A replica on a mesh.

    Args:
      mesh: its devices, with the axes of the strategy.
      strategy: how parameters, gradients and optimizer state are cut.
      shapes: the parameters' shapes, once known.
    """

    def __init__(self, mesh: Mesh, strategy: ShardingStrategy, shapes: Any = None):
        self._mesh, self._strategy, self.makes_pieces = mesh, strategy, True
        self.devices = mesh.devices.reshape(-1, mesh.devices.shape[-1])
        self._layout = None if shapes is None else Layout(strategy, mesh, shapes)
        self._local = [d for d in self.devices.flat if d.process_index == jax.process_index()]

    @property
    def compiler_options(self) -> Any:
        return self._decided.compiler_options

    @property
    def _decided(self) -> Layout:
        assert self._layout is not None, "laid_out(params) comes first"
        return self._layout

    def with_layout(self, params: Any) -> ShardedPlacement:
        return ShardedPlacement(self._mesh, self._strategy, params)

    def resized(self, width: int) -> ShardedPlacement:
        """The same devices as rows of ``width``, each row a copy: what is cut is cut into ``width`` pieces."""
        knobs = {"min_size": self._strategy.min_size, "scanned": self._strategy.scanned}
        if isinstance(self._strategy, (FullShard, HybridShard)):
            strategy = HybridShard(width, **knobs)
        elif isinstance(self._strategy, (ShardGradOp, HybridShardGradOp)):
            strategy = HybridShardGradOp(width, **knobs)
        else:
            strategy = NoShard(**knobs)
        return ShardedPlacement(strategy.mesh(list(self.devices.flat)), strategy, self._decided.shapes)

    def specs(self, name: str, tree: Any) -> Any:
        if name == "params":
            return self._decided.params_specs
        if name == "grads":
            return self._decided.grads_specs
        if name in _WHOLE:
            return P()
        # Optimizer states and whatever else keeps one value a parameter.
        return self._decided.mirrored(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree))

    def value_and_grad(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return value_and_grad(call, self._decided)

    def update(self, tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        return sharded_update(tx, self._decided, grads, opt_state, params, **extra)

    def constrain(self, trees: dict[str, Any]) -> dict[str, Any]:
        return lax.with_sharding_constraint(trees, self._shardings(trees))

    def start(self, begin: Begin, params: Any, model_state: Any, opt_state: Any) -> dict[str, Any]:
        # What a function makes is made in pieces: no device ever holds all of it.
        given = () if callable(params) else (jax.tree.map(self._put, params, self._decided.params_specs),)

        def program(model_state: Any, opt_state: Any, *given: Any) -> dict[str, Any]:
            return begin(given[0] if given else params(), model_state, opt_state)

        opt_state = jax.tree.map(self._put, opt_state, self._decided.mirrored(opt_state))
        arguments = (self._put(model_state, P()), opt_state, *given)
        shapes = jax.eval_shape(program, *arguments)
        return jax.jit(program, out_shardings=self._shardings(shapes))(*arguments)

    def move(self, trees: dict[str, Any]) -> dict[str, Any]:
        return jax.jit(_same, out_shardings=self._shardings(trees))(trees)

    def assemble(self, name: str, tree: Any, pieces: Sequence[Any]) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        arrays = []
        for leaf, sharding, here in zip(leaves, jax.tree.leaves(self._shardings({name: tree})), pieces, strict=True):
            if len(here) < len(self._local):
                # A meeting of islands of different sizes has one row of this one; the other rows get theirs from it.
                here = [jax.device_put(here[i % len(here)], device) for i, device in enumerate(self._local)]
            shape = (1, *leaf.shape[1:])
            arrays.append(jax.make_array_from_single_device_arrays(shape, sharding, list(here)))
        return jax.tree.unflatten(treedef, arrays)

    def put(self, batch: Any) -> Any:
        # Over all devices; whole on each if they do not divide it, as the last of an epoch may be.
        layout = self._decided
        return self._put(batch, P(layout.axes) if layout.splits(batch_size(batch)) else P())

    def _put(self, tree: Any, spec: P) -> Any:
        """Host arrays here, each process its own part."""
        sharding = NamedSharding(self._decided.mesh, spec)

        def placement(x: Any) -> jax.Array:
            if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
                return jax.device_put(x, sharding)
            host = np.asarray(x)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(placement, tree)

    def _shardings(self, trees: dict[str, Any]) -> dict[str, Any]:
        """A NamedSharding for every leaf of named trees."""
        return {name: self._named(self.specs(name, tree), tree) for name, tree in trees.items()}

    def _named(self, specs: Any, tree: Any) -> Any:
        def broadcast(spec: P, part: Any) -> Any:
            return jax.tree.map(lambda x: NamedSharding(self._decided.mesh, P(None, *spec) if x.ndim else P()), part)

        return jax.tree.map(broadcast, specs, tree, is_leaf=lambda x: isinstance(x, P))


def _same(tree: Any) -> Any:
    return tree
