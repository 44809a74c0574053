"""What of a run is in a checkpoint, in forms that outlive this program: dicts of arrays, and JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import jax

from jaxche.averaging import escape_name, path_names
from jaxche.cadence import DivergenceCorrection, ElChe
from jaxche.training._state import ReplicaState

# Of what is in a checkpoint and where. A folder of a format that is not readable is refused. Orbax joins the names on
# the way to an array by dots; in format 2 names with dots were written as they are, so that two could become one.
FORMAT = 3
READABLE = (2, 3)
# What is saved of a state besides arrays, by its own names.
_PLACE = ("round", "epoch", "cursor", "examples", "owed", "sync_ms", "pending")


def nested(tree: Any, format: int) -> dict[str, Any]:
    """Any pytree as dicts of dicts named like its paths: plain Orbax restores it without its classes."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        *folders, name = _names(path, ".", format)
        inner = found
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = leaf
    return found


def unnested(like: Any, found: Mapping[str, Any], format: int) -> Any:
    """The pytree of which :func:`nested` made ``found``, structured as ``like``."""

    def pick(path: Any, _: Any) -> Any:
        inner: Any = found
        for name in _names(path, ".", format):
            inner = inner[name]
        return inner

    return jax.tree.map_with_path(pick, like)


def shapes(trees: Mapping[str, Any], format: int) -> dict[str, str]:
    """Shape and dtype of every leaf by its path, e.g. ``{"params/w": "float32[3,2]"}``."""
    return {
        "/".join((name, *_names(path, "/", format))): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for name, tree in trees.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def numbers(state: ReplicaState) -> dict[str, Any]:
    """What is not an array, as JSON has it."""
    return {name: getattr(state, name) for name in _PLACE} | {
        "che": state.che and state.che.to_dict(),
        "correction": asdict(state.correction),
    }


def with_numbers(state: ReplicaState, saved: Mapping[str, Any]) -> ReplicaState:
    """The state with what :func:`numbers` saved. What was learnt of other replicas is left behind."""
    che, correction = state.che, state.correction
    if che is not None and saved["che"] is not None:
        if saved["che"]["world_size"] == che.world_size:
            che = ElChe.from_dict({name: _tuples(value) for name, value in saved["che"].items()})
        else:
            anchor = min(max(saved["che"]["anchor"], che.min_anchor), che.max_anchor)
            che = replace(che, anchor=anchor, batch_counts=())
        correction = DivergenceCorrection.from_dict(saved["correction"])
    # A run that was saved by an earlier version had none pending.
    place = {name: _tuples(saved[name]) for name in _PLACE if name in saved}
    return replace(state, che=che, correction=correction, **place)


def version() -> str:
    """Of jaxche."""
    # Not the metadata's: a checkout on PYTHONPATH has none, or another's.
    return sys.modules[__name__.partition(".")[0]].__version__


def items_of(trees: Mapping[str, Any], format: int) -> dict[str, Any]:
    """The parameters as they are, and all else, if there is any; Orbax saves no empty trees."""
    rest = {name: nested(tree, format) for name, tree in trees.items() if name != "params"}
    return {"params": nested(trees["params"], format)} | ({"state": rest} if rest else {})


def joined_alike(trees: Mapping[str, Any], format: int) -> tuple[str, str] | None:
    """Two arrays to which Orbax gives one name in this format, if there are any."""
    seen: dict[str, str] = {}
    for tree, leaves in trees.items():
        for path, _ in jax.tree.leaves_with_path(leaves):
            name, shown = ".".join((tree, *_names(path, ".", format))), tree + jax.tree_util.keystr(path)
            if seen.setdefault(name, shown) != shown:
                return seen[name], shown
    return None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _names(path: Any, separator: str, format: int) -> tuple[str, ...]:
    """The names on the way to a leaf, which are going to be joined by ``separator``."""
    names = path_names(path) or ("value",)
    return names if format == 2 else tuple(escape_name(name, separator) for name in names)
