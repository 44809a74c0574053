"""The scaling of learning rates in a round: measures the gradient noise and scales the updates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxche.averaging import add_weighted, split_like, zero_sums
from jaxche.cadence import RoundPlan
from jaxche.scaling import (
    AdamScale,
    ScalingRule,
    local_estimates,
    noise_scale,
    scale_learning_rate,
    update_from_estimates,
    update_from_one,
)

# Measuring a gradient costs a small model a tenth of a step or more. After the first rounds only one step in eight is
# measured: the first steps of some rounds, enough for an estimate, and none of the others. A few steps of every round
# would give means of few batches, with a large variance of their squared norm. A single replica measures more steps,
# because each of its estimates is the difference of only two gradients.
_MEASURED, _MEASURED_SOLO = 8, 12
_ONE_IN = 8
_FIRST_ROUNDS = 8
_SMALL = 2**15  # elements: below that, a separate operation costs more than the copy into a vector


class MergeScale(NamedTuple):
    """The scale of local steps in the merge of their round."""

    replicas: Any = 1.0  # the effective number of replicas
    alpha: Any = 1.0  # the step length of the merge
    stride: Any = 1.0  # steps of all replicas per step of this replica


class Scaled(NamedTuple):
    """The scaling of a round, as recorded in its ``RoundInfo``."""

    noise: float = math.nan  # critical batch size in examples
    gain: float = 1.0  # base steps per step
    lr_factor: float = 1.0  # factor on the learning rate
    progress: float = math.nan  # base steps of the run so far
    base_batch_size: float = math.nan  # examples in the batch that the learning rate was tuned for

    @classmethod
    def of(cls, noise: Any, gain: Any, lr_factor: Any, progress: Any) -> Scaled:
        """The scaling of a round with this noise scale, in a compiled program."""
        return cls(noise.critical_batch_size, gain, lr_factor, progress, noise.base_batch_size)


@dataclass(frozen=True)
class Scaling:
    """A scaling rule and its arithmetic in the compiled programs; trees have no replica axis."""

    rule: ScalingRule
    base_batch_size: float | None  # examples; None before the first batch is read
    average: str
    solo: bool  # a single replica, which compares successive gradients
    sync: bool  # a merge after every batch
    # Join the small arrays of a gradient into one vector, which is cheaper; not for sharded arrays.
    joined: bool = False

    @property
    def preconditioned(self) -> bool:
        """Whether noise is measured with the preconditioner of an Adam-type optimizer."""
        return isinstance(self.rule, AdamScale)

    @property
    def measures_every_step(self) -> bool:
        """Whether every step is measured: with one step per round, only the gradients of the others can be compared."""
        return self.sync and not self.solo

    def measured_steps(self, plan: RoundPlan) -> tuple[int, ...]:
        """The number of first steps that each replica measures in a round.

        All replicas measure in the same rounds. An estimate needs two gradients; but if gradients are averaged, each
        replica measures at least one, as its part of the mean.
        """
        if self.measures_every_step:
            return plan.counts
        most, longest = _MEASURED_SOLO if self.solo else _MEASURED, max(plan.counts)
        enough = tuple(min(most, count) for count in plan.counts)
        if plan.round < _FIRST_ROUNDS:
            return enough
        every = math.ceil(_ONE_IN * min(most, longest) / max(longest, 1))
        if plan.round % every:
            return (0,) * len(enough)
        shares = (min(n, every * count // _ONE_IN) for n, count in zip(enough, plan.counts, strict=True))
        if self.average == "gradients":
            return tuple(max(share, min(n, 1)) for share, n in zip(shares, enough, strict=True))
        return tuple(share if share >= 2 else 0 for share in shares)

    def transform(self, tx: Any) -> optax.GradientTransformationExtraArgs:
        return scale_learning_rate(tx, self.rule)

    def start(self, params: Any) -> dict[str, Any]:
        """The entries of a ``LocalState`` before the first round."""
        noise = noise_scale.init(params, base_batch_size=self.base_batch_size, differenced=self.solo)
        return {"noise": noise, "progress": jnp.zeros((), jnp.float32)}

    def begin(self, noise: Any, params: Any, opt_state: Any) -> tuple[Any, dict[str, Any]]:
        """The preconditioner of a round or None, and trees of its carry.

        All gradients of a round are compared with one preconditioner, and to compute it costs a small model some
        percent of a step. The carry gets ``tracked``, the sums of measured steps; ``scaled``, the sums of gains and
        learning rate factors; and the ``noise`` of a single replica, whose previous gradient is in ``tracked``.
        """
        zero = noise_scale.Sums(jnp.zeros_like(noise.sqr_sum), *(jnp.zeros((), jnp.float32) for _ in range(5)))
        preconditioner = self._preconditioner(opt_state, params)
        if self.average == "gradients":
            return preconditioner, {"tracked": zero}
        steps = {"scaled": jnp.zeros(2, jnp.float32)}
        if self.solo:
            noise = jax.tree.map(jnp.copy, noise)
            tracked = {"previous": self._join(noise.previous), "examples": jnp.zeros((), jnp.float32)}
            return preconditioner, steps | {"noise": replace(noise, previous=None), "tracked": tracked}
        return preconditioner, steps | {"tracked": {"sums": zero, "grads": zero_sums(self._join(params))}}

    def accumulate(self, tracked: Any, noise: Any, grads: Any, examples: Any, preconditioner: Any) -> Any:
        """Add the gradient of one batch to the sums ``tracked`` of the estimate."""
        grads = self._join(grads)
        sums = noise_scale.local_sums(self._with_groups(grads, noise), grads, examples, opt_state=preconditioner)
        if self.average == "gradients":
            return jax.tree.map(jnp.add, tracked, sums)
        total = add_weighted(tracked["grads"], grads, examples)
        return {"sums": jax.tree.map(jnp.add, tracked["sums"], sums), "grads": total}

    def update_from_step(
        self, noise: Any, tracked: Any, grads: Any, examples: Any, preconditioner: Any
    ) -> tuple[Any, Any]:
        """The noise scale of a single replica after a measured step, and the new ``tracked``."""
        grads = self._join(grads)
        whole = replace(self._with_groups(grads, self._with_base_batch(noise)), previous=tracked["previous"])
        after = update_from_one(whole, grads, examples, opt_state=preconditioner)
        tracked = {"previous": after.previous, "examples": tracked["examples"] + examples}
        return replace(after, previous=None, groups=noise.groups), tracked

    def end_round(self, noise: Any, tracked: Any, examples: Any, params: Any) -> Any:
        """The noise scale of a single replica after a round of so many examples."""
        # Examples without measurement decay the averages. That can wait until here, because it keeps their ratios.
        noise = noise_scale.skip(self._with_base_batch(noise), examples - tracked["examples"])
        return replace(noise, previous=self._split(tracked["previous"], params))

    def arguments(self, noise: Any, progress: Any, examples: Any, replicas: Any = 1.0) -> dict[str, Any]:
        """The extra arguments of the scaled optimizer for an update on so many examples."""
        noise = self._with_base_batch(noise)
        scale = examples * jnp.asarray(replicas, jnp.float32) / noise.base_batch_size
        return {"scale": scale, "noise": noise, "progress": progress}

    def payload(self, tracked: Any, noise: Any, opt_state: Any, params: Any, examples: Any) -> Any:
        """The scalars that a replica adds to the all-reduce for the estimate.

        If parameters are averaged: its own estimates, and the examples without measurement. If gradients are averaged:
        its sums, scaled from the measured batches to all batches, because they are compared with the mean over all.
        """
        if self.average == "gradients":
            measured = jnp.where(tracked.examples > 0, tracked.examples, jnp.float32(1))
            return jax.tree.map(lambda x: examples / measured * x, tracked)
        measured = tracked["sums"].examples
        mean = jax.tree.map(lambda g: g / measured.astype(g.dtype), tracked["grads"])
        preconditioner = self._preconditioner(opt_state, params)
        own = local_estimates(self._with_groups(mean, noise), tracked["sums"], mean, opt_state=preconditioner)
        return own, examples - measured

    def update_from_estimates(self, noise: Any, total: Any) -> Any:
        """The next noise scale if parameters are averaged, from the sum of all payloads."""
        estimates, skipped = total
        return update_from_estimates(noise_scale.skip(self._with_base_batch(noise), skipped), estimates)

    def update_from_gradients(self, noise: Any, total: Any, mean_grads: Any, opt_state: Any, examples: Any) -> Any:
        """The next noise scale if gradients are averaged, from the sum of all payloads and the mean gradient."""
        unmeasured = jnp.where(total.contributors > 0, jnp.float32(0), examples)
        noise = noise_scale.skip(self._with_base_batch(noise), unmeasured)
        preconditioner, mean = self._preconditioner(opt_state, mean_grads), self._join(mean_grads)
        after = noise_scale.update_from_sums(self._with_groups(mean, noise), total, mean, opt_state=preconditioner)
        return replace(after, groups=noise.groups)

    def with_base_batch_size(self, examples: int) -> Scaling:
        """A scaling with a base batch size: the given one, else the batch size of the data."""
        return self if self.base_batch_size else replace(self, base_batch_size=float(examples))

    def _preconditioner(self, opt_state: Any, like: Any) -> noise_scale.Preconditioner | None:
        """The preconditioner of the optimizer, joined as gradients are."""
        if not self.preconditioned:
            return None
        found = noise_scale.preconditioner(opt_state, like)
        if not self.joined:
            return found
        pairs = zip(found.of(like), jax.tree.leaves(like), strict=True)
        return found._replace(
            factors=self._join([jnp.ones(x.shape, jnp.float32) if f is None else f for f, x in pairs])
        )

    def _join(self, tree: Any) -> Any:
        """The arrays of a tree, with the small ones joined into one vector."""
        if not self.joined:
            return tree
        leaves = jax.tree.leaves(tree)
        small = [x.ravel() for x in leaves if x.size < _SMALL]
        with jax.numpy_dtype_promotion("standard"):  # of parameters of several dtypes, also where users forbid it
            return [x for x in leaves if x.size >= _SMALL] + ([jnp.concatenate(small)] if small else [])

    def _split(self, joined: Any, like: Any) -> Any:
        """The inverse of :meth:`_join`."""
        if not self.joined:
            return joined
        leaves, treedef = jax.tree.flatten(like)
        arrays = list(joined)
        small = [x for x in leaves if x.size < _SMALL]
        parts, large = iter(split_like(arrays.pop(), small) if small else ()), iter(arrays)
        found = [next(parts) if x.size < _SMALL else next(large) for x in leaves]
        # Beside complex arrays real ones were joined as complex.
        found = [x if jnp.iscomplexobj(old) else x.real for x, old in zip(found, leaves, strict=True)]
        return jax.tree.unflatten(treedef, [x.astype(old.dtype) for x, old in zip(found, leaves, strict=True)])

    def _with_groups(self, joined: Any, noise: Any) -> Any:
        """The noise scale with the groups of joined arrays; a state has those of the parameters."""
        return replace(noise, groups=noise_scale.init(joined).groups) if self.joined else noise

    def _with_base_batch(self, noise: Any) -> Any:
        """The noise scale with its base batch size, which the first round sets."""
        kept = noise.base_batch_size
        return replace(noise, base_batch_size=jnp.where(kept > 0, kept, jnp.float32(self.base_batch_size or 0)))


def with_previous_gradient(noise: Any, params: Any, compares: bool) -> Any:
    """The noise scale with an empty previous gradient, laid out like ``params``, or without one."""
    if (noise.previous is not None) == compares:
        return noise
    like = {"previous": params if compares else None, "has_previous": noise.has_previous}
    where = jax.tree.map(lambda x: x.sharding, like)
    return replace(noise, **jax.jit(partial(jax.tree.map, jnp.zeros_like), out_shardings=where)(like))
