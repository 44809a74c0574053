"""Bytes: counted, read and written."""

from __future__ import annotations

import math
import re
from typing import Any

import jax

_UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}


def nbytes(tree: Any) -> int:
    """Bytes of the arrays of a tree, whole.

    Args:
      tree: pytree of arrays or ``jax.ShapeDtypeStruct``.

    Returns:
      The number of bytes.

    Example:
      >>> import jax.numpy as jnp
      >>> nbytes({"w": jnp.zeros((8, 4)), "b": jnp.zeros(3, jnp.bfloat16)})
      134
    """
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def nbytes_per_device(tree: Any, shardings: Any = None) -> int:
    """Bytes of the arrays of a tree that one device holds.

    Args:
      tree: pytree of arrays or ``jax.ShapeDtypeStruct``.
      shardings: pytree of their shardings, structured as ``tree``, None for what is whole; default: those they have.

    Returns:
      The number of bytes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxche.sharding import FullShard
      >>> w = jax.ShapeDtypeStruct((8, 4), jnp.float32)
      >>> nbytes_per_device(w, FullShard().shardings(w, FullShard().mesh(jax.devices()[:4])))
      32
    """
    if shardings is None:
        shardings = jax.tree.map(lambda x: x.sharding, tree)

    def held(x: Any, sharding: Any) -> int:
        return math.prod(x.shape if sharding is None else sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(held, tree, shardings)))


def as_bytes(size: int | float | str) -> int:
    """A size in bytes, or as people write it.

    Args:
      size: a number of bytes, or text such as ``"16GiB"`` or ``"500 MB"``.

    Returns:
      The number of bytes.

    Raises:
      ValueError: not a positive size.

    Example:
      >>> as_bytes("1.5 KiB"), as_bytes(2048)
      (1536, 2048)
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)", str(size).strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not float(match[1]) > 0:
        raise ValueError(f'memory={size!r} is not a size; write bytes or text such as "16GiB"')
    return int(float(match[1]) * unit)


def show_bytes(size: float) -> str:
    """A size as tables print it.

    Example:
      >>> show_bytes(1536), show_bytes(12), show_bytes(16 * 2**30)
      ('1.5 KiB', '12 B', '16.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
