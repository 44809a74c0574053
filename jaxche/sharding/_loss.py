"""Loss functions: the accepted signatures, and the one to which they are adapted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxche.averaging import Weighted
from jaxche.drawing import brief
from jaxche.sharding._loss_errors import taught
from jaxche.sharding._models import flax_kind

# The names of a random key.
RNG_NAMES = ("rng", "key")

# call(params, model_state, batch, rng) -> (loss, (metrics, model_state)); the loss and the metrics are float32 scalars,
# or Weighted of two of them. With outputs, -> (loss, (metrics, model_state, outputs)).
Loss: TypeAlias = Callable[..., Any]


def as_loss(loss_fn: Callable[..., Any], outputs: bool = False) -> Loss:
    """Adapt a loss function to one signature.

    ``loss_fn(params, batch)`` returns ``loss`` or ``(loss, metrics)``. It gets ``rng=`` (or ``key=``) and
    ``model_state=`` if it has parameters of these names, and with the latter returns
    ``(loss, (metrics, new_model_state))``. The loss and each metric are scalars, means over the batch, or a
    :class:`~jaxche.Weighted`.

    Args:
      loss_fn: the function.
      outputs: whether it may return arrays of any shape instead of ``metrics``, or a dict in which only the scalars are
        metrics.

    Returns:
      ``call(params, model_state, batch, rng) -> (loss, (metrics, model_state))``. Without metrics the dict is empty;
      without model state the given one is returned. With ``outputs`` it returns
      ``(loss, (metrics, model_state, outputs))``.

    Raises:
      ValueError: ``loss_fn`` is not callable, or does not take ``(params, batch)``.

    Example:
      >>> import jax.numpy as jnp
      >>> call = as_loss(lambda params, batch: jnp.mean(params * batch))
      >>> loss, (metrics, model_state) = call(2.0, None, jnp.ones(3), None)
      >>> float(loss), metrics, model_state
      (2.0, {}, None)
    """
    if kind := flax_kind(loss_fn):
        loss = "jaxche.NNXLoss(model, loss_fn)" if kind == "nnx" else "jaxche.linen_loss(module, loss_fn)"
        raise ValueError(f"loss_fn is a model, {brief(loss_fn)}, not its loss; write {loss}")
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn={brief(loss_fn)} is not a function; write def loss_fn(params, batch): ... return loss"
        )
    wanted = wanted_names(loss_fn, "params, batch", (*RNG_NAMES, "model_state"))
    wants_state = "model_state" in wanted

    def call(params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[Any, tuple[Any, ...]]:
        named = {name: model_state if name == "model_state" else rng for name in wanted}
        try:
            result = loss_fn(params, batch, **named)
        except Exception as error:
            if better := taught(error, params, batch):
                raise better from None
            raise
        return _normalise(result, wants_state, model_state, outputs)

    return call


def wanted_names(function: Callable[..., Any], first: str, known: Sequence[str], name: str = "loss_fn") -> list[str]:
    """The ``known`` names among the parameters of a function; refuses others without a default.

    ``first`` are the names of the two that it gets by position, ``name`` is that of the function in errors.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    by_position = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(by_position) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        raise ValueError(f"{name} takes ({', '.join(parameters)}); write def {name}({first})")
    rest = [p for p in parameters.values() if p.kind is p.KEYWORD_ONLY or p in by_position[2:]]
    for p in rest:
        if p.name not in known and p.default is p.empty:
            raise ValueError(
                f"{name} takes ({', '.join(parameters)}), but {p.name!r} has no value; for a random key "
                f"write def {name}({first}, rng), and bind other values: functools.partial({name}, {p.name}=...)"
            )
    return [p.name for p in rest if p.name in known]


def loss_and_aux(result: Any) -> tuple[Any, Any]:
    """The loss that a function returned, and what it returned beside it: without that, no metrics."""
    if not isinstance(result, tuple) or isinstance(result, Weighted):
        return result, {}
    if len(result) != 2:
        raise ValueError(
            f"loss_fn returned a tuple of {len(result)}; return loss or (loss, metrics), with all metrics in one dict: "
            'return loss, {"accuracy": accuracy}'
        )
    return result


def _normalise(result: Any, wants_state: bool, model_state: Any, keeps: bool) -> tuple[Any, tuple[Any, ...]]:
    loss, aux = loss_and_aux(result)
    if wants_state:
        if not isinstance(aux, tuple) or isinstance(aux, Weighted) or len(aux) != 2:
            raise ValueError(
                "loss_fn takes model_state=, so it must return (loss, (metrics, new_model_state)); "
                "with no metrics write: return loss, ({}, new_model_state)"
            )
        aux, model_state = aux
    metrics, outputs = _metrics_and_outputs(aux, keeps)
    return _loss_value(loss), (metrics, model_state, *((outputs,) if keeps else ()))


def _metrics_and_outputs(aux: Any, keeps: bool) -> tuple[dict[str, Any], Any]:
    """The scalars of a dict by name, and the rest, which is refused unless it is kept."""
    if isinstance(aux, Mapping):
        metrics = {name: _metric(name, value) for name, value in aux.items() if _is_scalar(value)}
        rest: Any = {name: value for name, value in aux.items() if not _is_scalar(value)}
        if rest and not keeps:
            raise ValueError(_no_metric(*next(iter(rest.items()))))
    elif _is_scalar(aux):
        raise ValueError(
            'loss_fn returned a number beside the loss, without a name; write: return loss, {"accuracy": accuracy}. '
            "If the two are a sum and its weight, write: return jaxche.Weighted(total, weight)"
        )
    elif keeps:
        metrics, rest = {}, aux
    else:
        raise ValueError(
            f"loss_fn returned {brief(aux)} beside the loss; metrics are a dict of numbers: return loss, "
            '{"accuracy": accuracy}. To keep arrays of each batch, write '
            "jaxche.Trainer(loss_fn, tx, outputs=lambda info, batches: kept.extend(batches))"
        )
    return metrics, _kept(rest) if keeps else None


def _is_scalar(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is not None and (value.shape != () or jnp.issubdtype(dtype, jax.dtypes.prng_key)):
        return False
    return dtype is not None or isinstance(value, Weighted | bool | int | float)


def _no_metric(name: Any, value: Any) -> str:
    """What is wrong with a metric that is not a number."""
    if hasattr(value, "shape"):
        return (
            f"metric {name!r} has shape {value.shape}; metrics are scalars: write {name}.mean(). To keep the array of "
            "each batch, write jaxche.Trainer(loss_fn, tx, outputs=lambda info, batches: kept.extend(batches))"
        )
    if isinstance(value, Mapping) and value:
        inner = next(iter(value))
        return (
            f"metric {name!r} is a dict of {', '.join(map(repr, value))}; metrics are scalars, each with a name of its "
            f'own: write {{"{name}_{inner}": {name}["{inner}"], ...}}'
        )
    return f"metric {name!r} is {brief(value)}, not a number; leave it out of the dict, or give an array of shape ()"


def _kept(outputs: Any) -> Any:
    if not jax.tree.leaves(outputs):
        raise ValueError(
            "outputs= has nothing to keep, because loss_fn returns only numbers; leave outputs= out, or return arrays "
            'beside the loss: return loss, {"logits": logits, "accuracy": accuracy}'
        )
    for path, leaf in jax.tree.leaves_with_path(outputs):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float):
            raise ValueError(f"outputs{jax.tree_util.keystr(path)} is {brief(leaf)}, not an array; leave it out")
    return jax.tree.map(jnp.asarray, outputs)


def _loss_value(loss: Any) -> Any:
    total = loss.total if isinstance(loss, Weighted) else loss
    if total is None:
        raise ValueError("loss_fn returned None; does its last line lack a return? Write return loss")
    if not hasattr(total, "dtype") and not isinstance(total, bool | int | float):
        raise ValueError(f'loss_fn returned {brief(loss)}; write return loss, or return loss, {{"accuracy": accuracy}}')
    total = jnp.asarray(total)
    if total.shape != () or not jnp.issubdtype(total.dtype, jnp.floating):
        raise ValueError(
            f"loss_fn returned a loss of shape {total.shape} and dtype {total.dtype}; "
            "it must be one float, the mean over the batch: return loss.mean()"
        )
    total = total.astype(jnp.float32)
    return Weighted(total, _weight("the loss", loss.weight)) if isinstance(loss, Weighted) else total


def _metric(name: str, value: Any) -> Any:
    total = value.total if isinstance(value, Weighted) else value
    if not _is_scalar(total) or isinstance(total, Weighted):
        raise ValueError(_no_metric(name, total))
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
        name = jax.tree_util.keystr(path) or "batch"
        if not is_numeric(leaf):
            raise ValueError(_no_numbers(name, leaf))
        shape = jnp.shape(leaf)
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


def is_numeric(leaf: Any) -> bool:
    """Whether JAX takes this leaf of a batch as an array."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | bool | int | float | complex):
        return True
    if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind in _NO_NUMBERS or leaf.dtype.names:
        return False
    try:
        return bool(jax.dtypes.canonicalize_dtype(leaf.dtype))
    except TypeError:
        return False


# Kinds of NumPy's dtypes: text, objects, and times.
_NO_NUMBERS = tuple("USOTMm")


def _no_numbers(name: str, leaf: Any) -> str:
    if isinstance(leaf, str | bytes) or getattr(getattr(leaf, "dtype", None), "kind", "") in _NO_NUMBERS:
        return (
            f"{name} of a batch is {brief(leaf)}, text or objects and not numbers; give token or class numbers, e.g. "
            "np.int32, or leave it out of the batch"
        )
    return (
        f"{name} of a batch is a {type(leaf).__name__}, {brief(leaf)}, not an array of NumPy or JAX; "
        "write np.asarray(x) for it, for each batch of the data"
    )
