"""The mesh of all replicas, and the conversion of local trees to ``[R, ...]`` views on it and back."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.distributed import Group, own_cpu_devices
from jaxche.replicas._packing import SMALL_BYTES, SMALL_BYTES_TO_HOST
from jaxche.replicas._placement import DevicePlacement, Placement, is_local

AXIS = "replica"
# The axes within a replica: copies, and the shards of each copy.
_INNER = ("copy", "shard")
# Arrays from this size on are cut for a sum over replicas.
_CUT_BYTES = 1 << 18


class ReplicaMesh:
    """All replicas as one mesh, the replicas along its axis ``replica``.

    Replicas of one device make a mesh of that axis alone. Sharded replicas of one shape add all their devices, so that
    shards merge without a gather. Sharded replicas of different sizes add as many devices each as the greatest common
    divisor of their widths: each reshards its trees to these devices, and the merged trees back. With ``host`` the mesh
    has CPU devices, shards are copied there and back, and no program spans accelerators. With ``idle`` no replica
    trains on these devices.
    """

    def __init__(self, group: Group, placements: Sequence[Placement], host: bool = False, idle: bool = False):
        self._group = group
        # A context for programs on it that turns the errors of lost processes into PeerLostError.
        self.collective = group.collective if group.num_processes > 1 else contextlib.nullcontext
        self._here = [placement for placement in placements if is_local(placement)]
        width = math.gcd(*(placement.devices.shape[1] for placement in placements))
        # Whether replicas have one shape: the rows of a view are its buffers then, and not copies of other shards.
        self.keeps_buffers = len({placement.devices.shape for placement in placements}) == 1
        rows, self._views = [placement.devices for placement in placements], self._here
        if not self.keeps_buffers:
            rows = [devices.reshape(-1, width)[:1] for devices in rows]
            self._views = [placement.resized(width) for placement in self._here]
        homes = _local_devices(rows)
        # The size up to which arrays merge joined.
        self.small_bytes = SMALL_BYTES
        if host:
            if any(device.platform != "cpu" for row in rows for device in row.flat):
                self.small_bytes = SMALL_BYTES_TO_HOST
            rows = _host_devices(rows, idle)
        rows = [group.with_connections(row) for row in rows]
        # The specs of a sharded replica name its inner axes, also if one of its devices is in the mesh.
        plain = all(isinstance(placement, DevicePlacement) for placement in placements)
        grid = np.array([row[0, 0] for row in rows]) if plain else np.stack(rows)
        names = (AXIS,) if plain else (AXIS, *_INNER)
        self.mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
        # For each local replica: its devices in the mesh, and the devices of its arrays; one list if they are the same.
        self._rows = [
            (row, row if row == home else home) for row, home in zip(_local_devices(rows), homes, strict=True)
        ]
        # The local replicas by their rank.
        here = [rank for rank, row in enumerate(rows) if any(d.process_index == jax.process_index() for d in row.flat)]
        self._places = {rank: place for place, rank in enumerate(here)}
        self._is_plain, self._shardings = plain, dict[P, NamedSharding]()

    def compile_everywhere(self, program: Any, arguments: Sequence[Any]) -> None:
        """Compile a program with collectives, and in an elastic run wait for all: its collectives time out early."""
        if self._group.elastic:
            program.lower(*arguments).compile()
            self._group.barrier()

    def connect(self) -> None:
        """Connect the processes of the mesh by a sum of one number.

        XLA connects processes in the first collective of an order of devices, and then a process must not be late.
        """
        total = jax.shard_map(
            lambda x: lax.psum(x, AXIS), mesh=self.mesh, in_specs=P(AXIS), out_specs=P(), axis_names={AXIS}
        )
        with self.collective():
            jax.block_until_ready(jax.jit(total)(self.rows(np.ones((len(self._here), 1)))))

    @property
    def inner(self) -> tuple[str, ...]:
        """The mesh axes within a replica; none if replicas are single devices."""
        return self.mesh.axis_names[1:]

    def specs(self, name: str, tree: Any) -> Any:
        """The PartitionSpecs of a named tree within a replica of this mesh."""
        return self._views[0].specs(name, tree)

    def cut(self, specs: Any, tree: Any) -> Any:
        """Specs that also cut large arrays that each device of a replica holds whole, for their sum over replicas.

        Then each device sums one part with the other replicas, and not all of them the whole, and the devices of a
        replica gather the sums from each other. ``tree`` has a leading replica axis.
        """
        parts = math.prod(self.mesh.shape[axis] for axis in self.inner)

        def one(spec: P, x: Any) -> P:
            shape = x.shape[1:]
            places = [i for i, size in enumerate(shape) if size % parts == 0]
            if any(spec) or not places or math.prod(shape) * x.dtype.itemsize < _CUT_BYTES:
                return spec
            return P(*[None] * places[0], self.inner)

        if parts == 1:
            return specs
        return jax.tree.map(one, specs, tree, is_leaf=lambda x: isinstance(x, P))

    def sharding(self, spec: Any) -> NamedSharding:
        """The sharding of an ``[R, ...]`` view with rows sharded by ``spec``."""
        if spec not in self._shardings:
            self._shardings[spec] = NamedSharding(self.mesh, P(AXIS, *spec))
        return self._shardings[spec]

    def shardings(self, name: str, tree: Any) -> Any:
        """The shardings of the ``[R, ...]`` view of a named tree; ``tree`` is that of one replica."""
        return jax.tree.map(self.sharding, self.specs(name, tree), is_leaf=lambda x: isinstance(x, P))

    def stack(self, trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The ``[R, ...]`` views of named trees, from one dict per local replica; no copy if shapes agree."""
        if not self.keeps_buffers:
            trees = [view.move(named) for view, named in zip(self._views, trees, strict=True)]
        self._start_copies(trees)
        return {name: self._by_spec(self._stacked, name, *(named[name] for named in trees)) for name in trees[0]}

    def _start_copies(self, trees: Sequence[dict[str, Any]]) -> None:
        """Start to copy arrays that merge on the host; :func:`jax.device_put` from an accelerator waits for each."""
        for named, (devices, homes) in zip(trees, self._rows, strict=True):
            if devices[0].client is not homes[0].client:
                for leaf in jax.tree.leaves(named):
                    for shard in self._shards_of(leaf, homes):
                        shard.copy_to_host_async()

    def _shards_of(self, leaf: Any, homes: Sequence[Any]) -> list[Any]:
        # With one device an array is its own shard; shards of others take several times as long to list.
        return [leaf] if self._is_plain else _shards(leaf, homes)

    def _stacked(self, spec: P, *leaves: Any) -> jax.Array:
        shards: list[Any] = []
        for leaf, (devices, homes) in zip(leaves, self._rows, strict=True):
            shards += _moved(self._shards_of(leaf, homes), homes, devices)
        shape = (self.mesh.shape[AXIS], *leaves[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.sharding(spec), shards)

    def unstack(self, named: dict[str, Any]) -> list[dict[str, Any]]:
        """One dict of named trees per local replica, from their ``[R, ...]`` views."""
        parts: list[dict[str, Any]] = [{} for _ in self._here]
        for name, tree in named.items():
            leaves = jax.tree.leaves(tree)
            for i, (part, view, (devices, homes)) in enumerate(zip(parts, self._views, self._rows, strict=True)):
                rows = ([leaf.addressable_data(i)] if self._is_plain else _shards(leaf, devices) for leaf in leaves)
                pieces = [_moved(row, devices, homes) for row in rows]
                part[name] = view.assemble(name, tree, pieces)
        if self.keeps_buffers:
            return parts
        return [placement.move(part) for placement, part in zip(self._here, parts, strict=True)]

    def unreplicate(self, name: str, tree: Any) -> Any:
        """One row of an ``[R, ...]`` view with equal rows; each device keeps its shards."""

        def one(spec: P, x: jax.Array) -> jax.Array:
            pieces = [shard.data[0] for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape[1:], NamedSharding(self.mesh, P(*spec)), pieces)

        return self._by_spec(one, name, tree)

    def replicate(self, name: str, tree: Any, like: Any) -> Any:
        """The inverse of :meth:`unreplicate`; ``like`` is the tree of one replica."""

        def one(spec: P, x: jax.Array) -> jax.Array:
            pieces = [shard.data[None] for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(
                (self.mesh.shape[AXIS], *x.shape), self.sharding(spec), pieces
            )

        return self._by_spec(one, name, tree, like=like)

    def abstract_tree(self, name: str, tree: Any, rows: int | None, own: bool) -> Any:
        """Shapes and shardings on this mesh to restore a named tree from a checkpoint.

        ``rows`` is the number of saved rows, or None for a tree from :meth:`unreplicate`. With ``own`` each replica
        gets its own row; else every replica gets all rows.
        """

        def one(spec: P, x: Any) -> jax.ShapeDtypeStruct:
            shape = x.shape[1:] if rows is None else (rows, *x.shape[1:])
            axes = spec if rows is None else (AXIS if own else None, *spec)
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(self.mesh, P(*axes)))

        return self._by_spec(one, name, tree)

    def _by_spec(self, fn: Any, name: str, *trees: Any, like: Any = None) -> Any:
        """``fn(spec, *leaves)`` for all leaves; ``like`` is the tree of one replica, by default the first tree."""
        specs = self.specs(name, trees[0] if like is None else like)
        if isinstance(specs, P):
            return jax.tree.map(lambda *leaves: fn(specs, *leaves), *trees)
        return jax.tree.map(fn, specs, *trees, is_leaf=lambda x: isinstance(x, P))

    def rows(self, numbers: np.ndarray) -> jax.Array:
        """``[R, devices of a replica, columns]``, from one row of host numbers per local replica."""
        per_replica = self.mesh.size // self.mesh.shape[AXIS]
        shape = (self.mesh.shape[AXIS], per_replica, numbers.shape[1])
        sharding = NamedSharding(self.mesh, P(AXIS, self.inner or None))
        host = numbers.astype(np.float32)[:, None, None]

        def row(index: Any) -> np.ndarray:
            return host[self._places[index[0].start or 0]]

        # Several times faster than device_put for each device.
        return jax.make_array_from_callback(shape, sharding, row)


def own_row(numbers: Any) -> Any:
    """These numbers of a replica as its row in a table of zeros; the sum over replicas is the whole table."""
    table = jnp.zeros((lax.axis_size(AXIS), *numbers.shape), numbers.dtype)
    return table.at[lax.axis_index(AXIS)].set(numbers)


def _shards(leaf: Any, devices: Sequence[Any]) -> list[Any]:
    """The shards of an array on these devices."""
    by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
    return [by_device[device] for device in devices]


def _moved(shards: list[Any], here: Sequence[Any], there: Sequence[Any]) -> list[Any]:
    """Shards on other devices, copied asynchronously unless they are the same ones."""
    if here is there:
        return shards
    return [x if a is b else jax.device_put(x, b) for x, a, b in zip(shards, here, there, strict=True)]


def _local_devices(rows: Sequence[np.ndarray]) -> list[list[Any]]:
    """The devices of this process in each row that has any."""
    process = jax.process_index()
    own = [[d for d in row.flat if d.process_index == process] for row in rows]
    return [devices for devices in own if devices]


def _host_devices(rows: Sequence[np.ndarray], idle: bool) -> list[np.ndarray]:
    """CPU devices of the same processes for each row: those without a replica first, or with ``idle`` those alone."""
    busy = {device for row in rows for device in row.flat}
    free: dict[int, list[Any]] = {}
    for device in sorted(jax.devices("cpu"), key=lambda d: (d in busy, d.id)):
        if not (idle and device in busy):
            free.setdefault(device.process_index, []).append(device)
    wanted = collections.Counter(device.process_index for row in rows for device in row.flat)
    for process, count in wanted.items():
        here = free.get(process, [])
        if count > len(here) and jax.process_count() == 1:
            free[process] = list(own_cpu_devices(count))
        elif count > len(here):
            raise ValueError(
                f"backend='host' merges on CPU devices, and process {process} has {len(here)} of them for its "
                f"{count} devices; write jax.config.update('jax_num_cpu_devices', {count}) before jaxche.initialize()"
            )
    taken = [[free[device.process_index].pop(0) for device in row.flat] for row in rows]
    return [np.array(devices, dtype=object).reshape(row.shape) for devices, row in zip(taken, rows, strict=True)]
