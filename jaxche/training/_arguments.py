"""The arguments of a trainer, and the settings that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optax
from jax.sharding import Mesh

from jaxche.cadence import ApplyPolicy, ElChe, VirtualFleet
from jaxche.distributed import ElasticGroup, process_group
from jaxche.messages import brief, one_of, whole_number
from jaxche.replicas import BatchOutputs, FrozenArrays, Placement, Scaling, make_placements, merges_on_host
from jaxche.reports import RoundInfo
from jaxche.scaling import ScalingRule
from jaxche.sharding import Device, NoShard, ShardingStrategy
from jaxche.stages import Partitioned
from jaxche.training._checks import (
    MOST_OVERLAP,
    Averaging,
    can_overlap,
    check_auto,
    check_auto_wire,
    check_fleet,
    check_joined,
    check_names,
    check_outputs,
    check_overlap,
    check_rules,
    check_scaling,
    check_wire,
    checked_ema,
    checked_max_rows,
    checked_overlap,
    checked_paces,
    checked_rows,
)
from jaxche.training._fingerprint import abbreviated
from jaxche.training._groups import checked_groups
from jaxche.training._settings import Settings
from jaxche.training._stages import checked_stages
from jaxche.training._start_checks import check_line_search


def default_cadence(average: str) -> dict[str, Any]:
    """The arguments of the default cadence for what replicas average."""
    # From a small anchor the progress tuner finds the right round length in a few rounds. Averaged gradients make one
    # update a round, however long it is: no replica moves on its own.
    tuner, anchor = ("progress", 1) if average == "parameters" else ("steady", 2)
    return {"anchor": anchor, "overhead_target": 0.015, "tuner": tuner}


@dataclass(frozen=True)
class Arguments:
    """The arguments of a trainer as given; :class:`Trainer` describes them."""

    loss_fn: Callable[..., Any] | Partitioned
    tx: optax.GradientTransformation
    policy: ApplyPolicy | str
    che: ElChe | None
    average: str | None
    merge: str
    opt_state: str
    outer: optax.GradientTransformation | None
    replicas: Sequence[Device | Mesh | Sequence[Device]] | str | None
    strategy: ShardingStrategy | None
    backend: str
    seed: int
    pace_ms: float | Sequence[float] | None
    scaling: ScalingRule | None
    base_batch_size: float | None
    fleet: VirtualFleet | None
    rows: str | None
    joined_batches: int | None
    max_rows: int | Sequence[int] | None
    outputs: Callable[[RoundInfo, list[BatchOutputs]], Any] | None
    wire: str
    overlap: float | None
    groups: str | Sequence[Sequence[int]] | None
    group_merges: int | None
    ema: float | None

    def settings(self) -> Settings:
        """The settings that follow; ValueError for an argument that is invalid, alone or with others."""
        check_joined()
        if not isinstance(self.policy, str):  # the look-up would compare an array with each of them
            one_of("policy", self.policy, [policy.value for policy in ApplyPolicy])
        group, policy = process_group(), ApplyPolicy(self.policy)
        seed = whole_number("seed", self.seed, -(2**63), "seed=0", 2**63 - 1)
        overlap = checked_overlap(0.0 if self.overlap is None else self.overlap)
        averaging = self._averaging(policy, overlap)
        check_auto_wire(self.wire, self.che, isinstance(group, ElasticGroup), self.fleet)
        placements = self._placements()
        world_size = len(placements)
        che = _checked_cadence(self.che, world_size, averaging.average)
        if world_size == 1:  # a plain training loop: one update per batch
            averaging = averaging._replace(average="parameters")
        check_fleet(self.fleet, world_size, group.num_processes, self.pace_ms)
        check_overlap(overlap, averaging, placements, self.fleet is not None)
        overlaps = (overlap,)
        if self.overlap is None and policy is ApplyPolicy.AUTO and self._may_overlap(averaging, placements):
            overlaps = (0.0, MOST_OVERLAP)
        groups = checked_groups(self.groups, self.group_merges, averaging, placements)
        if che is not None:
            che = replace(che, overlap=overlap, half_life=groups.half_life(world_size))
        rows, joined = checked_rows(self.rows, self.joined_batches, policy, world_size, averaging.staged)
        check_outputs(self.outputs, averaging.staged, placements)
        settings = Settings(
            group=group,
            loss_fn=self.loss_fn,
            loss=self._loss(),
            staged=averaging.staged,
            tx=self.tx,
            policy=policy,
            chooses=policy is ApplyPolicy.AUTO and world_size > 1,
            fits_auto=not averaging.staged and self.groups is None and self.rows != "equal" and not self._of_one_policy,
            average=averaging.average,
            merge=averaging.merge,
            opt_state=averaging.opt_state,
            outer=self.outer,
            ema=checked_ema(self.ema),
            placements=placements,
            processes_of_ranks=[
                tuple(sorted({device.process_index for device in placement.devices.flat})) for placement in placements
            ],
            seed=seed,
            paces=checked_paces(self.pace_ms, world_size) if self.fleet is None else [None] * world_size,
            scaling=self._scaling(policy, averaging.average, placements),
            host=merges_on_host("host" if overlap else self.backend, placements, group.elastic),
            wire=self.wire if world_size > 1 else "float32",
            overlap=overlap,
            overlaps=overlaps,
            groups=groups,
            fleet=self.fleet,
            che=che,
            rows=rows,
            given_rows=self.rows,
            joined=joined,
            unit=math.lcm(*(placement.devices.size for placement in placements)),
            max_rows=checked_max_rows(self.max_rows, rows, world_size),
            outputs=self.outputs,
            strategy=self.strategy or NoShard(),
        )
        return replace(settings, fingerprint=self._fingerprint(settings))

    @property
    def _of_one_policy(self) -> dict[str, Any]:
        """The given arguments that ``policy="auto"`` refuses, because they are of exact sync or of local steps."""
        names = ("average", "outer", "scaling", "che", "joined_batches")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _averaging(self, policy: ApplyPolicy, overlap: float) -> Averaging:
        """What replicas average, with defaults filled in."""
        average, merge, opt_state = self.average, self.merge, self.opt_state
        check_names(average, merge, opt_state, self.backend)
        staged = isinstance(self.loss_fn, Partitioned)
        if policy is ApplyPolicy.AUTO:
            check_auto(self._of_one_policy, staged)
        if average is None:
            average = "gradients" if policy is ApplyPolicy.SYNC else "parameters"
        if merge == "auto":
            merge = "steps"  # the best of the measured rules, see docs/policies.md
        if opt_state == "auto":
            opt_state = "average" if average == "parameters" and not overlap else "local"
        averaging = Averaging(policy, average, merge, opt_state, self.outer, self.scaling, self.backend, staged)
        check_rules(self.tx, averaging)
        check_line_search(self.tx)
        check_scaling(self.scaling, self.base_batch_size, opt_state)
        check_wire(self.wire, averaging)
        return averaging

    def _may_overlap(self, averaging: Averaging, placements: Sequence[Any]) -> bool:
        """Whether ``policy="auto"`` may run merges beside steps, with moments that stay with their replica."""
        if len(placements) == 1 or self.opt_state not in ("auto", "local") or process_group().elastic:
            return False
        return can_overlap(averaging, placements, self.fleet is not None)

    def _placements(self) -> Sequence[Any]:
        """The placements of the replicas of all processes."""
        if isinstance(self.loss_fn, Partitioned):
            return checked_stages(self.loss_fn, self.replicas, self.strategy, self.scaling)
        virtual = len(self.fleet.ms_per_batch) if isinstance(self.fleet, VirtualFleet) else 0
        return make_placements(self.replicas, self.strategy or NoShard(), virtual)

    def _loss(self) -> Any:
        """The loss function of one replica."""
        if isinstance(self.loss_fn, Partitioned):
            return self.loss_fn
        return FrozenArrays(self.loss_fn, self.outputs is not None)

    def _scaling(self, policy: ApplyPolicy, average: str, placements: Sequence[Placement]) -> Scaling | None:
        """The scaling rule with what it has to know of the replicas."""
        if self.scaling is None:
            return None
        return Scaling(
            self.scaling,
            self.base_batch_size,
            average,
            solo=len(placements) == 1,
            sync=policy is ApplyPolicy.SYNC,
            joined=not any(placement.makes_pieces for placement in placements),
        )

    def _fingerprint(self, settings: Settings) -> dict[str, str]:
        """The text of each argument that determines the result of a run."""
        che = settings.che.to_dict() if settings.che else {}
        return {
            "policy": settings.policy.value,
            "average": settings.average,
            "merge": settings.merge,
            "opt_state": settings.opt_state,
            "seed": str(settings.seed),
            "strategy": repr(settings.loss_fn.protocol if settings.staged else settings.strategy),
            "backend": "host" if settings.host else "device",
            "wire": self.wire,
            "overlap": str(settings.overlap) if len(settings.overlaps) == 1 else "auto",
            "groups": f"{settings.groups.ranks}, group_merges={self.group_merges}",
            "rows": f"{settings.rows}, {settings.joined} batches joined, max_rows={self.max_rows}",
            "scaling": rule_text(self.scaling),
            "base_batch_size": str(self.base_batch_size),
            **({"ema": str(settings.ema)} if settings.ema else {}),
            **{f"che.{name}": abbreviated(value) for name, value in che.items()},
        }


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
    return ElChe(world_size=world_size, **default_cadence(average))


def rule_text(rule: Any) -> str:
    """The text of a scaling rule; a default ``repr`` would contain an address in memory."""
    return type(rule).__qualname__ if type(rule).__repr__ is object.__repr__ else repr(rule)
