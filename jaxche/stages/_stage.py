"""A stage as declared, and the shapes that travel between stages, found without computing anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxche.averaging import Weighted, is_float
from jaxche.messages import brief, type_of
from jaxche.sharding import RNG_NAMES, collections_of, flax_kind, not_floats, not_trained

# What to write instead, by errors of Flax.
_LINES = {
    "InvalidRngError": "For a random key write def stage(params, x, rng), and apply(..., rngs={...: rng})",
    "TraceContextError": "Write nnx.merge(graph, params, rest, copy=True)",
}


class Stage:
    """A stage of the model: ``call(params, x)``, with a random key if it has an argument ``rng`` or ``key``."""

    def __init__(self, index: int, call: Any, remat: bool = False):
        if not callable(call):
            raise ValueError(f"stages[{index}]={call!r} is not a function; write def f(params, x): ... return x")
        if kind := flax_kind(call):
            line = 'lambda params, x: module.apply({"params": params}, x)'
            if kind == "nnx":
                line = (
                    "graph, params, rest = nnx.split(model, nnx.Param, ...), and "
                    "lambda params, x: nnx.merge(graph, params, rest, copy=True)(x)"
                )
            raise ValueError(f"stages[{index}] is a module of {kind}, not a function of its parameters; write {line}")
        self.index, self.call, self.remat = index, call, remat
        self.name = f"stage {index} ({getattr(call, '__name__', type(call).__name__)})"
        try:
            names = [*inspect.signature(call).parameters][2:]
        except (TypeError, ValueError):  # a builtin without a signature
            names = []
        self._wanted = [name for name in RNG_NAMES if name in names]

    def __call__(self, params: Any, x: Any, key: Any) -> Any:
        return self.call(params, x, **dict.fromkeys(self._wanted, key))


def stage_key(seed: int, step: Any, stage: Any, micro: Any) -> Any:
    """The random key of one stage for one micro-batch of one step."""
    key = jax.random.key(seed)
    for number in (step, stage, micro):
        key = jax.random.fold_in(key, number)
    return key


def spec(tree: Any) -> Any:
    """Shapes and dtypes of a tree of arrays after transfer to a device."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))

    return jax.tree.map(one, tree)


def cotangents(tree: Any) -> Any:
    """The float leaves of a tree; None for the others, which have no gradient."""
    return jax.tree.map(lambda leaf: leaf if is_float(leaf) else None, tree)


def describe(tree: Any) -> str:
    """Shapes and dtypes on one line."""
    paths = jax.tree.leaves_with_path(tree)
    leaves = (f"{jax.tree_util.keystr(path)} {brief(leaf)}".strip() for path, leaf in paths)
    return ", ".join(leaves) or "no arrays"


def check_stage_params(params: Any, n_stages: int) -> None:
    """Refuse parameters that are not one entry a stage, or not float."""
    if not isinstance(params, (list, tuple)) or len(params) != n_stages:
        got = f"{len(params)} entries" if isinstance(params, (list, tuple)) else type(params).__name__
        raise ValueError(f"params: {got} for {n_stages} stages; give a list with the parameters of each stage")
    for stage, tree in enumerate(params):
        if others := collections_of(tree):
            raise ValueError(
                f"params[{stage}] is a whole dict of variables, {', '.join(map(repr, tree))}, and the optimizer would "
                f'train all; give variables["params"], and keep {others[0]} in the stage function'
            )
        if found := not_trained(tree, f"params[{stage}]"):
            raise ValueError(
                f"{found}, and the optimizer would train it; write graph, params, rest = nnx.split(model, nnx.Param, "
                "...), and nnx.merge(graph, params, rest, copy=True) in the stage function"
            )
        for name, leaf, kind in not_floats(tree, f"params[{stage}]"):
            if kind is None:
                raise ValueError(f"{name} is {brief(leaf)}, not an array; keep it in the stage function")
            raise ValueError(f"{name} is {kind}, not float; keep what is not trained in the stage function")


def trace_stages(
    stages: Sequence[Stage], loss: Callable[[Any, Any], Any], params: Sequence[Any], batch: Any
) -> tuple[Any, ...]:
    """The spec of the output of each stage, from specs of the parameters and of one micro-batch; checks the loss."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    outputs: list[Any] = []
    for stage in stages:
        x = outputs[-1] if outputs else batch
        outputs.append(evaluate_stage(stage, params[stage.index], x, key))
    value = _evaluate(loss, (outputs[-1], batch), "loss does not accept what the last stage gives", outputs[-1])
    if isinstance(value, Weighted):
        raise ValueError(
            "loss returned a jaxche.Weighted, and stages take the mean over their micro-batches; "
            "write return loss.total / loss.weight"
        )
    is_array = isinstance(value, jax.ShapeDtypeStruct)
    if not is_array or value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        shown = f"shape {value.shape} and dtype {value.dtype}" if is_array else type_of(value)
        raise ValueError(
            f"loss returned {shown}; it must be one float, the mean over the batch: "
            "write def loss(y, batch): return ((y - batch['y']) ** 2).mean()"
        )
    return tuple(outputs)


def check_arrays(tree: Any, name: str) -> None:
    """Refuse shapes in place of the arrays of a computation."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is the shape {describe(leaf)} without values; give arrays, e.g. "
                f"jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), {name})"
            )


def evaluate_stage(stage: Stage, params: Any, x: Any, key: Any) -> Any:
    """The spec of the output of a stage; ValueError if it does not accept its input."""
    source = f"what stage {stage.index - 1} gives" if stage.index else "the batch"
    return _evaluate(stage, (params, x, key), f"{stage.name} does not accept {source}", spec(x))


def _evaluate(call: Callable[..., Any], arguments: tuple[Any, ...], refusal: str, x: Any) -> Any:
    try:
        return spec(jax.eval_shape(lambda *given: call(*given), *arguments))
    except Exception as error:
        kind = type(error).__name__
        line = f". {_LINES[kind]}" if kind in _LINES else ""
        raise ValueError(f"{refusal}: {describe(x)}. It raised {kind}: {error}{line}") from error
