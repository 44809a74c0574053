"""A pipeline of equal stages as one program over all their devices, worked off by the same schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.averaging import sum_dtype
from jaxche.sharding import Device
from jaxche.stages._execute import StageResult
from jaxche.stages._program import Cut, full_cotangent, stage_key
from jaxche.stages._residuals import Residuals
from jaxche.stages._schedule import Schedule
from jaxche.stages._ticks import IDLE, Ticks, make_ticks
from jaxche.stages._trace import Stage, cotangents

_AXIS = "stage"


class _Carry(NamedTuple):
    """What a device keeps from tick to tick: slots of a ring for each, by the number of the micro-batch."""

    inputs: Any  # activations that have come
    kept: Any  # residuals of forwards whose backward is still to come
    gradients: Any  # gradients that have come
    total: Any
    loss: Any


class OneProgram:
    """All stages of a pipeline as one SPMD program, where each is the same function on a device of the same kind.

    Every device goes through the ticks of the schedule in step with the others: in each it does a forward, a backward
    or nothing, and then passes on what it has by ``ppermute``. So the host dispatches once a step, and not once a task;
    in return a tick in which some stages go forward and others backward takes as long as the backward. There is room
    for the most activations that any stage keeps, on each device, and the batch lies on each.

    Args:
      stage: the function, as the declaration of a stage that takes activations.
      entry: which leaves of the batch are the first stage's input.
      loss: the loss.
      seed: of the keys of stages that name ``rng``.
      devices: one a stage.
      cut: how a batch is cut.
      schedule: the tasks of each stage.
      params: spec of one stage's parameters.
      x: spec of an activation of a micro-batch.
      batch: spec of the batch.
    """

    def __init__(
        self,
        stage: Stage,
        entry: Sequence[int],
        loss: Callable[[Any, Any], Any],
        seed: int,
        devices: Sequence[Device],
        cut: Cut,
        schedule: Schedule,
        params: Any,
        x: Any,
        batch: Any,
    ):
        self._stage, self._entry, self._loss, self._seed, self._cut = stage, tuple(entry), loss, seed, cut
        self._last, self._params, self._x, self._batch = len(devices) - 1, params, x, batch
        mesh = Mesh(np.array(devices), (_AXIS,))
        self._by_stage, self._everywhere = NamedSharding(mesh, P(_AXIS)), NamedSharding(mesh, P())
        self._residuals = Residuals()
        self._kept = self._trace_kept()
        needs_x = stage.remat or self._residuals.uses("x")
        self._ticks: Ticks = make_ticks(schedule, needs_x)

        def place(shape: Any, dtype: Any, sharding: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        given = (
            jax.tree.map(lambda s: place(self._stacked(s.shape), s.dtype, self._by_stage), params),
            jax.tree.map(lambda s: place(s.shape, s.dtype, self._everywhere), batch),
            jax.ShapeDtypeStruct((), np.uint32),
        )
        mapped = jax.shard_map(
            self._run_ticks, mesh=mesh, in_specs=(P(_AXIS), P(), P()), out_specs=(P(), P(_AXIS)), check_vma=False
        )
        self._compiled = jax.jit(mapped).lower(*given).compile()
        self._before: Any = None

    def run(self, params: Sequence[Any], batch: Any, step: int) -> list[StageResult]:
        """One step.

        Args:
          params: of each stage, on its device.
          batch: the whole batch.
          step: number of the step.
        """
        stacked = jax.tree.map(self._stack, *params)
        batch = jax.device_put(batch, self._everywhere)
        # Two programs with collectives in flight can deadlock the CPU client.
        jax.block_until_ready(self._before)
        loss, grads = self._compiled(stacked, batch, np.uint32(step % 2**32))
        self._before = loss
        results = []
        for stage in range(self._last + 1):
            own = jax.tree.map(lambda g, s, i=stage: g.addressable_data(i).reshape(s.shape), grads, self._params)
            results.append(StageResult(own, None, self._ticks.kept))
        results[-1] = results[-1]._replace(loss=loss.addressable_shards[self._last].data)
        return results

    def _stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Stages one behind the other along the first axis, so that each one's own array is a shard as it is."""
        return ((self._last + 1) * shape[0], *shape[1:]) if shape else (self._last + 1,)

    def _stack(self, *leaves: Any) -> Any:
        shape = leaves[0].shape
        shards = list(leaves) if shape else [leaf.reshape(1) for leaf in leaves]
        return jax.make_array_from_single_device_arrays(self._stacked(shape), self._by_stage, shards)

    def _trace_kept(self) -> Any:
        """Specs of what a forward leaves for its backward."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        return jax.eval_shape(lambda p, x, key: self._forward(p, x, key)[1], self._params, self._x, key)

    def _forward(self, params: Any, x: Any, key: Any) -> tuple[Any, list[Any]]:
        if self._stage.remat:
            return self._stage(params, x, key), []
        y, pull = jax.vjp(lambda p, x: self._stage(p, x, key), params, x)
        return y, self._residuals.take(pull, params=params, x=x)

    def _backward(self, params: Any, x: Any, key: Any, kept: Any, gradient: Any) -> tuple[Any, Any]:
        if self._stage.remat:
            _, pull = jax.vjp(lambda p, x: self._stage(p, x, key), params, x)
        else:
            pull = self._residuals.give(kept, params=params, x=x)
        grads, back = pull(full_cotangent(self._x, gradient))
        return grads, cotangents(back)

    def _loss_and_gradient(self, y: Any, labels: Any) -> tuple[Any, Any]:
        def share(y: Any) -> Any:
            loss = self._loss(y, labels)
            return loss.astype(sum_dtype(loss.dtype)) / self._cut.count

        loss, pull = jax.vjp(share, y)
        return loss, cotangents(pull(jnp.ones_like(loss))[0])

    def _run_ticks(self, params: Any, batch: Any, step: Any) -> tuple[Any, Any]:
        """What each device does; ``params`` are its own stage's."""
        params = jax.tree.map(lambda leaf, s: leaf.reshape(s.shape), params, self._params)
        me, ticks = lax.axis_index(_AXIS), self._ticks
        loss = jax.eval_shape(self._loss_and_gradient, self._x, self._labels(batch, 0))[0]
        empty = _Carry(
            _slots(self._x, ticks.inputs),
            _slots(self._kept, ticks.kept),
            _slots(cotangents(self._x), ticks.gradients),
            jax.tree.map(lambda p: jnp.zeros(p.shape, sum_dtype(p.dtype)), params),
            jnp.zeros((), loss.dtype),
        )

        def start(carry: _Carry, micro: Any) -> tuple[Any, Any, Any]:
            labels = self._labels(batch, micro)
            own = jax.tree.unflatten(jax.tree.structure(self._x), [jax.tree.leaves(labels)[i] for i in self._entry])
            x = jax.tree.map(lambda a, b: jnp.where(me == 0, a, b), own, _read(carry.inputs, micro))
            return x, labels, stage_key(self._seed, step, me, micro)

        def forward(carry: _Carry, micro: Any) -> tuple[_Carry, Any, Any]:
            x, labels, key = start(carry, micro)
            y, kept = self._forward(params, x, key)
            carry = carry._replace(kept=_write(carry.kept, kept, micro))

            def end(carry: _Carry) -> _Carry:
                loss, gradient = self._loss_and_gradient(y, labels)
                return carry._replace(loss=carry.loss + loss, gradients=_write(carry.gradients, gradient, micro))

            return lax.cond(me == self._last, end, lambda carry: carry, carry), y, no_gradient

        def backward(carry: _Carry, micro: Any) -> tuple[_Carry, Any, Any]:
            x, _, key = start(carry, micro)
            kept, gradient = _read(carry.kept, micro), _read(carry.gradients, micro)
            grads, back = self._backward(params, x, key, kept, gradient)
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), carry.total, grads)
            return carry._replace(total=total), no_activation, back

        no_activation = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._x)
        no_gradient = cotangents(no_activation)

        def tick(forwards: bool, backwards: bool) -> Callable[..., Any]:
            tasks = [lambda carry, micro: (carry, no_activation, no_gradient)]
            tasks += [forward] * forwards + [backward] * backwards
            most = len(tasks) - 1

            def one(carry: _Carry, row: Any) -> tuple[_Carry, None]:
                kind, micro, activation_of, gradient_of = row[:, me]
                # Where there are only backwards, they are the first and only task beside doing nothing.
                carry, y, back = lax.switch(jnp.minimum(kind, most), tasks, carry, micro)
                if forwards:
                    came = lax.ppermute(y, _AXIS, [(i, i + 1) for i in range(self._last)])
                    carry = carry._replace(inputs=_write(carry.inputs, came, activation_of))
                if backwards:
                    came = lax.ppermute(back, _AXIS, [(i + 1, i) for i in range(self._last)])
                    carry = carry._replace(gradients=_write(carry.gradients, came, gradient_of))
                return carry, None

            return one

        carry = empty
        for part in ticks.parts:
            carry, _ = lax.scan(tick(part.forwards, part.backwards), carry, jnp.asarray(part.rows))
        grads = jax.tree.map(lambda t, p: jnp.atleast_1d(t.astype(p.dtype)), carry.total, params)
        return lax.psum(carry.loss, _AXIS), grads

    def _labels(self, batch: Any, micro: Any) -> Any:
        size: Any = self._cut.size
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, micro * size, size), batch)


def _slots(like: Any, count: int) -> Any:
    return jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), like)


def _read(slots: Any, micro: Any) -> Any:
    return jax.tree.map(lambda ring: lax.dynamic_index_in_dim(ring, micro % len(ring), keepdims=False), slots)


def _write(slots: Any, values: Any, micro: Any) -> Any:
    """Into the slot of a micro-batch; nothing if its number is ``IDLE``."""

    def one(ring: Any, value: Any) -> Any:
        place = micro % len(ring)
        there = lax.dynamic_index_in_dim(ring, place, keepdims=False)
        return lax.dynamic_update_index_in_dim(ring, jnp.where(micro == IDLE, there, value), place, 0)

    return jax.tree.map(one, slots, values)
