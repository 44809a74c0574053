"""The sums of a merge with few bytes: coded changes of the parameters and moments of the optimizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxche.averaging import (
    blocks_size,
    exchange,
    exchange_means,
    gather_means,
    is_float,
    is_gathered,
    part_size,
    psum_buckets,
    split_like,
    sum_dtype,
    weighted,
    zero_sums,
)
from jaxche.replicas._opt_state import are_accumulators, are_params
from jaxche.replicas._placement import Placement
from jaxche.replicas._replica_mesh import AXIS, own_row

# Arrays of as many numbers are coded alone: joining them takes XLA longer than coding them.
_ALONE = 1 << 15


class Residual(NamedTuple):
    """The changes that a replica has not sent yet."""

    # Of its own changes, like the parameters.
    own: Any
    # Of the means that it computes for all, if each replica averages a part: a vector; else None.
    part: Any = None


def zero_residual(params: Any, moments: Any, replicas: int, is_sharded: bool) -> Residual:
    """The residual before the first merge, for arrays or shapes without a replica axis and the coded ``moments``."""
    size = _part_size(params, moments, replicas, is_sharded)
    return Residual(zero_sums(params), None if size is None else jnp.zeros(size, jnp.float32))


def fitted(residual: Residual | None, moments: Any, replicas: int, placement: Placement) -> Residual | None:
    """A residual, with a leading axis of 1, for this number of replicas; a part of another size becomes zero."""
    if residual is None:
        return None
    size = _part_size(residual.own, moments, replicas, placement.makes_pieces)
    if size is None:
        return residual._replace(part=None)
    if residual.part is not None and residual.part.shape == (1, size):
        return residual
    return residual._replace(part=placement.put_whole([np.zeros((1, size), np.float32)])[0])


def _part_size(params: Any, moments: Any, replicas: int, is_sharded: bool) -> int | None:
    """The size of a part, or None if every replica decodes all codes, as sharded replicas do."""
    if is_sharded or is_gathered(replicas):
        return None
    coded = [[x for x in jax.tree.leaves(params) if _is_real(x)], moments]
    return sum(part_size(sum(blocks_size(x.size) for x in arrays), replicas) for arrays in coded)


def _is_real(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.complexfloating)


def are_coded(tx: optax.GradientTransformation, params: Any) -> list[bool]:
    """Whether each leaf of ``tx.init(params)``, whose arguments may be shapes, is sent as codes."""
    # Parameters in the state are not, because their rounding errors would stay.
    state = jax.eval_shape(tx.init, params)
    leaves = zip(jax.tree.leaves(state), are_accumulators(state), are_params(tx, params), strict=True)
    return [is_float(x) and _is_real(x) and x.size > 1 and not (kept or param) for x, kept, param in leaves]


class Means(NamedTuple):
    """The means and sums of a merge on a device; ``mean`` and ``totals`` are equal on all replicas."""

    mean: Any  # of the changes
    residual: Residual | None  # if changes are sent as codes
    moments: dict[int, Any]
    totals: Any  # of the payload


def coded_sums(
    delta: Any,
    residual: Residual,
    moments: dict[int, Any],
    payload: dict[str, Any],
    wire: str,
    coded_moments: Sequence[int],
) -> Means:
    r"""Sums over the replicas, on each device over its own shards, with codes :math:`Q` of changes and moments.

    .. math:: e \leftarrow e + \Delta, \qquad \bar\Delta = \sum_r w_r Q(e_r) / \sum_r w_r, \qquad e \leftarrow e - Q(e)

    .. math:: m \leftarrow m - Q(m) + \sum_r w_r Q(m_r) / \sum_r w_r

    A replica of weight 0 sends no change, and its residual stays. A moment that is not finite on one of them stays on
    all. Complex arrays, the ``moments`` that are not among ``coded_moments``, and ``payload`` with its ``"weight"`` are
    summed as they are.
    """
    (changes, treedef), weight = jax.tree.flatten(delta), payload["weight"]
    unsent, takes_part = jax.tree.leaves(residual.own), weight != 0
    coded = [i for i, x in enumerate(changes) if _is_real(x)]
    due = [changes[i] + unsent[i] for i in coded]
    # The moments of a replica that takes no part may be any numbers.
    kept = [jnp.where(takes_part | jnp.isfinite(moments[i]), moments[i], 0) for i in coded_moments]
    kept = [x.astype(sum_dtype(x.dtype)) for x in kept]
    vectors = [[_vector(run) for run in _runs(arrays)] for arrays in (due, kept)]
    exact = {
        "payload": payload,
        "changes": weighted({i: x for i, x in enumerate(changes) if i not in coded}, weight),
        "moments": weighted({i: x for i, x in moments.items() if i not in coded_moments}, weight),
    }
    if residual.part is None:
        leaves, structure = jax.tree.flatten(exact)
        floats = {i: x for i, x in enumerate(leaves) if x.dtype == weight.dtype}
        rest = psum_buckets({i: x for i, x in enumerate(leaves) if i not in floats}, AXIS)
        numbers = jnp.concatenate([x.ravel() for x in floats.values()])
        found, sums = gather_means(vectors, numbers, weight, AXIS, wire)
        rest |= dict(zip(floats, split_like(sums, list(floats.values())), strict=True))
        total, part = jax.tree.unflatten(structure, [rest[i] for i in range(len(leaves))]), None
    else:
        exact["weights"] = own_row(weight)
        total = psum_buckets(exact, AXIS, exchanges=True)
        found, part = exchange_means(vectors, total["weights"], residual.part, AXIS, wire)
    weights = total["payload"]["weight"]
    means, sent = ([_joined(x, like) for x, like in zip(one, (due, kept), strict=True)] for one in found)
    for i, x, mean, own in zip(coded, due, means[0], sent[0], strict=True):
        changes[i], unsent[i] = mean, jnp.where(takes_part, x - own, unsent[i])
    for i, s in total["changes"].items():
        changes[i] = s / weights.astype(s.dtype)
    merged = {i: s / weights.astype(s.dtype) for i, s in total["moments"].items()}
    for i, x, mean, own in zip(coded_moments, kept, means[1], sent[1], strict=True):
        # As the least values so far, which begin infinite.
        merged[i] = jnp.where(jnp.isfinite(mean), x - own + mean, moments[i].astype(x.dtype))
    residual = Residual(jax.tree.unflatten(treedef, unsent), part)
    return Means(jax.tree.unflatten(treedef, changes), residual, merged, total["payload"])


def _runs(arrays: Sequence[Any]) -> list[list[Any]]:
    """Runs of arrays, in order, each coded by itself: a large array is a run of its own, small ones share runs."""
    found: list[list[Any]] = []
    for x in arrays:
        if x.size >= _ALONE or not found or found[-1][-1].size >= _ALONE:
            found.append([x])
        else:
            found[-1].append(x)
    return found


def _vector(arrays: Sequence[Any]) -> Any:
    """The numbers of a run as float32, each of several arrays in blocks of its own."""
    if len(arrays) == 1:
        return arrays[0].ravel().astype(jnp.float32)
    return jnp.concatenate([jnp.pad(x.ravel().astype(jnp.float32), (0, blocks_size(x.size) - x.size)) for x in arrays])


def _split(vector: Any, like: Sequence[Any]) -> list[Any]:
    """The inverse of :func:`_vector`, in the dtypes in which arrays are summed."""
    starts = itertools.accumulate((blocks_size(x.size) for x in like), initial=0)
    parts = [vector[start : start + x.size] for start, x in zip(starts, like, strict=False)]
    return [part.reshape(x.shape).astype(sum_dtype(x.dtype)) for part, x in zip(parts, like, strict=True)]


def _joined(vectors: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """The arrays of all runs, from the vector of each."""
    runs = zip(vectors, _runs(like), strict=True)
    return [x for vector, run in runs for x in _split(vector, run)]


def agreement(params: Any, finite: Any, axis_name: str) -> tuple[Any, Any]:
    """Flags that are equal on all replicas: whether ``finite`` holds on all, and whether their parameters are equal.

    They exchange a checksum of the parameters. After a damaged message replicas could otherwise drift apart unseen, or
    one could fail alone.
    """
    checksum = jnp.uint32(0)
    for x in filter(_is_real, jax.tree.leaves(params)):
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
        # The position counts, so that numbers that change places are noticed.
        weights = 2 * lax.iota(jnp.uint32, x.size).reshape(x.shape) + 1
        checksum = 31 * checksum + jnp.sum(bits * weights, dtype=jnp.uint32)
    halves = jnp.stack([checksum & 0xFFFF, checksum >> 16]).astype(jnp.float32)  # exact
    rows = exchange(jnp.append(halves, finite), axis_name)
    return rows[:, 2].min(), jnp.all(rows[:, :2] == rows[:1, :2]).astype(jnp.float32)


def sent_bytes(program: Any) -> int:
    """The bytes that a replica sends in all collectives of a traced merge; sums and gathers go around a ring."""
    return round(_sent(program.jaxpr, 1, 1))


def _sent(jaxpr: Any, replicas: int, devices: int) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, (replicas, devices)
        if name == "shard_map":
            mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
            inner = (mesh.shape[AXIS], devices * math.prod(mesh.shape[axis] for axis in manual if axis != AXIS))
        share = {"all_gather": replicas - 1, "all_to_all": (replicas - 1) / replicas}.get(name, 0.0)
        if name.startswith(("psum", "pmax")):
            share = 2 * (replicas - 1) / replicas
        if share:
            total += devices * share * sum(x.aval.size * x.aval.dtype.itemsize for x in eqn.invars)
        for value in eqn.params.values():
            for one in value if isinstance(value, (tuple, list)) else (value,):
                found = getattr(one, "jaxpr", one)
                if hasattr(found, "eqns"):
                    total += _sent(found, *inner)
    return total
