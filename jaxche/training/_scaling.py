"""What a scaling rule adds to a round: noise measured where gradients are, a factor where updates are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxche.averaging import add_weighted, zero_sums
from jaxche.cadence import RoundPlan
from jaxche.scaling import AdamScale, ScalingRule, noise_scale, scale_learning_rate

# To measure a gradient costs a small model a tenth of a step or more, so an eighth of all steps are measured, after the
# first rounds, in which little is known. They are the first ones of a round, enough for an estimate, and none of the
# rounds after it: a few of each round would see a mean of few batches, and that is where the squared norm's scatter
# comes from. Of a single replica more, because each of its estimates is a difference of two gradients only.
_MEASURED, _MEASURED_ALONE = 8, 12
_ONE_IN = 8
_FIRST_ROUNDS = 8
_SMALL = 2**15  # numbers: for less than that, an operation of its own costs more than the copy into a vector


class MergeScale(NamedTuple):
    """What the local steps of a planned round are worth once merged; arrays to the compiled step.

    Attributes:
      replicas: the merge's effective number of replicas.
      alpha: its step length.
      stride: steps of all replicas for one of this replica.
    """

    replicas: Any = 1.0
    alpha: Any = 1.0
    stride: Any = 1.0


class Scaled(NamedTuple):
    """What a round tells of its scaling, in the order the merge program reports it.

    Attributes:
      noise: critical batch size in examples.
      gain: base steps a step was worth.
      lr_factor: factor on the learning rate.
      progress: base steps that all steps so far were worth.
      base_batch_size: examples in the batch the learning rate was tuned for.
    """

    noise: float = math.nan
    gain: float = 1.0
    lr_factor: float = 1.0
    progress: float = math.nan
    base_batch_size: float = math.nan


@dataclass(frozen=True)
class Scaling:
    """A rule, and the arithmetic it needs in the compiled programs. Trees here have no replica axis.

    Args:
      rule: the scaling rule.
      base_batch_size: examples in the batch the learning rate was tuned for; None until the data is seen.
      average: ``"parameters"`` or ``"gradients"``.
      solo: whether there is a single replica, whose noise shows in the difference of successive gradients only.
      sync: whether replicas meet after every batch.
      joined: whether small arrays of a gradient are looked at as one, which costs a small model's step less than one
        operation for each. Not where arrays are cut among devices.
    """

    rule: ScalingRule
    base_batch_size: float | None
    average: str
    solo: bool
    sync: bool
    joined: bool = False

    @property
    def preconditioned(self) -> bool:
        """Whether noise is measured as an Adam-type optimizer sees it."""
        return isinstance(self.rule, AdamScale)

    @property
    def measures_every_step(self) -> bool:
        """Whether every step is measured: where there is one a round, which nothing but the others' can tell of."""
        return self.sync and not self.solo

    def measured_steps(self, plan: RoundPlan) -> tuple[int, ...]:
        """How many of its first steps each replica measures in a round.

        All measure in the same rounds. Two gradients are the least that tell something; but where gradients are
        averaged and one replica's are measured, so is one of each other's, to stand for that replica in the mean.
        """
        if self.measures_every_step:
            return plan.counts
        most, longest = _MEASURED_ALONE if self.solo else _MEASURED, max(plan.counts)
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
        """The preconditioner of a round or None, and what its carry gets.

        It is made once, because gradients of a round are compared as seen from one place, and a square root and a
        division of every number cost a small model some percent of a step. In the carry are ``tracked`` for the
        estimate, which only steps that are measured touch, ``scaled`` for what the steps are worth, and the single
        replica's ``noise`` without its previous gradient, which is tracked along with the examples that were measured.
        """
        zero = noise_scale.Sums(jnp.zeros_like(noise.sqr_sum), *(jnp.zeros((), jnp.float32) for _ in range(5)))
        seen = self._preconditioner(opt_state, params)
        if self.average == "gradients":
            return seen, {"tracked": zero}
        steps = {"scaled": jnp.zeros(2, jnp.float32)}
        if self.solo:
            noise = jax.tree.map(jnp.copy, noise)
            tracked = {"previous": self._join(noise.previous), "examples": jnp.zeros((), jnp.float32)}
            return seen, steps | {"noise": replace(noise, previous=None), "tracked": tracked}
        return seen, steps | {"tracked": {"sums": zero, "grads": zero_sums(self._join(params))}}

    def accumulate(self, tracked: Any, noise: Any, grads: Any, examples: Any, seen: Any) -> Any:
        """Add one batch to what the estimate is made of.

        Args:
          tracked: from :meth:`begin`.
          noise: of the start of the round.
          grads: of the batch.
          examples: in the batch.
          seen: from :meth:`begin`.
        """
        grads = self._join(grads)
        sums = noise_scale.local_sums(self._with_groups(grads, noise), grads, examples, opt_state=seen)
        if self.average == "gradients":
            return jax.tree.map(jnp.add, tracked, sums)
        total = add_weighted(tracked["grads"], grads, examples)
        return {"sums": jax.tree.map(jnp.add, tracked["sums"], sums), "grads": total}

    def update_from_step(self, noise: Any, tracked: Any, grads: Any, examples: Any, seen: Any) -> tuple[Any, Any]:
        """The single replica's noise scale after a step that was measured, and what is tracked."""
        grads = self._join(grads)
        whole = replace(self._with_groups(grads, self._with_base_batch(noise)), previous=tracked["previous"])
        after = noise_scale.update_from_one(whole, grads, examples, opt_state=seen)
        tracked = {"previous": after.previous, "examples": tracked["examples"] + examples}
        return replace(after, previous=None, groups=noise.groups), tracked

    def end_round(self, noise: Any, tracked: Any, examples: Any, params: Any) -> Any:
        """The single replica's noise scale after a round of so many examples.

        Those it took without measuring let the averages fade, but change nothing that is read of them: that can wait
        till now.
        """
        noise = noise_scale.skip(self._with_base_batch(noise), examples - tracked["examples"])
        return replace(noise, previous=self._split(tracked["previous"], params))

    def arguments(self, noise: Any, progress: Any, examples: Any, replicas: Any = 1.0) -> dict[str, Any]:
        """What the scaled optimizer wants to know for an update on so many examples."""
        noise = self._with_base_batch(noise)
        scale = examples * jnp.asarray(replicas, jnp.float32) / noise.base_batch_size
        return {"scale": scale, "noise": noise, "progress": progress}

    def payload(self, tracked: Any, noise: Any, opt_state: Any, params: Any, examples: Any) -> Any:
        """What a replica puts into the all-reduce for the estimate: a few numbers, nothing model-sized.

        Where parameters are averaged, its own estimates and the examples it took without measuring. Where gradients
        are, sums in which the batches that were measured stand for all: the mean that they are compared with is of all.
        """
        if self.average == "gradients":
            measured = jnp.where(tracked.examples > 0, tracked.examples, jnp.float32(1))
            return jax.tree.map(lambda x: examples / measured * x, tracked)
        measured = tracked["sums"].examples
        mean = jax.tree.map(lambda g: g / measured.astype(g.dtype), tracked["grads"])
        seen = self._preconditioner(opt_state, params)
        own = noise_scale.local_estimates(self._with_groups(mean, noise), tracked["sums"], mean, opt_state=seen)
        return own, examples - measured

    def update_from_estimates(self, noise: Any, total: Any) -> Any:
        """The next noise scale of averaged parameters, from what everybody sent."""
        estimates, skipped = total
        return noise_scale.update_from_estimates(noise_scale.skip(self._with_base_batch(noise), skipped), estimates)

    def update_from_gradients(self, noise: Any, total: Any, mean_grads: Any, opt_state: Any, examples: Any) -> Any:
        """The next noise scale of averaged gradients, from everybody's sums, the mean gradient and its examples."""
        unseen = jnp.where(total.contributors > 0, jnp.float32(0), examples)
        noise = noise_scale.skip(self._with_base_batch(noise), unseen)
        seen, mean = self._preconditioner(opt_state, mean_grads), self._join(mean_grads)
        after = noise_scale.update_from_sums(self._with_groups(mean, noise), total, mean, opt_state=seen)
        return replace(after, groups=noise.groups)

    def with_base_batch_size(self, examples: int) -> Scaling:
        """The same with the base batch known: the one given, else the batch of the data."""
        return self if self.base_batch_size else replace(self, base_batch_size=float(examples))

    def _preconditioner(self, opt_state: Any, like: Any) -> noise_scale.Preconditioner | None:
        """How the optimizer sees gradients, in the form in which they are looked at."""
        if not self.preconditioned:
            return None
        seen = noise_scale.preconditioner(opt_state, like)
        if not self.joined:
            return seen
        pairs = zip(seen.of(like), jax.tree.leaves(like), strict=True)
        return seen._replace(factors=self._join([jnp.ones(x.shape, jnp.float32) if f is None else f for f, x in pairs]))

    def _join(self, tree: Any) -> Any:
        """The arrays of a tree, the small ones as one vector."""
        if not self.joined:
            return tree
        leaves = jax.tree.leaves(tree)
        small = [x.ravel() for x in leaves if x.size < _SMALL]
        return [x for x in leaves if x.size >= _SMALL] + ([jnp.concatenate(small)] if small else [])

    def _split(self, joined: Any, like: Any) -> Any:
        """What was joined as a tree like this one again."""
        if not self.joined:
            return joined
        leaves, treedef = jax.tree.flatten(like)
        large = iter(joined)
        found = [next(large) if x.size >= _SMALL else None for x in leaves]
        small, start = next(large, jnp.zeros(0)), 0
        for i, x in enumerate(leaves):
            if found[i] is None:
                found[i] = small[start : start + x.size].reshape(x.shape).astype(x.dtype)
                start += x.size
        return jax.tree.unflatten(treedef, found)

    def _with_groups(self, joined: Any, noise: Any) -> Any:
        """The noise scale of arrays as they are looked at; what a state keeps is of the parameters' own."""
        return replace(noise, groups=noise_scale.init(joined).groups) if self.joined else noise

    def _with_base_batch(self, noise: Any) -> Any:
        """The noise with its base batch, which the first round sets and a state keeps."""
        kept = noise.base_batch_size
        return replace(noise, base_batch_size=jnp.where(kept > 0, kept, jnp.float32(self.base_batch_size or 0)))


def with_previous_gradient(noise: Any, params: Any, compares: bool) -> Any:
    """The noise scale with a place for the previous gradient, or without; one it had before is forgotten.

    Args:
      noise: of a replica.
      params: of that replica; a gradient lies like them.
      compares: whether the next gradient is compared with the one before, as a single replica does.
    """
    if (noise.previous is not None) == compares:
        return noise
    like = {"previous": params if compares else None, "has_previous": noise.has_previous}
    where = jax.tree.map(lambda x: x.sharding, like)
    return replace(noise, **jax.jit(partial(jax.tree.map, jnp.zeros_like), out_shardings=where)(like))
