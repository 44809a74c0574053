"""The sums of a merge with few bytes: coded changes of the parameters, and a part of the optimizer's moments."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxche.averaging import (
    decode,
    encode,
    exchange_mean,
    gather,
    is_gathered,
    mean_of_rows,
    part_size,
    psum_buckets,
    sum_dtype,
    weighted,
)
from jaxche.training._placement import Placement
from jaxche.training._replica_mesh import AXIS

# Each number of a large array of moments is averaged at every eighth merge, so that moments add few bytes.
TURNS = 8
# Smaller arrays, such as a single learning rate, are averaged at every merge.
_SMALL = 1024


class Residual(NamedTuple):
    """What a replica has not sent yet."""

    # Of its own changes, like the parameters.
    own: Any
    # Of the means that it computes for all, where each replica averages a part; else None.
    part: Any = None


def zero_residual(params: Any, replicas: int, is_sharded: bool) -> Residual:
    """The residual before the first merge; ``params`` are arrays or shapes without a replica axis."""
    own = jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x.dtype)), params)
    size = _part_size(params, replicas, is_sharded)
    return Residual(own, None if size is None else jnp.zeros(size, jnp.float32))


def _part_size(params: Any, replicas: int, is_sharded: bool) -> int | None:
    """The size of a part, or None if every replica decodes all codes, as sharded replicas do."""
    if is_sharded or is_gathered(replicas):
        return None
    return part_size(sum(x.size for x in jax.tree.leaves(params) if _is_real(x)), replicas)


def fitted(residual: Residual | None, replicas: int, placement: Placement) -> Residual | None:
    """A residual, with a leading axis of 1, for this number of replicas; a part of another size becomes zero."""
    if residual is None:
        return None
    size = _part_size(residual.own, replicas, placement.makes_pieces)
    if size is None:
        return residual._replace(part=None)
    if residual.part is not None and residual.part.shape == (1, size):
        return residual
    return residual._replace(part=placement.put_whole([np.zeros((1, size), np.float32)])[0])


class CodedSums(NamedTuple):
    """The result of :func:`coded_sums` on a device; all but ``residual`` and ``opt_state`` is equal on all replicas."""

    mean: Any  # of the changes
    residual: Residual
    opt_state: dict[int, Any]  # with the moments whose turn it is merged
    totals: Any  # of the payload


def coded_sums(
    delta: Any, residual: Residual, opt_state: dict[int, Any], payload: Any, weight: Any, turn: Any, wire: str
) -> CodedSums:
    r"""Sums over the replicas, on each device over its own shards.

    .. math:: e \leftarrow e + \Delta, \qquad \bar\Delta = \sum_r w_r Q(e_r) / \sum_r w_r, \qquad e \leftarrow e - Q(e)

    A replica of weight 0 sends nothing, and its residual stays. ``payload`` is summed as it is.
    """
    takes_part, replicas = weight != 0, lax.axis_size(AXIS)
    leaves, treedef = jax.tree.flatten(delta)
    unsent, coded = jax.tree.leaves(residual.own), [i for i, x in enumerate(leaves) if _is_real(x)]
    due = [jnp.where(takes_part, leaves[i] + unsent[i], 0) for i in coded]
    vector = jnp.concatenate([x.ravel().astype(jnp.float32) for x in due] or [jnp.zeros(0, jnp.float32)])
    exact = {
        "payload": payload,
        "weights": jnp.zeros(replicas, jnp.float32).at[lax.axis_index(AXIS)].set(weight),
        "complex": weighted({i: x for i, x in enumerate(leaves) if i not in coded}, weight),
        "moments": weighted({i: _slice(x, turn) for i, x in opt_state.items()}, weight),
    }
    part = residual.part
    if part is None:
        data = encode(vector, wire)
        rows, total = _gather(data, exact)
        mean, sent = mean_of_rows(rows, total["weights"], vector.size, wire), decode(data, vector.size, wire)
    else:
        total = psum_buckets(exact, AXIS)
        mean, sent, part = exchange_mean(vector, total["weights"], part, AXIS, wire)
    weights = total["weights"].sum()
    for i, x in total["complex"].items():
        leaves[i] = x / weights.astype(x.dtype)
    ends = [0]
    for i, x in zip(coded, due, strict=True):
        ends = [ends[-1], ends[-1] + x.size]
        found, left = (v[slice(*ends)].reshape(x.shape).astype(x.dtype) for v in (mean, sent))
        leaves[i], unsent[i] = found, jnp.where(takes_part, x - left, unsent[i])
    merged = {i: _with_slice(x, total["moments"][i] / weights, turn) for i, x in opt_state.items()}
    residual = Residual(jax.tree.unflatten(treedef, unsent), part)
    return CodedSums(jax.tree.unflatten(treedef, leaves), residual, merged, total["payload"])


def _gather(data: Any, exact: Any) -> tuple[Any, Any]:
    """The codes of all replicas, and the sums of a tree; float32 arrays travel with the codes."""
    leaves, treedef = jax.tree.flatten(exact)
    places = [i for i, x in enumerate(leaves) if x.dtype == jnp.float32]
    rows, numbers = gather(data, jnp.concatenate([leaves[i].ravel() for i in places]), AXIS)
    rest = psum_buckets({i: x for i, x in enumerate(leaves) if i not in places}, AXIS)
    sums, offset = numbers.sum(0), 0
    for i in places:
        rest[i] = sums[offset : offset + leaves[i].size].reshape(leaves[i].shape)
        offset += leaves[i].size
    return rows, jax.tree.unflatten(treedef, [rest[i] for i in range(len(leaves))])


def _is_real(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.complexfloating)


def _slice(x: Any, turn: Any) -> Any:
    """The part of an array whose turn it is; all of a small one."""
    size = _slice_size(x)
    return x if size == x.size else lax.dynamic_slice(x.ravel(), (_start(turn, size),), (size,))


def _with_slice(x: Any, part: Any, turn: Any) -> Any:
    part, size = part.astype(x.dtype), _slice_size(x)
    return part if size == x.size else lax.dynamic_update_slice(x.ravel(), part, (_start(turn, size),)).reshape(x.shape)


def _slice_size(x: Any) -> int:
    return x.size if x.size < _SMALL or TURNS == 1 else math.ceil(x.size / TURNS)


def _start(turn: Any, size: int) -> Any:
    # The last one is moved back to the end of the array.
    return (turn % TURNS).astype(jnp.int32) * size


def sent_bytes(program: Any) -> int:
    """The bytes that a replica sends in a traced merge, by ring algorithms: all its collectives over the replicas."""
    return round(_sent(program.jaxpr, 1, 1))


def _sent(jaxpr: Any, replicas: int, devices: int) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, (replicas, devices)
        if name == "shard_map":
            mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
            inner = (mesh.shape[AXIS], devices * math.prod(mesh.shape[axis] for axis in manual if axis != AXIS))
        share = {"all_gather": replicas - 1, "all_to_all": (replicas - 1) / replicas}.get(name, 0.0)
        if name.startswith("psum"):
            share = 2 * (replicas - 1) / replicas
        if share:
            total += devices * share * sum(x.aval.size * x.aval.dtype.itemsize for x in eqn.invars)
        for value in eqn.params.values():
            for one in value if isinstance(value, (tuple, list)) else (value,):
                found = getattr(one, "jaxpr", one)
                if hasattr(found, "eqns"):
                    total += _sent(found, *inner)
    return total
