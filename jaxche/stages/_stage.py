"""A stage as declared, and the shapes that travel between stages, found without computing anything."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxche.averaging import Weighted, is_float


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """A stage of the model: ``call(params, x)``, or ``call(params, x, rng=key)`` if it has an argument ``rng``.

    With ``remat`` the backward recomputes the forward from the input.
    """

    index: int
    call: Callable[..., Any]
    wants_rng: bool
    remat: bool

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return f"stage {self.index} ({getattr(self.call, '__name__', type(self.call).__name__)})"

    def __call__(self, params: Any, x: Any, key: Any) -> Any:
        return self.call(params, x, rng=key) if self.wants_rng else self.call(params, x)


def as_stage(index: int, call: Any, remat: bool) -> Stage:
    """The stage of a declared function."""
    if not callable(call):
        raise ValueError(f"stages[{index}]={call!r} is not a function; write def f(params, x): ... return x")
    try:
        wants_rng = "rng" in inspect.signature(call).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        wants_rng = False
    return Stage(index, call, wants_rng, remat)


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


def micro_spec(batch: Any, size: int | None) -> Any:
    """The spec of a micro-batch of ``size`` examples, or of the whole batch."""
    if size is None:
        return batch
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), batch)


def cotangents(tree: Any) -> Any:
    """A gradient with respect to ``tree`` as it travels: float leaves, and None for the others."""
    return jax.tree.map(lambda leaf: leaf if is_float(leaf) else None, tree)


def describe(tree: Any) -> str:
    """Shapes and dtypes on one line."""
    leaves = [
        f"{jax.tree_util.keystr(path)} {leaf.dtype}[{', '.join(map(str, leaf.shape))}]".strip()
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]
    return ", ".join(leaves) or "no arrays"


def trace_stages(
    stages: Sequence[Stage], loss: Callable[[Any, Any], Any], params: Sequence[Any], batch: Any
) -> tuple[Any, ...]:
    """The spec of the output of each stage, from specs of the parameters and of one micro-batch.

    Raises ValueError if a stage or the loss does not accept its input, or if the loss is not a scalar float.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    outputs: list[Any] = []
    for stage in stages:
        x = outputs[-1] if outputs else batch
        source = f"what stage {stage.index - 1} gives" if outputs else "the batch"
        outputs.append(_evaluate(stage, (params[stage.index], x, key), f"{stage.name} does not accept {source}", x))
    value = _evaluate(loss, (outputs[-1], batch), "loss does not accept what the last stage gives", outputs[-1])
    if isinstance(value, Weighted):
        raise ValueError(
            "loss returned a jaxche.Weighted, and stages take the mean over their micro-batches; "
            "write return loss.total / loss.weight"
        )
    is_array = isinstance(value, jax.ShapeDtypeStruct)
    if not is_array or value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        shown = f"shape {value.shape} and dtype {value.dtype}" if is_array else f"a {type(value).__name__}"
        raise ValueError(
            f"loss returned {shown}; it must be one float, the mean over the batch: "
            "write def loss(y, batch): return ((y - batch['y']) ** 2).mean()"
        )
    return tuple(outputs)


def _evaluate(call: Callable[..., Any], arguments: tuple[Any, ...], refusal: str, x: Any) -> Any:
    try:
        return spec(jax.eval_shape(lambda *given: call(*given), *arguments))
    except Exception as error:
        raise ValueError(f"{refusal}: {describe(x)}. It raised {type(error).__name__}: {error}") from error
