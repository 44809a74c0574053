"""Outputs: the arrays that a loss function returns beside loss and scalars, for each batch, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax


class BatchOutputs(NamedTuple):
    """The outputs of one batch, or of the part of it that one replica ran.

    Attributes:
      epoch: epoch of the batch.
      index: index of the batch in the epoch.
      rows: the rows of the batch that the replica ran, a slice.
      values: the outputs, NumPy arrays in the tree that the loss function returned.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> def loss_fn(w, x):
      ...     prediction = x @ w
      ...     return jnp.mean((prediction - 1.0) ** 2), prediction
      >>> found = []
      >>> data = jaxche.Batches(np.ones((12, 2), np.float32), batch_size=4)
      >>> trainer = jaxche.Trainer(loss_fn, optax.sgd(0.1), outputs=lambda info, batches: found.extend(batches))
      >>> state, history = trainer.fit(trainer.init(jnp.zeros(2)), data, progress=False)
      >>> [(batch.epoch, batch.index, batch.rows.stop, batch.values.shape) for batch in found]
      [(0, 0, 4, (4,)), (0, 1, 4, (4,)), (0, 2, 4, (4,))]
    """

    epoch: int
    index: int
    rows: slice
    values: Any


def of_step(taken: Sequence[tuple[tuple[int, int], slice]], size: int, values: Any) -> list[BatchOutputs]:
    """The outputs of a step on ``size`` rows, for each of the batches that they were ``taken`` from."""
    values = jax.device_get(values)
    if len(taken) == 1:
        ((key, rows),) = taken
        first = rows.start or 0
        return [BatchOutputs(*key, slice(first, first + size), values)]
    found, first = [], 0
    for key, rows in taken:
        part = slice(first, first + rows.stop - rows.start)
        found.append(BatchOutputs(*key, rows, jax.tree.map(lambda x, part=part: x[part], values)))
        first = part.stop
    return found


def check_rows(shapes: Any, size: int) -> None:
    """Refuse outputs without a leading axis of the rows, where the rows of batches are cut and joined."""
    for path, leaf in jax.tree.leaves_with_path(shapes):
        if leaf.shape[:1] != (size,):
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"outputs{name} has the shape {leaf.shape}, but a step joins rows of several batches here, so each "
                f"output needs a leading axis of the {size} rows; return one output for each row, or write "
                "rows='equal', and policy='cadence' for policy='auto'"
            )


def in_order(batches: Sequence[BatchOutputs]) -> list[BatchOutputs]:
    """The same outputs in the order of the data."""
    return sorted(batches, key=lambda batch: (batch.epoch, batch.index, batch.rows.start))
