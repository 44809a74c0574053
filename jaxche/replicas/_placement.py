"""Placements of a replica: the protocol, one device, a mesh of devices; and those of all replicas of a trainer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.averaging import Weighted
from jaxche.messages import brief
from jaxche.sharding import (
    Device,
    Layout,
    RemoteDevice,
    ShardingStrategy,
    batch_size,
    check_strategy,
    devices,
    is_maker,
    is_private,
    local_devices,
    mean_of,
    sharded_update,
    value_and_grad,
    without_axes,
)

_log = logging.getLogger("jaxche")

# ``begin(params, model_state, opt_state)`` returns the named trees of a local state.
Begin: TypeAlias = Callable[[Any, Any, Any], dict[str, Any]]


class NamedTree(NamedTuple):
    """How the arrays of a named tree lie on the devices of a replica."""

    # Cut as the parameters or the gradients are; mirrored: cut as the gradient of the parameter with their path and
    # shape, if there is one; or whole on each device.
    layout: Literal["params", "grads", "residual", "mirrored", "whole"]
    # Whether they have a leading axis of 1, the replica's row of the ``[R, ...]`` view.
    has_axis: bool = True


# Every field of a local state, and of the constants and the carry of a round.
TREES = {
    "params": NamedTree("params"),
    "grads": NamedTree("grads"),
    "residual": NamedTree("residual"),
    "opt_state": NamedTree("mirrored"),
    "outer_state": NamedTree("mirrored"),
    "ema": NamedTree("mirrored"),
    "noise": NamedTree("mirrored"),
    "tracked": NamedTree("mirrored"),
    "preconditioner": NamedTree("mirrored"),
    "model_state": NamedTree("whole"),
    "progress": NamedTree("whole"),
    "scaled": NamedTree("whole"),
    "sums": NamedTree("whole"),
    "not_finite": NamedTree("whole"),
    "counts": NamedTree("whole"),
    "index": NamedTree("whole", has_axis=False),
    "stride": NamedTree("whole", has_axis=False),
    "merge_scale": NamedTree("whole", has_axis=False),
    "frozen": NamedTree("whole", has_axis=False),
}


class BatchPlacement(Protocol):
    """The devices of a replica, in two axes."""

    devices: np.ndarray

    def put(self, batch: Any) -> Any:
        """The batch on the devices, for the compiled step."""
        ...


class Placement(BatchPlacement, Protocol):
    """The devices of a replica, ``[copies, shards]``, and the layout of its arrays, which follows from :data:`TREES`.

    Inside programs only named trees have a replica axis. With ``makes_pieces`` each device computes its own shards of
    parameters from a function.
    """

    compiler_options: Any
    makes_pieces: bool

    def with_layout(self, params: Any) -> Placement:
        """This placement with a layout for parameters of these shapes."""
        ...

    def resized(self, width: int) -> Placement:
        """The same devices in rows of ``width``."""
        ...

    def specs(self, name: str, tree: Any) -> Any:
        """A PartitionSpec (without the replica axis) for each leaf of a named tree, or one for all leaves."""
        ...

    def value_and_grad(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``(params, model_state, batch, rng) -> ((loss, (metrics, model_state)), grads)``, for use inside ``jit``.

        The gradient of a weighted loss is that of its mean.
        """
        ...

    def update(self, tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """One optimizer step inside ``jit``: ``(params, opt_state)``."""
        ...

    def constrain(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Named trees with the shardings of :meth:`specs`, inside ``jit``."""
        ...

    def start(self, begin: Begin, params: Any, model_state: Any, opt_state: Any) -> dict[str, Any]:
        """The named trees of ``begin`` on these devices; a mesh also takes a function that returns params."""
        ...

    def move(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Named trees on these devices, resharded as :meth:`specs`."""
        ...

    def put_whole(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Arrays without a replica axis, whole on each of these devices."""
        ...

    def assemble(self, name: str, tree: Any, pieces: Sequence[Any]) -> Any:
        """A named tree from the shards of each leaf of ``tree`` on the devices of this process."""
        ...


def is_local(placement: BatchPlacement) -> bool:
    """Whether any of the devices is of this process."""
    return any(d.process_index == jax.process_index() for d in placement.devices.flat)


def spans_processes(placement: BatchPlacement) -> bool:
    """Whether the devices are of several processes."""
    return len({d.process_index for d in placement.devices.flat}) > 1


def devices_by_process() -> dict[int, list[Device]]:
    """All devices by process number, in order."""
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
    """A replica on one device."""

    def __init__(self, device: Device):
        self.device, self.compiler_options, self.makes_pieces = device, None, False
        self.devices = np.array([[device]], dtype=object)

    def with_layout(self, params: Any) -> DevicePlacement:
        return self

    def resized(self, width: int) -> DevicePlacement:
        return self

    def specs(self, name: str, tree: Any) -> Any:
        return P()

    def value_and_grad(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def value_and_grad(params: Any, *rest: Any) -> Any:
            def objective(params: Any) -> Any:
                loss, aux = call(params, *rest)
                return mean_of(loss), (loss if isinstance(loss, Weighted) else None, aux)

            (mean, (loss, aux)), grads = jax.value_and_grad(objective, has_aux=True)(params)
            return (mean if loss is None else loss, aux), grads

        return value_and_grad

    def update(self, tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    def constrain(self, trees: dict[str, Any]) -> dict[str, Any]:
        return trees

    def start(self, begin: Begin, params: Any, model_state: Any, opt_state: Any) -> dict[str, Any]:
        host = jax.tree.map(lambda x: without_axes(jnp.asarray(x)), (params, model_state, opt_state))
        return jax.jit(begin)(*jax.device_put(host, self.device))

    def move(self, trees: dict[str, Any]) -> dict[str, Any]:
        return trees

    def put_whole(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(jax.device_put(without_axes(x), self.device) for x in arrays)

    def assemble(self, name: str, tree: Any, pieces: Sequence[Any]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), [piece for (piece,) in pieces])

    def put(self, batch: Any) -> Any:
        # Passing NumPy arrays to the compiled call is several times faster than device_put.
        numpy = all(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch))
        return batch if numpy else jax.device_put(batch, self.device)


class ShardedPlacement:
    """A replica on a mesh with the axes of its sharding strategy; ``shapes`` are those of the parameters."""

    def __init__(self, mesh: Mesh, strategy: ShardingStrategy, shapes: Any = None):
        self.mesh = Layout(strategy, mesh, ()).mesh  # refuses a mesh without the strategy's axes
        self._strategy, self.makes_pieces = strategy, True
        self.devices = mesh.devices.reshape(-1, mesh.devices.shape[-1])
        self._layout = None if shapes is None else Layout(strategy, mesh, shapes)
        self._local = [d for d in self.devices.flat if d.process_index == jax.process_index()]

    @property
    def compiler_options(self) -> Any:
        return self._decided.compiler_options

    @property
    def _decided(self) -> Layout:
        assert self._layout is not None, "with_layout(params) comes first"
        return self._layout

    def with_layout(self, params: Any) -> ShardedPlacement:
        return ShardedPlacement(self.mesh, self._strategy, params)

    def resized(self, width: int) -> ShardedPlacement:
        """The same devices in rows of ``width`` shards, each row a copy."""
        strategy = self._strategy.across_nodes(width)
        return ShardedPlacement(strategy.mesh(list(self.devices.flat)), strategy, self._decided.shapes)

    def specs(self, name: str, tree: Any) -> Any:
        layout = self._decided
        match TREES[name].layout:
            case "params":
                return layout.params_specs
            case "grads":
                return layout.grads_specs
            case "residual":
                return tree and tree._replace(own=layout.grads_specs)
            case "mirrored":
                return layout.mirrored(without_replica_axis(tree))
            case "whole":
                return P()

    def value_and_grad(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return value_and_grad(call, self._decided)

    def update(self, tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        return sharded_update(tx, self._decided, grads, opt_state, params, **extra)

    def constrain(self, trees: dict[str, Any]) -> dict[str, Any]:
        return lax.with_sharding_constraint(trees, self._shardings(trees))

    def start(self, begin: Begin, params: Any, model_state: Any, opt_state: Any) -> dict[str, Any]:
        # From a function each device computes its own shards: no device holds the whole tree.
        given = () if is_maker(params) else (jax.tree.map(self._put, params, self._decided.params_specs),)

        def program(model_state: Any, opt_state: Any, *given: Any) -> dict[str, Any]:
            return begin(given[0] if given else params(), model_state, opt_state)

        opt_state = jax.tree.map(self._put, opt_state, self._decided.mirrored(opt_state))
        arguments = (self._put(model_state, P()), opt_state, *given)
        shapes = jax.eval_shape(program, *arguments)
        return jax.jit(program, out_shardings=self._shardings(shapes))(*arguments)

    def move(self, trees: dict[str, Any]) -> dict[str, Any]:
        return jax.jit(_same, out_shardings=self._shardings(trees))(trees)

    def put_whole(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(self._put(x, P()) for x in arrays)

    def assemble(self, name: str, tree: Any, pieces: Sequence[Any]) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        arrays = []
        for leaf, sharding, here in zip(leaves, jax.tree.leaves(self._shardings({name: tree})), pieces, strict=True):
            if len(here) < len(self._local):
                # With replicas of different sizes the replica mesh has one row of this one; copy it to the other rows.
                here = [jax.device_put(here[i % len(here)], device) for i, device in enumerate(self._local)]
            shape = (1, *leaf.shape[1:])
            arrays.append(jax.make_array_from_single_device_arrays(shape, sharding, list(here)))
        return jax.tree.unflatten(treedef, arrays)

    def put(self, batch: Any) -> Any:
        # Split over all devices, or whole on each if the batch size is not divisible, e.g. in the last batch.
        layout = self._decided
        return self._put(batch, P(layout.axes) if layout.splits(batch_size(batch)) else P())

    def _put(self, tree: Any, spec: P) -> Any:
        """Host arrays on these devices; each process puts its own shards."""
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


def make_placements(
    replicas: Sequence[Any] | str | None, strategy: ShardingStrategy, virtual: int = 0
) -> list[Placement]:
    """The placements of all replicas, on different devices unless they are ``virtual``; one kind in each process."""
    check_strategy(strategy)
    if isinstance(replicas, str):
        if replicas != "process":
            raise ValueError(
                f"replicas={replicas!r} is neither 'process' nor a list; write replicas='process' for one replica of "
                "all devices of a process, or replicas=jaxche.devices() for one of each device"
            )
        replicas = _of_processes(strategy)
    if virtual and replicas is None and not strategy.shards_state:
        replicas = list(itertools.islice(itertools.cycle(local_devices()), virtual))
    if isinstance(replicas, int | jax.Device | Mesh):
        one = f"jaxche.devices()[:{int(replicas)}]" if isinstance(replicas, int) else "[replica]"
        shown = brief(replicas)
        raise ValueError(f"replicas={shown} is not a list of devices or of meshes; write replicas={one}")
    given = _default_replicas(strategy) if replicas is None else list(replicas)
    devices = [d for r in given for d in (r.devices.flat if isinstance(r, Mesh) else (r,))]
    if (
        not devices
        or any(not isinstance(d, jax.Device | RemoteDevice) for d in devices)
        or (len(set(devices)) != len(devices) and not virtual)
    ):
        raise ValueError(
            f"replicas={brief(replicas)} must be different devices or meshes of them, e.g. replicas=jaxche.devices() "
            "or replicas=[strategy.mesh(devices[:4]), strategy.mesh(devices[4:])]; lists of devices are for a model in "
            "stages, loss_fn=jaxche.Partitioned(...)"
        )
    check_local_devices(devices)
    if any(map(is_private, local_devices())) and not any(map(is_private, devices)):
        _log.warning(
            "replicas has CPU devices only, because jax.devices() lists no accelerators in this run; to train on them "
            "write replicas=jaxche.devices()"
        )
    if replicas is None:
        strategy = strategy.within_node()
    if not strategy.shards_state and not any(isinstance(r, Mesh) for r in given):
        return [DevicePlacement(device) for device in given]
    return _sharded_placements([r if isinstance(r, Mesh) else strategy.mesh([r]) for r in given], strategy)


def check_local_devices(devices: Sequence[Device]) -> None:
    """Refuse devices if this process has none of them, or has several of different kinds."""
    here = [d for d in devices if d.process_index == jax.process_index()]
    if not here:
        raise ValueError("replicas has no device of this process; every process must hold at least one replica")
    kinds = sorted({d.device_kind for d in here})
    if len(kinds) > 1:
        raise ValueError(
            f"one process cannot merge devices of different kinds ({', '.join(kinds)}); start one process per kind, or "
            f"one per device: jaxche launch -n {len(here)} script.py"
        )


def _default_replicas(strategy: ShardingStrategy) -> list[Any]:
    if not strategy.shards_state:
        return devices()
    if (inside := strategy.within_node()) is not strategy:
        nodes = strategy.mesh(devices()).devices  # refuses a node size that does not divide the devices
        return [inside.mesh(node) for node in nodes]
    return _of_processes(strategy)


def _of_processes(strategy: ShardingStrategy) -> list[Any]:
    """The devices of each process as one replica."""
    found = devices_by_process().values()
    if not strategy.shards_state and all(len(own) == 1 for own in found):
        return [device for own in found for device in own]
    return [strategy.mesh(own) for own in found]


def _sharded_placements(meshes: Sequence[Mesh], strategy: ShardingStrategy) -> list[Placement]:
    placements: list[Placement] = [ShardedPlacement(mesh, strategy) for mesh in meshes]
    for placement in placements:
        if spans_processes(placement) and any(map(is_private, placement.devices.flat)):
            raise ValueError(
                f"replicas has an island on {list(placement.devices.flat)}, but in this run no program can span the "
                "accelerators of several processes; write islands whose devices are of one process"
            )
    shapes = {placement.devices.shape for placement in placements}
    if len(shapes) > 1 and any(spans_processes(placement) for placement in placements):
        raise ValueError(
            f"replicas has islands of {sorted(placement.devices.size for placement in placements)} devices, and one of "
            "them spans processes; then all islands must have the same shape. Write one island per process, or islands "
            "with equal numbers of devices"
        )
    return placements


def merges_on_host(backend: str, placements: Sequence[BatchPlacement], elastic: bool = False) -> bool:
    """Whether replicas merge on CPU devices; refuses ``"device"`` if no program can span the devices."""
    devices = [device for placement in placements for device in placement.devices.flat]
    several, reason = len(placements) > 1, ""
    if len(set(devices)) < len(devices):
        reason = "runs one program over all replicas, but some of these share a device"
    elif several and any(map(is_private, devices)):
        reason = (
            "runs one program over all replicas, but in this run each accelerator is visible in its own process only, "
            "because some processes train on the CPU or several on one GPU"
        )
    elif several and elastic and any(device.platform != "cpu" for device in devices):
        reason = (
            "merges on accelerators, whose collectives do not return after a process has died, and an elastic run "
            "continues then"
        )
    if reason and backend == "device":
        raise ValueError(f"backend='device' {reason}; write backend='host', or leave it out")
    kinds = {device.device_kind for device in devices}
    return backend == "host" or (backend == "auto" and (bool(reason) or len(kinds) > 1))
