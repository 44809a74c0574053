"""Checks of batches as they are read: their number, equal reads, and finite numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.messages import brief, type_of


def sequence_of(data: Any, epoch: int) -> Any:
    """The batches of an epoch: what the method ``epoch`` of the data returns, or the data if it has no such method."""
    if not callable(method := getattr(data, "epoch", None)):  # an attribute may be a count of epochs
        return data
    kind = type(data).__name__
    try:
        inspect.signature(method).bind(epoch)
    except TypeError:
        raise ValueError(
            f"the method epoch of the {kind} does not take the epoch, and the trainer calls data.epoch({epoch}) for "
            "the batches of that epoch; write def epoch(self, e): ... return batches, or rename a method that is about "
            "something else"
        ) from None
    except ValueError:  # of a function without a signature
        pass
    if not hasattr(found := method(epoch), "__getitem__"):
        raise ValueError(
            f"data.epoch({epoch}) of the {kind} returned {brief(found)}, not a sequence with data[i]; return the "
            "batches of that epoch as one, e.g. a list, or pass data=jaxche.Stream(data.epoch), which reads an iterable"
        )
    return found


def refuse_other_length(epoch: int, length: int, size: int) -> None:
    """Refuse an epoch whose number of batches is not ``size``."""
    if length != size:
        raise ValueError(
            f"data.epoch({epoch}) has {length} batches, but len(data) is {size}; every epoch must have len(data) "
            f"batches. Cut or fill the epochs, or train each in its own fit: trainer.fit(state, data.epoch({epoch}))"
        )


def line_for_two_arrays(data: Any) -> str:
    """What to write if data, two arrays of equally many rows, is meant as x and y; empty for other data."""
    if type(data) not in (list, tuple) or len(data) != 2 or not all(getattr(x, "ndim", 0) for x in data):
        return ""
    rows, other = map(len, data)
    if rows != other:
        return ""
    return (
        f"data is {type_of(data)} of two arrays of {rows} rows, each of which is taken as a batch; if they are "
        "x and y, write jaxche.Batches((x, y), batch_size=32)"
    )


def is_nondeterministic(first: Any, read: Callable[[int], Any], index: int, size: int, data: Any) -> bool:
    """Whether a second read of the batch ``first`` differs; refuses it if no array identifies its examples.

    ``read(index)`` reads a batch of the epoch, which has ``size`` batches.
    """
    first, second = _leaves(first), _leaves(read(index))
    if first.keys() == second.keys() and all(_equal(x, second[name]) for name, x in first.items()):
        return False
    # Constant arrays identify the examples, as labels do when images are augmented, unless all batches have the same.
    reads = second, _leaves(read(index))
    constant = {name: x for name, x in first.items() if all(name in tree and _close(x, tree[name]) for tree in reads)}
    if constant and size == 1:
        return True
    # Neighbours may have the same labels, if data is sorted by class.
    for step in (1, size // 2, size - 1) if constant else ():
        other = _leaves(read((index + step) % size))
        if any(name not in other or not _close(x, other[name]) for name, x in constant.items()):
            return True
    held = [name for name, value in getattr(data, "__dict__", {}).items() if isinstance(value, Iterator)]
    source = f"its iterator {held[0]}" if held else "an iterator"
    raise ValueError(
        f"data[{index}] is not the same when it is read again, and no array identifies its examples; the trainer reads "
        f"batches by their index, some of them twice. If data[i] returns the next batch of {source} and ignores i, "
        "read all first: data = list(iterator), or pass the arrays: jaxche.Batches(arrays, batch_size=32). "
        "If data[i] augments examples at random, seed it with the index: rng = np.random.default_rng((seed, i))"
    )


def non_finite_leaves(key: tuple[int, int], batch: Any) -> list[str]:
    """The leaves of a batch with values that are NaN or infinite, and the first row of each."""
    found = []
    for name, leaf in _leaves(batch).items():
        x = on_host(leaf)
        if _is_inexact(x) and not (finite := np.isfinite(x)).all():
            row = int(np.flatnonzero(~finite.reshape(len(x), -1).all(1))[0])
            kind = "NaN" if np.isnan(x).any() else "infinity"
            found.append(f"{kind} in {name.lstrip('.') or 'the array'} of batch {key[1]} of epoch {key[0]} (row {row})")
    return found


def _leaves(batch: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(batch)}


def _is_inexact(x: np.ndarray) -> bool:
    """Whether an array has numbers that may be NaN, those of bfloat16 included, which NumPy does not know."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _equal(x: Any, y: Any) -> bool:
    if x is y:
        return True
    x, y = on_host(x), on_host(y)
    return x.shape == y.shape and x.dtype == y.dtype and bool(np.array_equal(x, y, equal_nan=_is_inexact(x)))


def _close(x: Any, y: Any) -> bool:
    """Equal up to rounding, which may differ between reads in a pipeline of several threads."""
    if _equal(x, y):
        return True
    x, y = on_host(x), on_host(y)
    if x.shape != y.shape or x.dtype != y.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        return False
    return np.allclose(x.astype(np.float64), y.astype(np.float64), equal_nan=True)


def on_host(x: Any) -> np.ndarray:
    """The numbers of an array; of random keys, their words."""
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)
