"""The form in which trees of arrays lie in a store: a checked header, then the raw bytes.

An object is ``prefix | header | payload``. The prefix has a fixed size and holds the lengths and checksums of the other
two; the header is JSON and names each leaf, its dtype and its shape; the payload is the leaves' bytes, little-endian,
each starting at a multiple of 64. Nothing in an object is ever executed, and nothing in it decides how much memory is
allocated: the reader knows which leaves it expects and takes the layout from those.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxche.sharding import Device

_MAGIC = b"jaxchetr"
_VERSION = 2
# magic, version, length of the header, length of the payload, checksum of the payload; then the checksum of all of
# this and of the header. The checksums are XXH3, which takes a fifth of the time of writing the same bytes. What they
# guard against is a torn or rotten object: who can write to the store can write a valid one.
_PREFIX = struct.Struct("<8sIIQQ")
_CHECKSUM = struct.Struct("<Q")
_START = _PREFIX.size + _CHECKSUM.size
_ALIGNMENT = 64
_HEADER_LIMIT = 16 * 1024 * 1024  # 100,000 leaves
HEAD_LIMIT = _START + _HEADER_LIMIT

_NUMPY_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_ML_NAMES = (
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4", "uint2", "uint4"),
)
_DTYPES = {name: np.dtype(name) for name in _NUMPY_NAMES}
_DTYPES |= {name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES if hasattr(ml_dtypes, name)}


class DamagedObjectError(ValueError):
    """An object in the store is not what was put there: truncated, altered, or of another origin.

    Example:
      >>> try:
      ...     raise DamagedObjectError("step 3 of stage 0 is shorter than its header says")
      ... except ValueError as error:
      ...     print(error)
      step 3 of stage 0 is shorter than its header says
    """


class Leaf(NamedTuple):
    """What the header says of one leaf."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.name or 'the only leaf'}: {self.dtype}{list(self.shape)}"


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class _Layout(NamedTuple):
    """What is the same for all objects of trees of one structure, shapes and dtypes."""

    leaves: tuple[Leaf, ...]
    header: bytes
    size: int


def _layout(tree: Any) -> _Layout:
    leaves, structure = jax.tree.flatten(tree)
    leaves = [leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for leaf in leaves]
    return _made_layout(structure, tuple((leaf.dtype, tuple(leaf.shape)) for leaf in leaves))


# Kept, because to name the leaves of a small tree takes longer than to write it.
@functools.lru_cache(maxsize=1024)
def _made_layout(structure: Any, kinds: tuple[tuple[Any, tuple[int, ...]], ...]) -> _Layout:
    paths = jax.tree.leaves_with_path(jax.tree.unflatten(structure, range(len(kinds))))
    leaves = []
    for (path, _), (dtype, shape) in zip(paths, kinds, strict=True):
        name, kind = jax.tree_util.keystr(path), getattr(dtype, "name", str(dtype))
        if kind not in _DTYPES:
            raise ValueError(
                f"leaf {name or 'at the root'} has dtype {dtype}, which cannot be stored: arrays of numbers and "
                "booleans can; of a PRNG key store jax.random.key_data(key)"
            )
        leaves.append(Leaf(name, kind, tuple(int(n) for n in shape)))
    text = json.dumps([list(leaf) for leaf in leaves], separators=(",", ":")).encode()
    header = text.ljust(_padded(_START + len(text)) - _START)
    if len(header) > _HEADER_LIMIT:
        raise ValueError(f"a tree whose leaves take {len(header)} bytes to name cannot be stored: stack its leaves")
    return _Layout(tuple(leaves), header, _START + len(header) + sum(_padded(leaf.nbytes) for leaf in leaves))


def object_size(like: Any) -> int:
    """Bytes of the object that holds a tree like this one."""
    return _layout(like).size


def on_host(tree: Any) -> Any:
    """The tree as numpy arrays; on the CPU backend these are views, and on others the copies run side by side."""
    _layout(tree)  # what cannot be stored is refused by its name here, before numpy refuses it by another
    return jax.tree.unflatten(jax.tree.structure(tree), _fetched(jax.tree.leaves(tree)))


def _fetched(leaves: list[Any]) -> list[np.ndarray]:
    for value in leaves:
        if isinstance(value, jax.Array):
            value.copy_to_host_async()
    return [np.asarray(value) for value in leaves]


def on_device(tree: Any, device: Device) -> Any:
    """The numpy arrays of a tree on a device, for good: on the CPU backend without a copy where they are aligned.

    What ``jax.device_put`` does, in a third of its time a leaf.
    """
    there = _only(device)
    return jax.tree.map(lambda value: jax.make_array_from_callback(value.shape, there, lambda _: value), tree)


_only = functools.lru_cache(SingleDeviceSharding)  # works out what it is once


def encode(tree: Any) -> list[Any]:
    """The object of a tree, as buffers to be written one after the other; leaves are not copied.

    Args:
      tree: pytree of arrays.

    Returns:
      Buffers of bytes. The first is the head, which differs whenever the trees differ.
    """
    layout = _layout(tree)
    payload: list[Any] = []
    length = 0
    for leaf, value in zip(layout.leaves, _fetched(jax.tree.leaves(tree)), strict=True):
        flat = np.ascontiguousarray(value, dtype=_DTYPES[leaf.dtype]).reshape(-1).view(np.uint8)
        length += _padded(flat.size)
        payload += [part for part in (flat, np.zeros(_padded(flat.size) - flat.size, np.uint8)) if part.size]
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(layout.header), length, _checksum(*payload))
    return [prefix + _CHECKSUM.pack(_checksum(prefix, layout.header)) + layout.header, *payload]


def decode(data: Any, like: Any, key: str) -> Any:
    """The tree an object holds, as views of its bytes.

    Args:
      data: the object's bytes.
      like: pytree of arrays or ``jax.ShapeDtypeStruct`` that it must match.
      key: name of the object, for errors.

    Returns:
      The pytree of read-only numpy arrays.

    Raises:
      DamagedObjectError: the object is truncated or altered.
      ValueError: it holds another tree than ``like``; names the first leaf that differs.
    """
    view = memoryview(data).cast("B")
    header, check = _open(view, len(view), key)
    payload = view[_START + len(header) :]
    expected = _layout(like)
    if header != expected.header:
        raise _mismatch(header, expected.leaves, key)
    if len(view) != expected.size:
        raise DamagedObjectError(f"{key} was altered: {len(payload)} bytes are not the leaves its header names")
    if _checksum(payload) != check:
        raise _altered(key)
    values, offset, flat = [], 0, np.frombuffer(payload, np.uint8)
    for leaf in expected.leaves:
        values.append(flat[offset : offset + leaf.nbytes].view(_DTYPES[leaf.dtype]).reshape(leaf.shape))
        offset += _padded(leaf.nbytes)
    return jax.tree.unflatten(jax.tree.structure(like), values)


def explain(head: Any, size: int, like: Any, key: str) -> ValueError:
    """Why an object of another size than :func:`object_size` is refused, from its first ``HEAD_LIMIT`` bytes alone.

    Args:
      head: the object's first bytes.
      size: bytes of the whole object.
      like: the tree that was expected.
      key: name of the object.
    """
    try:
        return _mismatch(_open(memoryview(head).cast("B"), size, key)[0], _layout(like).leaves, key)
    except DamagedObjectError as error:
        return error


def _open(view: memoryview, size: int, key: str) -> tuple[bytes, int]:
    """The header and the checksum of the payload, after the checks that need no payload."""
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
    import xxhash  # of the extra that brings the stores

    hashed = xxhash.xxh3_64()
    for part in parts:
        hashed.update(part)
    return hashed.intdigest()


def _altered(key: str) -> DamagedObjectError:
    return DamagedObjectError(f"{key} was altered: its checksum is not the one it was written with")


def _mismatch(header: bytes, expected: tuple[Leaf, ...], key: str) -> ValueError:
    """Which leaf is not the expected one. The header is somebody else's: it is only shown, and shortened."""
    try:
        found = [f"{name or 'the only leaf'}: {dtype}{list(shape)}"[:200] for name, dtype, shape in json.loads(header)]
    except (ValueError, TypeError, RecursionError):
        return DamagedObjectError(f"{key} was altered: its header cannot be read")
    for there, wanted in itertools.zip_longest(found, map(str, expected), fillvalue="no further leaf"):
        if there != wanted:
            return ValueError(f"{key} holds {there} where {wanted} is expected")
    return DamagedObjectError(f"{key} was altered: its header is not in the form it was written in")
