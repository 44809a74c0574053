"""Loss functions: the accepted signatures, and the one to which they are adapted."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxche.averaging import Weighted

# call(params, model_state, batch, rng) -> (loss, (metrics, model_state)); the loss and the metrics are float32 scalars,
# or Weighted of two of them.
Loss: TypeAlias = Callable[..., Any]


def as_loss(loss_fn: Callable[..., Any]) -> Loss:
    """Adapt a loss function to one signature.

    ``loss_fn(params, batch)`` returns ``loss`` or ``(loss, metrics)``. It gets ``rng=`` and ``model_state=`` if it has
    parameters of these names, and with the latter returns ``(loss, (metrics, new_model_state))``. The loss and each
    metric are scalars, means over the batch, or a :class:`~jaxche.Weighted`.

    Args:
      loss_fn: the function.

    Returns:
      ``call(params, model_state, batch, rng) -> (loss, (metrics, model_state))``: without metrics the dict is empty,
      without model state the given one is returned.

    Raises:
      ValueError: not callable, or it does not take ``(params, batch)``.

    Example:
      >>> import jax.numpy as jnp
      >>> call = as_loss(lambda params, batch: jnp.mean(params * batch))
      >>> loss, (metrics, model_state) = call(2.0, None, jnp.ones(3), None)
      >>> float(loss), metrics, model_state
      (2.0, {}, None)
    """
    if not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r} is not a function; write def loss_fn(params, batch): ... return loss")
    parameters = inspect.signature(loss_fn).parameters
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        raise ValueError(f"loss_fn takes {list(parameters)}; write def loss_fn(params, batch)")
    wants_rng, wants_state = "rng" in parameters, "model_state" in parameters

    def call(params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[jax.Array, tuple[dict[str, Any], Any]]:
        named = ({"rng": rng} if wants_rng else {}) | ({"model_state": model_state} if wants_state else {})
        return _normalise(loss_fn(params, batch, **named), wants_state, model_state)

    return call


def _normalise(result: Any, wants_state: bool, model_state: Any) -> tuple[jax.Array, tuple[dict[str, Any], Any]]:
    if wants_state:
        nested = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], tuple)
        if not nested or len(result[1]) != 2:
            raise ValueError(
                "loss_fn names model_state= and so must return (loss, (metrics, new_model_state)); "
                "with no metrics write: return loss, ({}, new_model_state)"
            )
        loss, (metrics, model_state) = result
    elif isinstance(result, tuple) and not isinstance(result, Weighted):
        if len(result) != 2:
            raise ValueError(f"loss_fn returned a tuple of {len(result)}; return loss or (loss, metrics)")
        loss, metrics = result
    else:
        loss, metrics = result, {}
    if not isinstance(metrics, dict):
        raise ValueError(f"loss_fn returned metrics of type {type(metrics).__name__}; return a dict of scalars")
    return _loss_value(loss), ({name: _metric(name, value) for name, value in metrics.items()}, model_state)


def _loss_value(loss: Any) -> Any:
    total = jnp.asarray(loss.total if isinstance(loss, Weighted) else loss)
    if total.shape != () or not jnp.issubdtype(total.dtype, jnp.floating):
        raise ValueError(
            f"loss_fn returned a loss of shape {total.shape} and dtype {total.dtype}; "
            "it must be one float, the mean over the batch: return loss.mean()"
        )
    total = total.astype(jnp.float32)
    return Weighted(total, _weight("the loss", loss.weight)) if isinstance(loss, Weighted) else total


def _metric(name: str, value: Any) -> Any:
    total = value.total if isinstance(value, Weighted) else value
    if jnp.shape(total) != ():
        raise ValueError(f"metric {name!r} has shape {jnp.shape(total)}; metrics are scalars: write {name}.mean()")
    total = jnp.asarray(total, jnp.float32)
    return Weighted(total, _weight(f"metric {name!r}", value.weight)) if isinstance(value, Weighted) else total


def _weight(what: str, weight: Any) -> jax.Array:
    if jnp.shape(weight) != ():
        raise ValueError(
            f"the weight of {what} has shape {jnp.shape(weight)}; it is one number, the sum of the weights in the "
            "batch: write jaxche.Weighted((nll * mask).sum(), mask.sum())"
        )
    return lax.stop_gradient(jnp.asarray(weight, jnp.float32))


def mean_of(value: Any) -> Any:
    """The mean that a loss or metric stands for; of a :class:`~jaxche.Weighted` without any weight it is 0."""
    if not isinstance(value, Weighted):
        return value
    some = value.weight != 0
    # Not 0 / 0 in either branch, whose gradient would be NaN.
    return jnp.where(some, value.total / jnp.where(some, value.weight, 1), 0)


def batch_size(batch: Any) -> int:
    """Examples in a batch, the common leading axis of its leaves; ValueError for a batch without one."""
    sizes = {}
    for path, leaf in jax.tree.leaves_with_path(batch):
        shape = jnp.shape(leaf)
        name = jax.tree_util.keystr(path) or "batch"
        if not shape:
            raise ValueError(f"{name} is a scalar; every array of a batch needs a leading batch axis, e.g. x[None]")
        sizes[name] = shape[0]
    if not sizes:
        raise ValueError("a batch without arrays; return a pytree of arrays with a leading batch axis")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ValueError(f"the leading axes of a batch differ ({listed}); every array must hold the same examples")
    size = next(iter(sizes.values()))
    if size == 0:
        raise ValueError("a batch with no examples (leading axis 0); leave empty batches out of the data")
    return size
