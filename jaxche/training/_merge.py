"""The one program in which replicas meet: trees, times, counts and losses in the same all-reduce."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.averaging import (
    from_moments,
    is_float,
    measure_drift,
    outer_step,
    psum_buckets,
    sum_dtype,
    to_moments,
)
from jaxche.training._replica import Local, first, lift
from jaxche.training._scaling import Scaled, Scaling

AXIS = "replica"
# What each replica tells the others in a round, next to its tree. All are exact in float32.
HOST_COLUMNS = ("count", "wall_ms", "last_sync_ms", "failed", "stop", "plan_high", "plan_low")


class Merged(NamedTuple):
    """Result of a merge: each local replica's next state and the table every host sees alike."""

    locals: tuple[Local, ...]
    table: np.ndarray  # [R, len(HOST_COLUMNS) + 2 + metrics]
    drift: tuple[float, float]
    scaled: Scaled = Scaled()


class Merge:
    """Merge over the ``replica`` axis of a mesh, by one ``psum``.

    Args:
      mesh: mesh with the axis ``replica``, one device a replica.
      average: ``"parameters"`` or ``"gradients"``.
      rule: merge rule for parameters.
      opt_state: ``"local"``, ``"average"`` or ``"reset"``: what becomes of each replica's optimizer state.
      tx: the optimizer (steps on merged gradients; re-initialises on reset).
      outer: optax transform on the pseudo-gradient, or None for plain averaging.
      metrics: number of metric columns.
      scaling: scaling of the learning rate, or None; ``tx`` is then already wrapped.
    """

    def __init__(
        self,
        mesh: Mesh,
        average: str,
        rule: str,
        opt_state: str,
        tx: optax.GradientTransformation,
        outer: optax.GradientTransformation | None,
        metrics: int,
        scaling: Scaling | None = None,
    ):
        self._scaling = scaling
        self._mesh, self._rule, self._opt_mode, self._outer = mesh, rule, opt_state, outer
        self._tx: Any = optax.with_extra_args_support(tx)
        self._columns = len(HOST_COLUMNS) + 2 + metrics
        self._sharding = NamedSharding(mesh, P(AXIS))
        self._devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        body = self._parameters if average == "parameters" else self._gradients
        # Optimizer states that stay with their replica never enter the global program.
        if average == "parameters":
            self._common = ("params", "model_state", "outer_state")
            self._sent = ("params", "model_state", "opt_state")[: 3 if opt_state == "average" else 2]
        else:
            self._common = ("params", "model_state", "outer_state", "opt_state")
            self._sent = ("grads", "model_state")
        if scaling is not None:
            compared = ("opt_state",) if average == "parameters" and scaling.preconditioned else ()
            self._common = (*self._common, "noise", "progress", *compared)
        specs = (P(AXIS), P(AXIS), P(AXIS), P(AXIS), P())
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P(AXIS), P(), P()), check_vma=False)
        # A carry's trees have the shapes of the merged ones and give their buffers to them. Gradient accumulators
        # of low-precision parameters do not: they are float32.
        self._program = jax.jit(mapped, donate_argnums=1 if average == "parameters" else ())

    def __call__(self, starts: Any, carries: Any, rows: np.ndarray, alpha: float) -> Merged:
        """Merge the replicas of this process with all others and wait for the result.

        Args:
          starts: each local replica's :class:`Local` at the start of the round.
          carries: each local replica's carry at its end.
          rows: ``[local replicas, len(HOST_COLUMNS)]`` host numbers.
          alpha: step length of the merge rule.
        """
        merged, table, report = self._program(*self.arguments(starts, carries, rows, alpha))
        # Waiting here is part of the contract: two programs with collectives in flight can deadlock the CPU client.
        table, report = np.asarray(table), np.asarray(report).tolist()
        kept = [{"opt_state": carry.get("opt_state")} for carry in carries]
        locals_ = tuple(Local(**(own | part)) for own, part in zip(kept, self.unstack(merged), strict=True))
        return Merged(locals_, table, (report[0], report[1]), Scaled(*report[2:]))

    def arguments(self, starts: Any, carries: Any, rows: np.ndarray, alpha: float) -> tuple[Any, ...]:
        """What the program is called with."""
        host = [jax.device_put(np.float32(row[None]), d) for row, d in zip(rows, self._devices, strict=True)]
        # Of the same shapes as what is merged, but no result can take its buffers: it is not donated.
        measured = [{name: carry[name] for name in ("sums", "tracked", "scaled") if name in carry} for carry in carries]
        return (
            self.stack([{name: getattr(local, name) for name in self._common} for local in starts]),
            self.stack([{name: carry[name] for name in self._sent} for carry in carries]),
            self.stack(measured),
            self.stack(host),
            np.float32(alpha),
        )

    def stack(self, trees: Any) -> Any:
        """The ``[R, ...]`` view of one tree per local replica: no copy."""

        def assemble(*leaves: jax.Array) -> jax.Array:
            shape = (self._mesh.size, *leaves[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self._sharding, list(leaves))

        return jax.tree.map(assemble, *trees)

    def unstack(self, tree: Any) -> list[Any]:
        """One tree per local replica of an ``[R, ...]`` view: no copy."""
        leaves, treedef = jax.tree.flatten(tree)
        by_device = [{s.device: s.data for s in leaf.addressable_shards} for leaf in leaves]
        return [jax.tree.unflatten(treedef, [shards[d] for shards in by_device]) for d in self._devices]

    def _table(self, host: Any, sums: Any) -> Any:
        """This replica's row in an otherwise empty table; the sum over replicas is the whole table."""
        row = jnp.concatenate([first(host), first(sums)])
        return jnp.zeros((self._mesh.size, self._columns), jnp.float32).at[lax.axis_index(AXIS)].set(row)

    def _statistics(self, start: Any, end: Any, examples: Any) -> tuple[Any, Any]:
        """Model state as weighted moments, and how to finish once they are summed."""
        origin = first(start["model_state"])
        state = first(end["model_state"])
        leaves, treedef = jax.tree.flatten(to_moments(state, origin))
        averaged = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
        weighted = [leaves[i].astype(sum_dtype(leaves[i].dtype)) * examples for i in averaged]

        def finish(sums: list[Any], total: Any) -> Any:
            for i, s in zip(averaged, sums, strict=True):
                leaves[i] = s / total
            pooled = from_moments(jax.tree.unflatten(treedef, leaves), origin)
            return jax.tree.map(lambda new, old: new.astype(old.dtype) if is_float(old) else new, pooled, state)

        return weighted, finish

    def _parameters(self, start: Any, end: Any, measured: Any, host: Any, alpha: Any) -> tuple[Any, Any, Any]:
        sums = measured["sums"]
        x0, x = first(start["params"]), first(end["params"])
        count, examples = host[0, 0], sums[0, 0]
        # Not normalised: the sum of the weights travels in the same all-reduce.
        weight = {
            "steps": count,
            "batch": examples / jnp.maximum(count, 1.0),
            "fednova": (count > 0).astype(jnp.float32),
        }[self._rule]
        delta = jax.tree.map(lambda a, b: a.astype(sum_dtype(a.dtype)) - b.astype(sum_dtype(b.dtype)), x0, x)
        statistics, finish = self._statistics(start, end, examples)
        payload = {
            "delta": jax.tree.map(lambda d: d * weight.astype(d.dtype), delta),
            "weight": weight,
            "squares": weight * _square_norm(delta),
            "statistics": statistics,
            "examples": examples,
            "table": self._table(host, sums),
        }
        if self._opt_mode == "average":
            opt_leaves, opt_def = jax.tree.flatten(first(end["opt_state"]))
            floats = [i for i, leaf in enumerate(opt_leaves) if is_float(leaf)]
            payload["opt_state"] = [opt_leaves[i].astype(sum_dtype(opt_leaves[i].dtype)) * weight for i in floats]
        if self._scaling is not None:
            noise, gains = first(start["noise"]), first(measured["scaled"])
            seen = first(start["opt_state"]) if self._scaling.preconditioned else None
            payload["noise"] = self._scaling.sent(first(measured["tracked"]), noise, seen)
            payload["gains"] = jnp.append(gains, weight * gains[0])
        total = psum_buckets(payload, AXIS)
        mean = jax.tree.map(lambda d: d / total["weight"].astype(d.dtype), total["delta"])
        progress = jax.tree.map(lambda d: d * alpha.astype(d.dtype), mean)
        outer_state = first(start["outer_state"])
        if self._outer is None:
            params = jax.tree.map(lambda a, g: (a.astype(g.dtype) - g).astype(a.dtype), x0, progress)
        else:
            params, outer_state = outer_step(self._outer, x0, progress, outer_state)
        merged = {"params": lift(params), "outer_state": lift(outer_state)}
        merged["model_state"] = lift(finish(total["statistics"], total["examples"]))
        if self._opt_mode == "average":
            for i, s in zip(floats, total["opt_state"], strict=True):
                opt_leaves[i] = (s / total["weight"]).astype(opt_leaves[i].dtype)
            merged["opt_state"] = lift(jax.tree.unflatten(opt_def, opt_leaves))
        elif self._opt_mode == "reset":
            merged["opt_state"] = lift(self._tx.init(params))
        drift = measure_drift(total["squares"] / total["weight"], _square_norm(mean), _square_norm(params))
        report = [*drift]
        if self._scaling is not None:
            noise = self._scaling.learnt(noise, total["noise"])
            # Each replica counted its own steps; what they are worth together is their mean by the merge's weights.
            progress = first(start["progress"]) + alpha * total["gains"][2] / total["weight"]
            merged |= {"noise": lift(noise), "progress": lift(progress)}
            steps = total["table"][:, HOST_COLUMNS.index("count")].sum()
            report += [noise.critical_batch_size, total["gains"][0] / steps, total["gains"][1] / steps, progress]
            report.append(noise.base_batch_size)
        return merged, total["table"], jnp.stack(report)

    def _gradients(self, start: Any, end: Any, measured: Any, host: Any, alpha: Any) -> tuple[Any, Any, Any]:
        del alpha  # the mean gradient over all examples is exact: there is nothing to correct
        sums = measured["sums"]
        params = first(start["params"])
        statistics, finish = self._statistics(start, end, sums[0, 0])
        payload = {
            "grads": first(end["grads"]),
            "sums": sums[0],
            "statistics": statistics,
            "table": self._table(host, sums),
        }
        if self._scaling is not None:
            payload["noise"] = first(measured["tracked"])
        total = psum_buckets(payload, AXIS)
        examples = total["sums"][0]
        grads = jax.tree.map(lambda g, p: (g / examples.astype(g.dtype)).astype(p.dtype), total["grads"], params)
        loss = total["sums"][1] / examples
        before, scaled = first(start["opt_state"]), {}
        if self._scaling is not None:
            exact = jax.tree.map(lambda g: g / examples.astype(g.dtype), total["grads"])
            noise = self._scaling.learnt(first(start["noise"]), total["noise"], exact, before)
            scaled = self._scaling.arguments(noise, first(start["progress"]), examples)
        updates, opt_state = self._tx.update(grads, before, params, value=loss, **scaled)
        merged = {
            "params": lift(optax.apply_updates(params, updates)),
            "opt_state": lift(opt_state),
            "model_state": lift(finish(total["statistics"], examples)),
            "outer_state": start["outer_state"],
        }
        report = jnp.zeros(2, jnp.float32)
        if scaled:
            progress, gain = opt_state.progress, scaled["noise"].gain(scaled["scale"])
            merged |= {"noise": lift(scaled["noise"]), "progress": lift(progress)}
            told = [scaled["noise"].critical_batch_size, gain, opt_state.factor, progress]
            report = jnp.concatenate([report, jnp.stack([*told, scaled["noise"].base_batch_size])])
        return merged, total["table"], report


def _square_norm(tree: Any) -> Any:
    squares = [jnp.sum(jnp.square(jnp.abs(x)), dtype=jnp.float32) for x in jax.tree.leaves(tree) if is_float(x)]
    return jnp.sum(jnp.stack(squares))
