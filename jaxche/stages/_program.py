"""The compiled programs of one stage: forward, backward with accumulation, and output alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxche.averaging import sum_dtype
from jaxche.sharding import Device
from jaxche.stages._residuals import Residuals
from jaxche.stages._trace import Stage, cotangents


class Cut(NamedTuple):
    """How a batch is cut: examples in a micro-batch (None: the batch stays whole) and number of micro-batches."""

    size: int | None
    count: int


class StageSpec(NamedTuple):
    """Shapes and dtypes of a stage's parameters, its input, the batch and its output.

    The input is None for the first stage, which reads the batch; the batch is None for stages in the middle; the
    output is None for the last, which gives the loss.
    """

    params: Any
    x: Any
    batch: Any
    out: Any


class Kept(NamedTuple):
    """What a stage keeps of a forward for its backward."""

    x: Any
    out: Any
    residuals: Any


class StageProgram:
    """Compiled programs of one stage on one device for one set of shapes.

    The first stage reads its input out of the batch, the last its labels; both cut out the micro-batch themselves, so
    the batch is on a device once and a micro-batch costs no program of its own.

    Args:
      stage: the stage.
      loss: the loss for the last stage, else None.
      seed: of the keys for stages that name ``rng``: folded by step, stage and micro-batch.
      device: where it runs.
      cut: how a batch is cut.
      given: shapes and dtypes.
    """

    def __init__(
        self,
        stage: Stage,
        loss: Callable[[Any, Any], Any] | None,
        seed: int,
        device: Device,
        cut: Cut,
        given: StageSpec,
    ):
        self._stage, self._loss, self._seed, self._cut = stage, loss, seed, cut
        self.stage, self.device, self.is_first, self.is_last = stage.index, device, given.x is None, loss is not None
        self._out, self._loss_dtype = given.out, None
        self._residuals = Residuals()
        here = SingleDeviceSharding(device)

        def place(tree: Any) -> Any:
            return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), tree)

        params, x, batch = place(given.params), place(given.x), place(given.batch)
        numbers = jax.ShapeDtypeStruct((2,), np.uint32)
        lowered = jax.jit(self._forward).lower(params, x, batch, numbers)
        out, residuals = place(lowered.out_info)
        self._run_forward = lowered.compile()
        kept = self._keep(x, out, residuals)
        if self.is_last:
            self._loss_dtype = out.dtype
        gradient = place(cotangents(given.out))
        self._zeros: Any = None
        total = None
        if cut.count > 1:
            sums = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, sum_dtype(p.dtype)), given.params)
            total = place(sums)
            self._zeros = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums), out_shardings=here)
            self._zeros = self._zeros.lower().compile()
        backward = jax.jit(self._backward, donate_argnames="total")
        self._run_backward = backward.lower(params, batch, numbers, kept, gradient, total).compile()
        # Gradients of low-precision parameters are summed in float32 and rounded once.
        self._round: Any = None
        if total is not None and any(p.dtype != sum_dtype(p.dtype) for p in jax.tree.leaves(params)):
            dtypes = jax.tree.map(lambda p: p.dtype, given.params)
            self._round = jax.jit(lambda t: jax.tree.map(lambda g, d: g.astype(d), t, dtypes)).lower(total).compile()

    def zeros(self) -> Any:
        """What gradients are added to, or None where there is only one micro-batch."""
        return None if self._zeros is None else self._zeros()

    def forward(self, params: Any, x: Any, batch: Any, step: int, micro: int) -> tuple[Any, Kept]:
        """The stage's output, or for the last the micro-batch's share of the loss; and what the backward needs."""
        out, residuals = self._run_forward(params, x, batch, _numbers(step, micro))
        return out, self._keep(x, out, residuals)

    def backward(
        self, params: Any, batch: Any, step: int, micro: int, kept: Kept, gradient: Any, total: Any
    ) -> tuple[Any, Any]:
        """The sum of gradients with this micro-batch's added, and the gradient with respect to the input."""
        return self._run_backward(params, batch, _numbers(step, micro), kept, gradient, total)

    def finish(self, total: Any) -> Any:
        """The gradients in the parameters' own dtypes."""
        return total if self._round is None else self._round(total)

    def _keep(self, x: Any, out: Any, residuals: Any) -> Kept:
        if self._stage.remat:
            return Kept(x, None, None)
        uses = self._residuals.uses
        return Kept(x if uses("x") else None, out if uses("out") else None, residuals)

    def _inputs(self, x: Any, batch: Any, numbers: Any) -> tuple[Any, Any]:
        """The stage's input and the labels of the loss, both of this micro-batch."""
        size = self._cut.size
        if batch is not None and size is not None:
            batch = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, numbers[1] * size, size), batch)
        return (batch if self.is_first else x), batch

    def _linearise(self, params: Any, x: Any, batch: Any, numbers: Any) -> tuple[Any, Any]:
        x, labels = self._inputs(x, batch, numbers)
        key = stage_key(self._seed, numbers[0], self._stage.index, numbers[1])

        def call(params: Any, x: Any) -> Any:
            y = self._stage(params, x, key)
            if self._loss is None:
                return y
            loss = self._loss(y, labels)
            return loss.astype(sum_dtype(loss.dtype)) / self._cut.count

        return jax.vjp(lambda p: call(p, x), params) if self.is_first else jax.vjp(call, params, x)

    def _forward(self, params: Any, x: Any, batch: Any, numbers: Any) -> tuple[Any, list[Any]]:
        out, pull = self._linearise(params, x, batch, numbers)
        if self._stage.remat:
            return out, []
        return out, self._residuals.take(pull, params=params, batch=batch, x=x, out=out)

    def _backward(
        self, params: Any, batch: Any, numbers: Any, kept: Kept, gradient: Any, total: Any
    ) -> tuple[Any, Any]:
        if self._stage.remat:
            _, pull = self._linearise(params, kept.x, batch, numbers)
        else:
            pull = self._residuals.give(params=params, batch=batch, **kept._asdict())
        grads, *rest = pull(self._cotangent(gradient))
        if total is not None:
            grads = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
        return grads, cotangents(rest[0]) if rest else None

    def _cotangent(self, gradient: Any) -> Any:
        if self.is_last:
            return jnp.ones((), self._loss_dtype)
        return full_cotangent(self._out, gradient)


def full_cotangent(like: Any, gradient: Any) -> Any:
    """A gradient as it travels, with what ``jax.vjp`` expects where ``like`` is not float."""
    return jax.tree.map(lambda s, g: np.zeros(s.shape, jax.dtypes.float0) if g is None else g, like, gradient)


def stage_key(seed: int, step: Any, stage: Any, micro: Any) -> Any:
    """The key of one stage for one micro-batch of one step."""
    key = jax.random.key(seed)
    for number in (step, stage, micro):
        key = jax.random.fold_in(key, number)
    return key


def _numbers(step: int, micro: int) -> np.ndarray:
    return np.array([step % 2**32, micro], np.uint32)
