"""Loss functions: the accepted signatures, and the one to which they are adapted."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxche.averaging import Weighted
from jaxche.messages import brief, without_library
from jaxche.sharding._checks import flax_kind

# The names of a random key.
RNG_NAMES = ("rng", "key")
# Names of the labels of a batch, in a loss function that gets the arrays of a batch one by one.
_LABELS = ("y", "label", "labels", "target", "targets")
# Names of the batch.
_BATCHES = ("batch", "data")
# The attributes of a TrainState.
_TRAIN_STATE = ("params", "apply_fn", "apply_gradients", "opt_state", "tx", "step", "batch_stats")

# call(params, model_state, batch, rng) -> (loss, (metrics, model_state)); the loss and the metrics are scalars of the
# default float dtype (float64 with jax_enable_x64), or Weighted of two of them. With outputs, -> (loss, (metrics,
# model_state, outputs)).
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

    def call(params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[Any, tuple[Any, ...]]:
        named = {name: model_state if name == "model_state" else rng for name in wanted}
        try:
            result = loss_fn(params, batch, **named)
        except Exception as error:
            if message := _known_mistake(error, params):
                raise ValueError(message).with_traceback(without_library(error.__traceback__)) from None
            if isinstance(error, KeyError) and isinstance(batch, Mapping):
                keys = f"; params has {brief(list(params))}" if isinstance(params, Mapping) else ""
                error.add_note(f"the batch has {brief(list(batch))}{keys}")
            if type(error).__name__ == "InvalidRngError" and not {*RNG_NAMES} & {*wanted}:  # of Flax, as of dropout
                error.add_note(
                    "for a random key write def loss_fn(params, batch, rng), and apply(..., rngs={...: rng})"
                )
            if "model_state" in wanted and model_state is None:
                error.add_note(
                    "the state has no model_state; if the loss needs one: trainer.init(params, model_state=...)"
                )
            raise
        loss, aux = loss_and_aux(result)
        if not outputs:
            _refuse_gradients(loss, aux, params)
        if "model_state" in wanted:
            if not isinstance(aux, tuple) or isinstance(aux, Weighted) or len(aux) != 2:
                raise ValueError(
                    "loss_fn takes model_state=, so it must return (loss, (metrics, new_model_state)); "
                    "with no metrics write: return loss, ({}, new_model_state)"
                )
            aux, model_state = aux[0], jax.tree.map(jnp.asarray, aux[1])  # there may be Python numbers in it
        metrics, arrays = _metrics_and_outputs(aux, outputs)
        return _loss_value(loss), (metrics, model_state, *((arrays,) if outputs else ()))

    return call


def wanted_names(function: Callable[..., Any], first: str, known: Sequence[str], name: str = "loss_fn") -> list[str]:
    """The ``known`` names among the parameters of a function ``name(first, ...)``; refuses others without a default."""
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
            if p in by_position and p.name in _BATCHES and by_position[1].name not in _BATCHES:
                raise ValueError(_batch_not_second(name, first, by_position, known))
            line = f"bind other values: functools.partial({name}, {p.name}=...)"
            if "step" in p.name or "epoch" in p.name:
                line = "let the number come with the batch, as in 'A weight that follows the steps' of docs/recipes.md"
            elif p in by_position and p.name in _LABELS:
                arrays = [one.name for one in by_position[1:] if one.name not in known and one.default is one.empty]
                parts = ", ".join(f'batch["{one}"]' for one in arrays)
                line = f"give the arrays of the batch: lambda {first}: {name}({first.partition(',')[0]}, {parts})"
            raise ValueError(
                f"{name} takes ({', '.join(parameters)}), but {p.name!r} has no value; for a random key "
                f"write def {name}({first}, rng), and {line}"
            )
    return [p.name for p in rest if p.name in known]


def _batch_not_second(name: str, first: str, by_position: Sequence[inspect.Parameter], known: Sequence[str]) -> str:
    """The error for a function whose batch comes after other arguments."""

    def given(p: inspect.Parameter) -> str:
        if p.name in known:
            return p.name
        return "batch" if p.name in _BATCHES else "model_state" if "stat" in p.name else RNG_NAMES[0]

    words = [given(p) for p in by_position[1:] if p.default is p.empty]
    own = [first, *dict.fromkeys(word for word in words if word != "batch")]
    return (
        f"{name} takes ({', '.join(p.name for p in by_position)}), but the batch is the second argument; write lambda "
        f"{', '.join(own)}: {name}({', '.join([first.partition(',')[0], *words])})"
    )


def loss_and_aux(result: Any) -> tuple[Any, Any]:
    """The loss that a function returned, and the metrics or outputs beside it; ``{}`` if it returned only the loss."""
    if not isinstance(result, tuple) or isinstance(result, Weighted):
        return result, {}
    if len(result) != 2:
        raise ValueError(
            f"loss_fn returned a tuple of {len(result)}; return loss or (loss, metrics), with all metrics in one dict: "
            'return loss, {"accuracy": accuracy}'
        )
    return result


def _refuse_gradients(loss: Any, aux: Any, params: Any) -> None:
    """ValueError for what jax.grad and jax.value_and_grad return: arrays of the shapes of the parameters."""
    found = aux if hasattr(loss, "shape") else loss
    if jax.tree.structure(found) != jax.tree.structure(params):
        return
    shapes, own = ([jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (found, params))
    if shapes == own and any(shapes):
        raise ValueError(
            "loss_fn returned arrays of the shapes of the parameters; the trainer takes the gradient itself: leave "
            "jax.grad or jax.value_and_grad out, and write jaxche.Trainer(loss_fn, tx)"
        )


def mean_of(value: Any) -> Any:
    """The mean that a loss or metric stands for; of a :class:`~jaxche.Weighted` without any weight it is 0."""
    if not isinstance(value, Weighted):
        return value
    some = value.weight != 0
    # Not 0 / 0 in either branch, whose gradient would be NaN.
    return jnp.where(some, value.total / jnp.where(some, value.weight, 1), 0)


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
    if dtype is None:
        return isinstance(value, Weighted | bool | int | float)
    return value.shape == () and not jnp.issubdtype(dtype, jax.dtypes.prng_key)


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
    return _as_float("the loss", loss)


def _metric(name: Any, value: Any) -> Any:
    total = value.total if isinstance(value, Weighted) else value
    if not isinstance(name, str):
        raise ValueError(f"metric {name!r} has a name that is no text; write {{'{name}': ...}}")
    if not _is_scalar(total) or isinstance(total, Weighted):
        raise ValueError(_no_metric(name, total))
    if jnp.iscomplexobj(total):
        raise ValueError(f"metric {name!r} is complex; metrics are real: write jnp.abs({name})")
    return _as_float(f"metric {name!r}", value)


def _as_float(what: str, value: Any) -> Any:
    if not isinstance(value, Weighted):
        return jnp.asarray(value, float)
    if jnp.shape(value.weight) != ():
        raise ValueError(
            f"the weight of {what} has shape {jnp.shape(value.weight)}; it is one number, the sum of the weights in "
            "the batch: write jaxche.Weighted((nll * mask).sum(), mask.sum())"
        )
    # The gradient of a weighted loss is that of its total.
    weight = lax.stop_gradient(jnp.asarray(value.weight, float))
    return Weighted(jnp.asarray(value.total, float), weight)


def _known_mistake(error: Exception, params: Any) -> str | None:
    """What to write instead, for a known mistake of a loss function."""
    if isinstance(error, AttributeError) and error.obj is params and error.name in _TRAIN_STATE:
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
    if isinstance(error, ValueError) and (
        # The second text is that of an axis with the same name as one of the strategy.
        found := re.search(r"Resource axis: (\S+) of .* not found in mesh", str(error))
        or re.search(r"can only refer to Auto axes of the mesh\. Got spec=P\(.*'(shard|replica)'", str(error))
    ):
        return (
            f"loss_fn cuts an array over the axis {found[1]!r} of a mesh of its own, as boxes of nn.with_partitioning "
            "do, and here the strategy cuts the parameters; give init the arrays without boxes: "
            'nn.meta.unbox(variables["params"])'
        )
    if type(error).__name__ == "TraceContextError":
        what = re.search(r"[Cc]annot (?:mutate|\w+) '?(\w+)'? from", str(error))
        return (
            f"loss_fn changes {what[1] if what else 'an nnx object'} of an nnx object that it does not get as an "
            "argument. A frozen one, such as a teacher, needs model.eval() before. For random numbers write "
            "def loss_fn(model, batch, rngs); for metrics, instead of updating an "
            'nnx.MultiMetric, write return loss, {"accuracy": accuracy}, which the history averages. A model that '
            "loss_fn makes itself needs nnx.merge(graphdef, params, model_state, copy=True)"
        )
    if isinstance(error, jax.errors.JAXTypeError):
        return (
            "loss_fn needs the number of an array that is traced, as float(x), x.item(), np.asarray(x) and `if x` do; "
            'return the array itself, return loss, {"loss": loss}, and write jnp.where(x, a, b) for a condition. '
            f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        )
    return None
