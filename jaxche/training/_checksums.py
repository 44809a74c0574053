"""Checksums of a checkpoint: of its metadata, and of its arrays, however they are cut into shards."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.distributed import Group
from jaxche.training._state_dict import leaf_names

# Elements that are summed at a time, which bounds the memory.
_BLOCK = 1 << 20
_MODULUS = 1 << 64


def checksums(trees: Mapping[str, Any], group: Group) -> dict[str, int]:
    """The checksum of every leaf by its path; all processes call this together."""
    leaves = dict(leaf_names(trees))
    own = {name: checksum(leaf) for name, leaf in leaves.items()}
    if all(leaf.is_fully_replicated for leaf in leaves.values()):
        return own
    parts = group.all_gather(
        {name: 0 if leaf.is_fully_replicated and not group.is_first else own[name] for name, leaf in leaves.items()}
    )
    return {name: sum(part[name] for part in parts) % _MODULUS for name in leaves}


def checksum(leaf: jax.Array) -> int:
    r"""The checksum of the shards of this process, $\sum_i b_i (2 i + 1) \bmod 2^{64}$ with the bits of element $i$.

    Factors are odd, so one wrong bit is always found. Of copies of a shard the first counts.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    shards = leaf.addressable_shards
    shards = shards[:1] if leaf.is_fully_replicated else [shard for shard in shards if shard.replica_id == 0]
    parts = [_partial(np.asarray(one.data), [cut.start or 0 for cut in one.index], leaf.shape) for one in shards]
    return sum(parts) % _MODULUS


def _partial(host: np.ndarray, starts: list[int], shape: tuple[int, ...]) -> int:
    """The sum over a part of an array that begins at ``starts``."""
    if not host.size:
        return 0
    if not host.ndim:
        host, starts, shape = host.reshape(1), [0], (1,)
    unit = min(host.itemsize, 8)
    parts = host.itemsize // unit  # of a complex128
    bits = np.ascontiguousarray(host).view(f"u{unit}")
    shape, starts = (*shape[:-1], shape[-1] * parts), [*starts[:-1], starts[-1] * parts]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    steps = [
        (np.arange(start, start + size, dtype=np.uint64) * np.uint64(stride)).reshape(
            -1, *(1,) * (len(shape) - axis - 1)
        )
        for axis, (start, size, stride) in enumerate(zip(starts, bits.shape, strides, strict=True))
    ]
    inner, total = sum(steps[1:], start=np.uint64(0)), 0
    rows = max(1, _BLOCK // math.prod(bits.shape[1:]))
    for at in range(0, len(bits), rows):
        factors = (steps[0][at : at + rows] + inner) * np.uint64(2) + np.uint64(1)
        total += int((bits[at : at + rows].astype(np.uint64) * factors).sum(dtype=np.uint64))
    return total


def checksum_of_metadata(meta: Mapping[str, Any]) -> int:
    """The checksum of metadata as JSON, without the fields that are refused by name if they are wrong."""
    value = {name: value for name, value in meta.items() if name not in ("format", "jaxche")}
    return zlib.crc32(json.dumps(json.loads(json.dumps(value)), sort_keys=True).encode())
