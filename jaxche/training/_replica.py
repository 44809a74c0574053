"""One replica's local steps: compiled ahead, dispatched without waiting, timed to their true end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxche.averaging import sum_dtype
from jaxche.sharding import Loss, batch_size
from jaxche.training._agree import InStep
from jaxche.training._data import Feed
from jaxche.training._memory import round_memory
from jaxche.training._place import Home, Place, first, lift, spans_processes
from jaxche.training._scaling import Scaling, Worth

# Steps in flight per replica. Enough that the device never waits for Python, few enough that a round of hundreds
# of steps does not put hundreds of batches on the device at once. In short rounds an eighth of the round: a replica
# that has run out of time cannot take back what is in flight.
_IN_FLIGHT = 8

_PLAIN = Worth()


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
    """What a replica runs: ``begin(local, index, worth)`` makes the carry of a round, from which steps go on."""

    @property
    def begin(self) -> Callable[[Local, Any, Worth], dict[str, Any]]: ...

    def constants(self, local: Local) -> Local:
        """What a step reads of the start of the round, and never writes."""
        ...

    def compile(self, start: Local, carry: dict[str, Any], batch: Any) -> Any:
        """The step for batches of these shapes: ``step(start, carry, batch) -> (carry, loss)``."""
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
    ):
        self._place, self._seed = place, seed
        self._objective = place.value_and_grad(loss.call)
        self._tx: Any = optax.with_extra_args_support(tx)
        self._metrics, self._scaling = metrics, scaling
        step = self._local_step if average == "parameters" else self._accumulate
        self._average = average
        # keep_unused: the arguments also say on which device the zeros are made.
        self.begin = jax.jit(self._begin, keep_unused=True)
        self.step = jax.jit(step, donate_argnums=1, compiler_options=place.compiler_options)

    def constants(self, local: Local) -> Local:
        gradients, scaling = self._average == "gradients", self._scaling
        return Local(
            local.params if gradients else None,
            None,
            None,
            None,
            None if scaling is None or scaling.solo else local.noise,
            local.progress,
        )

    def compile(self, start: Local, carry: dict[str, Any], batch: Any) -> Any:
        return self.step.lower(start, carry, batch).compile()

    def _begin(self, local: Local, index: Any, worth: Worth) -> dict[str, Any]:
        # jnp.copy, because jit hands an unchanged input through as the same buffer, which a donating step would delete.
        copied = jax.tree.map(jnp.copy, local._asdict())
        carry = {
            "model_state": copied["model_state"],
            "index": index,
            "sums": jnp.zeros((1, 2 + len(self._metrics)), jnp.float32),
        }
        if self._scaling is not None:
            noise, params, opt_state = first((local.noise, local.params, local.opt_state))
            begun = self._scaling.begin(noise, params, opt_state, worth)
            carry |= {name: value if name == "worth" else lift(value) for name, value in begun.items()}
        if self._average == "parameters":
            carry |= {"params": copied["params"], "opt_state": copied["opt_state"]}
        else:
            carry["grads"] = jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x.dtype)), local.params)
        return self._place.constrain(carry)

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

    def _local_step(self, start: Local, carry: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
        params, opt_state = first(carry["params"]), first(carry["opt_state"])
        loss, grads, examples, carry_next = self._value_and_grad(params, carry, batch)
        scaled, more = self._scale(start, carry, grads, examples) if self._scaling is not None else ({}, {})
        params, opt_state = self._place.update(self._tx, grads, opt_state, params, value=loss, **scaled)
        if scaled:
            worth = jnp.stack([scaled["noise"].gain(scaled["scale"]), opt_state.factor])
            more["scaled"] = carry["scaled"] + worth[None]
        stepped = {"params": lift(params), "opt_state": lift(opt_state)}
        return self._place.constrain(carry | carry_next | more | stepped), loss

    def _scale(self, start: Local, carry: dict[str, Any], grads: Any, examples: Any) -> Any:
        """Arguments of the scaled optimizer in a local step, and what the carry keeps of the noise."""
        scaling, worth = self._scaling, carry["worth"]
        assert scaling is not None
        progress = first(start.progress) + worth.alpha * carry["scaled"][0, 0]
        if scaling.solo:
            noise = scaling.watch(first(carry["noise"]), grads, examples, first(carry["seen"]))
            more = {"noise": lift(noise)}
        else:
            noise = first(start.noise)
            tracked = scaling.track(first(carry["tracked"]), noise, grads, examples, first(carry["seen"]))
            more = {"tracked": lift(tracked)}
        return scaling.arguments(noise, progress, examples, worth.replicas), more

    def _accumulate(self, start: Local, carry: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
        loss, grads, examples, carry_next = self._value_and_grad(first(start.params), carry, batch)

        def add(total: Any, g: Any) -> Any:
            return total + examples.astype(total.dtype) * g[None].astype(total.dtype)

        if self._scaling is not None:
            tracked, noise = first(carry["tracked"]), first(start.noise)
            tracked = self._scaling.track(tracked, noise, grads, examples, first(carry["seen"]))
            carry_next |= {"tracked": lift(tracked), "seen": carry["seen"]}
        summed = {"grads": jax.tree.map(add, carry["grads"], grads)}
        return self._place.constrain(carry_next | summed), loss


class Outcome(NamedTuple):
    """The end of a local phase: the carry, the time to the true end of the last step, or what went wrong."""

    carry: dict[str, Any]
    steps: int
    wall_ms: float
    error: Exception | None = None


class PaceError(ValueError):
    """A pace that the computation cannot keep.

    Example:
      >>> issubclass(PaceError, ValueError)
      True
    """


class Replica:
    """One replica of this process: its place, its compiled steps, its clock."""

    def __init__(self, rank: int, place: Home, programs: Programs, pace_ms: float | None):
        self.rank, self.place, self._programs, self._pace_ms = rank, place, programs, pace_ms
        self._executables: dict[Any, Any] = {}
        self._stand_in: Any = None
        self._unread: list[Exception] = []
        self.compilations = 0

    def begin(self, local: Local, index: int, worth: Worth = _PLAIN) -> dict[str, Any]:
        return self._programs.begin(local, np.uint32(index % 2**32), Worth(*map(np.float32, worth)))

    def _executable(self, local: Local, carry: dict[str, Any], batch: Any) -> tuple[Any, Any]:
        """The step compiled for a batch of these shapes, and the batch as it takes it."""
        batch = self.place.put(batch)
        leaves, treedef = jax.tree.flatten(batch)
        key = (treedef, *((x.shape, x.dtype) for x in leaves))
        if key not in self._executables:
            batch_size(batch)  # refuses ragged batches by name before XLA sees them
            self._executables[key] = self._programs.compile(self._programs.constants(local), carry, batch)
            self.compilations += 1
        return self._executables[key], batch

    def compile(self, local: Local, batch: Any) -> bool:
        """Compile for this batch's shapes, without running anything; false if that was done before."""
        before = self.compilations
        self._executable(local, self.begin(local, 0), batch)
        self._stand_in = batch
        return self.compilations > before

    def warm_up(self, local: Local, batch: Any) -> None:
        """Run on a scratch copy until caches are warm; check the pace.

        Raises:
          PaceError: the step takes longer than the pace.
        """
        carry = self.begin(local, 0)
        step, batch = self._executable(local, carry, batch)
        fastest = float("inf")
        for _ in range(3 if self._pace_ms else 1):
            start = time.perf_counter()
            carry, loss = step(self._programs.constants(local), carry, batch)
            loss.block_until_ready()
            fastest = min(fastest, (time.perf_counter() - start) * 1e3)
        if self._pace_ms and fastest > self._pace_ms:
            enough = np.ceil(1.3 * fastest)
            raise PaceError(
                f"pace of rank {self.rank} is {self._pace_ms:g} ms, but a step takes {fastest:.1f} ms; "
                f"give it at least {enough:g} ms, e.g. pace_ms={enough:g}, or make the model or the batch smaller"
            )

    def run(
        self, local: Local, feed: Iterable[Any], index: int, worth: Worth = _PLAIN, limit_ms: float | None = None
    ) -> Outcome:
        """Take one step on each batch of ``feed``, or as many as begin within ``limit_ms``, at least one.

        Where several processes drive this replica, the first of them looks at the clock, and all take the same steps.
        Never raises, so that a failing replica still meets the others.
        """
        carry = self.begin(local, index, worth)
        constants = self._programs.constants(local)
        losses: list[Any] = []
        steps, in_flight, limit_s = 0, _IN_FLIGHT, float("inf")
        together = None
        if limit_ms is not None and isinstance(feed, Feed):
            in_flight, limit_s = min(_IN_FLIGHT, max(2, len(feed.keys) // 8)), limit_ms / 1e3
            if spans_processes(self.place):
                processes = sorted({device.process_index for device in self.place.devices.flat})
                together = InStep(tuple(processes), f"rank {self.rank}")
        start = due = time.perf_counter()
        try:
            for batch in self._gapless(feed):
                late = steps > 0 and time.perf_counter() - start > limit_s
                if together is not None:
                    # Not before every step: what the first one says takes a millisecond to the others.
                    late = steps > 0 and steps % in_flight == 0 and together.stop(late)
                if late:
                    break
                before, clock = self.compilations, time.perf_counter()
                step, batch = self._executable(local, carry, batch)
                if self.compilations != before:
                    start += time.perf_counter() - clock  # no compilation is ever timed
                carry, loss = step(constants, carry, batch)
                steps += 1
                if self._pace_ms:
                    loss.block_until_ready()
                    due = max(due + self._pace_ms / 1e3, time.perf_counter())
                    time.sleep(max(0.0, due - time.perf_counter()))
                losses.append(loss)
                if len(losses) == in_flight:
                    # Waiting costs a wake-up of this thread: once for half of them, not once a step.
                    losses[in_flight // 2 - 1].block_until_ready()
                    del losses[: in_flight // 2]
            jax.block_until_ready(carry)
            if self._unread:
                raise self._unread.pop()
        except Exception as error:
            return self.idle(local)._replace(error=error)
        return Outcome(carry, steps, (time.perf_counter() - start) * 1e3 if steps else 0.0)

    def memory(self, local: Local) -> dict[str, int]:
        """Bytes a device needs for a round of the largest batches compiled for; see :func:`round_memory`."""
        found = (round_memory(local, done, key[1:], _IN_FLIGHT) for key, done in self._executables.items())
        return {"rank": self.rank} | max(found, key=lambda parts: parts["in all"])

    def idle(self, local: Local) -> Outcome:
        """The outcome of taking no step."""
        return Outcome(self.begin(local, 0), 0, 0.0)

    def _gapless(self, feed: Iterable[Any]) -> Iterator[Any]:
        """The batches of a feed. Where another process of an island waits in each step, a batch that cannot be read is
        replaced by the one before, and the error kept for the end: it then has its steps, and nobody hangs.
        """
        if not (spans_processes(self.place) and isinstance(feed, Feed)):
            yield from feed
            return
        done = 0
        try:
            for batch in feed:
                self._stand_in = batch
                yield batch
                done += 1
        except Exception as error:
            self._unread.append(error)
            yield from itertools.repeat(self._stand_in, len(feed.keys) - done)
