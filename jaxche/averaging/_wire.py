"""Fewer bytes: float32 vectors as bfloat16, 8-bit or 4-bit codes with one scale per block, and their weighted mean."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# How the change of the parameters is sent, and the bits of a number; "float32" sends it as it is.
WIRES = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
# Numbers that share a scale. Smaller blocks round less and send more scales: 0.125 bits a number here.
BLOCK = 128
_LARGEST = {"int8": 127, "int4": 7}
_SCALE_BYTES = 2  # a bfloat16


def coded_bytes(size: int, wire: str) -> int:
    """The bytes of the codes and scales of ``size`` numbers."""
    if wire not in _LARGEST:
        return size * WIRES[wire] // 8
    return -(-size // BLOCK) * (BLOCK * WIRES[wire] // 8 + _SCALE_BYTES)


def encode(x: jax.Array, wire: str, rounding: Callable[[jax.Array], jax.Array] = jnp.round) -> jax.Array:
    r"""A vector as bytes: codes, then scales.

    .. math:: c_k = \mathrm{round}(x_k / s), \qquad s = \max_{k \in \text{block}} |x_k| / c_{\max}

    with the scale :math:`s` in bfloat16. ``"bfloat16"`` has no scales, and ``"float32"`` loses nothing. A block that is not
    finite decodes to NaN.

    Args:
      x: float32, ``[n]``.
      wire: one of ``WIRES``.
      rounding: ``jnp.round``, or ``jnp.trunc``, with which no number grows.

    Returns:
      uint8, ``[coded_bytes(n, wire)]``.
    """
    if wire == "float32":
        return to_bytes(x)
    if wire == "bfloat16":
        return to_bytes(_bfloat16(x, rounding))
    largest = _LARGEST[wire]
    blocks = jnp.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    exact = jnp.max(jnp.abs(blocks), axis=1) / largest
    scales = jnp.where(exact >= jnp.finfo(jnp.float32).tiny, _bfloat16(exact, rounding), 0)
    scales = jnp.where(jnp.isfinite(exact), scales, jnp.nan).astype(jnp.bfloat16)
    wide = scales.astype(jnp.float32)[:, None]
    codes = jnp.clip(rounding(jnp.where(wide > 0, blocks / jnp.where(wide > 0, wide, 1), 0)), -largest, largest)
    if rounding is jnp.trunc:  # the quotient may have been rounded up
        codes = jnp.where(jnp.abs(codes) * wide > jnp.abs(blocks), codes - jnp.sign(codes), codes)
    codes = codes.astype(jnp.int8)
    if wire == "int4":
        nibbles = lax.bitcast_convert_type(codes, jnp.uint8) & 0xF
        packed = nibbles[:, : BLOCK // 2] | nibbles[:, BLOCK // 2 :] << 4
    else:
        packed = lax.bitcast_convert_type(codes, jnp.uint8)
    return jnp.concatenate([packed.ravel(), to_bytes(scales)])


def decode(data: jax.Array, size: int, wire: str) -> jax.Array:
    """The inverse of :func:`encode` up to rounding: float32, ``[size]``. Products of code and scale are exact."""
    if wire not in _LARGEST:
        return from_bytes(data, jnp.dtype(wire)).astype(jnp.float32)
    blocks = -(-size // BLOCK)
    packed, scales = jnp.split(data, [data.size - blocks * _SCALE_BYTES])
    packed = packed.reshape(blocks, BLOCK * WIRES[wire] // 8)
    if wire == "int4":
        # Shifts of signed bytes restore the sign.
        signed = [lax.bitcast_convert_type(half, jnp.int8) for half in (packed << 4, packed)]
        codes = jnp.concatenate([half >> jnp.int8(4) for half in signed], axis=1)
    else:
        codes = lax.bitcast_convert_type(packed, jnp.int8)
    wide = from_bytes(scales, jnp.dtype(jnp.bfloat16)).astype(jnp.float32)
    return (codes.astype(jnp.float32) * wide[:, None]).ravel()[:size]


def _bfloat16(x: jax.Array, rounding: Callable[[jax.Array], jax.Array]) -> jax.Array:
    if rounding is not jnp.trunc:
        return x.astype(jnp.bfloat16)
    bits = lax.bitcast_convert_type(x, jnp.uint32) >> 16
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def to_bytes(x: jax.Array) -> jax.Array:
    """The bytes of an array, uint8 ``[nbytes]``."""
    return lax.bitcast_convert_type(x, jnp.uint8).ravel()


def from_bytes(data: jax.Array, dtype: Any) -> jax.Array:
    """The vector of these bytes."""
    return lax.bitcast_convert_type(data.reshape(-1, jnp.dtype(dtype).itemsize), dtype)


def part_size(size: int, replicas: int) -> int:
    """The numbers of a vector that each replica averages for all: whole blocks."""
    return -(-size // (replicas * BLOCK)) * BLOCK


def is_gathered(replicas: int) -> bool:
    """Whether each replica gets the codes of all others, which is as many bytes as two exchanges of parts.

    Each replica then receives :math:`n - 1` vectors of codes, and in two exchanges :math:`2 (n - 1) / n`.
    """
    return replicas <= 2


def mean_of_rows(rows: jax.Array, weights: jax.Array, size: int, wire: str) -> jax.Array:
    r"""The weighted mean :math:`\sum_r w_r x_r / \sum_r w_r` of coded vectors, summed in the order of the rows.

    A row of weight 0 adds nothing, also where it is not finite.
    """

    def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        data, weight = row
        return total + jnp.where(weight != 0, weight * decode(data, size, wire), 0), None

    total, _ = lax.scan(add, jnp.zeros(size, jnp.float32), (rows, weights))
    return total / weights.sum()


class Means(NamedTuple):
    """The weighted means of vectors over the replicas, and what this replica sent of its own vectors."""

    means: list[jax.Array]
    sent: list[jax.Array]


def gather_means(
    vectors: Sequence[jax.Array], exact: jax.Array, weight: jax.Array, axis_name: str, wire: str
) -> tuple[Means, jax.Array]:
    """Weighted means of coded vectors, and exact sums, in one all-gather: every replica decodes all codes.

    Args:
      vectors: this replica's vectors, float32; each is rounded as :func:`encode_all` does.
      exact: float32 ``[m]``, summed over the replicas as it is.
      weight: this replica's weight, a scalar.
      axis_name: the mapped axis of the replicas.
      wire: one of ``WIRES``.
    """
    sizes, data = [x.size for x in vectors], encode_all(vectors, wire)
    rows = lax.all_gather(jnp.concatenate([data, to_bytes(jnp.append(exact, weight))]), axis_name)
    numbers = jax.vmap(lambda row: from_bytes(row, exact.dtype))(rows[:, data.size :])
    found = _split(rows[:, : data.size], sizes, wire)
    means = [mean_of_rows(part, numbers[:, -1], size, wire) for part, size in zip(found, sizes, strict=True)]
    return Means(means, decode_all(data, sizes, wire)), numbers[:, :-1].sum(0)


def exchange_means(
    vectors: Sequence[jax.Array], weights: jax.Array, part: jax.Array, axis_name: str, wire: str
) -> tuple[Means, jax.Array]:
    """Weighted means of coded vectors in two exchanges: each replica averages its part, and sends that mean to all.

    Args:
      vectors: this replica's vectors, float32; each is rounded as :func:`encode_all` does.
      weights: ``[R]``, equal on all replicas.
      part: what this replica has not sent of its means of the first vector, ``[part_size(vectors[0].size, R)]``.
      axis_name: the mapped axis of the replicas.
      wire: one of ``WIRES``.

    Returns:
      The means, and the next ``part``.
    """
    replicas = weights.size
    sizes = [part_size(x.size, replicas) for x in vectors]
    padded = [jnp.pad(x, (0, replicas * size - x.size)) for x, size in zip(vectors, sizes, strict=True)]
    rows = [x.reshape(replicas, -1) for x in padded]
    data = jax.vmap(lambda *parts: encode_all(parts, wire))(*rows)
    received = _split(lax.all_to_all(data, axis_name, split_axis=0, concat_axis=0), sizes, wire)
    first, *others = (mean_of_rows(one, weights, size, wire) for one, size in zip(received, sizes, strict=True))
    due = first + part
    # To the nearest codes: means of codes would lose a whole one.
    own = jnp.concatenate([encode(x, wire) for x in (due, *others)])
    means = lax.all_gather(own, axis_name)

    def whole(rows: jax.Array) -> list[jax.Array]:
        found = jax.vmap(lambda row: tuple(decode_all(row, sizes, wire)))(rows)
        return [one.ravel()[: x.size] for one, x in zip(found, vectors, strict=True)]

    return Means(whole(means), whole(data)), due - decode_all(own, sizes, wire)[0]


def encode_all(vectors: Sequence[jax.Array], wire: str) -> jax.Array:
    """Vectors as bytes, one after the other: the first rounded to the nearest codes, the others towards zero.

    A vector of numbers of at least 0 minus its codes, rounded towards zero, is at least 0 again.
    """
    return jnp.concatenate([encode(x, wire, jnp.trunc if i else jnp.round) for i, x in enumerate(vectors)])


def decode_all(data: jax.Array, sizes: Sequence[int], wire: str) -> list[jax.Array]:
    """The inverse of :func:`encode_all` up to rounding."""
    return [decode(part, size, wire) for part, size in zip(_split(data, sizes, wire), sizes, strict=True)]


def _split(data: jax.Array, sizes: Sequence[int], wire: str) -> list[jax.Array]:
    """The bytes of each vector, along the last axis."""
    ends = itertools.accumulate(coded_bytes(size, wire) for size in sizes)
    return jnp.split(data, list(ends)[:-1], axis=-1)
