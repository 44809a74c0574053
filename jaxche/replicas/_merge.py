"""The merge of replicas: calls the merge program on their trees, and makes the next local states of its result."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.distributed import Group
from jaxche.replicas._coded_merge import sent_bytes
from jaxche.replicas._merge_program import MergeProgram, MergeRules, Report
from jaxche.replicas._opt_state import (
    are_accumulators,
    are_hyperparams,
    are_keys,
    are_plateaus,
    are_schedules,
    counts_of,
    with_counts,
)
from jaxche.replicas._packing import Deferred, Packed
from jaxche.replicas._placement import Placement, add_replica_axis, drop_replica_axis, spans_processes
from jaxche.replicas._programs import Carry, LocalState, Views, free
from jaxche.replicas._replica_mesh import AXIS, ReplicaMesh
from jaxche.replicas._scaling import Scaled, Scaling
from jaxche.replicas._table import HOST_COLUMNS

# Replaces the two halves of the plan's digest if the processes of one replica planned differently.
DIFFERS = (-1.0, -1.0)


class MergeMismatchError(RuntimeError):
    """The replicas decoded different parameters from the codes of one merge, which was not made.

    Example:
      >>> issubclass(MergeMismatchError, RuntimeError)
      True
    """


class ToMerge(NamedTuple):
    """The local replicas at the end of a round, for the merge."""

    starts: Sequence[LocalState]  # after the last merge
    carries: Sequence[Carry]
    rows: np.ndarray  # of the table, [local replicas, HOST_COLUMNS]


class Merged(NamedTuple):
    """The result of a merge; all but the local states is equal on every host."""

    local_states: tuple[LocalState, ...]
    table: np.ndarray  # [R, len(HOST_COLUMNS) + 1 + Columns.count]
    report: Report = Report()
    scaled: Scaled = Scaled()
    nbytes: int = 0  # that each replica sends
    wall_ms: float | None = None  # duration of the merged steps, if they are of an earlier round
    exchange_ms: float = 0.0  # duration of the exchange of the table in this process, if it came before the merge


class Merge:
    """Merges replicas with one ``psum`` over the ``replica`` axis.

    The program is manual over ``replica`` and automatic within a replica: norms, the outer optimizer and the update
    with merged gradients see whole arrays. Only the sum runs on shards.
    """

    def __init__(self, replica_mesh: ReplicaMesh, rules: MergeRules, local: LocalState):
        self._replica_mesh = replica_mesh
        self.nbytes: int | None = None  # that each replica sends, once traced
        average, opt_state, scaling = rules.average, rules.opt_state, rules.scaling
        # The fields of a carry that are averaged are in ``sent``. Optimizer states that stay with their replica are no
        # input of the global program.
        if average == "parameters":
            self._common = ("params", "model_state", "outer_state")
            self.sent = ("params", "model_state", "opt_state")[: 3 if opt_state == "average" else 2]
            made = ("params", "model_state", "outer_state", *(("opt_state",) if opt_state != "local" else ()))
            schedules = are_schedules(local.opt_state)  # one for each count
            self._merges_counts = bool(schedules) and (any(schedules) or opt_state == "average")
            if rules.wire != "float32":
                self._common, made = (*self._common, "residual"), (*made, "residual")
        else:
            self._common = ("params", "model_state", "outer_state", "opt_state")
            self.sent = ("grads", "model_state")
            made, self._merges_counts = self._common, False
        made = (*made, "counts") if self._merges_counts else made
        if scaling is not None:
            preconditioner = ("opt_state",) if average == "parameters" and scaling.preconditioned else ()
            self._common = (*self._common, "noise", "progress", *preconditioner)
            made = (*made, "noise", "progress")
        trees = local._asdict() | {"grads": local.params, "counts": counts_of(local.opt_state)}
        self._packings = rules.packings(replica_mesh, local)
        # The leaves of the optimizer state that a reset leaves to the replica. A key that began again would draw the
        # same numbers in every round, and a rate that began again would not fall.
        self._kept: list[bool] = []
        if opt_state == "reset" and average == "parameters":
            own = (are_accumulators, are_hyperparams, are_keys, are_plateaus)
            self._kept = list(map(max, *(are(local.opt_state) for are in own)))
        mapped = jax.shard_map(
            MergeProgram(replica_mesh, rules, local, self._packings),
            mesh=replica_mesh.mesh,
            in_specs=(P(AXIS), P(AXIS), P(AXIS), P(AXIS)),
            out_specs=(P(AXIS), P(), P()),
            axis_names={AXIS},
            check_vma=False,
        )
        merged = {name: replica_mesh.shardings(name, trees[name]) for name in made}
        everywhere = NamedSharding(replica_mesh.mesh, P())
        jit = functools.partial(jax.jit, mapped, out_shardings=(merged, everywhere, everywhere))
        # The merged trees take the buffers of the carry. They cannot take those of gradient accumulators, which are
        # float32 also for parameters of lower precision: there they take those of the state, if it is not kept.
        self._takes_starts = average == "gradients"
        self._program = jit() if self._takes_starts else jit(donate_argnums=1)
        self._donating = jit(donate_argnums=0) if self._takes_starts else self._program
        self.takes = ("opt_state",) if average == "parameters" and "opt_state" not in self._common else ()

    def __call__(self, given: ToMerge, donates: bool = False) -> Merged:
        """Merge the replicas of this process with all others and wait for the result.

        With ``donates`` the states at the start of the round are not kept.
        """
        arguments = self._compiled_for(given, donates)
        with self._replica_mesh.collective():
            merged, table, report = (self._donating if donates else self._program)(*arguments)
            # Waiting here is part of the contract: two programs with collectives in flight can deadlock the CPU client.
            table, (report, scaled) = reduce_rows(np.asarray(table)), _from_vector(report)
        if donates and self._takes_starts:
            free(
                [start._replace(ema=None) for start in given.starts], kept=[]
            )  # of accelerators that merge on the host
        if not report.agreed:
            kept = "" if donates else ", and the state before it is intact. Continue from it, or from a checkpoint"
            raise MergeMismatchError(
                "the replicas decoded different parameters from the codes of one merge: a message was damaged on its "
                f"way, or their machines compute differently. The round was not merged{kept}; if it happens again, "
                "write wire='float32'"
            )
        made = zip(given.starts, given.carries, self._parts(merged), strict=True)
        local_states = tuple(self._next(*one) for one in made)
        if self._replica_mesh.keeps_buffers:
            names = merged.keys() - ({"counts", "opt_state"} if "counts" in merged else {})
            views = Views(self._replica_mesh, {name: merged[name] for name in names})
            for local in local_states:
                local.views = views
        return Merged(local_states, table, report, scaled, self.nbytes or 0)

    def prepare(self, given: ToMerge, donates: bool = False) -> None:
        """Compile the program and connect the processes, without the transfer of a merge."""
        arguments = self._compiled_for(given, donates)
        (self._donating if donates else self._program).lower(*arguments).compile()
        self._replica_mesh.connect()

    def _compiled_for(self, given: ToMerge, donates: bool) -> tuple[Any, ...]:
        """The arguments of the program, which is compiled for them."""
        arguments = self.arguments(given)
        if self.nbytes is None:
            program = self._donating if donates else self._program
            self._replica_mesh.compile_everywhere(program, arguments)
            self.nbytes = sent_bytes(program.trace(*arguments).jaxpr)
        return arguments

    def arguments(self, given: ToMerge) -> tuple[Any, ...]:
        """The arguments of the program."""
        (starts, carries, rows), stack = given, self._replica_mesh.stack
        # Not donated, because no result has these shapes.
        measured = [carry.measured for carry in carries]
        known = self._views_of(starts)
        names = [name for name in self._common if name not in known]
        packed = {name: packing for name, packing in self._packings.items() if name in names}
        common = [{name: getattr(start, name) for name in names if name not in packed} for start in starts]
        common = [trees | start.packed(packed) for trees, start in zip(common, starts, strict=True)]
        if self._merges_counts:
            common = [tree | {"counts": start.counts} for tree, start in zip(common, starts, strict=True)]
            if "opt_state" not in self.sent:  # a donated buffer must not be passed twice
                measured = [m | {"counts": counts_of(c.opt_state)} for m, c in zip(measured, carries, strict=True)]
        return (
            stack(common) | {name: known[name] for name in self._common if name in known},
            stack([self._packed({name: getattr(carry, name) for name in self.sent}) for carry in carries]),
            stack(measured),
            self._replica_mesh.rows(rows),
        )

    def _packed(self, named: dict[str, Any]) -> dict[str, Any]:
        known = self._packings
        return {
            name: known[name].pack(tree) if name in known and not isinstance(tree, Packed) else tree
            for name, tree in named.items()
        }

    def _parts(self, merged: dict[str, Any]) -> list[dict[str, Any]]:
        """The merged trees of each replica of this process; an optimizer state that no step reads is deferred."""
        unstack = self._replica_mesh.unstack
        # With averaged gradients only the merge reads the optimizer's state, and it takes the view of all replicas.
        later = {"opt_state"} & merged.keys() if self._replica_mesh.keeps_buffers and "grads" in self.sent else set()
        parts = unstack({name: tree for name, tree in merged.items() if name not in later})
        rows = functools.cache(lambda: unstack({name: merged[name] for name in later}))
        for i, part in enumerate(parts):
            part |= {name: Deferred(lambda name=name, i=i: rows()[i][name]) for name in later}
        return parts

    def _next(self, start: LocalState, carry: Carry, merged: dict[str, Any]) -> LocalState:
        """The next local state: the merged trees, and the replica's own optimizer state and residual unless merged."""
        trees = {"opt_state": carry.opt_state, "residual": start.residual, "ema": start.ema} | merged
        if (counts := trees.pop("counts", None)) is not None:
            trees["opt_state"] = with_counts(trees["opt_state"], counts)
        if any(self._kept):
            fresh, structure = jax.tree.flatten(trees["opt_state"])
            pairs = zip(self._kept, jax.tree.leaves(carry.opt_state), fresh, strict=True)
            trees["opt_state"] = structure.unflatten(own if keep else new for keep, own, new in pairs)
        known = self._packings
        return LocalState(**trees | {n: Deferred.of(known[n], trees[n]) for n in known.keys() & trees.keys()})

    def _views_of(self, rows: Sequence[LocalState]) -> dict[str, Any]:
        """The views that have these rows; none if a row was changed since their merge."""
        views = rows[0].views
        if views is None or views.replica_mesh is not self._replica_mesh or any(row.views is not views for row in rows):
            return {}
        return views.trees


def reduce_rows(table: np.ndarray) -> np.ndarray:
    """``[R, columns]`` from one row per device: the maximum over the processes of a sharded replica."""
    rows = table.max(axis=1)
    # The maximum of different plans could look like a plan.
    plan = slice(HOST_COLUMNS.index("plan_high"), HOST_COLUMNS.index("plan_low") + 1)
    differ = (table[:, :, plan] != table[:, :1, plan]).any(axis=(1, 2))
    rows[differ, plan] = DIFFERS
    return rows


class SingleReplica:
    """Ends the round of a single replica; called like :class:`Merge`."""

    takes = ("params", "opt_state")

    def __init__(self, group: Group, placement: Placement, scaling: Scaling | None):
        self._group = group
        self._spans, self._scaling = spans_processes(placement), scaling

    def prepare(self, given: ToMerge, donates: bool = False) -> None:
        """Nothing to compile or to connect."""

    def __call__(self, given: ToMerge, donates: bool = False) -> Merged:
        (start,), (carry,), rows = given
        if self._spans:
            # The processes of the replica stop and fail together.
            rows = reduce_rows(np.stack(self._group.all_gather(rows.tolist()), axis=1))
        local = start._replace(params=carry.params, opt_state=carry.opt_state, model_state=carry.model_state)
        table = np.concatenate([rows, *jax.device_get([carry.not_finite, carry.sums])], axis=1)
        if self._scaling is None:
            return Merged((local,), table)
        # Without the trees that the next state takes unchanged.
        rest = carry._replace(opt_state=None, model_state=None)
        noise, progress, numbers = _end_scaling(self._scaling, rest, start.progress, np.float32(rows[0, 0]))
        local = local._replace(noise=noise, progress=progress)
        return Merged((local,), table, scaled=Scaled(*np.asarray(numbers).tolist()))


@functools.partial(jax.jit, static_argnums=0)
def _end_scaling(scaling: Scaling, carry: Carry, progress: Any, steps: Any) -> tuple[Any, Any, Any]:
    """Noise scale and progress after the round, and the fields of :class:`Scaled`."""
    progress = progress + carry.scaled[:, 0]
    noise, tracked, params = drop_replica_axis((carry.noise, carry.tracked, carry.params))
    noise = scaling.end_round(noise, tracked, carry.sums[0, 0].astype(jnp.float32), params)
    gain, lr_factor = carry.scaled[0] / steps
    scaled = Scaled.of(noise, gain, lr_factor, progress[0])
    return add_replica_axis(noise), progress, jnp.stack(scaled)


def _from_vector(vector: Any) -> tuple[Report, Scaled]:
    numbers, n_report = np.asarray(vector).tolist(), len(Report._fields)
    return Report(*numbers[:n_report]), Scaled(*numbers[n_report:])
