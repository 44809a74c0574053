"""Checksums of the arrays of a checkpoint, however they are cut into shards."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxche.checkpoints._trees import leaf_names
from jaxche.distributed import Group

_MODULUS = 1 << 64


def checksums(trees: Mapping[str, Any], group: Group) -> dict[str, int]:
    """The checksum of every leaf by its path; all processes call this together."""
    leaves = dict(leaf_names(trees))
    own = dict(zip(leaves, own_checksums(list(leaves.values())), strict=True))
    if all(leaf.is_fully_replicated for leaf in leaves.values()):
        return own
    parts = group.all_gather(
        {name: 0 if leaf.is_fully_replicated and not group.is_first else own[name] for name, leaf in leaves.items()}
    )
    return {name: sum(part[name] for part in parts) % _MODULUS for name in leaves}


def own_checksums(leaves: Sequence[jax.Array]) -> list[int]:
    r"""The checksum of the shards of this process, $\sum_i b_i (2 i + 1) \bmod 2^{64}$ with the bits of number $i$."""
    # Factors are odd, so one wrong bit is always found. The devices compute all sums at once; only these are copied.
    with jax.enable_x64(True):
        sums = jax.device_get([_sums(leaf) for leaf in leaves])
    return [sum(map(int, parts)) % _MODULUS for parts in sums]


def _sums(leaf: jax.Array) -> list[jax.Array]:
    """The sum over each shard that counts, on its device."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    shards = leaf.addressable_shards  # of copies the first counts
    shards = shards[:1] if leaf.is_fully_replicated else [shard for shard in shards if shard.replica_id == 0]
    return [_sum(one.data, tuple(cut.start or 0 for cut in one.index), leaf.shape) for one in shards]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _sum(x: jax.Array, starts: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    """The sum over a part of an array of this shape; the part begins at ``starts``."""
    if jnp.iscomplexobj(x):
        x, starts, shape = jnp.stack([x.real, x.imag], -1), (*starts, 0), (*shape, 2)
    factors = jnp.ones((), jnp.uint64)
    for axis, start in enumerate(starts):
        stride = 2 * math.prod(shape[axis + 1 :])
        place = lax.broadcasted_iota(jnp.uint64, x.shape, axis) + jnp.uint64(start)
        factors = factors + place * jnp.uint64(stride)
    return (_bits(x) * factors).sum(dtype=jnp.uint64)


def _bits(x: jax.Array) -> jax.Array:
    """The bits of each number."""
    if x.dtype == bool:
        return x.astype(jnp.uint64)
    width = (jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo)(x.dtype).bits
    return lax.bitcast_convert_type(x, f"uint{width}").astype(jnp.uint64)
