"""The fingerprint of a run: digests of code, settings, data and initial values, equal in all processes."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.averaging import escape_name, path_names
from jaxche.data import SequenceReader, on_host
from jaxche.distributed import Group
from jaxche.messages import odd_ones
from jaxche.scaling import with_extra_args

_log = logging.getLogger("jaxche")

# Relative tolerance: devices of different kinds round differently.
_TOLERANCE = 1e-3
# Maximum width of a cell in the table of differences.
_WIDTH = 40
# The digest of data whose reads differ.
NONDETERMINISTIC = "varies"


def digest(code: Any) -> str:
    """A short hash of a traced program, equal in all processes that trace the same code."""
    # The text of functions with custom derivatives contains their address in memory.
    return _hash(re.sub(r"0x[0-9a-f]+", "", str(code)).encode())


def update_digest(tx: Any, params: Any, **extra: Any) -> str:
    """The :func:`digest` of an optimizer's update, which gets ``extra`` beside ``value=``, with all its settings."""
    wide: Any = with_extra_args(tx)

    def update(grads: Any, opt_state: Any, params: Any, value: Any) -> Any:
        return wide.update(grads, opt_state, params, value=value, **extra)

    value = jax.ShapeDtypeStruct((), "float32")
    return digest(jax.make_jaxpr(update)(params, jax.eval_shape(wide.init, params), params, value))


def data_digest(reader: SequenceReader, size: int) -> str:
    """A short hash of the first, middle and last of ``size`` batches of epoch 0, or ``NONDETERMINISTIC``."""
    first = _batch_hash(reader.peek((0, 0)))
    if reader.nondeterministic:
        return NONDETERMINISTIC  # e.g. random augmentation: processes cannot compare
    return _hash("".join([first, *(_batch_hash(reader.take((0, i))) for i in (size // 2, size - 1))]).encode())


def check_streams(group: Group, batch: Any, is_sharded: bool) -> None:
    """Refuse streams that are equal by ``shards=False`` and begin with different batches, and warn of the opposite.

    One array that is the same identifies the batch, as labels do when images are augmented at random.
    """
    digests = group.all_gather(
        {jax.tree_util.keystr(path): _leaf_hash(x) for path, x in jax.tree.leaves_with_path(batch)}
    )
    alike = [name for name in digests[0] if len({other.get(name) for other in digests}) == 1]
    if not is_sharded and not alike:
        raise ValueError(
            "the streams of the processes begin with different batches, and shards=False means that all read the same; "
            "if each reads its own part, write jaxche.Stream(source, shards=True)"
        )
    if is_sharded and len(alike) == len(digests[0]) and group.is_first:
        _log.warning(
            "all processes read the same first batch, and shards=True means that each reads its own part, so that "
            "examples would be trained on more than once; write index, count = jaxche.process_shard() and read part "
            "index of count, or shards=False"
        )


def _batch_hash(batch: Any) -> str:
    leaves = jax.tree.leaves_with_path(batch)
    return _hash("".join(f"{jax.tree_util.keystr(path)} {_leaf_hash(leaf)}" for path, leaf in leaves).encode())


def _leaf_hash(leaf: Any) -> str:
    host = np.ascontiguousarray(on_host(leaf))
    return _hash(f"{host.dtype} {host.shape}".encode() + host.tobytes())


def abbreviated(value: Any) -> str:
    """The text of a value; of a long text, its beginning and a hash."""
    text = str(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH // 2]}... {_hash(text.encode())}"


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:12]


def refuse_differences(group: Group, fingerprint: Mapping[str, str]) -> None:
    """Refuse processes with different fingerprints; the error has a table of the differences."""
    fingerprints = group.all_gather(dict(fingerprint))
    names = dict.fromkeys(name for other in fingerprints for name in other)
    columns = {name: [str(other.get(name, "none")) for other in fingerprints] for name in names}
    columns = {name: values for name, values in columns.items() if NONDETERMINISTIC not in values}
    odd = odd_ones(columns, group.members)
    if odd.processes:
        raise ValueError(f"processes differ; run the same script and data everywhere:\n{odd.table}")


def refuse_other_values(group: Group, trees: Mapping[str, Any]) -> None:
    """Refuse arrays that differ between processes by more than rounding: in norm, or along a fixed direction."""
    if len(group.members) == 1:
        return
    everywhere = group.all_gather({name: _traits(name, tree) for name, tree in trees.items()})
    for name in trees:
        for array, (norm, projection) in everywhere[0][name].items():
            tolerance = _TOLERANCE * norm if math.isfinite(norm) else 0.0
            for process, other in zip(group.members, everywhere, strict=True):
                there = other[name].get(array, (math.inf, math.inf))
                if not np.allclose((norm, projection), there, rtol=0, atol=tolerance, equal_nan=True):
                    raise ValueError(
                        f"processes differ in the values of {array}: its norm is {norm:.6g} on process "
                        f"{group.members[0]} and {there[0]:.6g} on process {process}; make the same values everywhere, "
                        "e.g. from jax.random.key(0), not from the process number or the time"
                    )


def _traits(name: str, tree: Any) -> dict[str, tuple[float, float]]:
    """The norm and the projection of each array, by path."""
    named = {
        "/".join((name, *(escape_name(part, "/") for part in path_names(path)))): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    # One program for each set of devices, because the stages of a replica are on different devices.
    groups: dict[Any, dict[str, Any]] = {}
    for path, leaf in named.items():
        if not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            where = frozenset(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else None
            groups.setdefault(where, {})[path] = leaf
    found = {path: x for group in groups.values() for path, x in jax.device_get(_norms(group)).items()}
    return {path: (float(found[path][0]), float(found[path][1])) for path in named if path in found}


@jax.jit
def _norms(arrays: dict[str, Any]) -> dict[str, Any]:
    def measured(x: Any) -> tuple[Any, Any]:
        x = (jnp.abs(x) if jnp.iscomplexobj(x) else x).astype(jnp.float32)
        place = jnp.zeros(x.shape, jnp.uint32)
        for axis in range(x.ndim):
            place = place * jnp.uint32(31) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        direction = (place * jnp.uint32(2654435761) >> 8).astype(jnp.float32) / 2**23 - 1
        return jnp.sqrt(jnp.sum(x * x)), jnp.sum(x * direction)

    return {path: measured(x) for path, x in arrays.items()}
