"""The compiled programs of one stage, at its own speed or at a pace: forward, and backward that sums gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxche.averaging import sum_dtype, zero_sums
from jaxche.sharding import Device, batch_size
from jaxche.stages._stage import Stage, cotangents, stage_key


class MicroBatches(NamedTuple):
    """Examples in a micro-batch (None: the batch stays whole) and number of micro-batches."""

    size: int | None
    count: int

    @classmethod
    def of(cls, batch: Any, size: int | None) -> MicroBatches:
        """The micro-batches of a batch, which ``size`` must divide."""
        if size is None:
            if any(leaf.shape[:1] == (0,) for leaf in jax.tree.leaves(batch)):
                raise ValueError("a batch with no examples (leading axis 0); leave empty batches out of the data")
            return cls(None, 1)
        examples = batch_size(batch)
        if examples % size:
            raise ValueError(
                f"micro_batch_size={size} does not divide the batch of {examples} examples; "
                f"write e.g. micro_batch_size={largest_micro_batch(size, examples)}"
            )
        return cls(size, examples // size) if size < examples else cls(None, 1)

    def spec(self, batch: Any) -> Any:
        """The spec of a micro-batch, from that of the batch."""
        if self.size is None:
            return batch
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((self.size, *leaf.shape[1:]), leaf.dtype), batch)

    def take(self, batch: Any, number: Any) -> Any:
        """One micro-batch, inside a program."""
        if (size := self.size) is None:
            return batch
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, number * size, size), batch)


def largest_micro_batch(size: int, examples: int) -> int:
    """The largest micro-batch of at most ``size`` examples that divides a batch."""
    return next(n for n in range(min(size, examples), 0, -1) if examples % n == 0)


class StageSpec(NamedTuple):
    """Shapes and dtypes of the arguments and the result of a stage."""

    params: Any
    x: Any  # None for the first stage, which reads the batch
    batch: Any  # None for stages in the middle
    out: Any  # None for the last stage, which returns the loss


class Saved(NamedTuple):
    """The values that the backward of one micro-batch reads: input, output, and other residuals of the forward."""

    x: Any
    out: Any
    residuals: Any


class StageProgram:
    """Compiled programs of one stage on one device for one set of shapes."""

    def __init__(
        self,
        stage: Stage,
        loss: Callable[[Any, Any], Any] | None,  # None for all stages but the last
        seed: int,
        device: Device,
        micro: MicroBatches,
        given: StageSpec,
    ):
        self._stage, self._loss, self._seed, self._micro = stage, loss, seed, micro
        self.index, self.device, self.is_first, self.is_last = stage.index, device, given.x is None, loss is not None
        self._out, self._residuals = given.out, Residuals()
        here = SingleDeviceSharding(device)

        def place(tree: Any) -> Any:
            return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), tree)

        params, batch = place(given.params), place(given.batch)
        # The specs of what the stage receives.
        self.x, self.gradient = place(given.x), place(cotangents(given.out))
        numbers = jax.ShapeDtypeStruct((2,), np.uint32)
        lowered = jax.jit(self._forward).lower(params, self.x, batch, numbers)
        out, residuals = place(lowered.out_info)
        self._run_forward = lowered.compile()
        self._loss_dtype = out.dtype if self.is_last else None
        total: Any = None
        # The sum of gradients before the first of several micro-batches.
        self.zeros: Callable[[], Any] = lambda: None
        # The gradients in the dtypes of the parameters: those of low precision are summed in float32 and rounded once.
        self.finish: Callable[[Any], Any] = lambda total: total
        if micro.count > 1:
            total = place(jax.eval_shape(zero_sums, params))
            self.zeros = jax.jit(lambda: zero_sums(params), out_shardings=here).lower().compile()
            if any(p.dtype != sum_dtype(p.dtype) for p in jax.tree.leaves(params)):
                rounding = jax.jit(lambda total: jax.tree.map(lambda g, p: g.astype(p.dtype), total, params))
                self.finish = rounding.lower(total).compile()
        saved = self._save(self.x, out, residuals)
        backward = jax.jit(self._backward, donate_argnames="total")
        self._run_backward = backward.lower(params, batch, numbers, saved, self.gradient, total).compile()

    def forward(self, params: Any, x: Any, batch: Any, step: int, micro: int) -> tuple[Any, Saved]:
        """The output of the stage, or for the last one the share of the loss; and the values for the backward."""
        out, residuals = self._run_forward(params, x, batch, _numbers(step, micro))
        return out, self._save(x, out, residuals)

    def backward(
        self, params: Any, batch: Any, step: int, micro: int, saved: Saved, gradient: Any, total: Any
    ) -> tuple[Any, Any]:
        """The sum of gradients including this micro-batch, and the gradient with respect to the input."""
        return self._run_backward(params, batch, _numbers(step, micro), saved, gradient, total)

    def _save(self, x: Any, out: Any, residuals: Any) -> Saved:
        uses = self._residuals.uses
        return Saved(x if uses("x") else None, out if uses("out") else None, residuals)

    def _forward(self, params: Any, x: Any, batch: Any, numbers: Any) -> tuple[Any, list[Any]]:
        def call(params: Any, x: Any) -> Any:
            step, number = numbers
            # The program takes its micro-batch out of the batch, so the batch is on a device once.
            micro_batch = self._micro.take(batch, number)
            key = stage_key(self._seed, step, self._stage.index, number)
            y = self._stage(params, micro_batch if self.is_first else x, key)
            if self._loss is None:
                return y
            loss = self._loss(y, micro_batch)
            return loss.astype(sum_dtype(loss.dtype)) / self._micro.count

        if self._stage.remat:
            # Forward and backward are two programs, so nothing in one of them can be shared with the other.
            call = jax.checkpoint(call, prevent_cse=False)
        out, vjp = jax.vjp(call, params, x)
        return out, self._residuals.split(vjp, out=out, x=x, numbers=numbers, batch=batch, params=params)

    def _backward(
        self, params: Any, batch: Any, numbers: Any, saved: Saved, gradient: Any, total: Any
    ) -> tuple[Any, Any]:
        vjp = self._residuals.join(params=params, batch=batch, numbers=numbers, **saved._asdict())
        grads, back = vjp(self._cotangent(gradient))
        if total is not None:
            grads = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
        return grads, cotangents(back)

    def _cotangent(self, gradient: Any) -> Any:
        """The gradient that arrived, with the float0 zeros that ``jax.vjp`` expects for leaves that are not float."""
        if self.is_last:
            return jnp.ones((), self._loss_dtype)
        zero = jax.dtypes.float0
        return jax.tree.map(lambda s, g: np.zeros(s.shape, zero) if g is None else g, self._out, gradient)


class Pace(NamedTuple):
    """Wall times in ms to which the tasks of a stage are padded, to simulate a device of known speed.

    Attributes:
      forward_ms: of a forward task.
      backward_ms: of a backward task.

    Example:
      >>> Pace(forward_ms=4.0, backward_ms=8.0).backward_ms
      8.0
    """

    forward_ms: float
    backward_ms: float


class PacedProgram:
    """The program of a stage whose forward and backward begin when their arguments are computed, and are padded."""

    def __init__(self, program: StageProgram, pace: Pace):
        self._program, self._pace = program, pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def forward(self, *arguments: Any) -> tuple[Any, Any]:
        return _padded(self._pace.forward_ms, self._program.forward, arguments)

    def backward(self, *arguments: Any) -> tuple[Any, Any]:
        return _padded(self._pace.backward_ms, self._program.backward, arguments)


def _padded(pace_ms: float, task: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    jax.block_until_ready(arguments)
    start = time.perf_counter()
    result = jax.block_until_ready(task(*arguments))
    time.sleep(max(0.0, start + pace_ms / 1e3 - time.perf_counter()))
    return result


class Residuals:
    """The residuals of a ``jax.vjp`` in the program of the forward, and the vjp again in that of the backward."""

    # The forward would copy residuals that are parameters, inputs or outputs if it returned them, so only their places
    # are recorded.

    def __init__(self) -> None:
        self._sources: list[tuple[str, int]] = []
        self._structure: Any = None

    def split(self, vjp: Any, **there: Any) -> list[Any]:
        """The leaves of a vjp function that are not leaves of the named trees."""
        # A leaf in several trees is taken from the last.
        known = {id(leaf): (name, i) for name, tree in there.items() for i, leaf in enumerate(jax.tree.leaves(tree))}
        leaves, self._structure = jax.tree.flatten(vjp)
        residuals: list[Any] = []
        self._sources = []
        for leaf in leaves:
            if id(leaf) not in known:
                known[id(leaf)] = ("residuals", len(residuals))
                residuals.append(leaf)
            self._sources.append(known[id(leaf)])
        return residuals

    def join(self, residuals: Any, **there: Any) -> Any:
        """The vjp function, from the result of :meth:`split` and the same trees."""
        leaves = {name: jax.tree.leaves(tree) for name, tree in (there | {"residuals": residuals}).items()}
        return jax.tree.unflatten(self._structure, [leaves[name][i] for name, i in self._sources])

    def uses(self, name: str) -> bool:
        """Whether the backward reads a leaf of this tree."""
        return any(source == name for source, _ in self._sources)


def _numbers(step: int, micro: int) -> np.ndarray:
    return np.array([step % 2**32, micro], np.uint32)
