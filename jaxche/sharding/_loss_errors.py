"""Errors of a loss function while it is traced, and the lines to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax

from jaxche.drawing import brief, without_library


def taught(error: Exception, params: Any, batch: Any) -> ValueError | None:
    """The error to raise for a known mistake in a loss function, with the traceback of the first; else None."""
    message = _message(error, params)
    if message is None:
        if isinstance(error, KeyError) and isinstance(batch, Mapping):
            error.add_note(f"the batch has {brief(list(batch))}" + _keys("; params has", params))
        return None
    return ValueError(message).with_traceback(without_library(error.__traceback__))


def _keys(text: str, tree: Any) -> str:
    return f"{text} {brief(list(tree))}" if isinstance(tree, Mapping) else ""


def _message(error: Exception, params: Any) -> str | None:
    if isinstance(error, AttributeError) and error.obj is params and error.name in _OF_A_TRAIN_STATE:
        return (
            f"loss_fn reads .{error.name} of its first argument, which is the tree of parameters, not a TrainState; "
            'write def loss_fn(params, batch), with state.apply_fn({"params": params}, ...) in it, then '
            "trainer = jaxche.Trainer(loss_fn, state.tx) and trainer.init(state.params, opt_state=state.opt_state)"
        )
    if isinstance(error, NameError) and (found := re.search(r"unbound axis name: (\w+)", str(error))):
        axis = found[1]
        return (
            f"loss_fn uses the axis {axis!r} of a pmap, and here it gets the batch of one replica; the trainer "
            f"averages over replicas. Leave axis_name={axis!r} out, e.g. nn.BatchNorm(use_running_average=False), "
            f"whose statistics are merged with the parameters, and leave out jax.lax.pmean(..., {axis!r})"
        )
    if type(error).__name__ == "TraceContextError":
        what = re.search(r"[Cc]annot (?:mutate|\w+) '?(\w+)'? from", str(error))
        return (
            f"loss_fn changes {what[1] if what else 'an nnx object'} of an nnx object that it does not get as an "
            "argument. For random numbers write def loss_fn(model, batch, rngs); for metrics, instead of updating an "
            'nnx.MultiMetric, write return loss, {"accuracy": accuracy}, which the history averages'
        )
    if isinstance(error, jax.errors.JAXTypeError):
        return (
            "loss_fn needs the number of an array that is traced, as float(x), x.item(), np.asarray(x) and `if x` do; "
            'return the array itself, return loss, {"loss": loss}, and write jnp.where(x, a, b) for a condition. '
            f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        )
    return None


_OF_A_TRAIN_STATE = ("params", "apply_fn", "apply_gradients", "opt_state", "tx", "step", "batch_stats")
