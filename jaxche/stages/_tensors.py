"""The file format of trees of arrays in a store, with checksums.

An object is ``prefix | header | payload``. The prefix has a fixed size and holds the lengths and checksums of the other
two. The header is JSON with the name, dtype and shape of each leaf. The payload is the bytes of the leaves,
little-endian, each aligned to 64 bytes. Nothing in an object is executed, and nothing in it decides how much memory is
allocated: the reader takes the layout from the tree that it expects.

This is not safetensors, which has no checksum and no support for all dtypes of JAX, and whose writer first copies all
arrays into one buffer. Here arrays are written from where they are and read as views of the bytes.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.distributed import padded
from jaxche.stages._buffers import to_host

_MAGIC = b"jaxchetr"
_VERSION = 2
# magic, version, length of the header, length of the payload, checksum of the payload; then the checksum of these and
# of the header. XXH3 takes a fifth of the time of writing the same bytes. It detects truncated and corrupted objects;
# it is no protection against writers with access to the store.
_PREFIX = struct.Struct("<8sIIQQ")
_CHECKSUM = struct.Struct("<Q")
_START = _PREFIX.size + _CHECKSUM.size
_HEADER_LIMIT = 16 * 1024 * 1024  # 100,000 leaves


class DamagedObjectError(ValueError):
    """An object in the store is truncated or altered, or is not in the format of jaxche.

    Example:
      >>> try:
      ...     raise DamagedObjectError("step 3 of stage 0 is shorter than its header says")
      ... except ValueError as error:
      ...     print(error)
      step 3 of stage 0 is shorter than its header says
    """


class Leaf(NamedTuple):
    """One leaf in the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name or 'the only leaf'}: {self.dtype}{list(self.shape)}"


class _Layout(NamedTuple):
    """Header and size of the objects of all trees with the same structure, shapes and dtypes."""

    leaves: tuple[Leaf, ...]
    header: bytes
    size: int


def _layout(tree: Any) -> _Layout:
    leaves, structure = jax.tree.flatten(tree)
    leaves = [leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for leaf in leaves]
    return _cached_layout(structure, tuple((leaf.dtype, tuple(leaf.shape)) for leaf in leaves))


# Cached, because naming the leaves of a small tree takes longer than writing it.
@functools.lru_cache(maxsize=1024)
def _cached_layout(structure: Any, kinds: tuple[tuple[Any, tuple[int, ...]], ...]) -> _Layout:
    paths = jax.tree.leaves_with_path(jax.tree.unflatten(structure, range(len(kinds))))
    leaves = []
    for (path, _), (dtype, shape) in zip(paths, kinds, strict=True):
        name = jax.tree_util.keystr(path)
        if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
            raise ValueError(
                f"leaf {name or 'at the root'} has dtype {dtype}, which cannot be stored: arrays of numbers and "
                "booleans can; for a PRNG key store jax.random.key_data(key)"
            )
        leaves.append(Leaf(name, jnp.dtype(dtype).name, tuple(int(n) for n in shape)))
    text = json.dumps([list(leaf) for leaf in leaves], separators=(",", ":")).encode()
    header = text.ljust(padded(_START + len(text)) - _START)
    if len(header) > _HEADER_LIMIT:
        raise ValueError(f"a tree whose leaves take {len(header)} bytes to name cannot be stored: stack its leaves")
    return _Layout(tuple(leaves), header, _START + len(header) + sum(padded(leaf.nbytes) for leaf in leaves))


def read_limit(like: Any) -> int:
    """How many bytes to read of the object of a tree like this one: all, or the header of any other tree."""
    return max(_layout(like).size, _START + _HEADER_LIMIT)


def on_host(tree: Any) -> Any:
    """The tree as numpy arrays that can be stored."""
    _layout(tree)  # refuse dtypes that cannot be stored by the name of the leaf, before numpy raises
    return to_host(tree)


def encode(tree: Any) -> list[Any]:
    """The object of a tree, as buffers without copies of the leaves. The first buffer differs if the trees differ."""
    layout = _layout(tree)
    payload: list[Any] = []
    length = 0
    for leaf, value in zip(layout.leaves, to_host(jax.tree.leaves(tree)), strict=True):
        flat = np.ascontiguousarray(value, dtype=jnp.dtype(leaf.dtype)).reshape(-1).view(np.uint8)
        length += padded(flat.size)
        payload += [part for part in (flat, np.zeros(padded(flat.size) - flat.size, np.uint8)) if part.size]
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(layout.header), length, _checksum(*payload))
    return [prefix + _CHECKSUM.pack(_checksum(prefix, layout.header)) + layout.header, *payload]


def decode(data: Any, size: int, like: Any, key: str) -> Any:
    """The tree in an object named ``key``, of ``size`` bytes, as read-only views of its :func:`read_limit` bytes."""
    view, expected = memoryview(data).cast("B"), _layout(like)
    header, check = _read_header(view, size, key)
    if header != expected.header:
        raise _mismatch(header, expected.leaves, key)
    payload = view[_START + len(header) :]
    if size != expected.size:
        raise DamagedObjectError(f"{key} was altered: {len(payload)} bytes are not the leaves its header names")
    if _checksum(payload) != check:
        raise _altered(key)
    values, offset, flat = [], 0, np.frombuffer(payload, np.uint8)
    for leaf in expected.leaves:
        values.append(flat[offset : offset + leaf.nbytes].view(jnp.dtype(leaf.dtype)).reshape(leaf.shape))
        offset += padded(leaf.nbytes)
    return jax.tree.unflatten(jax.tree.structure(like), values)


def _read_header(view: memoryview, size: int, key: str) -> tuple[bytes, int]:
    """The header, verified, and the checksum of the payload."""
    if len(view) < _START:
        raise DamagedObjectError(f"{key} is {len(view)} bytes long, less than any tensor object: it is truncated")
    magic, version, header_size, payload_size, check = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise DamagedObjectError(f"{key} is no tensor object: it begins with {bytes(view[:8])!r}")
    if version != _VERSION:
        raise DamagedObjectError(f"{key} has version {version} of the tensor format; this jaxche reads {_VERSION}")
    announced = _START + header_size + payload_size
    if size != announced:
        raise DamagedObjectError(f"{key} is {size} bytes long where it announces {announced}: truncated or altered")
    header = bytes(view[_START : _START + header_size]) if header_size <= _HEADER_LIMIT else b""
    (head_check,) = _CHECKSUM.unpack_from(view, _PREFIX.size)
    if _checksum(view[: _PREFIX.size], header) != head_check:
        raise _altered(key)
    return header, check


def _checksum(*parts: Any) -> int:
    import xxhash  # from the extra "store"

    hashed = xxhash.xxh3_64()
    for part in parts:
        hashed.update(part)
    return hashed.intdigest()


def _altered(key: str) -> DamagedObjectError:
    return DamagedObjectError(f"{key} was altered: its checksum is not the one it was written with")


def _mismatch(header: bytes, expected: tuple[Leaf, ...], key: str) -> ValueError:
    """The first leaf that is not the expected one. The header is not trusted: it is only shown, and shortened."""
    try:
        found = [str(Leaf(*leaf))[:200] for leaf in json.loads(header)]
    except (ValueError, TypeError, RecursionError):
        return DamagedObjectError(f"{key} was altered: its header cannot be read")
    for there, wanted in itertools.zip_longest(found, map(str, expected), fillvalue="no further leaf"):
        if there != wanted:
            return ValueError(f"{key} holds {there} where {wanted} is expected")
    return DamagedObjectError(f"{key} was altered: its header is not in the form it was written in")
