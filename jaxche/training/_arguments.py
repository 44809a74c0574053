"""The arguments of a trainer: checked, completed, and the settings of its engine that follow from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

from jaxche.cadence import ApplyPolicy, ElChe, VirtualFleet, whole_number
from jaxche.data import check_stream, epoch_size, is_stream
from jaxche.distributed import ElasticGroup, process_group
from jaxche.drawing import brief, per_rank, short_traceback
from jaxche.replicas import BatchOutputs, FrozenArrays, Scaling, make_placements, merges_on_host
from jaxche.reports import RoundInfo
from jaxche.scaling import ScalingRule
from jaxche.sharding import Device, NoShard, ShardingStrategy
from jaxche.stages import Partitioned
from jaxche.training._checks import (
    Averaging,
    check_auto,
    check_auto_wire,
    check_fleet,
    check_joined,
    check_outputs,
    check_overlap,
    check_rules,
    check_scaling,
    check_whole_batches,
    check_wire,
    checked_max_rows,
    checked_overlap,
    checked_paces,
    checked_rows,
)
from jaxche.training._engine import Readers, Settings
from jaxche.training._fingerprint import abbreviated
from jaxche.training._groups import checked_groups
from jaxche.training._optimizer_checks import check_line_search
from jaxche.training._preparation import PreparedEngine
from jaxche.training._stages import StagedEngine, checked_stages

# The default cadence: from a small anchor the progress tuner finds the right round length in a few rounds.
DEFAULT_CADENCE: dict[str, Any] = {"anchor": 1, "overhead_target": 0.015, "tuner": "progress"}


class Arguments:
    """A trainer as given by its arguments: its replicas, their settings, and the engine that runs them."""

    # Follows the processes of an elastic run.
    _membership_type: Callable[[Any, ElasticGroup], Any] | None = None

    def __init__(
        self,
        loss_fn: Callable[..., Any] | Partitioned,
        tx: optax.GradientTransformation,
        policy: ApplyPolicy | str = ApplyPolicy.CADENCE,
        che: ElChe | None = None,
        average: str | None = None,
        merge: str = "steps",
        opt_state: str = "auto",
        outer: optax.GradientTransformation | None = None,
        replicas: Sequence[Device | Mesh | Sequence[Device]] | None = None,
        strategy: ShardingStrategy | None = None,
        backend: str = "auto",
        seed: int = 0,
        pace_ms: float | Sequence[float] | None = None,
        scaling: ScalingRule | None = None,
        base_batch_size: float | None = None,
        fleet: VirtualFleet | None = None,
        rows: str | None = None,
        joined_batches: int | None = None,
        max_rows: int | Sequence[int] | None = None,
        outputs: Callable[[RoundInfo, list[BatchOutputs]], Any] | None = None,
        wire: str = "float32",
        overlap: float = 0.0,
        groups: str | Sequence[Sequence[int]] | None = None,
        group_merges: int | None = None,
    ):
        check_joined()
        self._group = group = process_group()
        self._has_peers = group.num_processes > 1
        self.policy, self.seed = ApplyPolicy(policy), whole_number("seed", seed, -(2**63), "seed=0", 2**63 - 1)
        staged = isinstance(loss_fn, Partitioned)
        elastic = isinstance(group, ElasticGroup)
        auto = self.policy is ApplyPolicy.AUTO
        if auto:
            given = {"average": average, "outer": outer, "scaling": scaling, "che": che}
            check_auto(given | {"joined_batches": joined_batches}, staged)
        if average is None:
            average = "gradients" if self.policy is ApplyPolicy.SYNC else "parameters"
        self.overlap = overlap = checked_overlap(overlap)
        if merge == "auto":
            merge = "steps"  # the best of the measured rules, see docs/policies.md
        if opt_state == "auto":
            opt_state = "average" if average == "parameters" and not overlap else "local"
        averaging = Averaging(self.policy, average, merge, opt_state, outer, scaling, backend, staged)
        check_rules(tx, averaging)
        check_line_search(tx)
        check_scaling(scaling, base_batch_size, tx, opt_state)
        check_wire(wire, averaging)
        check_auto_wire(wire, che, elastic, fleet is not None)
        if staged:
            placements = checked_stages(loss_fn, replicas, strategy, scaling)
        else:
            virtual = len(fleet.ms_per_batch) if isinstance(fleet, VirtualFleet) else 0
            placements = make_placements(replicas, strategy or NoShard(), virtual)
        world_size = len(placements)
        che = _checked_cadence(che, world_size, average)
        if world_size == 1:
            average = "parameters"  # a plain training loop: one update per batch
            averaging = averaging._replace(average=average)
        self.average, self.merge, self.scaling, self.wire = average, merge, scaling, wire
        self._tx, self._opt_state = tx, opt_state
        check_fleet(fleet, world_size, group.num_processes, pace_ms)
        self._fleet = fleet
        check_overlap(overlap, averaging, placements, fleet is not None)
        self._groups = checked_groups(groups, group_merges, averaging, placements)
        if che is not None:
            che = replace(che, overlap=overlap, half_life=self._groups.half_life(world_size))
        self._che = che
        self._given_rows = rows
        self.rows, self._joined = checked_rows(rows, joined_batches, self.policy, world_size, staged)
        # Each device of a sharded replica takes as many rows.
        self._unit = math.lcm(*(placement.devices.size for placement in placements))
        paces = checked_paces(pace_ms, world_size) if fleet is None else [None] * world_size
        scaled = None
        if scaling is not None:
            scaled = Scaling(
                scaling,
                base_batch_size,
                average,
                solo=world_size == 1,
                sync=self.policy is ApplyPolicy.SYNC,
                joined=not any(placement.makes_pieces for placement in placements),
            )
        host = merges_on_host("host" if overlap else backend, placements)
        check_outputs(outputs, staged, placements)
        self._outputs = outputs
        loss: Any = loss_fn if staged else FrozenArrays(loss_fn, outputs is not None)
        settings = Settings(
            group=group,
            loss=loss,
            tx=tx,
            average=average,
            merge=merge,
            opt_state=opt_state,
            outer=outer,
            placements=placements,
            seed=self.seed,
            paces=paces,
            scaling=scaled,
            host=host,
            readers=Readers(group, self._epoch_size),
            joins_rows=world_size > 1 and (self.rows == "speed" or self._joined != world_size),
            wire=wire if world_size > 1 else "float32",
            overlaps=overlap > 0,
            virtual=fleet is not None,
            groups=self._groups,
            max_rows=checked_max_rows(max_rows, self.rows, world_size),
        )
        self._engine = self._local_engine = (StagedEngine if staged else PreparedEngine)(settings)
        self._engines = [self._engine]
        self._chooses = auto and world_size > 1
        if self._chooses:  # the programs of exact sync beside those of local steps
            self._sync_engine = PreparedEngine(replace(settings, average="gradients", merge="steps", opt_state="local"))
            self._engines.append(self._sync_engine)
        self._fingerprint = {
            "policy": self.policy.value,
            "average": average,
            "merge": merge,
            "opt_state": opt_state,
            "seed": str(self.seed),
            "strategy": repr(loss_fn.protocol if staged else strategy or NoShard()),
            "backend": "host" if host else "device",
            "wire": wire,
            "overlap": str(overlap),
            "groups": f"{self._groups.ranks}, group_merges={group_merges}",
            "rows": f"{self.rows}, {self._joined} batches joined, max_rows={max_rows}",
            "scaling": _rule_text(scaling),
            "base_batch_size": str(base_batch_size),
            **{f"che.{name}": abbreviated(value) for name, value in (che.to_dict() if che else {}).items()},
        }
        self._loss_fn = loss_fn
        self._metric_programs: list[Any] = []  # of the last evaluations
        self._strategy = "" if staged or strategy is None or strategy == NoShard() else str(strategy)
        self._membership = self._membership_type(self, group) if self._membership_type and elastic else None

    __init__.__qualname__ = "Trainer.__init__"  # for Python's TypeError about its arguments
    __init__ = short_traceback(__init__)

    def __repr__(self) -> str:
        """One line: the replicas, and the arguments by which they train."""
        world_size = self._engine.world_size
        if world_size == 1:
            rules = ["a plain training loop"]
        else:
            rules = [f"policy={self.policy.value!r}"]
            if self.policy is not ApplyPolicy.AUTO:
                rules.append(f"average={self.average!r}")
                rules += [f"merge={self.merge!r}"] if self.average == "parameters" else []
            rules += [f"wire={self.wire!r}"] if self.wire != "float32" else []
            rules += [f"overlap={self.overlap:g}"] if self.overlap else []
            rules += [f"groups={self._groups.ranks}"] if self._groups.ranks else []
        by_speed = self.policy in (ApplyPolicy.SYNC, ApplyPolicy.AUTO)  # by default
        rules += [f"rows={self.rows!r}"] if world_size > 1 and (self.rows == "speed") != by_speed else []
        rules += [f"strategy={self._strategy}"] if self._strategy else []
        rules += [f"scaling={_rule_text(self.scaling)}"] if self.scaling else []
        return f"Trainer({', '.join([_replicas_text(self._engine.devices, self._fleet), *rules])})"

    def _epoch_size(self, data: Any, epochs: int = 1) -> int:
        """The number of batches in an epoch, ``EPOCH_SIZE`` for a stream; refuses data that cannot be read."""
        if is_stream(data):
            spans = any(len(processes) > 1 for processes in self._engine.processes_of_ranks)
            if spans and isinstance(self._engine, StagedEngine):
                raise ValueError(
                    "data is a stream, and the stages of a replica that are in several processes read batches by their "
                    "index; give a sequence, e.g. jaxche.Batches(arrays, batch_size=32), or each process whole replicas"
                )
            stream = check_stream(data, self._group, spans, epochs)
            if stream.shards and self._has_peers:
                check_whole_batches(self.policy, self._given_rows, self._joined, self._engine.world_size)
        return epoch_size(data)


def _checked_cadence(che: ElChe | None, world_size: int, average: str) -> ElChe | None:
    """The cadence of several replicas, by default one for what they average."""
    line = f"write che=jaxche.ElChe(world_size={world_size}, ...)" if world_size > 1 else "leave che= out"
    if che is not None and not isinstance(che, ElChe):
        raise ValueError(f"che={brief(che)} is not a cadence; {line}")
    if che is not None and che.world_size != world_size:
        replicas = f"are {world_size} replicas" if world_size > 1 else "is one replica"
        raise ValueError(f"che is for world_size={che.world_size}, but there {replicas}; {line}")
    if che is not None or world_size == 1:
        return che
    # Averaged gradients make one update a round, however long it is: no replica moves on its own.
    own = {} if average == "parameters" else {"tuner": "steady", "anchor": 2}
    return ElChe(world_size=world_size, **(DEFAULT_CADENCE | own))


def _rule_text(rule: Any) -> str:
    """The text of a rule in the fingerprint; a default ``repr`` would contain an address in memory."""
    return type(rule).__qualname__ if type(rule).__repr__ is object.__repr__ else repr(rule)


def _replicas_text(replicas: Sequence[np.ndarray], fleet: VirtualFleet | None) -> str:
    """The replicas and their devices, e.g. ``"3 replicas on 2 x NVIDIA H100 and 1 x NVIDIA L4"``."""
    sizes = sorted({devices.size for devices in replicas})
    text = f"{len(replicas)} replica{'s' if len(replicas) > 1 else ''}"
    if fleet is not None:
        return f"{text} on a virtual clock, {per_rank(fleet.ms_per_batch, '{:g}')} ms a batch"
    if sizes[-1] > 1:
        text += f" of {' or '.join(map(str, sizes))} devices"
    kinds = Counter(device.device_kind for devices in replicas for device in devices.flat)
    return f"{text} on {' and '.join(f'{count} x {kind}' for kind, count in kinds.items())}"
