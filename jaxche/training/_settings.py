"""The settings of a trainer: its arguments, checked and completed. They never change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import optax

from jaxche.cadence import ApplyPolicy, Choice, ElChe, VirtualFleet
from jaxche.distributed import Group
from jaxche.replicas import MergeRules, Placement, Scaling
from jaxche.sharding import ShardingStrategy
from jaxche.training._groups import Groups


@dataclass(frozen=True)
class Settings:
    """The settings of a trainer: those without a comment are its arguments, with defaults filled in."""

    group: Group  # the processes of the run
    loss_fn: Any
    loss: Any  # FrozenArrays(loss_fn), or a model in stages
    staged: bool  # loss_fn is a model in stages
    tx: optax.GradientTransformation
    policy: ApplyPolicy
    chooses: bool  # between exact sync and local steps, with the programs of both
    fits_auto: bool  # whether policy="auto" takes the other arguments
    average: str
    merge: str
    opt_state: str
    outer: optax.GradientTransformation | None
    ema: float | None
    placements: Sequence[Placement]  # of the replicas of all processes at the start
    processes_of_ranks: Sequence[tuple[int, ...]]  # of each replica
    seed: int
    paces: Sequence[float | None]  # ms a step, for each replica
    scaling: Scaling | None
    host: bool  # merge on CPU devices
    wire: str
    overlap: float
    overlaps: tuple[float, ...]  # from which policy="auto" chooses for its local steps
    groups: Groups
    fleet: VirtualFleet | None
    che: ElChe | None  # of the first round; None for a single replica
    rows: str
    given_rows: str | None  # rows= itself
    joined: int  # batches in an update under ``sync``
    unit: int  # shares of rows are multiples of it, because each device of a sharded replica takes as many rows
    max_rows: Sequence[float] | None  # of a step of each replica; None for what its memory allows
    outputs: Callable[..., Any] | None
    strategy: ShardingStrategy  # of the devices of a replica
    fingerprint: dict[str, str] = field(default_factory=dict)  # of a run, as far as it follows from the arguments

    @property
    def joins_rows(self) -> bool:
        """Whether steps may join rows of several batches."""
        world_size = len(self.placements)
        return world_size > 1 and (self.rows == "speed" or self.joined != world_size)

    @property
    def first_choice(self) -> Choice | None:
        """What ``policy="auto"`` begins with; None under other policies."""
        if not self.chooses:
            return None
        if self.wire in ("float32", "auto") and 0.0 in self.overlaps:
            return Choice()
        reason = "not measured yet: local steps, which have the given wire or overlap"
        return Choice(ApplyPolicy.CADENCE, overlap=max(self.overlaps), reason=reason)

    @property
    def extra_args(self) -> dict[str, Any]:
        """What the update of ``tx`` gets beside ``value=``, for checks and digests."""
        return {} if self.scaling is None else {"progress": jnp.float32(0)}

    def rules(self, tx: optax.GradientTransformation, scaling: Scaling | None) -> MergeRules:
        """The rules of the merge, with the optimizer and the scaling after the first batch has been read."""
        return MergeRules(self.average, self.merge, self.opt_state, tx, self.outer, scaling)
