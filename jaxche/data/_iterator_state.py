"""Values of Python, NumPy and torch as JSON, exactly or not at all: states of iterators, and of metrics."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from jaxche.messages import type_of

_TAG = "jaxche"


def to_json(value: Any) -> Any:
    """The value as JSON, from which :func:`from_json` makes an equal one; TypeError for a type that is not covered."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [to_json(x) for x in value]
    if type(value) is dict:
        return {_TAG: "dict", "items": [[to_json(key), to_json(x)] for key, x in value.items()]}
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [to_json(x) for x in value]}
    if type(value) is bytes:
        return {_TAG: "bytes", "data": base64.b64encode(value).decode()}
    if type(value).__module__ == "torch" and hasattr(value, "detach"):
        return {_TAG: "tensor", "array": to_json(value.detach().cpu().numpy())}
    if type(value) is np.ndarray or isinstance(value, np.generic):
        dtype, kind = value.dtype, "array" if isinstance(value, np.ndarray) else "number"
        name = dtype.name if dtype.isbuiltin == 2 else dtype.str  # 2: added to NumPy, as bfloat16, whose str is "|V2"
        if not dtype.hasobject and np.dtype(name) == dtype:
            return {_TAG: kind, "dtype": name, "shape": np.shape(value), "data": to_json(value.tobytes())}
    raise TypeError(f"{type_of(value)} has no exact form in JSON")


def from_json(value: Any) -> Any:
    """The inverse of :func:`to_json`."""
    if isinstance(value, list):
        return [from_json(x) for x in value]
    if not isinstance(value, dict):
        return value
    match value[_TAG]:
        case "dict":
            return {from_json(key): from_json(x) for key, x in value["items"]}
        case "tuple":
            return tuple(from_json(x) for x in value["items"])
        case "bytes":
            return base64.b64decode(value["data"])
        case "tensor":
            import torch  # type: ignore[import-not-found]

            return torch.from_numpy(from_json(value["array"]))
        case kind:
            array = np.frombuffer(from_json(value["data"]), value["dtype"]).reshape(value["shape"]).copy()
            return array if kind == "array" else array[()]
