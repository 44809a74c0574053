"""Replicas in stages: their checks, placement, programs, merge and engine."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxche.averaging import add_weighted, measure_drift, zero_sums
from jaxche.distributed import Group
from jaxche.replicas import (
    TREES,
    Begin,
    Carry,
    Constants,
    DevicePlacement,
    LocalState,
    Merge,
    Merged,
    MergeRules,
    ReplicaMesh,
    Report,
    Steps,
    ToMerge,
    add_replica_axis,
    are_schedules,
    check_local_devices,
    counts_of,
    devices_by_process,
    drop_replica_axis,
    is_local,
    marked,
    stayed_finite,
    update_in_round,
    with_large,
    without_large,
    without_replica_axis,
)
from jaxche.scaling import with_extra_args
from jaxche.sharding import Device, RemoteDevice, batch_size
from jaxche.stages import Direct, Partitioned, Pipeline, check_stage_params, largest_micro_batch
from jaxche.training._fingerprint import digest
from jaxche.training._preparation import PreparedEngine

_STAGE_TREES = ("params", "opt_state", "outer_state", "ema")


class StagedPlacement:
    """The placement of a replica in stages: for each stage a device of one process, not that of ``model`` itself."""

    def __init__(self, model: Partitioned, devices: Sequence[Device]):
        self.model, self.by_stage = model, [DevicePlacement(device) for device in devices]
        self.devices = np.array([list(devices)], dtype=object)
        self.makes_pieces = False

    def start(self, begin: Begin, params: Any, model_state: Any, opt_state: Any) -> dict[str, Any]:
        """The named trees of a local state; parameters and optimizer states are tuples with one entry per stage."""
        assert model_state is None, "stages have none"
        opt_states = (None,) * len(self.by_stage) if opt_state is None else opt_state
        given = zip(self.by_stage, params, opt_states, strict=True)
        made = [placement.start(begin, tree, None, own) for placement, tree, own in given]
        trees = {name: tuple(one[name] for one in made) for name in _STAGE_TREES}
        return LocalState(**trees, model_state=None)._asdict()

    def put(self, batch: Any) -> Any:
        return self.by_stage[0].put(batch)


class StagedPrograms:
    """The programs of a replica in stages; the host drives its steps.

    A step computes the gradients with the pipeline, then updates each stage on its device. ``examples`` is the batch
    size of the data. A smaller batch, such as the last one of an epoch, is cut into micro-batches of the largest size
    that divides it.
    """

    def __init__(
        self,
        placement: StagedPlacement,
        tx: optax.GradientTransformation,
        average: str,
        seed: int,
        examples: int,
        solo: bool,
    ):
        self._model, self._examples, self._solo = placement.model, examples, solo
        self._average, self._devices = average, list(placement.devices[0])
        self._seed = placement.model.seed + seed
        self._tx: Any = with_extra_args(tx)
        self._by_size: dict[int | None, Partitioned] = {}
        # keep_unused: the arguments also say on which device the zeros are made.
        self._begin = jax.jit(self._copy_state, static_argnames="takes", keep_unused=True)
        self._update = jax.jit(self._update_stage, donate_argnums=(1, 2))
        self._update_on_device = placement.by_stage[0].update
        self._add = jax.jit(add_weighted, donate_argnums=0)
        self._count = jax.jit(_add_to_sums, donate_argnums=0)
        self._stayed_finite, self._marked = jax.jit(stayed_finite), jax.jit(marked)

    def begin(
        self, local: LocalState, index: Any, merge_scale: Any, takes: Sequence[str] = ()
    ) -> tuple[Constants, Carry]:
        stages = zip(local.params, local.opt_state, strict=True)
        begun = [self._begin(*stage, takes=tuple(takes)) for stage in stages]
        trees: dict[str, Any] = {name: tuple(one[name] for one in begun) for name in begun[0]}
        trees |= {name: with_large(trees[name], jax.tree.leaves(getattr(local, name))) for name in takes}
        sums = jax.device_put(np.zeros((1, 2), np.float32), self._devices[-1])
        constants = Constants()
        if self._average == "gradients":
            constants = Constants(params=local.params)
        elif not self._solo and any(are_schedules(local.opt_state)):
            counts = tuple(map(counts_of, local.opt_state))
            constants = Constants(counts=counts, stride=np.float32(merge_scale.stride))
        return constants, Carry(None, int(index), sums, **trees)

    def lower(self, start: Constants, carry: Carry, batch: Any) -> Callable[[], Steps]:
        examples = batch_size(batch)
        model = self._model_for(examples)
        model.compile(self._params(start, carry), batch)  # a stage is traced with what the one before it returns
        step = functools.partial(self._step, model, np.float32(examples))
        return lambda: Steps(step, step)

    def marked(self, local: LocalState, takes: Sequence[str]) -> LocalState:
        return local._replace(**{name: tuple(map(self._marked, getattr(local, name))) for name in takes})

    def finish(self, local: LocalState, carry: Carry) -> Carry:
        if self._average == "gradients":
            return carry
        before = zip(local.params, local.opt_state, strict=True)
        after = zip(carry.params, carry.opt_state, strict=True)
        flags = list(map(self._stayed_finite, before, after))  # all are dispatched before one is waited for
        return carry._replace(not_finite=np.array([[not all(map(bool, flags))]], np.float32))

    def idle(self, local: LocalState, carry: Carry) -> Carry:
        return carry if self._average == "gradients" else carry._replace(not_finite=np.zeros((1, 1), np.float32))

    def _params(self, start: Constants, carry: Carry) -> Any:
        return carry.params if self._average == "parameters" else start.params

    def _model_for(self, examples: int) -> Partitioned:
        protocol: Any = self._model.protocol
        size = protocol.micro_batch_size
        if size is not None and examples < self._examples:
            size = largest_micro_batch(size, examples)
            protocol = replace(protocol, micro_batch_size=size)
        if size not in self._by_size:
            self._by_size[size] = Partitioned(
                [with_replica_axis(stage) for stage in self._model.stages],
                self._model.loss,
                protocol,
                self._devices,
                remat=self._model.remat,
                seed=self._seed,
            )
        return self._by_size[size]

    def _step(self, model: Partitioned, examples: Any, start: Constants, carry: Carry, batch: Any) -> tuple[Carry, Any]:
        params = self._params(start, carry)
        loss, grads = model.value_and_grad(params, batch, step=carry.index)
        stepped = carry._replace(index=carry.index + 1, sums=self._count(carry.sums, loss, examples))
        if self._average == "gradients":
            added = (self._add(*stage, examples) for stage in zip(carry.grads, grads, strict=True))
            return stepped._replace(grads=tuple(added)), loss
        losses = jax.device_put([loss] * len(self._devices), self._devices)
        counts = start.counts or (None,) * len(params)
        stages = zip(grads, carry.opt_state, params, losses, counts, strict=True)
        updated = [self._update(*stage, start.stride) for stage in stages]
        params, opt_state = zip(*updated, strict=True)
        return stepped._replace(params=params, opt_state=opt_state), loss

    def _copy_state(self, params: Any, opt_state: Any, takes: tuple[str, ...]) -> dict[str, Any]:
        if self._average == "gradients":
            return {"grads": zero_sums(params)}
        copied = jax.tree.map(jnp.copy, {"params": params, "opt_state": opt_state})
        return copied | {name: without_large(copied[name]) for name in takes}

    def _update_stage(
        self, grads: Any, opt_state: Any, params: Any, loss: Any, begun: Any, stride: Any
    ) -> tuple[Any, Any]:
        grads, opt_state, params, begun = drop_replica_axis((grads, opt_state, params, begun))
        update = functools.partial(self._update_on_device, self._tx, grads, params=params, value=loss)
        return add_replica_axis(update_in_round(update, opt_state, begun, stride))


def _add_to_sums(sums: Any, loss: Any, examples: Any) -> Any:
    return sums + (jnp.stack([jnp.float32(1), loss.astype(jnp.float32)]) * examples)[None]


def with_replica_axis(stage: Callable[..., Any]) -> Callable[..., Any]:
    """The stage for parameters with the leading replica axis."""

    @functools.wraps(stage)
    def call(params: Any, x: Any, **more: Any) -> Any:
        # Not x[0]: the gradient of a reshape is a reshape, that of an index is a scatter.
        return stage(jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[1:]), params), x, **more)

    return call


def checked_stages(model: Partitioned, replicas: Any, strategy: Any, scaling: Any) -> list[Any]:
    """The placements of replicas in stages; refuses arguments that stages do not support."""
    protocol, n_stages = model.protocol, len(model.stages)
    if strategy is not None:
        raise ValueError(
            f"strategy={strategy!r} cuts layers among devices, and loss_fn is a jaxche.Partitioned, which cuts between "
            "them; leave strategy= out, or give the loss function of the whole model"
        )
    if scaling is not None:
        raise ValueError(
            f"scaling={scaling!r} measures the noise of whole gradients, and a jaxche.Partitioned has its gradients on "
            "the devices of its stages; leave scaling= out, or give the loss function of the whole model"
        )
    if None in model.devices:
        raise ValueError(
            "loss_fn is a jaxche.Partitioned with local_stages=, but all stages of a replica are in one process; leave "
            "it out, and give each process replicas of its own"
        )
    if not isinstance(protocol, Direct | Pipeline):
        raise ValueError(
            f"protocol={protocol!r} is for stages in several processes, but a replica has all its stages in one; write "
            "jaxche.Partitioned(stages, loss, jaxche.Pipeline(micro_batch_size=8))"
        )
    if isinstance(replicas, str):
        raise ValueError(
            f"replicas={replicas!r}: a replica of {n_stages} stages has {n_stages} devices; leave replicas= out, for "
            "as many as there are in each process, or give lists of devices"
        )
    given = _default_replicas(n_stages) if replicas is None else [_devices_of(r, n_stages) for r in replicas]
    for one, other in itertools.combinations(given, 2):
        if shared := set(one) & set(other):
            raise ValueError(f"replicas has {shared.pop()} in two replicas; give each devices of its own")
    for devices in given:
        if len({d.process_index for d in devices}) > 1:
            raise ValueError(
                f"replicas has one on {devices}, devices of several processes; give each replica devices of one "
                "process. One model over processes trains with jaxche.Partitioned(..., local_stages=).step"
            )
    check_local_devices(list(itertools.chain(*given)))
    return [StagedPlacement(model, devices) for devices in given]


def _devices_of(replica: Any, n_stages: int) -> list[Any]:
    devices = [] if isinstance(replica, Mesh | jax.Device | RemoteDevice) else list(replica)
    if len(devices) != n_stages or any(not isinstance(d, jax.Device | RemoteDevice) for d in devices):
        raise ValueError(
            f"replicas has {replica!r}; for {n_stages} stages each replica is a list of {n_stages} devices, e.g. "
            f"replicas=[devices[:{n_stages}], devices[{n_stages}:{2 * n_stages}]], or [device] * {n_stages} for one "
            "that holds them all"
        )
    return devices


def _default_replicas(n_stages: int) -> list[list[Any]]:
    """Replicas of ``n_stages`` successive devices of each process."""
    replicas = []
    for process, devices in devices_by_process().items():
        if len(devices) % n_stages:
            raise ValueError(
                f"process {process} has {len(devices)} devices, which do not make whole replicas of {n_stages} stages; "
                f"name those to use, e.g. replicas=[jaxche.devices()[:{n_stages}]]"
            )
        replicas += [devices[i : i + n_stages] for i in range(0, len(devices), n_stages)]
    return replicas


class StageMeshes:
    """A replica mesh for each stage, over the devices that hold the stage; see :class:`ReplicaMesh`."""

    def __init__(self, group: Group, placements: Sequence[StagedPlacement], host: bool):
        n_stages = placements[0].devices.size
        self.by_stage = [
            ReplicaMesh(group, [placement.by_stage[stage] for placement in placements], host)
            for stage in range(n_stages)
        ]
        self.local_devices = [placement.devices[0] for placement in placements if is_local(placement)]

    def stack(self, trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The ``[R, ...]`` views of named trees, from one dict per local replica; tuples with one entry per stage."""
        names = [name for name in _STAGE_TREES if name in trees[0]]
        by_stage = [
            replica_mesh.stack([{name: named[name][stage] for name in names} for named in trees])
            for stage, replica_mesh in enumerate(self.by_stage)
        ]
        return trees[0] | {name: tuple(views[name] for views in by_stage) for name in names}

    def unstack(self, named: dict[str, Any]) -> list[dict[str, Any]]:
        """One dict of named trees per local replica from their views."""
        by_stage = [
            replica_mesh.unstack({name: tree[stage] for name, tree in named.items()})
            for stage, replica_mesh in enumerate(self.by_stage)
        ]
        return [{name: tuple(part[name] for part in parts) for name in named} for parts in zip(*by_stage, strict=True)]

    def unreplicate(self, name: str, tree: Any) -> Any:
        """One row of the view of each stage; the rows are equal."""
        return tuple(replica_mesh.unreplicate(name, one) for replica_mesh, one in zip(self.by_stage, tree, strict=True))

    def replicate(self, name: str, tree: Any, like: Any) -> Any:
        """The inverse of :meth:`unreplicate`."""
        stages = zip(self.by_stage, tree, like, strict=True)
        return tuple(replica_mesh.replicate(name, one, alike) for replica_mesh, one, alike in stages)

    def abstract_tree(self, name: str, tree: Any, rows: int | None, own: bool) -> Any:
        """Shapes and shardings of each stage, see :meth:`ReplicaMesh.abstract_tree`."""
        return tuple(
            replica_mesh.abstract_tree(name, one, rows, own)
            for replica_mesh, one in zip(self.by_stage, tree, strict=True)
        )


class StageMerge:
    """Merges the stages one after the other, because two programs with collectives in flight can deadlock."""

    def __init__(self, stage_meshes: StageMeshes, rules: MergeRules, local: LocalState):
        self._devices = stage_meshes.local_devices
        # A stage without parameters has nothing to merge.
        self._merges = {
            s: Merge(replica_mesh, rules, _stage_of(local, s))
            for s, replica_mesh in enumerate(stage_meshes.by_stage)
            if jax.tree.leaves(local.params[s])
        }
        self.takes = next(iter(self._merges.values())).takes

    @property
    def nbytes(self) -> int:
        """The bytes that each replica sends, all its stages together."""
        return sum(merge.nbytes or 0 for merge in self._merges.values())

    def prepare(self, given: ToMerge, donates: bool = False) -> None:
        """Compile the merges and connect the processes; see :meth:`Merge.prepare`."""
        for s, merge in self._merges.items():
            merge.prepare(self._of_stage(s, given), donates)

    def _of_stage(self, stage: int, given: ToMerge) -> ToMerge:
        # The last stage counts the examples, and the merge of each stage needs them for its weights.
        own = [
            _stage_of(carry, stage)._replace(**jax.device_put(carry.measured, devices[stage]))
            for carry, devices in zip(given.carries, self._devices, strict=True)
        ]
        return given._replace(starts=[_stage_of(start, stage) for start in given.starts], carries=own)

    def __call__(self, given: ToMerge, donates: bool = False) -> Merged:
        """Merge the replicas of this process with all others and wait for the result; see :class:`Merge`."""
        merged = {s: merge(self._of_stage(s, given), donates) for s, merge in self._merges.items()}
        local_states = []
        for i, start in enumerate(given.starts):
            stages = [
                merged[s].local_states[i] if s in merged else _stage_of(start, s) for s in range(len(start.params))
            ]
            by_name = {name: tuple(getattr(stage, name) for stage in stages) for name in _STAGE_TREES}
            local_states.append(start._replace(**by_name))
        table = np.max([one.table for one in merged.values()], axis=0)  # equal but for the flags of each stage
        report = _joined_report([one.report for one in merged.values()])
        return Merged(tuple(local_states), table, report, nbytes=self.nbytes)


def _joined_report(reports: Sequence[Report]) -> Report:
    """The report of a merge of all stages, from those of the stages."""
    summed = ("mean_of_squares", "mean_delta_sq", "mean_params_sq", "squares_by_batches")
    sums: dict[str, Any] = {name: sum(getattr(report, name) for report in reports) for name in summed}
    drift, direction = measure_drift(*list(sums.values())[:3])
    finite = min(report.finite for report in reports)
    return reports[0]._replace(drift=float(drift), drift_direction=float(direction), finite=finite, **sums)


def _stage_of(trees: Any, stage: int) -> Any:
    """The local state, or the carry, of one stage."""
    own = {name: tree for name, tree in trees._asdict().items() if TREES[name].layout != "whole" and tree}
    return trees._replace(**{name: tree[stage] for name, tree in own.items()})


class StagedEngine(PreparedEngine):
    """The engine of replicas in stages."""

    _merge_type = StageMerge

    def _set_layout(self, params: Any) -> None:
        check_stage_params(params, self._placements[0].devices.size)
        super()._set_layout(tuple(params))

    def _make_mesh(self, shapes: Any) -> StageMeshes:
        placements: Any = self._placements
        return StageMeshes(self._group, placements, self._settings.host)

    def _build(self, local: LocalState, batch: Any, examples: int) -> Sequence[Any]:
        def programs(placement: StagedPlacement) -> StagedPrograms:
            return StagedPrograms(
                placement,
                self._tx,
                average=self._settings.average,
                seed=self._settings.seed,
                examples=examples,
                solo=len(self._settings.placements) == 1,
            )

        self._set_replicas(programs)
        one = without_replica_axis(local.params)
        placements: Any = self._placements
        model = placements[self.ranks[0]].model
        code = model.trace(one, batch)
        self._code = {"code of stages": digest(code)} | self._code_of_optimizers(local)
        self._rules = self._settings.rules(self._tx, None)
        self._set_merge(self._make_merge(local))
        return code.consts

    def _digest_of(self, tx: Any, shapes: Any, **extra: Any) -> str:
        return digest([super(StagedEngine, self)._digest_of(tx, params, **extra) for params in shapes])

    def _resources(self, local_states: Sequence[LocalState], takes: Sequence[str]) -> list[Any]:
        """Empty: stages take whole batches, and need memory for the activations that their schedule keeps."""
        return []

    def unreplicate(self, tree: Any) -> Any:
        return None if tree is None else tuple(map(super().unreplicate, tree))
