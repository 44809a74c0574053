"""Models where a function or parameters are expected: of which library they are, and the lines to write instead."""

from __future__ import annotations

from typing import Any

import jax

from jaxche.drawing import brief


def flax_kind(value: Any) -> str:
    """``"linen"`` or ``"nnx"`` for a module of Flax, else an empty text; does not import Flax."""
    for base in type(value).__mro__:
        if base.__name__ == "Module" and base.__module__.startswith(("flax.linen.", "flax.nnx.")):
            return base.__module__.split(".")[1]
    return ""


def is_maker(params: Any) -> bool:
    """Whether these are a function that makes parameters; a tree of arrays that can be called is none."""
    return callable(params) and jax.tree_util.all_leaves([params])


def shapes_of(params: Any, init: str) -> Any:
    """Shapes and dtypes of parameters, or of those that a function returns; refuses a model in their place.

    ``init`` is the call in the message, to which they were passed.
    """
    kind = flax_kind(params)
    if kind == "nnx":
        raise ValueError(
            f"params is an nnx model, {brief(params)}; write loss = jaxche.NNXLoss(model, loss_fn), "
            f"jaxche.Trainer(loss, tx) and {init}(loss.params, loss.model_state)"
        )
    if kind == "linen":
        raise ValueError(
            f"params is a linen module, {brief(params)}, without parameters; "
            f'write {init}(module.init(jax.random.key(0), x)["params"])'
        )
    if hasattr(params, "trainable_variables"):
        raise ValueError(
            f"params is a model, {brief(params)}, not a tree of arrays; write "
            f"{init}([v.value for v in model.trainable_variables]), and model.stateless_call(...) in loss_fn"
        )
    if hasattr(params, "apply_gradients") and hasattr(params, "params"):
        raise ValueError(f"params is a TrainState; write {init}(state.params, opt_state=state.opt_state)")
    if not is_maker(params):
        return params
    try:
        return jax.eval_shape(params)
    except TypeError as error:
        if error.__traceback__ is not None and "required" in str(error) and "argument" in str(error):
            raise ValueError(
                f"params={brief(params)} is a function with arguments, and it is called without; "
                f'write {init}(lambda: module.init(jax.random.key(0), x)["params"])'
            ) from None
        raise


def not_an_array(name: str, leaf: Any, init: str) -> str | None:
    """What to write where a leaf of the parameters is no array."""
    if hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex):
        return None
    if callable(leaf):
        return (
            f"{name} is a function, {brief(leaf)}; parameters are arrays alone. With Equinox write "
            f"params, static = eqx.partition(model, eqx.is_inexact_array), {init}(params), and "
            "eqx.combine(params, static) in loss_fn"
        )
    return f"{name} is {brief(leaf)}, not an array; leave it out of params, and close over it in loss_fn"
