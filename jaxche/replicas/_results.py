"""The result of the local steps of a replica, with their outputs, at their end or, with overlap, before the last ones.

An early result has the steps and rows that are left, whose batches are read by then, and the time that all steps would
take. So replicas exchange the table of a round beside its last steps. What these measure is unsent, and a part of the
next table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.data import Feed, Key
from jaxche.replicas._opt_state import counts_of
from jaxche.replicas._programs import Carry
from jaxche.replicas._table import Columns
from jaxche.sharding import batch_size


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


class LocalResult(NamedTuple):
    """The result of the local steps of a replica."""

    carry: Carry
    steps: int
    wall_ms: float  # until the last step was computed, without the times below
    error: Exception | None = None  # of a step that failed
    outputs: Sequence[BatchOutputs] = ()
    group_ms: float = 0.0  # in merges with its group, waits included
    compile_ms: float = 0.0
    divided: int = 0  # steps on rows of several shapes
    rows: int = 0  # of all steps


class Unsent(NamedTuple):
    """What the last steps of each replica of this process have measured, after the table of their round was sent."""

    sums: tuple[Any, ...]  # the next table adds them, unless they are None
    errors: tuple[Exception | None, ...]  # the next round fails by them
    batches: tuple[tuple[Key, ...], ...]  # of these steps, for each rank
    columns: Columns  # of the sums

    def for_table(self, columns: Columns) -> Unsent:
        """The same for a table with these columns, which has no place for the sums of another loss function."""
        return self if columns == self.columns else self._replace(sums=(None,) * len(self.sums), columns=columns)

    @property
    def error(self) -> Exception | None:
        """The first of the errors."""
        return next(filter(None, self.errors), None)


class EarlyResult:
    """The result of a replica that is exchanged beside its last steps."""

    def __init__(self, after: int):
        self.after = after  # the steps before it is sent
        self.is_sent = False  # before the last steps
        self.sums: Any = None  # that were sent then
        self._future: Future[LocalResult] = Future()

    def result(self) -> LocalResult:
        """Wait for it."""
        return self._future.result()

    def ends(self, future: Future[LocalResult]) -> None:
        """Send the result at the end of the steps, unless one was sent."""
        if self.is_sent:
            return
        if (error := future.exception()) is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(future.result())

    def send(self, carry: Carry, feed: Feed, result: LocalResult) -> Carry:
        """Send the result so far with the steps that are left; returns the carry that measures these alone."""
        found = [feed.peek(position) for position in range(feed.position, len(feed.steps))]
        left = [batches for batches in found if batches]
        steps = result.steps + len(left)
        sent, fresh = split_sums(carry, len(left))
        total = result._replace(
            carry=sent,
            steps=steps,
            wall_ms=result.wall_ms * steps / result.steps if result.steps else 0.0,
            rows=result.rows + sum(batch_size(batch) for batches in left for batch in batches),
            divided=result.divided + sum(len(batches) > 1 for batches in left),
        )
        self.is_sent, self.sums = True, sent.sums
        self._future.set_result(total)
        return carry._replace(sums=fresh)


def split_sums(carry: Carry, left: int) -> tuple[Carry, Any]:
    """What an exchange reads of a carry before so many steps, and the sums of none, with which they begin."""
    sums, counts, flag, fresh = _split(carry.sums, counts_of(carry.opt_state), np.int32(left))
    return Carry(None, None, sums, opt_state=counts, not_finite=flag), fresh


@jax.jit
def _split(sums: Any, counts: Sequence[Any], left: Any) -> tuple[Any, Sequence[Any], Any, Any]:
    """A copy of the sums, the counts after the steps that are left, the flag of a finite replica, and sums of none."""
    counts = [count + left.astype(count.dtype) for count in counts]
    return sums, counts, jnp.zeros_like(sums[:, :1]), jnp.zeros_like(sums)


def with_sums(carry: Carry, sums: Any) -> Carry:
    """The carry at the begin of a round with the sums that were not sent, if there are any."""
    return carry if sums is None else carry._replace(sums=jnp.copy(sums))  # the steps take it


def without_sums(carry: Carry, sums: Any) -> Carry:
    """The carry at the end of that round, with the sums of its own steps alone."""
    return carry if sums is None else carry._replace(sums=carry.sums - sums)


def unsent_of(
    early: Sequence[EarlyResult],
    results: Sequence[LocalResult],
    batches: tuple[tuple[Key, ...], ...],
    columns: Columns,
    without_steps: Callable[[int], LocalResult],
    not_finite: Callable[[int, int], Exception],
) -> tuple[list[LocalResult], Unsent]:
    """The results of a round for its merge, with all sums, and what the table lacks: ``batches`` of each rank.

    A replica whose last steps have failed merges as if it had taken no steps; the next round fails by it.
    ``without_steps(index)`` is the result of one without steps, and ``not_finite(index, steps)`` the error of one that
    took so many and in whose last ones a number became NaN or infinite.
    """
    found = []
    for index, (one, result) in enumerate(zip(early, results, strict=True)):
        last = result.carry.sums
        if not one.is_sent:
            found.append((result, jnp.zeros_like(last), None))
        elif result.error is not None:
            found.append((without_steps(index), jnp.zeros_like(last), result.error))
        elif not _is_finite(result.carry):
            found.append((without_steps(index), last, not_finite(index, result.steps)))
        else:
            whole = result._replace(carry=result.carry._replace(sums=one.sums + last))
            found.append((whole, last, None))
    kept, sums, errors = zip(*found, strict=True)
    return list(kept), Unsent(sums, errors, batches, columns)


def _is_finite(carry: Carry) -> bool:
    """Whether the loss of the last steps, and the replica after them, are finite."""
    flag, sums = jax.device_get((carry.not_finite, carry.sums))
    return not np.any(flag) and bool(np.isfinite(sums[0, 1]))


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
