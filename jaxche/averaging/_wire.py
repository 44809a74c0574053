"""Fewer bytes: float32 vectors as bfloat16, 8-bit or 4-bit codes with one scale per block, and their weighted mean."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxche.averaging._mean import exchange

# How the change of the parameters is sent, and the bits of a number; "float32" sends it as it is.
WIRES = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
# Numbers that share a scale. Smaller blocks round less and send more scales: 0.125 bits a number here.
BLOCK = 128
_LARGEST = {"int8": 127, "int4": 7}
_SCALE_BYTES = 2  # a bfloat16
# A scale with this bit is the lowest of the floats in a block without negative numbers; these have lost so many bits.
_IS_FLOATS = 0x8000
_CUT_BITS = {"int8": 20, "int4": 24}


def blocks_size(size: int) -> int:
    """The numbers in the blocks of a vector."""
    return -(-size // BLOCK) * BLOCK


def coded_bytes(size: int, wire: str) -> int:
    """The bytes of the codes and scales of ``size`` numbers."""
    if wire not in _LARGEST:
        return size * WIRES[wire] // 8
    return blocks_size(size) // BLOCK * (BLOCK * WIRES[wire] // 8 + _SCALE_BYTES)


def encode(x: jax.Array, wire: str, cut: bool = False) -> jax.Array:
    r"""A vector as bytes: codes, then scales.

    .. math:: c_k = \mathrm{round}(x_k / s), \qquad s = \max_{k \in \text{block}} |x_k| / c_{\max}

    with the scale :math:`s` in bfloat16, from the finite numbers of the block. The lowest code stands for a number that
    is not finite, which decodes to NaN. ``"bfloat16"`` has no scales, and ``"float32"`` loses nothing.

    With ``cut`` no number grows: codes are rounded towards zero. Then a block without negative numbers, such as second
    moments, which range over many magnitudes, is cut to floats of 4 or 8 bits: powers of 4 down to :math:`4^{-14}` of
    the largest, or 3 bits after the leading one down to :math:`2^{-31}`.

    Args:
      x: float32, ``[n]``.
      wire: one of ``WIRES``.
      cut: whether to round towards zero.

    Returns:
      uint8, ``[coded_bytes(n, wire)]``.
    """
    if wire == "float32":
        return to_bytes(x)
    if wire == "bfloat16":
        return to_bytes(_cut_bits(x, 16).astype(jnp.uint16) if cut else x.astype(jnp.bfloat16))
    largest = _LARGEST[wire]
    blocks = jnp.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    finite = jnp.isfinite(blocks)
    sizes = jnp.where(finite, jnp.abs(blocks), 0)
    top = jnp.max(sizes, axis=1)
    exact = top / largest
    scales = lax.bitcast_convert_type(_cut_bits(exact, 16) << 16, jnp.float32) if cut else exact
    scales = jnp.where(exact >= jnp.finfo(jnp.float32).tiny, scales, 0).astype(jnp.bfloat16)
    wide = scales.astype(jnp.float32)[:, None]
    ratios = jnp.where(wide > 0, (sizes if cut else blocks) / jnp.where(wide > 0, wide, 1), 0)
    scales = lax.bitcast_convert_type(scales, jnp.uint16)
    if not cut:
        codes = jnp.clip(jnp.round(ratios), -largest, largest).astype(jnp.int32)
    else:
        codes = jnp.minimum(ratios, largest).astype(jnp.int32)
        # The quotient may have been rounded up.
        codes = codes - (codes.astype(jnp.float32) * wide > sizes).astype(jnp.int32)
        codes = jnp.where(blocks < 0, -codes, codes)
    codes = jnp.where(finite, codes, -largest - 1)
    if cut:
        highest = 2 * largest + 1
        bits = _cut_bits(sizes, _CUT_BITS[wire]).astype(jnp.int32)
        lowest = jnp.maximum(_cut_bits(top, _CUT_BITS[wire]).astype(jnp.int32), highest) - highest
        positive = (jnp.min(blocks, axis=1) >= 0) & jnp.all(finite, axis=1)
        codes = jnp.where(positive[:, None], jnp.maximum(bits - lowest[:, None], 0), codes)
        scales = jnp.where(positive, lowest.astype(jnp.uint16) | jnp.uint16(_IS_FLOATS), scales)
    codes = (codes & 0xFF).astype(jnp.uint8)
    if wire == "int4":
        codes = codes & 0xF
        codes = codes[:, : BLOCK // 2] | codes[:, BLOCK // 2 :] << 4
    return jnp.concatenate([codes.ravel(), to_bytes(scales)])


def decode(data: jax.Array, size: int, wire: str) -> jax.Array:
    """The inverse of :func:`encode` up to rounding: float32, ``[size]``. Products of code and scale are exact."""
    if wire not in _LARGEST:
        return from_bytes(data, jnp.dtype(wire)).astype(jnp.float32)
    blocks = -(-size // BLOCK)
    packed, scales = jnp.split(data, [data.size - blocks * _SCALE_BYTES])
    codes = packed.reshape(blocks, BLOCK * WIRES[wire] // 8)
    if wire == "int4":
        codes = jnp.concatenate([codes << 4, codes & 0xF0], axis=1)
    # The shift of signed bytes restores the sign.
    spare = 8 - WIRES[wire]
    numbers = (lax.bitcast_convert_type(codes, jnp.int8) >> jnp.int8(spare)).astype(jnp.float32)
    scales = from_bytes(scales, jnp.dtype(jnp.uint16))[:, None]
    scaled = numbers * lax.bitcast_convert_type(scales, jnp.bfloat16).astype(jnp.float32)
    numbers = jnp.where(numbers < -_LARGEST[wire], jnp.nan, scaled)
    floats = (codes >> spare).astype(jnp.uint32)
    bits = (floats + (scales & 0x7FFF).astype(jnp.uint32)) << _CUT_BITS[wire]
    floats = jnp.where(floats > 0, lax.bitcast_convert_type(bits, jnp.float32), 0)
    return jnp.where(scales >= _IS_FLOATS, floats, numbers).ravel()[:size]


def _cut_bits(x: jax.Array, lowest: int) -> jax.Array:
    """The bits of floats without the lowest ones."""
    return lax.bitcast_convert_type(x, jnp.uint32) >> lowest


def to_bytes(x: jax.Array) -> jax.Array:
    """The bytes of an array, uint8 ``[nbytes]``."""
    return lax.bitcast_convert_type(x, jnp.uint8).ravel()


def from_bytes(data: jax.Array, dtype: Any) -> jax.Array:
    """The vector of these bytes."""
    return lax.bitcast_convert_type(data.reshape(-1, jnp.dtype(dtype).itemsize), dtype)


def part_size(size: int, replicas: int) -> int:
    """The numbers of a vector that each replica averages for all: whole blocks."""
    return blocks_size(-(-size // replicas))


def is_gathered(replicas: int) -> bool:
    """Whether each replica gets the codes of all others, which is as many bytes as two exchanges of parts.

    Each replica then receives :math:`n - 1` vectors of codes, and in two exchanges :math:`2 (n - 1) / n`.
    """
    return replicas <= 2


def mean_of_rows(rows: jax.Array, weights: jax.Array, size: int, wire: str) -> jax.Array:
    r"""The weighted mean :math:`\sum_r w_r x_r / \sum_r w_r` of coded vectors, summed in the order of the rows.

    A row of weight 0 adds nothing, even if it is not finite.
    """

    def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        data, weight = row
        return total + jnp.where(weight != 0, weight * decode(data, size, wire), 0), None

    weights = weights.astype(jnp.float32)
    # Without a loop, two rows are one pass over memory.
    total, _ = lax.scan(add, jnp.zeros(size, jnp.float32), (rows, weights), unroll=min(len(rows), 2))
    return total / weights.sum()


# A long vector in pieces; each is coded by itself, because XLA joins long arrays slowly.
Pieces = Sequence[jax.Array]


class Means(NamedTuple):
    """The weighted means of vectors over the replicas, and the vectors of this replica as decoded, in pieces."""

    means: list[list[jax.Array]]
    sent: list[list[jax.Array]]


def gather_means(
    vectors: Sequence[Pieces], exact: jax.Array, weight: jax.Array, axis_name: str, wire: str
) -> tuple[Means, jax.Array]:
    """Weighted means of coded vectors, and exact sums, in one all-gather: every replica decodes all codes.

    Args:
      vectors: this replica's vectors, float32, in pieces; each is rounded as :func:`encode_all` does.
      exact: ``[m]``, summed over the replicas as it is.
      weight: this replica's weight, a scalar of the same dtype.
      axis_name: the mapped axis of the replicas.
      wire: one of ``WIRES``.
    """
    own = encode_all(vectors, wire)
    data = list(itertools.chain.from_iterable(own))
    rows = lax.all_gather(jnp.concatenate([*data, to_bytes(jnp.append(exact, weight))]), axis_name)
    *found, numbers = jnp.split(rows, list(itertools.accumulate(x.size for x in data)), axis=1)
    numbers, coded = jax.vmap(lambda row: from_bytes(row, exact.dtype))(numbers), iter(found)
    means = [[mean_of_rows(next(coded), numbers[:, -1], x.size, wire) for x in pieces] for pieces in vectors]
    return Means(means, _decoded(own, vectors, wire)), numbers[:, :-1].sum(0)


def exchange_means(
    vectors: Sequence[Pieces], weights: jax.Array, part: jax.Array, axis_name: str, wire: str
) -> tuple[Means, jax.Array]:
    """Weighted means of coded vectors in two exchanges: each replica averages its part, and sends that mean to all.

    Args:
      vectors: this replica's vectors, float32, in pieces; each is rounded as :func:`encode_all` does.
      weights: ``[R]``, equal on all replicas.
      part: what this replica has not sent of its parts of the means, one after the other, each ``[part_size(n, R)]``
        with the numbers n in the blocks of a vector.
      axis_name: the mapped axis of the replicas.
      wire: one of ``WIRES``.

    Returns:
      The means, and the next ``part``.
    """
    replicas = weights.size
    sizes = [part_size(sum(blocks_size(x.size) for x in pieces), replicas) for pieces in vectors]
    own = encode_all(vectors, wire)
    rows = [_rows(data, pieces, size, replicas, wire) for data, pieces, size in zip(own, vectors, sizes, strict=True)]
    received = lax.all_to_all(jnp.concatenate(rows, axis=1), axis_name, split_axis=0, concat_axis=0)
    ends = list(itertools.accumulate(coded_bytes(size, wire) for size in sizes))[:-1]
    due = [
        mean_of_rows(one, weights, size, wire)
        for one, size in zip(jnp.split(received, ends, axis=1), sizes, strict=True)
    ]
    due = [mean + rest for mean, rest in zip(due, jnp.split(part, list(itertools.accumulate(sizes))[:-1]), strict=True)]
    data = [pieces[0] for pieces in encode_all([[x] for x in due], wire)]
    found = jnp.split(exchange(jnp.concatenate(data), axis_name), ends, axis=1)
    coded = [_of_rows(one, pieces, size, wire) for one, pieces, size in zip(found, vectors, sizes, strict=True)]
    kept = [decode(x, size, wire) for x, size in zip(data, sizes, strict=True)]
    rest = jnp.concatenate(due) - jnp.concatenate(kept)
    means = Means(_decoded(coded, vectors, wire), _decoded(own, vectors, wire))
    return means, jnp.where(jnp.isfinite(rest), rest, 0)


def encode_all(vectors: Sequence[Pieces], wire: str) -> list[list[jax.Array]]:
    """The bytes of each piece: the first vector is rounded to the nearest codes, the others are cut."""
    return [[encode(x, wire, cut=i > 0) for x in pieces] for i, pieces in enumerate(vectors)]


def _decoded(data: Sequence[Pieces], vectors: Sequence[Pieces], wire: str) -> list[list[jax.Array]]:
    """The pieces of each vector from their bytes."""
    pairs = (zip(one, pieces, strict=True) for one, pieces in zip(data, vectors, strict=True))
    return [[decode(x, like.size, wire) for x, like in pair] for pair in pairs]


def _block_bytes(wire: str) -> tuple[int, int]:
    """The bytes of the codes of a block, and of its scale."""
    return BLOCK * WIRES[wire] // 8, _SCALE_BYTES if wire in _LARGEST else 0


def _rows(data: Pieces, pieces: Pieces, size: int, replicas: int, wire: str) -> jax.Array:
    """The codes of a vector in rows of ``size`` numbers, one for each replica; blocks behind its end are zero."""
    rows = []
    for position, nbytes in enumerate(_block_bytes(wire)):
        blocks = [_columns(x, like.size, wire)[position].ravel() for x, like in zip(data, pieces, strict=True)]
        whole = jnp.concatenate([jnp.zeros(0, jnp.uint8), *blocks])
        whole = jnp.pad(whole, (0, replicas * size // BLOCK * nbytes - whole.size))
        rows.append(whole.reshape(replicas, -1))
    return jnp.concatenate(rows, axis=1)


def _of_rows(rows: jax.Array, pieces: Pieces, size: int, wire: str) -> list[jax.Array]:
    """The inverse of :func:`_rows`: the bytes of each piece."""
    ends = list(itertools.accumulate(blocks_size(x.size) // BLOCK for x in pieces))
    halves = jnp.split(rows, [size // BLOCK * _block_bytes(wire)[0]], axis=1)
    columns = [
        jnp.split(half.ravel(), [end * nbytes for end in ends])[:-1]
        for half, nbytes in zip(halves, _block_bytes(wire), strict=True)
    ]
    found = map(jnp.concatenate, zip(*columns, strict=True))
    return [x[: coded_bytes(like.size, wire)] for x, like in zip(found, pieces, strict=True)]


def _columns(data: jax.Array, size: int, wire: str) -> list[jax.Array]:
    """The bytes of the codes and of the scales of one vector, in whole blocks."""
    codes = blocks_size(size) // BLOCK * _block_bytes(wire)[0]
    return jnp.split(jnp.pad(data, (0, max(0, codes - data.size))), [codes])
