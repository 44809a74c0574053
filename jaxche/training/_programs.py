"""The compiled programs of a replica's local phase, and the values they carry."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxche.averaging import add_weighted, is_float, zero_sums
from jaxche.sharding import Loss, batch_size
from jaxche.training._placement import Placement, add_replica_axis, drop_replica_axis
from jaxche.training._scaling import MergeScale, Scaling
from jaxche.training._schedule_counts import advance_counts, are_schedules, counts_of, with_run_counts


def all_finite(tree: Any) -> Any:
    """Whether every number of the tree is finite."""
    # x - x is 0 for every finite x and NaN for all others; this sum is three times as fast as all(isfinite(x)).
    sums = [jnp.abs(jnp.sum(x - x)).astype(jnp.float32) for x in jax.tree.leaves(tree) if is_float(x)]
    return jnp.sum(jnp.stack([jnp.float32(0), *sums])) == 0


def stayed_finite(before: Any, after: Any) -> Any:
    """Whether every number that was finite before still is; a state may begin with an infinite best value."""

    def compared() -> Any:
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        flags = [(jnp.isfinite(new) | ~jnp.isfinite(old)).all() for old, new in pairs if is_float(new)]
        return jnp.all(jnp.stack([jnp.bool_(True), *flags]))

    return lax.cond(all_finite(after), lambda: jnp.bool_(True), compared)


def non_finite_flag(finite: Any) -> Any:
    """The column of a merge's table for a flag of one replica, ``[1, 1]``: 1 where a number is not finite."""
    return 1 - jnp.float32(finite)[None, None]


class Steps(NamedTuple):
    """The compiled steps of a round; where all are alike, one program in both places.

    Attributes:
      measuring: ``step(start, carry, batch) -> (carry, loss)`` of the steps whose gradients are measured.
      plain: of the others.
    """

    measuring: Any
    plain: Any


class LocalState(NamedTuple):
    """What one replica keeps between rounds. Every leaf has a leading axis of 1: its row of the ``[R, ...]`` view.

    ``noise`` and ``progress`` are None unless learning rates are scaled.
    """

    params: Any
    opt_state: Any
    model_state: Any
    outer_state: Any
    noise: Any = None
    progress: Any = None


class Constants(NamedTuple):
    """What the steps of a round read and never write; None is what the settings have no use for.

    An array that each step hands on to the next costs ten times as much to dispatch. Arrays have a leading axis of 1,
    but for ``stride`` and ``worth``.
    """

    # Averaging gradients: where they are taken.
    params: Any = None
    # Where a schedule depends on them: the optimizer's counts at the start, and steps of all for one of this replica.
    counts: Any = None
    stride: Any = None
    # Scaling: how the optimizer sees gradients, what steps are worth, and what was known at the start.
    seen: Any = None
    merge_scale: MergeScale | None = None
    progress: Any = None
    noise: Any = None


class Carry(NamedTuple):
    """What the steps of a round hand on; None is what the settings have no use for. Arrays have a leading axis of 1.

    ``index`` is the number of the next batch, for its random numbers; ``sums`` are examples, and loss and metrics times
    examples.
    """

    model_state: Any
    index: Any
    sums: Any
    # Averaging parameters: the replica's own.
    params: Any = None
    opt_state: Any = None
    # Averaging gradients: their sum, weighted by examples.
    grads: Any = None
    # Scaling: what the noise is estimated from, what the steps were worth, and a single replica's noise.
    tracked: Any = None
    scaled: Any = None
    noise: Any = None
    # At the end of a round: 1 where a number became NaN or infinite.
    not_finite: Any = None


class Programs(Protocol):
    """What a replica runs: ``begin(local, index, worth) -> (made, carry)`` opens a round, from which steps go on."""

    @property
    def begin(self) -> Callable[[LocalState, Any, MergeScale], tuple[Constants, Carry]]: ...

    def constants(self, local: LocalState, made: Constants) -> Constants:
        """What :meth:`begin` made, with what the steps read of the replica's state itself."""
        ...

    def compile(self, start: Constants, carry: Carry, batch: Any) -> Steps:
        """The steps for batches of these shapes."""
        ...

    def finish(self, local: LocalState, carry: Carry) -> Carry:
        """The carry at the end of a round that began with ``local``, with ``not_finite`` if a merge cannot see it."""
        ...

    def idle(self, carry: Carry) -> Carry:
        """The same for a carry of :meth:`begin`, without a collective: one process of an island may call it alone."""
        ...


class LocalPrograms:
    """The compiled programs of a replica's local phase: ``begin`` and ``step``.

    ``begin`` copies the state a round starts from, so that the steps may donate their buffers and the state the
    caller holds stays valid: whatever goes wrong in a round, the last good state is still there.

    Args:
      placement: where the replica lives.
      loss: the loss in its one form.
      tx: optimizer of the local steps.
      average: ``"parameters"``: a step updates the replica's own parameters. ``"gradients"``: a step adds its
        gradient, weighted by examples, to an accumulator.
      seed: seed of ``rng=``.
      metrics: names of the loss function's metrics, sorted.
      scaling: scaling of the learning rate, or None; ``tx`` is then already wrapped.
      solo: whether this is the only replica, whose own steps are those of the run.
    """

    def __init__(
        self,
        placement: Placement,
        loss: Loss,
        tx: optax.GradientTransformation,
        average: str,
        seed: int,
        metrics: tuple[str, ...],
        scaling: Scaling | None = None,
        solo: bool = False,
    ):
        self._placement, self._seed, self._solo = placement, seed, solo
        self._objective = placement.value_and_grad(loss)
        self._tx: Any = optax.with_extra_args_support(tx)
        self._metrics, self._scaling = metrics, scaling
        step = self._local_step if average == "parameters" else self._accumulate
        self._average = average
        # keep_unused: the arguments also say on which device the zeros are made.
        self.begin = jax.jit(self._begin, keep_unused=True)
        self._not_finite, self._finite = jax.jit(self._non_finite), jax.jit(self._zero_flag, keep_unused=True)
        self._step = jax.jit(
            step, static_argnames="measures", donate_argnums=1, compiler_options=placement.compiler_options
        )

    def constants(self, local: LocalState, made: Constants) -> Constants:
        if self._average == "gradients":
            made = made._replace(params=local.params)
        if made.stride is not None:
            made = made._replace(counts=counts_of(local.opt_state))
        if self._scaling is not None:
            made = made._replace(progress=local.progress, noise=None if self._scaling.solo else local.noise)
        return made

    def compile(self, start: Constants, carry: Carry, batch: Any) -> Steps:
        step = self._step.lower(start, carry, batch, measures=True).compile()
        if self._scaling is None or self._scaling.measures_every_step:
            return Steps(step, step)
        plain = self._step.lower(*_without_noise(start, carry), batch, measures=False).compile()
        return Steps(step, partial(_plain_step, plain))

    def finish(self, local: LocalState, carry: Carry) -> Carry:
        if self._average == "gradients":
            return carry  # all of it goes into the merge
        before, after = ((x.params, x.opt_state, x.model_state) for x in (local, carry))
        return carry._replace(not_finite=self._not_finite(before, after))

    def idle(self, carry: Carry) -> Carry:
        return carry if self._average == "gradients" else carry._replace(not_finite=self._finite(carry.sums))

    def _zero_flag(self, sums: Any) -> Any:
        return self._placement.constrain({"not_finite": jnp.zeros_like(sums[:, :1])})["not_finite"]

    def _non_finite(self, before: Any, after: Any) -> Any:
        return self._placement.constrain({"not_finite": non_finite_flag(stayed_finite(before, after))})["not_finite"]

    def _begin(self, local: LocalState, index: Any, merge_scale: MergeScale) -> tuple[Constants, Carry]:
        # jnp.copy, because jit hands an unchanged input through as the same buffer, which a donating step would delete.
        copied = jax.tree.map(jnp.copy, local)
        made = Constants()
        carry = Carry(copied.model_state, index, jnp.zeros((1, 2 + len(self._metrics)), jnp.float32))
        if self._scaling is not None:
            noise, params, opt_state = drop_replica_axis((local.noise, local.params, local.opt_state))
            seen, begun = self._scaling.begin(noise, params, opt_state)
            made, carry = (
                made._replace(seen=add_replica_axis(seen), merge_scale=merge_scale),
                carry._replace(**add_replica_axis(begun)),
            )
        if self._average == "parameters":
            carry = carry._replace(params=copied.params, opt_state=copied.opt_state)
            if not self._solo and any(are_schedules(local.opt_state)):
                made = made._replace(stride=merge_scale.stride)
        else:
            carry = carry._replace(grads=zero_sums(local.params))
        return self._constrained(made), self._constrained(carry)

    def _constrained(self, trees: Any) -> Any:
        """A carry or constants, kept where the place says."""
        present = {name: tree for name, tree in trees._asdict().items() if tree is not None}
        return trees._replace(**self._placement.constrain(present))

    def _value_and_grad(self, params: Any, carry: Carry, batch: Any) -> tuple[Any, Any, Any, Carry]:
        """Loss, gradients, examples, and the carry with what every step counts."""
        rng = jax.random.fold_in(jax.random.key(self._seed), carry.index)
        (loss, (metrics, model_state)), grads = self._objective(
            params, drop_replica_axis(carry.model_state), batch, rng
        )
        examples = jnp.float32(batch_size(batch))
        row = jnp.stack([jnp.float32(1), loss, *(metrics[name] for name in self._metrics)]) * examples
        counted = carry._replace(
            model_state=add_replica_axis(model_state), index=carry.index + 1, sums=carry.sums + row[None]
        )
        return loss, grads, examples, counted

    def _local_step(self, start: Constants, carry: Carry, batch: Any, measures: bool) -> tuple[Carry, Any]:
        params, opt_state, scaled = drop_replica_axis(carry.params), drop_replica_axis(carry.opt_state), {}
        loss, grads, examples, carry = self._value_and_grad(params, carry, batch)
        if self._scaling is not None:
            scaled, carry = self._scale(start, carry, grads, examples, measures)
        seen = (
            opt_state
            if start.stride is None
            else with_run_counts(opt_state, drop_replica_axis(start.counts), start.stride)
        )
        params, updated = self._placement.update(self._tx, grads, seen, params, value=loss, **scaled)
        opt_state = updated if start.stride is None else advance_counts(opt_state, seen, updated)
        if scaled:
            gain = jnp.stack([scaled["noise"].gain(scaled["scale"]), opt_state.factor])
            carry = carry._replace(scaled=carry.scaled + gain[None])
        return self._constrained(
            carry._replace(params=add_replica_axis(params), opt_state=add_replica_axis(opt_state))
        ), loss

    def _scale(
        self, start: Constants, carry: Carry, grads: Any, examples: Any, measures: bool
    ) -> tuple[dict[str, Any], Carry]:
        """Arguments of the scaled optimizer in a local step, and the carry with what it keeps of the noise."""
        scaling, merge_scale, seen = self._scaling, start.merge_scale, drop_replica_axis(start.seen)
        assert scaling is not None
        assert merge_scale is not None
        progress = drop_replica_axis(start.progress) + merge_scale.alpha * carry.scaled[0, 0]
        noise = drop_replica_axis((carry if measures and scaling.solo else start).noise)
        if measures and scaling.solo:
            noise, tracked = scaling.update_from_step(noise, drop_replica_axis(carry.tracked), grads, examples, seen)
            carry = carry._replace(noise=add_replica_axis(noise), tracked=add_replica_axis(tracked))
        elif measures:
            tracked = scaling.accumulate(drop_replica_axis(carry.tracked), noise, grads, examples, seen)
            carry = carry._replace(tracked=add_replica_axis(tracked))
        return scaling.arguments(noise, progress, examples, merge_scale.replicas), carry

    def _accumulate(self, start: Constants, carry: Carry, batch: Any, measures: bool) -> tuple[Carry, Any]:
        loss, grads, examples, carry = self._value_and_grad(drop_replica_axis(start.params), carry, batch)
        if self._scaling is not None and measures:
            tracked, noise = drop_replica_axis(carry.tracked), drop_replica_axis(start.noise)
            tracked = self._scaling.accumulate(tracked, noise, grads, examples, drop_replica_axis(start.seen))
            carry = carry._replace(tracked=add_replica_axis(tracked))
        summed = add_weighted(carry.grads, add_replica_axis(grads), examples)
        return self._constrained(carry._replace(grads=summed)), loss


def _without_noise(start: Constants, carry: Carry) -> tuple[Constants, Carry]:
    """Constants and carry of a step that does not measure: it may read a single replica's noise, and writes none."""
    if carry.noise is not None:
        start = start._replace(noise=carry.noise)
    return start, carry._replace(tracked=None, noise=None)


def _plain_step(step: Any, start: Constants, carry: Carry, batch: Any) -> tuple[Carry, Any]:
    rest, loss = step(*_without_noise(start, carry), batch)
    return rest._replace(tracked=carry.tracked, noise=carry.noise), loss
