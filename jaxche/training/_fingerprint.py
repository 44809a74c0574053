"""What has to be alike in all processes: code, settings, data, and the values that training starts from."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxche.averaging import escape_name, path_names
from jaxche.distributed import Group
from jaxche.drawing import odd_ones
from jaxche.training._data import Reader

# Devices of other kinds round differently, so values that all computed alike may differ in their last digits.
_ALIKE = 1e-3
# Letters of a cell in the table of who differs.
_LENGTH = 40
# Of data that is not the same when it is read again.
NONDETERMINISTIC = "varies"


def digest(code: Any) -> str:
    """A short hash of a traced program, the same wherever the same code was traced."""
    # Functions that have derivatives of their own are printed with their address in this process.
    return _hash(re.sub(r"0x[0-9a-f]+", "", str(code)).encode())


def update_digest(tx: Any, params: Any) -> str:
    """The :func:`digest` of an optimizer's update of parameters of these shapes, with all its settings."""
    wide: Any = optax.with_extra_args_support(tx)

    def update(grads: Any, opt_state: Any, params: Any, value: Any) -> Any:
        return wide.update(grads, opt_state, params, value=value)

    value = jax.ShapeDtypeStruct((), "float32")
    return digest(jax.make_jaxpr(update)(params, jax.eval_shape(wide.init, params), params, value))


def data_digest(reader: Reader, size: int) -> str:
    """A short hash of the first, the middle and the last batch of epoch 0, or ``"varies"``.

    Args:
      reader: of the data.
      size: batches in an epoch.
    """
    first = _batch_hash(reader.peek((0, 0)))
    if reader.nondeterministic:
        return NONDETERMINISTIC  # a random augmentation, say: then nobody can compare
    return _hash("".join([first, *(_batch_hash(reader.take((0, i))) for i in (size // 2, size - 1))]).encode())


def _batch_hash(batch: Any) -> str:
    seen = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(batch):
        host = np.ascontiguousarray(leaf)
        seen.update(f"{jax.tree_util.keystr(path)} {host.dtype} {host.shape}".encode())
        seen.update(host.tobytes())
    return seen.hexdigest()


def abbreviated(value: Any) -> str:
    """A value as text, or the beginning of it and a hash of all."""
    text = str(value)
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH // 2]}... {_hash(text.encode())}"


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:12]


def refuse_differences(group: Group, fingerprint: Mapping[str, str]) -> None:
    """Refuse to start when processes run different code, data or settings.

    Args:
      group: the processes of the run.
      fingerprint: name of each thing that must agree and a short text of it.

    Raises:
      ValueError: names what differs and who has which value.
    """
    everyone = group.all_gather(dict(fingerprint))
    names = dict.fromkeys(name for other in everyone for name in other)
    columns = {name: [str(other.get(name, "none")) for other in everyone] for name in names}
    columns = {name: values for name, values in columns.items() if NONDETERMINISTIC not in values}
    odd = odd_ones(columns, group.members)
    if odd.who:
        raise ValueError(f"processes differ; run the same script and data everywhere:\n{odd.table}")


def refuse_other_values(group: Group, trees: Mapping[str, Any]) -> None:
    """Refuse to start where the arrays of these trees are not the same in all processes, but for rounding.

    Of each array its norm and its projection on a fixed direction are compared.

    Args:
      group: the processes of the run.
      trees: arrays by the name of what they are.

    Raises:
      ValueError: names the first array that differs, and where.
    """
    if len(group.members) == 1:
        return
    everyone = group.all_gather({name: _traits(name, tree) for name, tree in trees.items()})
    for name in trees:
        for array, (norm, along) in everyone[0][name].items():
            most = _ALIKE * norm if math.isfinite(norm) else 0.0
            for process, other in zip(group.members, everyone, strict=True):
                there = other[name].get(array, (math.inf, math.inf))
                if not np.allclose((norm, along), there, rtol=0, atol=most, equal_nan=True):
                    raise ValueError(
                        f"processes differ in the values of {array}: its norm is {norm:.6g} on process "
                        f"{group.members[0]} and {there[0]:.6g} on process {process}; make the same ones everywhere, "
                        "e.g. from jax.random.key(0) and not from a number of the process or the time"
                    )


def _traits(name: str, tree: Any) -> dict[str, tuple[float, float]]:
    """Norm and projection of each array by its path."""
    named = {
        "/".join((name, *(escape_name(part, "/") for part in path_names(path)))): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    # Stages of a replica are on devices of their own, and a program is on those of its arguments.
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
