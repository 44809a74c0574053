"""Results of batches, combined on the host in the order of the data: sums, ``nnx`` metrics, metrics that merge."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.averaging import Weighted
from jaxche.data import from_json, to_json
from jaxche.messages import brief, type_of
from jaxche.sharding import RNG_NAMES, wanted_names

_log = logging.getLogger("jaxche")

_FORMS = (
    "return a dict of means over the batch, e.g. {'accuracy': correct.mean()}, with jaxche.Weighted(total, weight) for "
    "means over something else, or an object with merge() and compute() such as a clu.metrics.Collection"
)


def as_metric(metric_fn: Callable[..., Any], takes: str = "params, batch") -> Callable[..., Any]:
    """Adapt ``metric_fn(params, batch)``: ``call(params, model_state, batch, rng)`` gives it the others that it names.

    ``takes`` are its arguments in messages: a model in stages has its output ``y`` in the place of parameters.
    """
    if not callable(metric_fn):
        raise ValueError(
            f"metric_fn={metric_fn!r} is not a function; write def metric_fn({takes}): ... return a dict. "
            "Metrics of flax.nnx go into metrics=, and metric_fn returns the arguments of their update"
        )
    wanted = wanted_names(metric_fn, takes, (*RNG_NAMES, "model_state"), "metric_fn")

    def call(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        named = {name: model_state if name == "model_state" else rng for name in wanted}
        result = metric_fn(params, batch, **named)
        # In linen_loss, the result of a metric function is in the place of a loss.
        first = result[0] if type(result) is tuple and len(result) == 2 else None
        return first if isinstance(first, Mapping) or _merges(first) else result

    return call


def _is_scalar(x: Any) -> bool:
    return isinstance(x, Weighted) or np.shape(x) == ()


def outputs_of(result: Any, scalars_only: bool = False) -> Any:
    """The result of a metric function: a dict of scalars and ``Weighted``, or an object that merges.

    A loss function may serve as one: its loss and its metrics are the results, its model state is discarded, and with
    ``scalars_only`` so is all else that it returns. A metric that is called ``loss`` gives way to the loss.
    """
    if _merges(result):
        return result
    if isinstance(result, Weighted) or np.isscalar(result) or getattr(result, "shape", None) == ():
        result = {"loss": result}
    elif isinstance(result, tuple) and len(result) == 2:
        loss, rest = result
        rest = rest[0] if isinstance(rest, tuple) and len(rest) == 2 else rest
        if scalars_only:
            rest = {name: x for name, x in rest.items() if _is_scalar(x)} if isinstance(rest, Mapping) else {}
        if isinstance(rest, Mapping):
            result = {"loss": loss, **rest} | {"loss": loss}
    if not isinstance(result, Mapping) or not result:
        raise ValueError(f"metric_fn returned {brief(result)}; {_FORMS}")
    return {name: _scalar(name, value) for name, value in result.items()}


def arguments_of(result: Any) -> dict[str, Any]:
    """The result of a metric function as the arguments of ``metrics.update``."""
    if not isinstance(result, Mapping):
        raise ValueError(
            f"metric_fn returned {brief(result)}; with metrics= it returns the arguments of their update, e.g. "
            "{'logits': logits, 'labels': batch['y']}"
        )
    return dict(result)


def _merges(result: Any) -> bool:
    return callable(getattr(result, "merge", None)) and callable(getattr(result, "compute", None))


def _scalar(name: Any, value: Any) -> Any:
    if not isinstance(name, str):
        raise ValueError(f"metric {name!r} has a name that is no text; write {{'{name}': ...}}")
    parts = value if isinstance(value, Weighted) else (value,)
    if any(isinstance(part, str) or not (hasattr(part, "dtype") or np.isscalar(part)) for part in parts):
        raise ValueError(f"metric {name!r} is {type_of(value)}; {_FORMS}")
    for part in parts:
        dtype = jnp.result_type(part)
        if jnp.issubdtype(dtype, jax.dtypes.extended) or jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(f"metric {name!r} has dtype {dtype}; metrics are real numbers, e.g. jnp.abs({name})")
        if jnp.shape(part) != ():
            raise ValueError(
                f"metric {name!r} has shape {jnp.shape(part)}; metrics are scalars: write {name}.mean(), or "
                f"jaxche.Weighted({name}.sum(), {name}.size)"
            )
    return value


class Total(Protocol):
    """Combines the outputs of batches, which are added in the order of the data."""

    def add(self, outputs: Any, examples: int) -> None:
        """Add the outputs of a batch of so many examples, on the host."""
        ...

    def save(self) -> Any:
        """The outputs so far as JSON, for the process that has the next batches."""
        ...

    def load(self, saved: Any, outputs: Any) -> None:
        """Continue from :meth:`save`; ``outputs`` are of any batch."""
        ...

    def result(self) -> dict[str, float]:
        """The results by name."""
        ...


def total_of(outputs: Any, metrics: Any) -> Total:
    """An empty total for such outputs."""
    if metrics is not None:
        return Updated(metrics)
    return MergedMetrics() if _merges(outputs) else Sums()


class Sums:
    """Weighted means: sums of totals and weights in float64; a plain mean weighs as many examples as its batch has."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, outputs: Mapping[str, Any], examples: int) -> None:
        for name, value in outputs.items():
            part = value if isinstance(value, Weighted) else Weighted(float(value) * examples, examples)
            total, weight = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total + float(part.total), weight + float(part.weight)

    def save(self) -> Any:
        return self._sums

    def load(self, saved: Any, outputs: Any) -> None:
        self._sums = {name: (total, weight) for name, (total, weight) in saved.items()}

    def result(self) -> dict[str, float]:
        if empty := [name for name, (_, weight) in self._sums.items() if weight == 0]:
            names = ", ".join(map(repr, empty))
            _log.warning("evaluation: %s is NaN: jaxche.Weighted(total, weight) had weight 0 in all batches", names)
        return {name: total / weight if weight else math.nan for name, (total, weight) in self._sums.items()}


class Updated:
    """An ``nnx`` metric, updated with the outputs of one batch after the other; the given object is not changed."""

    def __init__(self, metrics: Any):
        from flax import nnx

        self._nnx, self._metrics = nnx, nnx.clone(metrics)
        self._metrics.reset()

    def add(self, outputs: Mapping[str, Any], examples: int) -> None:
        self._metrics.update(**jax.tree.map(jnp.asarray, dict(outputs)))

    def save(self) -> Any:
        return _encoded(self._nnx.state(self._metrics))

    def load(self, saved: Any, outputs: Any) -> None:
        self._nnx.update(self._metrics, _decoded(saved, self._nnx.state(self._metrics)))

    def result(self) -> dict[str, float]:
        return named_floats(self._metrics.compute(), type(self._metrics).__name__.lower())


class MergedMetrics:
    """Metrics with ``merge`` and ``compute``, such as those of clu."""

    def __init__(self) -> None:
        self._merged: Any = None

    def add(self, outputs: Any, examples: int) -> None:
        self._merged = outputs if self._merged is None else self._merged.merge(outputs)

    def save(self) -> Any:
        return _encoded(self._merged)

    def load(self, saved: Any, outputs: Any) -> None:
        self._merged = _decoded(saved, outputs)

    def result(self) -> dict[str, float]:
        return named_floats(self._merged.compute(), type(self._merged).__name__.lower())


def named_floats(computed: Any, name: str) -> dict[str, float]:
    """Computed metrics as floats by name; of a dataclass, the names of its fields are appended."""
    value: Any = computed
    if dataclasses.is_dataclass(computed):
        value = {f"{name}_{field.name}": getattr(computed, field.name) for field in dataclasses.fields(computed)}
    if isinstance(value, Mapping):
        parts = {str(inner): named_floats(part, str(inner)) for inner, part in value.items()}
        names = [key for part in parts.values() for key in part]
        if len(set(names)) < len(names):  # of nested metrics
            parts = {inner: {f"{inner}_{key}": x for key, x in part.items()} for inner, part in parts.items()}
        return {key: x for part in parts.values() for key, x in part.items()}
    if np.shape(value) != ():
        raise ValueError(
            f"metric {name!r} computes an array of shape {np.shape(value)}; evaluate returns one float for each name: "
            "reduce it in compute()"
        )
    return {name: float(value)}


def _encoded(tree: Any) -> list[Any]:
    return [to_json(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)]


def _decoded(saved: Any, like: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(from_json(leaf)) for leaf in saved])
