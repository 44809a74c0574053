"""What a trainer relies on in its data: epochs of one length, and batches that can be read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def refuse_other_length(epoch: int, length: int, size: int) -> None:
    """Refuse an epoch that has not the ``size`` batches that plans, keys and checkpoints count with."""
    if length != size:
        raise ValueError(
            f"data.epoch({epoch}) has {length} batches, and len(data) is {size}; every epoch needs as many. Cut or "
            f"fill epochs to len(data) batches, or train them one by one: trainer.fit(state, data.epoch({epoch}))"
        )


def varies(first: Any, read: Callable[[int], Any], index: int, size: int, data: Any) -> bool:
    """Whether a batch that was read is not the same when it is read again, though of the same examples.

    Args:
      first: the batch.
      read: reads one of its epoch, by its index.
      index: of the batch.
      size: batches in the epoch.
      data: for the message.

    Raises:
      ValueError: no array of the batch shows that it is of the same examples.
    """
    again = read(index)
    same, known = _leaves(first), _leaves(again)
    if same.keys() == known.keys() and all(_equal(x, known[name]) for name, x in same.items()):
        return False
    # What stays identifies the examples, as labels do where images are augmented; unless it is the same in all batches.
    once_more = _leaves(read(index))
    reads = known, once_more
    stays = {name: x for name, x in same.items() if all(name in tree and _close(x, tree[name]) for tree in reads)}
    if stays and size == 1:
        return True
    # Neighbours may have the same labels, where data is sorted by class.
    for step in (1, size // 2, size - 1) if stays else ():
        other = _leaves(read((index + step) % size))
        if any(name not in other or not _close(x, other[name]) for name, x in stays.items()):
            return True
    held = [name for name, value in getattr(data, "__dict__", {}).items() if isinstance(value, Iterator)]
    source = f"its iterator {held[0]}" if held else "an iterator"
    raise ValueError(
        f"data[{index}] is not the same when it is read again, in none of the arrays that tell one batch from another; "
        f"batches are read by their index, some of them twice. If it gives the next batch of {source} whatever the "
        "index, read them all first: data = list(iterator), or give the arrays: jaxche.Batches(arrays, batch_size=32). "
        "If it augments examples at random, draw from the index: rng = np.random.default_rng((seed, i))"
    )


def _leaves(batch: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(batch)}


def _equal(x: Any, y: Any) -> bool:
    if x is y:
        return True
    x, y = _on_host(x), _on_host(y)
    return x.shape == y.shape and x.dtype == y.dtype and bool(np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"))


def _close(x: Any, y: Any) -> bool:
    """Equal but for rounding, which a pipeline in several threads may do otherwise each time."""
    if _equal(x, y):
        return True
    x, y = _on_host(x), _on_host(y)
    return x.shape == y.shape and x.dtype.kind == "f" == y.dtype.kind and np.allclose(x, y, equal_nan=True)


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
