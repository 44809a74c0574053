"""The merge program: one all-reduce carries the trees, times, counts and losses of all replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxche.averaging import (
    change,
    from_moments,
    is_float,
    measure_drift,
    outer_step,
    psum_buckets,
    to_moments,
    weighted,
)
from jaxche.replicas._coded_merge import Means, Residual, agreement, are_coded, coded_sums
from jaxche.replicas._opt_state import (
    add_steps,
    advance_by_batches,
    are_accumulators,
    are_after_several,
    are_plateaus,
    are_schedules,
    counts_of,
    select_counts,
)
from jaxche.replicas._packing import Packing, marked, packings
from jaxche.replicas._placement import add_replica_axis, drop_replica_axis, without_replica_axis
from jaxche.replicas._programs import LocalState, all_finite, non_finite_flag, stayed_finite
from jaxche.replicas._replica_mesh import AXIS, ReplicaMesh, own_row
from jaxche.replicas._scaling import Scaled, Scaling
from jaxche.replicas._table import HOST_COLUMNS, NOT_FINITE
from jaxche.scaling import with_extra_args

_COUNT, _BATCHES, _ACCUMULATED = map(HOST_COLUMNS.index, ("count", "batches", "accumulated"))
_STATES = ("params", "model_state", "outer_state", "opt_state")
# The weight of batches of padding alone: small enough to vanish beside others, and no division by zero without any.
TINY_WEIGHT = 1e-20


class MergeRules(NamedTuple):
    """The rules of a merge, named as the arguments of the trainer; with ``scaling``, it wraps ``tx`` already."""

    average: str
    merge: str
    opt_state: str
    tx: optax.GradientTransformation
    outer: optax.GradientTransformation | None
    scaling: Scaling | None
    # The column of the sums with the weights of the loss: the examples, or those of a jaxche.Weighted.
    loss_weight: int = 0
    wire: str = "float32"

    def packings(self, replica_mesh: ReplicaMesh, local: LocalState) -> dict[str, Packing]:
        """The packings of the trees that are sent packed; arrays of a sharded replica have several layouts."""
        names = () if replica_mesh.inner else self._packed(local.opt_state)
        trees = local._asdict() | {"grads": local.params}
        return packings({name: trees[name] for name in names}, replica_mesh.small_bytes)

    def _packed(self, opt_state: Any) -> tuple[str, ...]:
        """The trees that are sent packed, where replicas are single devices."""
        if self.average == "gradients":
            return ("grads",)
        # These need the arrays themselves, and to cut them out of vectors in the merge program takes long to compile.
        if self.wire != "float32" or self.outer is not None or self.scaling is not None or self.opt_state == "reset":
            return ()
        all_averaged = self.opt_state == "average" and not any(are_accumulators(opt_state) + are_plateaus(opt_state))
        return ("params", "opt_state") if all_averaged else ("params",)


class Report(NamedTuple):
    """The scalars of a merge; the merge program returns them and those of :class:`Scaled` as one vector."""

    drift: Any = 0.0
    drift_direction: Any = 0.0
    # The arguments of measure_drift.
    mean_of_squares: Any = 0.0
    mean_delta_sq: Any = 0.0
    mean_params_sq: Any = 0.0
    # The mean of squares with weights by batches, whatever the merge rule.
    squares_by_batches: Any = 0.0
    # 1.0 if the merge made no number NaN or infinite.
    finite: Any = 1.0
    # Batches accumulated by MultiSteps and not applied, where gradients are averaged.
    accumulated: Any = 0.0
    # 1.0 if all replicas decoded the same parameters from the codes of a merge.
    agreed: Any = 1.0


def _to_vector(report: Report, scaled: Scaled | None) -> Any:
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in (*report, *(scaled or ()))])


class MergeProgram:
    """The body of the merge program, as each replica runs it in ``shard_map``; packed trees stay packed."""

    def __init__(
        self,
        replica_mesh: ReplicaMesh,
        rules: MergeRules,
        local: LocalState,
        packings: Mapping[str, Packing],
    ):
        self._replica_mesh, self._rules, self._packings = replica_mesh, rules, packings
        self._scaling, self._tx = rules.scaling, with_extra_args(rules.tx)
        self._merge = self._parameters if rules.average == "parameters" else self._gradients
        self._schedules, self._several = are_schedules(local.opt_state), are_after_several(local.opt_state)
        self._accumulates = are_accumulators(local.opt_state)
        codes = rules.wire != "float32" and rules.opt_state == "average"
        coded = are_coded(rules.tx, without_replica_axis(local.params)) if codes else []
        self._coded_moments = [i for i, is_coded in enumerate(coded) if is_coded]
        self._keeps_count = select_counts(local.opt_state, self._accumulates)
        plateaus = are_plateaus(local.opt_state) if rules.opt_state == "average" else []
        self._plateaus = [i for i, is_plateau in enumerate(plateaus) if is_plateau]
        # Gradients are sharded at least as finely as parameters, so sums are sharded like gradients.
        changes = replica_mesh.cut(replica_mesh.specs("grads", local.params), local.params)
        self._specs = {"delta": changes, "grads": changes}
        # In the order of the leaves, because only some of them are sent.
        opt_specs = replica_mesh.cut(replica_mesh.specs("opt_state", local.opt_state), local.opt_state)
        self._opt_specs = jax.tree.leaves(opt_specs, is_leaf=lambda x: isinstance(x, P))

    def _sum(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Sum over replicas, on each device over its own shards: the all-reduce of the round."""
        if not self._replica_mesh.inner:
            return psum_buckets(payload, AXIS)
        specs = {name: self._specs.get(name, P()) for name in payload}
        if "opt_state" in payload:
            specs["opt_state"] = {i: self._opt_specs[i] for i in payload["opt_state"]}
        return self._on_shards(lambda shards: psum_buckets(shards, AXIS), (specs,), specs)(payload)

    def _on_shards(self, sums: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The sums over replicas, on each device of a sharded replica over its own shards."""
        inner = self._replica_mesh.inner
        return jax.shard_map(sums, in_specs=in_specs, out_specs=out_specs, axis_names=set(inner), check_vma=False)

    def _coded_sums(self, delta: Any, residual: Residual, moments: dict[int, Any], payload: dict[str, Any]) -> Means:
        """The sums with coded changes, on each device over its own shards."""
        sums = functools.partial(coded_sums, wire=self._rules.wire, coded_moments=self._coded_moments)
        if not self._replica_mesh.inner:
            return sums(delta, residual, moments, payload)
        specs = (self._specs["delta"], Residual(self._specs["delta"]), {i: self._opt_specs[i] for i in moments}, P())
        return self._on_shards(sums, specs, Means(*specs))(delta, residual, moments, payload)

    def _take_plateaus(self, merged: dict[str, Any], row: Any) -> None:
        """Put the numbers of the replica with most steps, which are this row, in place of the means."""
        leaves = jax.tree.leaves(merged["opt_state"])
        taken = {i: row[place] for place, i in enumerate(self._plateaus)}
        merged["opt_state"] = _with_leaves(merged["opt_state"], taken)
        numbers = select_counts(merged["opt_state"], range(len(leaves)))
        pairs = zip(numbers, merged["counts"], strict=True)
        merged["counts"] = [taken[i].astype(old.dtype) if i in taken else old for i, old in pairs]

    def _statistics(self, end: Any, examples: Any) -> tuple[Any, Any]:
        """The weighted model state, and a function that makes the mean of its sum, with one more sum for variances."""
        state = end["model_state"]
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

    def __call__(self, start: Any, end: Any, measured: Any, host: Any) -> tuple[Any, Any, Any]:
        """The merge: ``(merged trees, table, report)``; but for ``host``, arrays have no replica axis within it."""
        start, end, measured = drop_replica_axis((start, end, measured))
        host = host.astype(measured["sums"].dtype)  # weights as exact as the sums
        merged, table, report = self._merge(start, end, measured, host)
        return add_replica_axis(merged), table, report

    def _parameters(self, start: Any, end: Any, measured: Any, host: Any) -> tuple[Any, Any, Any]:
        """The weighted mean of parameters: ``(merged trees, table, report)``."""
        sums, examples = measured["sums"], measured["sums"][0]
        x0, x = start["params"], end["params"]
        batches = _trained(examples, host[0, 0, _BATCHES])
        weight = self._weight(sums, host[0, 0, _COUNT], batches)
        delta = change(x0, x)
        statistics, finish = self._statistics(end, examples)
        payload = {
            "weight": weight,
            "squares": weighted(_square_norm(delta), jnp.stack([weight, batches])),
            "statistics": statistics,
            "examples": examples,
            "table": _table(host, measured["not_finite"], sums),
        }
        new_counts: list[Any] = []
        if "counts" in start:  # if the merge needs those of the optimizer
            new_counts = measured["counts"] if "counts" in measured else counts_of(end["opt_state"])
            steps = _differences(start["counts"], new_counts)
            payload["counts"] = jnp.stack([steps, steps * weight])
            payload |= self._own_counts(steps)
        if self._plateaus:
            leaves = jax.tree.leaves(end["opt_state"])
            payload["plateaus"] = own_row(jnp.stack([leaves[i].astype(float) for i in self._plateaus]))
        if self._scaling is not None:
            payload |= self._noise_payload(start, measured, weight, examples.astype(jnp.float32))
        mean, residual, moments, total = self._means(start, end, delta, payload)
        # The steps that were taken: fewer than planned if a replica reached its time limit.
        counts = total["table"][:, 0, _COUNT]
        alpha = _fednova_step(counts) if self._rules.merge == "fednova" else jnp.ones_like(counts[0])
        progress = jax.tree.map(lambda d: d * alpha.astype(d.dtype), mean)
        params, outer_state = self._next_params(x0, progress, start["outer_state"])
        model_state = finish(total["statistics"], jnp.maximum(total["examples"], 1))
        merged = {"params": params, "outer_state": outer_state, "model_state": model_state}
        if residual is not None:
            merged["residual"] = residual
        if self._rules.opt_state == "average":
            merged["opt_state"] = _with_leaves(end["opt_state"], moments)
        elif self._rules.opt_state == "reset":
            merged["opt_state"] = fresh = self._tx.init(params)
            new_counts = counts_of(fresh)
        if "counts" in start:
            merged["counts"] = self._merged_counts(start["counts"], new_counts, total)
        if self._plateaus:
            self._take_plateaus(merged, total["plateaus"][jnp.argmax(counts)])
        squares = (total["squares"][0] / total["weight"], _square_norm(mean), _square_norm(params))
        by_batches = total["squares"][1] / _trained(counts, total["table"][:, 0, _BATCHES]).sum()
        finite, agreed = self._stayed_finite(start, merged), jnp.float32(1)
        if self._rules.wire != "float32":  # each replica has decoded for itself
            finite, agreed = agreement(params, finite, AXIS)
        report, scaled = Report(*measure_drift(*squares), *squares, by_batches, finite, agreed=agreed), None
        if self._scaling is not None:
            noise = self._scaling.update_from_estimates(start["noise"], total["noise"])
            # Each replica counted its own base steps; the merge takes their weighted mean.
            gained = alpha * total["gains"][2] / total["weight"]
            progress = start["progress"] + gained.astype(jnp.float32)
            merged |= {"noise": noise, "progress": progress}
            steps = counts.sum()
            scaled = Scaled.of(noise, total["gains"][0] / steps, total["gains"][1] / steps, progress)
        return merged, total["table"], _to_vector(report, scaled)

    def _weight(self, sums: Any, count: Any, batches: Any) -> Any:
        """The weight of this replica, not normalised: the same all-reduce sums the weights."""
        return {
            "steps": batches,
            "batch": self._some_weight(sums) / jnp.maximum(count, 1.0),
            "fednova": (count > 0).astype(count.dtype),
        }[self._rules.merge]

    def _noise_payload(self, start: Any, measured: Any, weight: Any, examples: Any) -> dict[str, Any]:
        """The sums of which the noise scale and the mean gain are made."""
        assert self._scaling is not None
        opt_state, gains = start["opt_state"] if self._scaling.preconditioned else None, measured["scaled"]
        return {
            "noise": self._scaling.payload(measured["tracked"], start["noise"], opt_state, start["params"], examples),
            "gains": jnp.append(gains, weighted(gains[0], weight)),
        }

    def _means(self, start: Any, end: Any, delta: Any, payload: dict[str, Any]) -> Means:
        """The weighted means of the changes and of the moments, as numbers or as codes, and the sums of the payload."""
        moments = {}
        if self._rules.opt_state == "average":
            leaves = jax.tree.leaves(end["opt_state"])
            # The flags of a replica without steps become those of the others, as its moments do: each has a vote.
            leaves = [x.astype(jnp.float32) if x.dtype == bool else x for x in leaves]
            moments = {
                i: x for i, x in enumerate(leaves) if is_float(x) and not (self._accumulates[i] or i in self._plateaus)
            }
        if self._rules.wire != "float32":
            return self._coded_sums(delta, start["residual"], moments, payload)
        total = self._sum(payload | weighted({"delta": delta, "opt_state": moments}, payload["weight"]))
        summed = total["delta"], total["opt_state"]
        mean, moments = jax.tree.map(lambda s: s / total["weight"].astype(s.dtype), summed)
        return Means(mean, None, moments, total)

    def _next_params(self, params: Any, progress: Any, outer_state: Any) -> tuple[Any, Any]:
        """The parameters after the merged progress, by the outer optimizer if there is one, and its state."""
        if self._rules.outer is not None:
            return outer_step(self._rules.outer, params, progress, outer_state)
        return jax.tree.map(lambda a, g: (a.astype(g.dtype) - g).astype(a.dtype), params, progress), outer_state

    def _some_weight(self, sums: Any) -> Any:
        """The weight of the loss in these sums, above 0 where there are examples, also if all of them are padding."""
        weight = sums[self._rules.loss_weight]
        return weight if self._rules.loss_weight == 0 else jnp.where(sums[0] > 0, jnp.maximum(weight, TINY_WEIGHT), 0)

    def _merged_counts(self, old_counts: Any, new_counts: Any, total: Any) -> list[Any]:
        """The optimizer's counts after a merge: schedules add the steps of all replicas, moments the weighted mean."""
        merged = []
        for i, (old, count) in enumerate(zip(old_counts, new_counts, strict=True)):
            if self._schedules[i]:
                # In batches: a step on a part of one counts for that part.
                steps, batches = total["table"][:, 0, _COUNT], total["table"][:, 0, _BATCHES].sum()
                added = total["counts"][0, i] * batches / steps.sum()
                if self._several[i]:
                    # Replicas that share batches make as many updates, but in different rounds. Those of one replica
                    # are counted, because a sum of fractions of updates would be rounded in every round.
                    one = jnp.argmax(steps)
                    own = total["own_counts"][one, i] * batches / steps[one]
                    added = jnp.where(batches < steps.sum(), own, added)
                count = add_steps(old, jnp.round(added))
            elif self._rules.opt_state == "average" and not self._keeps_count[i]:
                mean = total["counts"][1, i] / total["weight"]
                count = add_steps(old, jnp.round(mean))
            merged.append(count)
        return merged

    def _own_counts(self, steps: Any) -> dict[str, Any]:
        """The steps that this replica has added to each count, where some of these count updates of several batches."""
        return {"own_counts": own_row(steps)} if any(self._several) else {}

    def _stayed_finite(self, start: dict[str, Any], merged: dict[str, Any]) -> Any:
        """1.0 if the merge made no finite number of a state NaN or infinite, else 0.0."""
        names = [name for name in _STATES if name in start and name in merged]
        before, after = ([tree[name] for name in names] for tree in (start, merged))
        if not self._replica_mesh.inner:  # a few long vectors are compiled sooner than many arrays
            packing = Packing(add_replica_axis(after))
            before, after = (packing.pack(add_replica_axis(trees)) for trees in (before, after))
        return stayed_finite(before, after).astype(jnp.float32)

    def numbers(self, start: Any, measured: Any, host: Any) -> tuple[dict[str, Any], Any]:
        """The table and the optimizer's counts of a merge of parameters that comes later: ``(counts, table)``."""
        start, measured = drop_replica_axis((start, measured))
        payload: dict[str, Any] = {"table": _table(host, measured["not_finite"], measured["sums"])}
        if "counts" not in start:
            return {}, psum_buckets(payload, AXIS, exchanges=True)["table"]
        old, new = start["counts"], measured["counts"]
        steps = _differences(old, new)
        payload |= {"counts": steps[None]} | self._own_counts(steps)
        total = psum_buckets(payload, AXIS, exchanges=True)
        return {"counts": add_replica_axis(self._merged_counts(old, new, total))}, total["table"]

    def _gradients(self, start: Any, end: Any, measured: Any, host: Any) -> tuple[Any, Any, Any]:
        """One update with the mean of all gradients, equal on all replicas: ``(merged trees, table, report)``."""
        # Before the update: what is compared with the state before it could not be made in its place.
        known, start = lax.optimization_barrier((marked({name: start[name] for name in _STATES}), start))
        sums, params, before = measured["sums"], start["params"], start["opt_state"]
        statistics, finish = self._statistics(end, sums[0])
        payload = {
            "grads": end["grads"],
            "sums": sums,
            "statistics": statistics,
            "table": _table(host, non_finite_flag(all_finite(end["grads"]))[0], sums),
        }
        if self._scaling is not None:
            payload["noise"] = self._scaling.payload(measured["tracked"], None, None, None, sums[0].astype(jnp.float32))
        total = self._sum(payload)
        # The first merge only compiles and has no examples: 0 / 0 would be an error under jax_debug_nans.
        some = total["sums"].at[0].max(1)
        examples, weight = some[0], self._some_weight(some)
        packing = self._packings.get("grads")
        summed = packing.unpack(total["grads"]) if packing else total["grads"]
        grads = jax.tree.map(lambda g, p: (g / weight.astype(g.dtype)).astype(p.dtype), summed, params)
        loss = total["sums"][1] / weight
        arguments, scaled = {}, None
        if self._scaling is not None:
            exact = jax.tree.map(lambda g: g / examples.astype(g.dtype), summed)
            examples32 = examples.astype(jnp.float32)
            noise = self._scaling.update_from_gradients(start["noise"], total["noise"], exact, before, examples32)
            arguments = self._scaling.arguments(noise, start["progress"], examples32)
        updates, after = self._tx.update(grads, before, params, value=loss, **arguments)
        batches = jnp.round(total["table"][:, 0, _BATCHES].sum())
        opt_state, accumulated = advance_by_batches(batches, before, after, host[0, 0, _ACCUMULATED])
        merged = {
            "params": optax.apply_updates(params, updates),
            "opt_state": opt_state,
            "model_state": finish(total["statistics"], examples),
            "outer_state": start["outer_state"],
        }
        stayed = self._stayed_finite(known, merged)
        # The optimizer may skip a gradient that is not finite, as optax.apply_if_finite does.
        table = total["table"].at[..., NOT_FINITE].multiply((1 - stayed).astype(total["table"].dtype))
        if arguments:
            noise, progress = arguments["noise"], opt_state.progress
            merged |= {"noise": noise, "progress": progress}
            scaled = Scaled.of(noise, noise.gain(arguments["scale"]), opt_state.factor, progress)
        return merged, table, _to_vector(Report(finite=stayed, accumulated=accumulated), scaled)


def _table(host: Any, not_finite: Any, sums: Any) -> Any:
    """The rows of a replica, one for each of its devices, in a table of zeros."""
    columns = jnp.concatenate([not_finite.astype(sums.dtype), sums])
    host = host.astype(sums.dtype)
    return own_row(jnp.concatenate([host[0], jnp.broadcast_to(columns, (host.shape[1], columns.size))], axis=1))


def _trained(number: Any, batches: Any) -> Any:
    """The batches that a replica has trained on: its part of them, if the number of its examples or steps is not 0."""
    return jnp.where(number > 0, batches, 0)


def _differences(old: Any, new: Any) -> Any:
    """What was added to each count, as one vector; a count may have the shape ``(1,)``."""
    return jnp.stack([(b - a).reshape(()) for a, b in zip(old, new, strict=True)]).astype(float)


def _with_leaves(tree: Any, changed: Mapping[int, Any]) -> Any:
    """The tree with some of its leaves changed, by number, in their own dtype."""
    leaves, treedef = jax.tree.flatten(tree)
    for i, leaf in changed.items():
        leaves[i] = leaf > 0.5 if leaves[i].dtype == bool else leaf.astype(leaves[i].dtype)
    return jax.tree.unflatten(treedef, leaves)


def _square_norm(tree: Any) -> Any:
    """The sum of squares of all floats but those that are infinite, as in the parameters of a mask."""
    sizes = [jnp.where(jnp.isinf(x), 0, jnp.abs(x)) for x in jax.tree.leaves(tree) if is_float(x)]
    return jnp.sum(jnp.stack([jnp.sum(jnp.square(x.astype(float))) for x in sizes]))


def _fednova_step(counts: Any) -> Any:
    """The step length of :func:`~jaxche.merge_weights` under ``"fednova"``, from the steps of each replica."""
    return (counts > 0).sum(dtype=counts.dtype) * jnp.square(counts).sum() / jnp.square(counts.sum())
