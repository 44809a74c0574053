"""The one program in which replicas meet: trees, times, counts and losses in the same all-reduce."""

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
from jaxche.training._placement import Placement, add_replica_axis, drop_replica_axis, spans_processes
from jaxche.training._programs import Carry, LocalState, all_finite, non_finite_flag, stayed_finite
from jaxche.training._replica_mesh import AXIS, ReplicaMesh
from jaxche.training._scaling import Scaled, Scaling
from jaxche.training._schedule_counts import advance_by_batches, are_schedules, counts_of, with_counts

# What each replica tells the others in a round, next to its tree. All are exact in float32.
HOST_COLUMNS = ("count", "wall_ms", "last_sync_ms", "failed", "stop", "accumulated", "plan_high", "plan_low")
# What stands in the place of the plan's two halves where the processes of one replica planned differently.
DIFFERS = (-1.0, -1.0)


class MergeRules(NamedTuple):
    """What is averaged, and how.

    Attributes:
      average: ``"parameters"`` or ``"gradients"``.
      merge: merge rule for parameters.
      opt_state: ``"local"``, ``"average"`` or ``"reset"``: what becomes of each replica's optimizer state.
      tx: the optimizer (steps on merged gradients; re-initialises on reset).
      outer: optax transform on the pseudo-gradient, or None for plain averaging.
      scaling: scaling of the learning rate, or None; ``tx`` is then already wrapped.
    """

    average: str
    merge: str
    opt_state: str
    tx: optax.GradientTransformation
    outer: optax.GradientTransformation | None
    scaling: Scaling | None


class MergeProgram:
    """The body of the merge program, run by each replica for itself.

    Args:
      replica_mesh: the mesh of all replicas.
      rules: of the merge.
      local: one replica's :class:`LocalState`, for its shapes.
    """

    def __init__(self, replica_mesh: ReplicaMesh, rules: MergeRules, local: LocalState):
        self._replica_mesh, self._rule, self._opt_mode = replica_mesh, rules.merge, rules.opt_state
        self._outer, self._scaling = rules.outer, rules.scaling
        self._tx: Any = optax.with_extra_args_support(rules.tx)
        self._schedules = are_schedules(local.opt_state)
        # Gradients are cut at least as finely as parameters, so what is summed is cut like them.
        self._cut = {
            "delta": replica_mesh.specs("grads", local.params),
            "grads": replica_mesh.specs("grads", local.params),
            "opt_state": replica_mesh.specs("opt_state", local.opt_state),
        }

    def _sum(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Sum over replicas, each device its own pieces: the all-reduce of the round."""
        if not self._replica_mesh.inner:
            return psum_buckets(payload, AXIS)
        cut = {name: self._cut.get(name, P()) for name in payload}
        if "opt_state" in payload:
            specs = jax.tree.leaves(self._cut["opt_state"], is_leaf=lambda x: isinstance(x, P))
            cut["opt_state"] = {i: specs[i] for i in payload["opt_state"]}
        inner = set(self._replica_mesh.inner)
        by_piece = jax.shard_map(
            lambda pieces: psum_buckets(pieces, AXIS),
            in_specs=(cut,),
            out_specs=cut,
            axis_names=inner,
            check_vma=False,
        )
        return by_piece(payload)

    def _table(self, host: Any, not_finite: Any, sums: Any) -> Any:
        """This replica's rows in an otherwise empty table; the sum over replicas is the whole table."""
        told = jnp.concatenate([not_finite, sums], axis=1)
        rows = jnp.concatenate([host[0], jnp.broadcast_to(told, (host.shape[1], told.shape[1]))], axis=1)
        table = jnp.zeros((self._replica_mesh.mesh.shape[AXIS], *rows.shape), jnp.float32)
        return table.at[lax.axis_index(AXIS)].set(rows)

    def _statistics(self, end: Any, examples: Any) -> tuple[Any, Any]:
        """Weighted model state, and how to finish once it is summed: variances take a second, small all-reduce."""
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
        """Weighted mean of parameters: the merged trees, the table, and what the round tells of itself."""
        sums = measured["sums"]
        x0, x = drop_replica_axis(start["params"]), drop_replica_axis(end["params"])
        count, examples = host[0, 0, 0], sums[0, 0]
        # Not normalised: the sum of the weights travels in the same all-reduce.
        weight = {
            "steps": count,
            "batch": examples / jnp.maximum(count, 1.0),
            "fednova": (count > 0).astype(jnp.float32),
        }[self._rule]
        delta = jax.tree.map(lambda a, b: a.astype(sum_dtype(a.dtype)) - b.astype(sum_dtype(b.dtype)), x0, x)
        statistics, finish = self._statistics(end, examples)
        payload = {
            "delta": weighted(delta, weight),
            "weight": weight,
            "squares": weighted(_square_norm(delta), weight),
            "statistics": statistics,
            "examples": examples,
            "table": self._table(host, measured["not_finite"], sums),
        }
        if "counts" in start:
            begun = drop_replica_axis(start["counts"])
            counted = drop_replica_axis(measured["counts"] if "counts" in measured else counts_of(end["opt_state"]))
            steps = jnp.stack([new - old for old, new in zip(begun, counted, strict=True)]).astype(jnp.float32)
            payload["counts"] = jnp.stack([steps, steps * weight])
        if self._opt_mode == "average":
            opt_leaves, opt_def = jax.tree.flatten(drop_replica_axis(end["opt_state"]))
            floats = [i for i, leaf in enumerate(opt_leaves) if is_float(leaf)]
            payload["opt_state"] = weighted({i: opt_leaves[i] for i in floats}, weight)
        if self._scaling is not None:
            noise, gains = drop_replica_axis(start["noise"]), drop_replica_axis(measured["scaled"])
            seen = drop_replica_axis(start["opt_state"]) if self._scaling.preconditioned else None
            payload["noise"] = self._scaling.payload(drop_replica_axis(measured["tracked"]), noise, seen, x0, examples)
            payload["gains"] = jnp.append(gains, weighted(gains[0], weight))
        total = self._sum(payload)
        # Of the steps that were taken, which a replica that ran out of time has fewer of than planned.
        counts = total["table"][:, 0, HOST_COLUMNS.index("count")]
        alpha = _fednova_step(counts) if self._rule == "fednova" else jnp.float32(1)
        mean = jax.tree.map(lambda d: d / total["weight"].astype(d.dtype), total["delta"])
        progress = jax.tree.map(lambda d: d * alpha.astype(d.dtype), mean)
        outer_state = drop_replica_axis(start["outer_state"])
        if self._outer is None:
            params = jax.tree.map(lambda a, g: (a.astype(g.dtype) - g).astype(a.dtype), x0, progress)
        else:
            params, outer_state = outer_step(self._outer, x0, progress, outer_state)
        merged = {"params": add_replica_axis(params), "outer_state": add_replica_axis(outer_state)}
        merged["model_state"] = add_replica_axis(finish(total["statistics"], total["examples"]))
        if self._opt_mode == "average":
            for i, s in total["opt_state"].items():
                opt_leaves[i] = (s / total["weight"]).astype(opt_leaves[i].dtype)
            merged["opt_state"] = add_replica_axis(jax.tree.unflatten(opt_def, opt_leaves))
        elif self._opt_mode == "reset":
            fresh = self._tx.init(params)
            merged["opt_state"], counted = add_replica_axis(fresh), counts_of(fresh)
        if "counts" in start:
            merged["counts"] = add_replica_axis(self._merged_counts(begun, counted, total))
        squares = (total["squares"] / total["weight"], _square_norm(mean), _square_norm(params))
        report = [*measure_drift(*squares), *squares, _stayed_finite(start, merged), jnp.float32(0)]
        if self._scaling is not None:
            noise = self._scaling.update_from_estimates(noise, total["noise"])
            # Each replica counted its own steps; what they are worth together is their mean by the merge's weights.
            progress = drop_replica_axis(start["progress"]) + alpha * total["gains"][2] / total["weight"]
            merged |= {"noise": add_replica_axis(noise), "progress": add_replica_axis(progress)}
            steps = counts.sum()
            report += [noise.critical_batch_size, total["gains"][0] / steps, total["gains"][1] / steps, progress]
            report.append(noise.base_batch_size)
        return merged, total["table"], jnp.stack(report)

    def _merged_counts(self, begun: Any, own: Any, total: Any) -> list[Any]:
        """The optimizer's counts after a merge: schedules count the steps of all, moments are as old as their mean."""
        merged = []
        for i, (first_count, count) in enumerate(zip(begun, own, strict=True)):
            if self._schedules[i]:
                count = first_count + total["counts"][0, i].astype(first_count.dtype)
            elif self._opt_mode == "average":
                mean = total["counts"][1, i] / total["weight"]
                count = first_count + jnp.round(mean).astype(first_count.dtype)
            merged.append(count)
        return merged

    def gradients(self, start: Any, end: Any, measured: Any, host: Any) -> tuple[Any, Any, Any]:
        """One update on the mean of all gradients, the same everywhere."""
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
        examples = total["sums"][0]
        grads = jax.tree.map(lambda g, p: (g / examples.astype(g.dtype)).astype(p.dtype), total["grads"], params)
        loss = total["sums"][1] / examples
        before, scaled = drop_replica_axis(start["opt_state"]), {}
        if self._scaling is not None:
            exact = jax.tree.map(lambda g: g / examples.astype(g.dtype), total["grads"])
            noise = self._scaling.update_from_gradients(
                drop_replica_axis(start["noise"]), total["noise"], exact, before, examples
            )
            scaled = self._scaling.arguments(noise, drop_replica_axis(start["progress"]), examples)
        updates, after = self._tx.update(grads, before, params, value=loss, **scaled)
        batches = total["table"][:, 0, HOST_COLUMNS.index("count")].sum()
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
        # A gradient that the optimizer skips, as optax.apply_if_finite does, breaks nothing.
        table = total["table"].at[..., len(HOST_COLUMNS)].multiply(1 - stayed)
        report = jnp.append(jnp.zeros(5, jnp.float32), jnp.stack([stayed, accumulated.astype(jnp.float32)]))
        if scaled:
            progress, gain = opt_state.progress, scaled["noise"].gain(scaled["scale"])
            merged |= {"noise": add_replica_axis(scaled["noise"]), "progress": add_replica_axis(progress)}
            told = [scaled["noise"].critical_batch_size, gain, opt_state.factor, progress]
            report = jnp.concatenate([report, jnp.stack([*told, scaled["noise"].base_batch_size])])
        return merged, table, report


def _stayed_finite(start: dict[str, Any], merged: dict[str, Any]) -> Any:
    """1.0 where the merge broke no number of a state, else 0.0."""
    names = [name for name in ("params", "model_state", "outer_state", "opt_state") if name in start and name in merged]
    before, after = ([tree[name] for name in names] for tree in (start, merged))
    return stayed_finite(before, after).astype(jnp.float32)


def _square_norm(tree: Any) -> Any:
    squares = [jnp.sum(jnp.square(jnp.abs(x)), dtype=jnp.float32) for x in jax.tree.leaves(tree) if is_float(x)]
    return jnp.sum(jnp.stack(squares))


def _fednova_step(counts: Any) -> Any:
    """The step length of :func:`~jaxche.merge_weights`, each replica with the share of its steps."""
    return (counts > 0).sum() * jnp.square(counts).sum() / jnp.square(counts.sum())


class Merged(NamedTuple):
    """Result of a merge: each local replica's next state and the table every host sees alike."""

    local_states: tuple[LocalState, ...]
    table: np.ndarray  # [R, len(HOST_COLUMNS) + 3 + metrics]
    drift: tuple[float, float]
    scaled: Scaled = Scaled()
    squares: tuple[float, ...] = (0.0, 0.0, 0.0)  # what the drift is made of
    finite: bool = True  # whether the merge itself made nothing NaN or infinite
    accumulated: int = 0  # batches that no update of MultiSteps has counted, where gradients are averaged


class Merge:
    """Merge over the ``replica`` axis, by one ``psum``.

    The program is manual over ``replica`` and automatic within a replica: norms, the outer optimizer and the update on
    merged gradients see whole arrays however they are cut. Only the sum itself runs on pieces.

    Args:
      replica_mesh: the mesh of all replicas and the way there.
      rules: what is averaged, and how.
      local: one replica's :class:`LocalState`, for its shapes.
    """

    def __init__(self, replica_mesh: ReplicaMesh, rules: MergeRules, local: LocalState):
        self._replica_mesh, self._compiled = replica_mesh, False
        within = MergeProgram(replica_mesh, rules, local)
        average, opt_state, scaling = rules.average, rules.opt_state, rules.scaling
        # Optimizer states that stay with their replica never enter the global program.
        if average == "parameters":
            self._common = ("params", "model_state", "outer_state")
            self._sent = ("params", "model_state", "opt_state")[: 3 if opt_state == "average" else 2]
            made = ("params", "model_state", "outer_state", *(("opt_state",) if opt_state != "local" else ()))
            schedules = are_schedules(local.opt_state)  # one for each count
            self._merges_counts = bool(schedules) and (any(schedules) or opt_state == "average")
        else:
            self._common = ("params", "model_state", "outer_state", "opt_state")
            self._sent = ("grads", "model_state")
            made, self._merges_counts = self._common, False
        made = (*made, "counts") if self._merges_counts else made
        if scaling is not None:
            compared = ("opt_state",) if average == "parameters" and scaling.preconditioned else ()
            self._common = (*self._common, "noise", "progress", *compared)
            made = (*made, "noise", "progress")
        specs = (P(AXIS), P(AXIS), P(AXIS), P(AXIS))
        mapped = jax.shard_map(
            within.parameters if average == "parameters" else within.gradients,
            mesh=replica_mesh.mesh,
            in_specs=specs,
            out_specs=(P(AXIS), P(), P()),
            axis_names={AXIS},
            check_vma=False,
        )
        trees = local._asdict() | {"counts": counts_of(local.opt_state)}
        merged = {name: replica_mesh.shardings(name, trees[name]) for name in made}
        everywhere = NamedSharding(replica_mesh.mesh, P())
        # A carry's trees have the shapes of the merged ones and give their buffers to them. Gradient accumulators
        # of low-precision parameters do not: they are float32.
        self._program = jax.jit(
            mapped,
            donate_argnums=1 if average == "parameters" else (),
            out_shardings=(merged, everywhere, everywhere),
        )

    def __call__(self, starts: Sequence[LocalState], carries: Sequence[Carry], rows: np.ndarray) -> Merged:
        """Merge the replicas of this process with all others and wait for the result.

        Args:
          starts: each local replica's :class:`LocalState` at the start of the round.
          carries: each local replica's carry at its end.
          rows: ``[local replicas, len(HOST_COLUMNS)]`` host numbers.
        """
        arguments = self.arguments(starts, carries, rows)
        if self._replica_mesh.group.elastic and not self._compiled:
            # So that nobody waits in a collective while others compile: its patience is short there.
            self._program.lower(*arguments).compile()
            self._replica_mesh.group.barrier()
            self._compiled = True
        with self._replica_mesh.group.collective():
            merged, table, report = self._program(*arguments)
            # Waiting here is part of the contract: two programs with collectives in flight can deadlock the CPU client.
            table, report = reduce_rows(np.asarray(table)), np.asarray(report).tolist()
        parts = self._replica_mesh.unstack(merged)
        local_states = tuple(_next(carry, part) for carry, part in zip(carries, parts, strict=True))
        scaled, squares = Scaled(*report[7:]), tuple(report[2:5])
        return Merged(local_states, table, (report[0], report[1]), scaled, squares, report[5] == 1, int(report[6]))

    def arguments(self, starts: Sequence[LocalState], carries: Sequence[Carry], rows: np.ndarray) -> tuple[Any, ...]:
        """What the program is called with."""
        stack = self._replica_mesh.stack
        # Of the same shapes as what is merged, but no result can take its buffers: it is not donated.
        measured = [_present(carry, "sums", "not_finite", "tracked", "scaled") for carry in carries]
        common = [{name: getattr(local, name) for name in self._common} for local in starts]
        if self._merges_counts:
            common = [tree | {"counts": counts_of(start.opt_state)} for tree, start in zip(common, starts, strict=True)]
            if "opt_state" not in self._sent:  # whose buffers are donated: its counts are not passed a second time
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


def _next(carry: Carry, merged: dict[str, Any]) -> LocalState:
    """What a replica goes on with: the merged trees, and its own optimizer state where it keeps that."""
    trees = {"opt_state": carry.opt_state} | merged
    counts = trees.pop("counts", None)
    return (
        LocalState(**trees)
        if counts is None
        else LocalState(**trees | {"opt_state": with_counts(trees["opt_state"], counts)})
    )


def reduce_rows(table: np.ndarray) -> np.ndarray:
    """``[R, columns]`` from a row per device: the processes of an island wait for their slowest, and stop together."""
    rows = table.max(axis=1)
    # Processes of one island that planned differently must not look like one that agrees with itself.
    plan = slice(HOST_COLUMNS.index("plan_high"), HOST_COLUMNS.index("plan_low") + 1)
    differ = (table[:, :, plan] != table[:, :1, plan]).any(axis=(1, 2))
    rows[differ, plan] = DIFFERS
    return rows


class SingleReplica:
    """The end of a round of a single replica; called like :class:`Merge`.

    Args:
      group: the processes of the run.
      placement: where it lives.
      scaling: scaling of the learning rate, or None.
    """

    def __init__(self, group: Group, placement: Placement, scaling: Scaling | None):
        self._group = group
        self._spans, self._scaling = spans_processes(placement), scaling

    def __call__(self, starts: Sequence[LocalState], carries: Sequence[Carry], rows: np.ndarray) -> Merged:
        (start,), (carry,) = starts, carries
        if self._spans:
            rows = reduce_rows(
                np.stack(self._group.all_gather(rows.tolist()), axis=1)
            )  # they stop together, and fail together
        local = LocalState(carry.params, carry.opt_state, carry.model_state, start.outer_state)
        table = np.concatenate([rows, np.asarray(carry.not_finite), np.asarray(carry.sums)], axis=1)
        if self._scaling is None:
            return Merged((local,), table, (0.0, 0.0))
        # Without what the next state takes as it is.
        told_of = carry._replace(opt_state=None, model_state=None)
        noise, progress, told = _summary(self._scaling, told_of, start.progress, np.float32(rows[0, 0]))
        local = local._replace(noise=noise, progress=progress)
        return Merged((local,), table, (0.0, 0.0), Scaled(*np.asarray(told).tolist()))


@functools.partial(jax.jit, static_argnums=0)
def _summary(scaling: Scaling, carry: Carry, progress: Any, steps: Any) -> tuple[Any, Any, Any]:
    """Noise and progress after its steps, and what the round tells of its scaling."""
    progress = progress + carry.scaled[:, 0]
    noise, tracked, params = drop_replica_axis((carry.noise, carry.tracked, carry.params))
    noise = scaling.end_round(noise, tracked, carry.sums[0, 0], params)
    told = [noise.critical_batch_size, *(carry.scaled[0] / steps), progress[0], noise.base_batch_size]
    return add_replica_axis(noise), progress, jnp.stack(told)
