"""What a replica runs: the programs of its local steps, and the state they start from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxche.averaging import add_weighted, zero_sums
from jaxche.sharding import Loss, batch_size
from jaxche.training._counts import advanced, ahead, are_schedules, counts_of
from jaxche.training._finite import broken, stayed_finite
from jaxche.training._place import Place, first, lift
from jaxche.training._scaling import Scaling, Worth


class Steps(NamedTuple):
    """The compiled steps of a round; where all are alike, one program in both places.

    Attributes:
      measuring: ``step(start, carry, batch) -> (carry, loss)`` of the steps whose gradients are measured.
      plain: of the others.
    """

    measuring: Any
    plain: Any


class Local(NamedTuple):
    """What one replica keeps between rounds. Every leaf has a leading axis of 1: its row of the ``[R, ...]`` view.

    ``noise`` and ``progress`` are None unless learning rates are scaled.
    """

    params: Any
    opt_state: Any
    model_state: Any
    outer_state: Any
    noise: Any = None
    progress: Any = None


class Programs(Protocol):
    """What a replica runs: ``begin(local, index, worth) -> (made, carry)`` opens a round, from which steps go on."""

    @property
    def begin(self) -> Callable[[Local, Any, Worth], tuple[dict[str, Any], dict[str, Any]]]: ...

    def constants(self, local: Local, made: dict[str, Any]) -> dict[str, Any]:
        """What a step reads of the start of the round, and never writes: an array that each step hands on to the next
        costs ten times as much to dispatch.
        """
        ...

    def compile(self, start: dict[str, Any], carry: dict[str, Any], batch: Any) -> Steps:
        """The steps for batches of these shapes."""
        ...

    def ended(self, local: Local, carry: dict[str, Any]) -> dict[str, Any]:
        """The carry at the end of a round that began with ``local``, with ``not_finite`` if a merge cannot see it."""
        ...


class LocalPrograms:
    """The compiled programs of a replica's local phase: ``begin`` and ``step``.

    ``begin`` copies the state a round starts from, so that the steps may donate their buffers and the state the
    caller holds stays valid: whatever goes wrong in a round, the last good state is still there.

    Args:
      place: where the replica lives.
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
        place: Place,
        loss: Loss,
        tx: optax.GradientTransformation,
        average: str,
        seed: int,
        metrics: tuple[str, ...],
        scaling: Scaling | None = None,
        solo: bool = False,
    ):
        self._place, self._seed, self._solo = place, seed, solo
        self._objective = place.value_and_grad(loss)
        self._tx: Any = optax.with_extra_args_support(tx)
        self._metrics, self._scaling = metrics, scaling
        step = self._local_step if average == "parameters" else self._accumulate
        self._average = average
        # keep_unused: the arguments also say on which device the zeros are made.
        self.begin = jax.jit(self._begin, keep_unused=True)
        self._not_finite = jax.jit(self._broken)
        self._step = jax.jit(
            step, static_argnames="measures", donate_argnums=1, compiler_options=place.compiler_options
        )

    def constants(self, local: Local, made: dict[str, Any]) -> dict[str, Any]:
        start = made | ({"params": local.params} if self._average == "gradients" else {})
        if "stride" in made:
            start["counts"] = counts_of(local.opt_state)
        if self._scaling is not None:
            start |= {"progress": local.progress} | ({} if self._scaling.solo else {"noise": local.noise})
        return start

    def compile(self, start: dict[str, Any], carry: dict[str, Any], batch: Any) -> Steps:
        step = self._step.lower(start, carry, batch, measures=True).compile()
        if self._scaling is None or self._scaling.always:
            return Steps(step, step)
        start, rest, _ = _parted(start, carry)
        return Steps(step, partial(_unmeasured, self._step.lower(start, rest, batch, measures=False).compile()))

    def ended(self, local: Local, carry: dict[str, Any]) -> dict[str, Any]:
        if self._average == "gradients":
            return carry  # all of it goes into the merge
        names = ("params", "opt_state", "model_state")
        before, after = ({name: tree[name] for name in names} for tree in (local._asdict(), carry))
        return carry | self._not_finite(before, after)

    def _broken(self, before: Any, after: Any) -> dict[str, Any]:
        return self._place.constrain({"not_finite": broken(stayed_finite(before, after))})

    def _begin(self, local: Local, index: Any, worth: Worth) -> tuple[dict[str, Any], dict[str, Any]]:
        # jnp.copy, because jit hands an unchanged input through as the same buffer, which a donating step would delete.
        copied = jax.tree.map(jnp.copy, local._asdict())
        made: dict[str, Any] = {}
        carry: dict[str, Any] = {
            "model_state": copied["model_state"],
            "index": index,
            "sums": jnp.zeros((1, 2 + len(self._metrics)), jnp.float32),
        }
        if self._scaling is not None:
            noise, params, opt_state = first((local.noise, local.params, local.opt_state))
            seen, begun = self._scaling.begin(noise, params, opt_state)
            made, carry = {"seen": lift(seen), "worth": worth}, carry | lift(begun)
        if self._average == "parameters":
            carry |= {"params": copied["params"], "opt_state": copied["opt_state"]}
            if not self._solo and any(are_schedules(local.opt_state)):
                made["stride"] = worth.stride
        else:
            carry["grads"] = zero_sums(local.params)
        return self._place.constrain(made), self._place.constrain(carry)

    def _value_and_grad(self, params: Any, carry: dict[str, Any], batch: Any) -> Any:
        rng = jax.random.fold_in(jax.random.key(self._seed), carry["index"])
        (loss, (metrics, model_state)), grads = self._objective(params, first(carry["model_state"]), batch, rng)
        examples = jnp.float32(batch_size(batch))
        row = jnp.stack([jnp.float32(1), loss, *(metrics[name] for name in self._metrics)]) * examples
        advanced = {
            "model_state": lift(model_state),
            "index": carry["index"] + 1,
            "sums": carry["sums"] + row[None],
        }
        return loss, grads, examples, advanced

    def _local_step(
        self, start: dict[str, Any], carry: dict[str, Any], batch: Any, measures: bool
    ) -> tuple[dict[str, Any], Any]:
        params, opt_state = first(carry["params"]), first(carry["opt_state"])
        loss, grads, examples, carry_next = self._value_and_grad(params, carry, batch)
        scaled, more = self._scale(start, carry, grads, examples, measures) if self._scaling is not None else ({}, {})
        seen = ahead(opt_state, first(start["counts"]), start["stride"]) if "stride" in start else opt_state
        params, updated = self._place.update(self._tx, grads, seen, params, value=loss, **scaled)
        opt_state = advanced(opt_state, seen, updated) if "stride" in start else updated
        if scaled:
            worth = jnp.stack([scaled["noise"].gain(scaled["scale"]), opt_state.factor])
            more["scaled"] = carry["scaled"] + worth[None]
        stepped = {"params": lift(params), "opt_state": lift(opt_state)}
        return self._place.constrain(carry | carry_next | more | stepped), loss

    def _scale(self, start: dict[str, Any], carry: dict[str, Any], grads: Any, examples: Any, measures: bool) -> Any:
        """Arguments of the scaled optimizer in a local step, and what the carry keeps of the noise."""
        scaling, worth, seen = self._scaling, start["worth"], first(start["seen"])
        assert scaling is not None
        progress = first(start["progress"]) + worth.alpha * carry["scaled"][0, 0]
        noise, more = first((carry if measures and scaling.solo else start)["noise"]), {}
        if measures and scaling.solo:
            noise, tracked = scaling.watch(noise, first(carry["tracked"]), grads, examples, seen)
            more = {"noise": lift(noise), "tracked": lift(tracked)}
        elif measures:
            more = {"tracked": lift(scaling.track(first(carry["tracked"]), noise, grads, examples, seen))}
        return scaling.arguments(noise, progress, examples, worth.replicas), more

    def _accumulate(
        self, start: dict[str, Any], carry: dict[str, Any], batch: Any, measures: bool
    ) -> tuple[dict[str, Any], Any]:
        loss, grads, examples, carry_next = self._value_and_grad(first(start["params"]), carry, batch)
        if self._scaling is not None and measures:
            tracked, noise = first(carry["tracked"]), first(start["noise"])
            carry_next["tracked"] = lift(self._scaling.track(tracked, noise, grads, examples, first(start["seen"])))
        summed = {"grads": add_weighted(carry["grads"], lift(grads), examples)}
        return self._place.constrain(carry_next | summed), loss


def _parted(start: dict[str, Any], carry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Start and carry of a step that does not measure, and what only steps that do write; it may read the noise."""
    rest = dict(carry)
    kept = {name: rest.pop(name) for name in ("tracked", "noise") if name in rest}
    return (start | {"noise": kept["noise"]} if "noise" in kept else start), rest, kept


def _unmeasured(step: Any, start: dict[str, Any], carry: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
    start, rest, kept = _parted(start, carry)
    rest, loss = step(start, rest, batch)
    return rest | kept, loss
