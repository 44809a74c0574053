"""Plan a model of the user: the costs of a step under several strategies, from a function that makes the model."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxche.averaging import is_float, sum_dtype
from jaxche.messages import brief, whole_number
from jaxche.sharding._checks import batch_size as rows_of
from jaxche.sharding._checks import collections_of
from jaxche.sharding._compare import Comparison, compare_strategies
from jaxche.sharding._strategy import Device, ShardingStrategy

_FORMS = (
    "write a function that returns parameters, e.g. return model.init(key, x)['params']; an nnx model; a model and "
    "example inputs: return model, x; or a whole step: return loss_fn, tx, params, batch"
)
_MODEL_NOTE = "loss: the mean square of the outputs; with Adam"


class _Step(NamedTuple):
    """A step to plan."""

    loss_fn: Callable[..., Any]
    tx: Any
    params: Any
    batch: Any
    model_state: Any
    note: str


def plan(
    make: Callable[[], Any],
    *,
    batch_size: int | None = None,
    strategies: Sequence[ShardingStrategy] | None = None,
    devices: Sequence[Device] | None = None,
    memory: int | str | None = None,
    accumulate: int = 1,
    compute_dtype: Any = None,
) -> Comparison:
    """Compare the costs of training a model under several strategies, before there is a training loop.

    Only shapes are computed: ``make`` is traced, and each step is compiled but not run. The table has the bytes that a
    device stores and sends; its last line is the strategy to use. ``jaxche plan train.py:make`` prints the same.

    Args:
      make: a function without arguments that returns one of

        - ``loss_fn, tx, params, batch`` or ``loss_fn, tx, params, batch, model_state``, a step as for
          :func:`sharded_step`;
        - ``model, x`` with a linen or nnx model and one or more example inputs ``x``; the loss is then the mean square
          of the outputs;
        - an nnx model, or a tree of parameters; without inputs, activations are not counted.

        Without ``tx`` the optimizer is Adam.
      batch_size: rows of the batch, on all devices; default: those of the example, rounded up until devices and
        micro-batches divide them.
      strategies: as for :func:`compare_strategies`.
      devices: as for :func:`compare_strategies`.
      memory: as for :func:`compare_strategies`, e.g. ``"16GiB"``.
      accumulate: as for :func:`compare_strategies`.
      compute_dtype: as for :func:`compare_strategies`.

    Returns:
      A :class:`Comparison`; print it.

    Raises:
      ValueError: ``make`` has arguments or returns something else; and as for :func:`compare_strategies`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jaxche.sharding import plan
      >>> def make_model():
      ...     return nn.Sequential([nn.Dense(512), nn.relu, nn.Dense(10)]), jnp.zeros((64, 256))
      >>> costs = plan(make_model, devices=jax.devices()[:4], memory="6MiB")
      >>> print(costs.advice)
      advice: NoShard(), the default of the trainer: it fits 6.0 MiB, and no other strategy sends less
    """
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise ValueError("devices=[] has no devices; leave it out for all of them, jax.devices()")
    accumulate = whole_number("accumulate", accumulate, 1, "accumulate=1")
    if batch_size is not None:
        batch_size = whole_number("batch_size", batch_size, 1, "batch_size=64, the rows on all devices")
    step = _traced(make)
    parts = len(devices) * accumulate
    rows = rows_of(step.batch)  # refuses a batch whose arrays have other numbers of rows
    rows = batch_size or math.ceil(rows / parts) * parts
    costs = compare_strategies(
        step.loss_fn,
        step.tx,
        step.params,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), step.batch),
        strategies=strategies,
        devices=devices,
        memory=memory,
        model_state=step.model_state,
        accumulate=accumulate,
        compute_dtype=compute_dtype,
    )
    return dataclasses.replace(costs, note=step.note)


def _traced(make: Callable[[], Any]) -> _Step:
    """The step that ``make`` describes, with shapes in place of its arrays."""
    if not callable(make):
        raise ValueError(f"make={type(make).__name__} is not a function; write plan(make), with def make(): ...")
    _check_signature(make)
    steps: list[_Step] = []

    def trace() -> Any:
        steps.append(_step_of(make()))
        return steps[0].params, steps[0].batch, steps[0].model_state

    params, batch, model_state = jax.eval_shape(trace)
    return steps[0]._replace(params=params, batch=batch, model_state=model_state)


def _check_signature(make: Callable[[], Any]) -> None:
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # a builtin without a signature
        return
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        name = getattr(make, "__name__", "make")
        raise ValueError(
            f"{name} needs {', '.join(needed)}, and a plan calls it without arguments; give them defaults, or write "
            f"def make(): return {name}(...)"
        )


def _step_of(made: Any) -> _Step:
    from flax import linen, nnx

    first, *rest = made if isinstance(made, tuple) and made else (made,)
    if isinstance(first, linen.Module):
        if not rest:
            raise ValueError("a linen model has no parameters without inputs; write: return model, x")
        return _linen_step(first, rest)
    if isinstance(first, nnx.Module):
        return _nnx_step(first, rest) if rest else _parameters_step(nnx.to_pure_dict(nnx.state(first, nnx.Param)))
    if callable(first):
        if len(rest) not in (3, 4):
            raise ValueError(f"a step of {len(rest) + 1} parts; write: return loss_fn, tx, params, batch")
        tx, params, batch, *model_state = rest
        return _Step(first, tx, params, batch, model_state[0] if model_state else None, "the step is the given one")
    leaves = jax.tree.leaves(made)
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        raise ValueError(f"the function returned {brief(made)}, and a plan needs a model; {_FORMS}")
    if others := collections_of(made):
        raise ValueError(
            f"the function returned a whole dict of variables, {', '.join(map(repr, made))}, and {others[0]} are no "
            'parameters; write: return variables["params"], or with inputs: return model, x'
        )
    return _parameters_step(made)


def _parameters_step(params: Any) -> _Step:
    """A step without a model: its gradient is that of the length of the parameters."""

    def loss_fn(params: Any, batch: Any) -> Any:
        squares = (jnp.vdot(x, x).real.astype(jnp.float32) for x in jax.tree.leaves(params))
        return sum(squares) + 0.0 * jnp.mean(batch)

    note = "without activations, as there are no inputs; with Adam"
    return _Step(loss_fn, optax.adam(1e-3), params, jnp.zeros(1), None, note)


def _linen_step(model: Any, inputs: Sequence[Any]) -> _Step:
    from flax.core.meta import unbox

    arrays, with_arrays = _arrays_of(inputs)
    keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(0)), strict=True))
    variables = dict(unbox(model.init(keys, *inputs)))

    def loss_fn(params: Any, batch: Any, rng: Any, model_state: Any) -> Any:
        output, state = model.apply(
            {"params": params, **model_state}, *with_arrays(batch), rngs={"dropout": rng}, mutable=list(model_state)
        )
        return _mean_square(output), ({}, state)

    return _Step(loss_fn, optax.adam(1e-3), variables.pop("params", {}), arrays, variables, _MODEL_NOTE)


def _nnx_step(model: Any, inputs: Sequence[Any]) -> _Step:
    from flax import nnx

    arrays, with_arrays = _arrays_of(inputs)
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def loss_fn(params: Any, batch: Any, model_state: Any) -> Any:
        model = nnx.merge(graph, params, model_state)
        loss = _mean_square(model(*with_arrays(batch)))
        _, _, others = nnx.split(model, nnx.Param, ...)
        return loss, ({}, nnx.to_pure_dict(others))

    params, others = nnx.to_pure_dict(params), nnx.to_pure_dict(others)
    return _Step(loss_fn, optax.adam(1e-3), params, arrays, others, _MODEL_NOTE)


def _arrays_of(inputs: Sequence[Any]) -> tuple[Any, Callable[[Any], list[Any]]]:
    """The inputs with None for those that are no arrays, and a function that puts the others in these places again."""
    arrays = [x if all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x)) else None for x in inputs]
    others = [x if array is None else None for x, array in zip(inputs, arrays, strict=True)]  # no tracers of the arrays

    def with_arrays(given: Any) -> list[Any]:
        return [x if array is None else array for x, array in zip(others, given, strict=True)]

    return arrays, with_arrays


def _mean_square(output: Any) -> Any:
    floats = [x for x in jax.tree.leaves(output) if is_float(x)]
    return sum((jnp.mean(jnp.square(jnp.abs(x.astype(sum_dtype(x.dtype))))) for x in floats), jnp.float32(0.0))
