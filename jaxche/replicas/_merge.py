"""The merge of replicas: one program whose all-reduce carries trees, times, counts and losses."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.averaging import (
    from_moments,
    is_float,
    measure_drift,
    outer_step,
    psum_buckets,
    sum_dtype,
    to_moments,
    weighted,
)
from jaxche.distributed import Group
from jaxche.replicas._coded_merge import CodedSums, Residual, agreement, coded_sums, sent_bytes
from jaxche.replicas._placement import Placement, add_replica_axis, drop_replica_axis, spans_processes
from jaxche.replicas._programs import Carry, LocalState, all_finite, non_finite_flag, stayed_finite
from jaxche.replicas._replica_mesh import AXIS, ReplicaMesh
from jaxche.replicas._scaling import Scaled, Scaling
from jaxche.replicas._schedule_counts import advance_by_batches, are_schedules, counts_of, with_counts

# Columns that the host of a replica adds to the table of a merge. All are exact in float32.
# ``count`` is the number of steps, and ``batches`` that of batches: a step may run a part of a batch.
# ``group_ms`` is the time of the replica in merges with its group, waits included.
# ``ended`` is 0, or where the stream of the process has ended, 1 more than its batches (modulo 2**23).
HOST_COLUMNS = (
    "count",
    "batches",
    "wall_ms",
    "group_ms",
    "last_sync_ms",
    "last_hidden_ms",
    "failed",
    "stop",
    "accumulated",
    "ended",
    "plan_high",
    "plan_low",
)
_COUNT, _BATCHES = HOST_COLUMNS.index("count"), HOST_COLUMNS.index("batches")
# Replaces the two halves of the plan's digest if the processes of one replica planned differently.
DIFFERS = (-1.0, -1.0)
# The weight of batches of padding alone, where something has to be divided by it: beside others it is nothing.
TINY_WEIGHT = 1e-20


class MergeRules(NamedTuple):
    """The rules of a merge, named as the arguments of the trainer; with ``scaling``, it wraps ``tx`` already."""

    average: str
    merge: str
    opt_state: str
    tx: optax.GradientTransformation
    outer: optax.GradientTransformation | None
    scaling: Scaling | None
    # The column of the sums with the weights of the loss: the examples, or weights of its own.
    loss_weight: int = 0
    wire: str = "float32"


class MergeMismatchError(RuntimeError):
    """The replicas decoded different parameters from the codes of one merge; the state before it is intact.

    Example:
      >>> issubclass(MergeMismatchError, RuntimeError)
      True
    """


class Report(NamedTuple):
    """The scalars of a merge; the merge program returns them as one vector, followed by those of :class:`Scaled`."""

    drift: Any = 0.0
    drift_direction: Any = 0.0
    # The arguments of measure_drift.
    mean_of_squares: Any = 0.0
    mean_delta_sq: Any = 0.0
    mean_params_sq: Any = 0.0
    # 1.0 if the merge made no number NaN or infinite.
    finite: Any = 1.0
    # Batches accumulated by MultiSteps and not applied, where gradients are averaged.
    accumulated: Any = 0.0
    # 1.0 if all replicas decoded the same parameters from the codes of a merge.
    agreed: Any = 1.0


def _to_vector(report: Report, scaled: Scaled | None) -> Any:
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in (*report, *(scaled or ()))])


def _from_vector(vector: Any) -> tuple[Report, Scaled]:
    numbers, n_report = np.asarray(vector).tolist(), len(Report._fields)
    return Report(*numbers[:n_report]), Scaled(*numbers[n_report:])


class MergeProgram:
    """The body of the merge program, as each replica runs it in ``shard_map``."""

    def __init__(self, replica_mesh: ReplicaMesh, rules: MergeRules, local: LocalState):
        self._replica_mesh, self._rule, self._opt_mode = replica_mesh, rules.merge, rules.opt_state
        self._outer, self._scaling, self._loss_weight = rules.outer, rules.scaling, rules.loss_weight
        self._wire = rules.wire
        self._tx: Any = optax.with_extra_args_support(rules.tx)
        self._schedules = are_schedules(local.opt_state)
        # Gradients are sharded at least as finely as parameters, so sums are sharded like gradients.
        self._specs = {
            "delta": replica_mesh.specs("grads", local.params),
            "grads": replica_mesh.specs("grads", local.params),
            "opt_state": replica_mesh.specs("opt_state", local.opt_state),
        }

    def _sum(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Sum over replicas, on each device over its own shards: the all-reduce of the round."""
        if not self._replica_mesh.inner:
            return psum_buckets(payload, AXIS)
        specs = {name: self._specs.get(name, P()) for name in payload}
        if "opt_state" in payload:
            leaf_specs = jax.tree.leaves(self._specs["opt_state"], is_leaf=lambda x: isinstance(x, P))
            specs["opt_state"] = {i: leaf_specs[i] for i in payload["opt_state"]}
        sum_shards = jax.shard_map(
            lambda shards: psum_buckets(shards, AXIS),
            in_specs=(specs,),
            out_specs=specs,
            axis_names=set(self._replica_mesh.inner),
            check_vma=False,
        )
        return sum_shards(payload)

    def _coded_sums(
        self, delta: Any, residual: Residual, moments: dict[int, Any], payload: dict[str, Any]
    ) -> CodedSums:
        """The sums with coded changes, on each device over its own shards."""
        arguments = (delta, residual, moments, payload)
        sums = functools.partial(coded_sums, wire=self._wire)
        if not self._replica_mesh.inner:
            return sums(*arguments)
        leaf_specs = jax.tree.leaves(self._specs["opt_state"], is_leaf=lambda x: isinstance(x, P))
        opt_specs, own = {i: leaf_specs[i] for i in moments}, Residual(self._specs["delta"])
        sum_shards = jax.shard_map(
            sums,
            in_specs=(self._specs["delta"], own, opt_specs, P()),
            out_specs=CodedSums(self._specs["delta"], own, opt_specs, P()),
            axis_names=set(self._replica_mesh.inner),
            check_vma=False,
        )
        return sum_shards(*arguments)

    def _table(self, host: Any, not_finite: Any, sums: Any) -> Any:
        """The rows of this replica in a table of zeros; the sum over replicas is the whole table."""
        columns = jnp.concatenate([not_finite, sums], axis=1)
        rows = jnp.concatenate([host[0], jnp.broadcast_to(columns, (host.shape[1], columns.shape[1]))], axis=1)
        table = jnp.zeros((self._replica_mesh.mesh.shape[AXIS], *rows.shape), jnp.float32)
        return table.at[lax.axis_index(AXIS)].set(rows)

    def _statistics(self, end: Any, examples: Any) -> tuple[Any, Any]:
        """The weighted model state, and a function that makes the mean of its sum.

        Variances take a second, small all-reduce.
        """
        state = drop_replica_axis(end["model_state"])
        leaves, treedef = jax.tree.flatten(state)
        averaged = [i for i, leaf in enumerate(leaves) if is_float(leaf)]

        def finish(sums: list[Any], total: Any) -> Any:
            for i, s in zip(averaged, sums, strict=True):
                leaves[i] = s / total.astype(s.dtype)
            means = jax.tree.unflatten(treedef, leaves)
            if moments := to_moments(state, means):
                summed = self._sum({"moments": weighted(moments, examples)})["moments"]
                means = from_moments(jax.tree.map(lambda s: s / total.astype(s.dtype), summed), means)
            return jax.tree.map(lambda new, old: new.astype(old.dtype) if is_float(old) else new, means, state)

        return weighted([leaves[i] for i in averaged], examples), finish

    def parameters(self, start: Any, end: Any, measured: Any, host: Any) -> tuple[Any, Any, Any]:
        """The weighted mean of parameters: ``(merged trees, table, report)``."""
        sums = measured["sums"]
        x0, x = drop_replica_axis(start["params"]), drop_replica_axis(end["params"])
        count, examples = host[0, 0, _COUNT], sums[0, 0]
        # Not normalised: the same all-reduce sums the weights.
        weight = {
            "steps": host[0, 0, _BATCHES],
            "batch": self._some_weight(sums[0]) / jnp.maximum(count, 1.0),
            "fednova": (count > 0).astype(jnp.float32),
        }[self._rule]
        delta = jax.tree.map(lambda a, b: a.astype(sum_dtype(a.dtype)) - b.astype(sum_dtype(b.dtype)), x0, x)
        statistics, finish = self._statistics(end, examples)
        moments: dict[int, Any] = {}
        payload = {
            "weight": weight,
            "squares": weighted(_square_norm(delta), weight),
            "statistics": statistics,
            "examples": examples,
            "table": self._table(host, measured["not_finite"], sums),
        }
        if "counts" in start:
            old_counts = drop_replica_axis(start["counts"])
            new_counts = drop_replica_axis(measured["counts"] if "counts" in measured else counts_of(end["opt_state"]))
            steps = jnp.stack([new - old for old, new in zip(old_counts, new_counts, strict=True)]).astype(jnp.float32)
            payload["counts"] = jnp.stack([steps, steps * weight])
        if self._opt_mode == "average":
            opt_leaves, opt_def = jax.tree.flatten(drop_replica_axis(end["opt_state"]))
            floats = [i for i, leaf in enumerate(opt_leaves) if is_float(leaf)]
            moments = {i: opt_leaves[i] for i in floats}
        if self._scaling is not None:
            noise, gains = drop_replica_axis(start["noise"]), drop_replica_axis(measured["scaled"])
            opt_state = drop_replica_axis(start["opt_state"]) if self._scaling.preconditioned else None
            tracked = drop_replica_axis(measured["tracked"])
            payload["noise"] = self._scaling.payload(tracked, noise, opt_state, x0, examples)
            payload["gains"] = jnp.append(gains, weighted(gains[0], weight))
        merged = {}
        if self._wire == "float32":
            payload["delta"] = weighted(delta, weight)
            if self._opt_mode == "average":
                payload["opt_state"] = weighted(moments, weight)
            total = self._sum(payload)
            mean = jax.tree.map(lambda d: d / total["weight"].astype(d.dtype), total["delta"])
            moments = {i: s / total["weight"] for i, s in total.get("opt_state", {}).items()}
        else:
            residual = drop_replica_axis(start["residual"])
            mean, residual, moments, total = self._coded_sums(delta, residual, moments, payload)
            merged["residual"] = add_replica_axis(residual)
        # The steps that were taken: fewer than planned if a replica reached its time limit.
        counts = total["table"][:, 0, _COUNT]
        alpha = _fednova_step(counts) if self._rule == "fednova" else jnp.float32(1)
        progress = jax.tree.map(lambda d: d * alpha.astype(d.dtype), mean)
        outer_state = drop_replica_axis(start["outer_state"])
        if self._outer is None:
            params = jax.tree.map(lambda a, g: (a.astype(g.dtype) - g).astype(a.dtype), x0, progress)
        else:
            params, outer_state = outer_step(self._outer, x0, progress, outer_state)
        merged |= {"params": add_replica_axis(params), "outer_state": add_replica_axis(outer_state)}
        merged["model_state"] = add_replica_axis(finish(total["statistics"], total["examples"]))
        if self._opt_mode == "average":
            for i, moment in moments.items():
                opt_leaves[i] = moment.astype(opt_leaves[i].dtype)
            merged["opt_state"] = add_replica_axis(jax.tree.unflatten(opt_def, opt_leaves))
        elif self._opt_mode == "reset":
            fresh = self._tx.init(params)
            merged["opt_state"], new_counts = add_replica_axis(fresh), counts_of(fresh)
        if "counts" in start:
            merged["counts"] = add_replica_axis(self._merged_counts(old_counts, new_counts, total))
        squares = (total["squares"] / total["weight"], _square_norm(mean), _square_norm(params))
        finite, agreed = _stayed_finite(start, merged), jnp.float32(1)
        if self._wire != "float32":  # each replica has decoded for itself
            finite, agreed = agreement(params, finite, AXIS)
        report, scaled = Report(*measure_drift(*squares), *squares, finite, agreed=agreed), None
        if self._scaling is not None:
            noise = self._scaling.update_from_estimates(noise, total["noise"])
            # Each replica counted the base steps of its own; the merge takes their weighted mean.
            progress = drop_replica_axis(start["progress"]) + alpha * total["gains"][2] / total["weight"]
            merged |= {"noise": add_replica_axis(noise), "progress": add_replica_axis(progress)}
            steps = counts.sum()
            scaled = Scaled(
                noise=noise.critical_batch_size,
                gain=total["gains"][0] / steps,
                lr_factor=total["gains"][1] / steps,
                progress=progress,
                base_batch_size=noise.base_batch_size,
            )
        return merged, total["table"], _to_vector(report, scaled)

    def _some_weight(self, sums: Any) -> Any:
        """The weight of the loss in these sums, above 0 where there are examples, also if all of them are padding."""
        weight = sums[self._loss_weight]
        return weight if self._loss_weight == 0 else jnp.where(sums[0] > 0, jnp.maximum(weight, TINY_WEIGHT), 0)

    def _merged_counts(self, old_counts: Any, new_counts: Any, total: Any) -> list[Any]:
        """The optimizer's counts after a merge: schedules add the steps of all replicas, moments the weighted mean."""
        merged = []
        for i, (old, count) in enumerate(zip(old_counts, new_counts, strict=True)):
            if self._schedules[i]:
                # In batches: a step on a part of one counts for that part.
                host = total["table"][:, 0]
                part = host[:, _BATCHES].sum() / host[:, _COUNT].sum()
                count = old + jnp.round(total["counts"][0, i] * part).astype(old.dtype)
            elif self._opt_mode == "average":
                mean = total["counts"][1, i] / total["weight"]
                count = old + jnp.round(mean).astype(old.dtype)
            merged.append(count)
        return merged

    def numbers(self, start: Any, measured: Any, host: Any) -> tuple[dict[str, Any], Any]:
        """The table and the optimizer's counts of a merge of parameters that comes later: ``(counts, table)``."""
        payload: dict[str, Any] = {"table": self._table(host, measured["not_finite"], measured["sums"])}
        if "counts" not in start:
            return {}, self._sum(payload)["table"]
        old, new = drop_replica_axis(start["counts"]), drop_replica_axis(measured["counts"])
        payload["counts"] = jnp.stack([b - a for a, b in zip(old, new, strict=True)]).astype(jnp.float32)[None]
        total = self._sum(payload)
        return {"counts": add_replica_axis(self._merged_counts(old, new, total))}, total["table"]

    def gradients(self, start: Any, end: Any, measured: Any, host: Any) -> tuple[Any, Any, Any]:
        """One update with the mean of all gradients, equal on all replicas: ``(merged trees, table, report)``."""
        sums = measured["sums"]
        params = drop_replica_axis(start["params"])
        statistics, finish = self._statistics(end, sums[0, 0])
        payload = {
            "grads": drop_replica_axis(end["grads"]),
            "sums": sums[0],
            "statistics": statistics,
            "table": self._table(host, non_finite_flag(all_finite(end["grads"])), sums),
        }
        if self._scaling is not None:
            payload["noise"] = self._scaling.payload(
                drop_replica_axis(measured["tracked"]), None, None, None, sums[0, 0]
            )
        total = self._sum(payload)
        examples, weight = total["sums"][0], self._some_weight(total["sums"])
        grads = jax.tree.map(lambda g, p: (g / weight.astype(g.dtype)).astype(p.dtype), total["grads"], params)
        loss = total["sums"][1] / weight
        before, arguments, scaled = drop_replica_axis(start["opt_state"]), {}, None
        if self._scaling is not None:
            exact = jax.tree.map(lambda g: g / examples.astype(g.dtype), total["grads"])
            noise = self._scaling.update_from_gradients(
                drop_replica_axis(start["noise"]), total["noise"], exact, before, examples
            )
            arguments = self._scaling.arguments(noise, drop_replica_axis(start["progress"]), examples)
        updates, after = self._tx.update(grads, before, params, value=loss, **arguments)
        batches = jnp.round(total["table"][:, 0, _BATCHES].sum())
        opt_state, accumulated = advance_by_batches(
            batches, before, after, host[0, 0, HOST_COLUMNS.index("accumulated")]
        )
        merged = {
            "params": add_replica_axis(optax.apply_updates(params, updates)),
            "opt_state": add_replica_axis(opt_state),
            "model_state": add_replica_axis(finish(total["statistics"], examples)),
            "outer_state": start["outer_state"],
        }
        stayed = _stayed_finite(start, merged)
        # The optimizer may skip a gradient that is not finite, as optax.apply_if_finite does.
        table = total["table"].at[..., len(HOST_COLUMNS)].multiply(1 - stayed)
        if arguments:
            noise, progress = arguments["noise"], opt_state.progress
            merged |= {"noise": add_replica_axis(noise), "progress": add_replica_axis(progress)}
            scaled = Scaled(
                noise=noise.critical_batch_size,
                gain=noise.gain(arguments["scale"]),
                lr_factor=opt_state.factor,
                progress=progress,
                base_batch_size=noise.base_batch_size,
            )
        return merged, table, _to_vector(Report(finite=stayed, accumulated=accumulated), scaled)


def _stayed_finite(start: dict[str, Any], merged: dict[str, Any]) -> Any:
    """1.0 if the merge made no finite number of a state NaN or infinite, else 0.0."""
    names = [name for name in ("params", "model_state", "outer_state", "opt_state") if name in start and name in merged]
    before, after = ([tree[name] for name in names] for tree in (start, merged))
    return stayed_finite(before, after).astype(jnp.float32)


def _square_norm(tree: Any) -> Any:
    squares = [jnp.sum(jnp.square(jnp.abs(x)), dtype=jnp.float32) for x in jax.tree.leaves(tree) if is_float(x)]
    return jnp.sum(jnp.stack(squares))


def _fednova_step(counts: Any) -> Any:
    """The step length of :func:`~jaxche.merge_weights` under ``"fednova"``, from the steps of each replica."""
    return (counts > 0).sum() * jnp.square(counts).sum() / jnp.square(counts.sum())


class Merged(NamedTuple):
    """The result of a merge; all but the local states is equal on every host."""

    local_states: tuple[LocalState, ...]
    table: np.ndarray  # [R, len(HOST_COLUMNS) + 1 + Columns.count]
    drift: tuple[float, float]
    scaled: Scaled = Scaled()
    squares: tuple[float, ...] = (0.0, 0.0, 0.0)  # the arguments of measure_drift
    finite: bool = True  # whether the merge made no number NaN or infinite
    accumulated: int = 0  # see Report
    nbytes: int = 0  # that each replica sends
    wall_ms: float | None = None  # duration of the merged steps, if they are of an earlier round


class Merge:
    """Merges replicas with one ``psum`` over the ``replica`` axis.

    The program is manual over ``replica`` and automatic within a replica: norms, the outer optimizer and the update
    with merged gradients see whole arrays. Only the sum runs on shards.
    """

    def __init__(self, replica_mesh: ReplicaMesh, rules: MergeRules, local: LocalState):
        self._replica_mesh, self._compiled = replica_mesh, False
        self.nbytes: int | None = None  # that each replica sends, once traced
        program = MergeProgram(replica_mesh, rules, local)
        average, opt_state, scaling = rules.average, rules.opt_state, rules.scaling
        # Optimizer states that stay with their replica are no input of the global program.
        if average == "parameters":
            self._common = ("params", "model_state", "outer_state")
            self._sent = ("params", "model_state", "opt_state")[: 3 if opt_state == "average" else 2]
            made = ("params", "model_state", "outer_state", *(("opt_state",) if opt_state != "local" else ()))
            schedules = are_schedules(local.opt_state)  # one for each count
            self._merges_counts = bool(schedules) and (any(schedules) or opt_state == "average")
            if rules.wire != "float32":
                self._common, made = (*self._common, "residual"), (*made, "residual")
        else:
            self._common = ("params", "model_state", "outer_state", "opt_state")
            self._sent = ("grads", "model_state")
            made, self._merges_counts = self._common, False
        made = (*made, "counts") if self._merges_counts else made
        if scaling is not None:
            preconditioner = ("opt_state",) if average == "parameters" and scaling.preconditioned else ()
            self._common = (*self._common, "noise", "progress", *preconditioner)
            made = (*made, "noise", "progress")
        specs = (P(AXIS), P(AXIS), P(AXIS), P(AXIS))
        mapped = jax.shard_map(
            program.parameters if average == "parameters" else program.gradients,
            mesh=replica_mesh.mesh,
            in_specs=specs,
            out_specs=(P(AXIS), P(), P()),
            axis_names={AXIS},
            check_vma=False,
        )
        trees = local._asdict() | {"counts": counts_of(local.opt_state)}
        merged = {name: replica_mesh.shardings(name, trees[name]) for name in made}
        everywhere = NamedSharding(replica_mesh.mesh, P())
        # The merged trees take the buffers of the carry. They cannot take those of gradient accumulators, which are
        # float32 also for parameters of lower precision.
        self._program = jax.jit(
            mapped,
            donate_argnums=1 if average == "parameters" else (),
            out_shardings=(merged, everywhere, everywhere),
        )

    def __call__(self, starts: Sequence[LocalState], carries: Sequence[Carry], rows: np.ndarray) -> Merged:
        """Merge the replicas of this process with all others and wait for the result.

        ``starts`` and ``carries`` are those of each local replica; ``rows`` are ``[local replicas, HOST_COLUMNS]``.
        """
        arguments = self.arguments(starts, carries, rows)
        if self._replica_mesh.group.elastic and not self._compiled:
            # Collectives of an elastic run have a short timeout, so all compile before any of them enters one.
            self._program.lower(*arguments).compile()
            self._replica_mesh.group.barrier()
            self._compiled = True
        if self.nbytes is None:
            self.nbytes = sent_bytes(self._program.trace(*arguments).jaxpr)
        with self._replica_mesh.group.collective():
            merged, table, report = self._program(*arguments)
            # Waiting here is part of the contract: two programs with collectives in flight can deadlock the CPU client.
            table, (report, scaled) = reduce_rows(np.asarray(table)), _from_vector(report)
        if not report.agreed:
            raise MergeMismatchError(
                "the replicas decoded different parameters from the codes of one merge: a message was damaged on its "
                "way, or their machines compute differently. The round was not merged, and the state before it is "
                "intact. Continue from it, or from a checkpoint; if it happens again, write wire='float32'"
            )
        parts = self._replica_mesh.unstack(merged)
        local_states = tuple(map(_next, starts, carries, parts))
        return Merged(
            local_states,
            table,
            drift=(report.drift, report.drift_direction),
            scaled=scaled,
            squares=(report.mean_of_squares, report.mean_delta_sq, report.mean_params_sq),
            finite=report.finite == 1,
            accumulated=int(report.accumulated),
            nbytes=self.nbytes,
        )

    def arguments(self, starts: Sequence[LocalState], carries: Sequence[Carry], rows: np.ndarray) -> tuple[Any, ...]:
        """The arguments of the program."""
        stack = self._replica_mesh.stack
        # Not donated, because no result has these shapes.
        measured = [_present(carry, "sums", "not_finite", "tracked", "scaled") for carry in carries]
        common = [{name: getattr(local, name) for name in self._common} for local in starts]
        if self._merges_counts:
            common = [tree | {"counts": counts_of(start.opt_state)} for tree, start in zip(common, starts, strict=True)]
            if "opt_state" not in self._sent:  # a donated buffer must not be passed twice
                measured = [m | {"counts": counts_of(c.opt_state)} for m, c in zip(measured, carries, strict=True)]
        return (
            stack(common),
            stack([{name: getattr(carry, name) for name in self._sent} for carry in carries]),
            stack(measured),
            self._replica_mesh.rows(rows),
        )


def _present(carry: Carry, *names: str) -> dict[str, Any]:
    found = {name: getattr(carry, name) for name in names}
    return {name: tree for name, tree in found.items() if tree is not None}


def _next(start: LocalState, carry: Carry, merged: dict[str, Any]) -> LocalState:
    """The next local state: the merged trees, and the replica's own optimizer state and residual unless merged."""
    trees = {"opt_state": carry.opt_state, "residual": start.residual} | merged
    counts = trees.pop("counts", None)
    return (
        LocalState(**trees)
        if counts is None
        else LocalState(**trees | {"opt_state": with_counts(trees["opt_state"], counts)})
    )


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

    def __init__(self, group: Group, placement: Placement, scaling: Scaling | None):
        self._group = group
        self._spans, self._scaling = spans_processes(placement), scaling

    def __call__(self, starts: Sequence[LocalState], carries: Sequence[Carry], rows: np.ndarray) -> Merged:
        (start,), (carry,) = starts, carries
        if self._spans:
            # The processes of the replica stop and fail together.
            rows = reduce_rows(np.stack(self._group.all_gather(rows.tolist()), axis=1))
        local = LocalState(carry.params, carry.opt_state, carry.model_state, start.outer_state, residual=start.residual)
        table = np.concatenate([rows, np.asarray(carry.not_finite), np.asarray(carry.sums)], axis=1)
        if self._scaling is None:
            return Merged((local,), table, (0.0, 0.0))
        # Without the trees that the next state takes unchanged.
        rest = carry._replace(opt_state=None, model_state=None)
        noise, progress, numbers = _end_scaling(self._scaling, rest, start.progress, np.float32(rows[0, 0]))
        local = local._replace(noise=noise, progress=progress)
        return Merged((local,), table, (0.0, 0.0), Scaled(*np.asarray(numbers).tolist()))


@functools.partial(jax.jit, static_argnums=0)
def _end_scaling(scaling: Scaling, carry: Carry, progress: Any, steps: Any) -> tuple[Any, Any, Any]:
    """Noise scale and progress after the round, and the fields of :class:`Scaled`."""
    progress = progress + carry.scaled[:, 0]
    noise, tracked, params = drop_replica_axis((carry.noise, carry.tracked, carry.params))
    noise = scaling.end_round(noise, tracked, carry.sums[0, 0], params)
    gain, lr_factor = carry.scaled[0] / steps
    scaled = Scaled(noise.critical_batch_size, gain, lr_factor, progress[0], noise.base_batch_size)
    return add_replica_axis(noise), progress, jnp.stack(scaled)
