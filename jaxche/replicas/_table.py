"""The table of a merge: one row of each replica, which all processes receive.

A row has the columns of the host, then ``not_finite``, then those of the loss function (:class:`Columns`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxche.averaging import Weighted

# Exact in float32, and far larger than the error of a sum of examples.
ROW_MODULUS = 2**23

FAILED, BROKEN = 1, 2


class HostColumns(NamedTuple):
    """The numbers that the host of a replica adds to its row.

    Counts, flags and halves of digests are exact in float32; times and parts of batches are rounded.
    """

    count: float  # steps
    # Batches of these steps: a step may run a part of a batch. The parts of joined batches add up to them, and a
    # replica may have one without rows, and no step.
    batches: float
    wall_ms: float  # time of the steps
    group_ms: float  # time in merges with its group, waits included
    compile_ms: float  # time in which it compiled for batches of other shapes, in neither of these
    prepare_ms: float  # the longest time in which its process has compiled before a round
    last_sync_ms: float  # cost of the merge before this one
    last_merge_ms: float  # the duration of the last merge, also of what ran beside the steps of this round
    last_exchange_ms: float  # the duration of the last exchange of a table that came before a merge
    failed: float  # FAILED if a step raised an error, BROKEN if what was unsent had a number that is not finite
    stop: float  # the most urgent request to stop
    accumulated: float  # batches accumulated by MultiSteps and not applied
    rows: float  # of its batches, modulo ROW_MODULUS: the sum of examples on devices is rounded from 2**24 on
    divided: float  # steps on rows of several shapes
    ended: float  # 0, or where the stream of the process has ended, 1 more than its batches, modulo 2**23
    plan_high: float  # the halves of the digest of the plan
    plan_low: float


HOST_COLUMNS = HostColumns._fields
NOT_FINITE = len(HOST_COLUMNS)
SUMS = slice(NOT_FINITE + 1, None)


class MetricsError(ValueError):
    """A loss function that returns other metrics for another batch."""


@dataclass(frozen=True)
class Columns:
    """The columns ``[examples, loss, *metrics, *weights]``.

    A mean over a batch counts with its examples: its column has the mean times the examples. A
    :class:`~jaxche.Weighted` counts with its own weight: its column has the total, and its weight has a column too.
    """

    metrics: tuple[str, ...] = ()
    weighted: tuple[int, ...] = ()  # positions in (loss, *metrics)

    @classmethod
    def of(cls, loss: Any, metrics: dict[str, Any]) -> Columns:
        """The columns for a loss function that returns values like these."""
        names = tuple(sorted(metrics))
        values = (loss, *(metrics[name] for name in names))
        return cls(names, tuple(i for i, value in enumerate(values) if isinstance(value, Weighted)))

    @property
    def count(self) -> int:
        """The number of columns."""
        return 2 + len(self.metrics) + len(self.weighted)

    @functools.cached_property
    def weights(self) -> tuple[int, ...]:
        """The column with the weights of the loss, and that of each metric; column 0 has the examples."""
        first, own = 2 + len(self.metrics), self.weighted
        return tuple(first + own.index(i) if i in own else 0 for i in range(1 + len(self.metrics)))

    def __str__(self) -> str:
        names = ("the loss", *(f"metric {name!r}" for name in self.metrics))
        return ", ".join(f"{name} as a Weighted" if i in self.weighted else name for i, name in enumerate(names))

    def row(self, loss: Any, metrics: dict[str, Any], examples: Any) -> Any:
        """The numbers that a batch adds to the sums, ``[columns]``; MetricsError for other columns than these."""
        if (found := Columns.of(loss, metrics)) != self:
            raise MetricsError(
                f"loss_fn returned {found} for a batch, and {self} for the first; return the same for every batch: a "
                "metric of some batches is a jaxche.Weighted in all of them, in the others jaxche.Weighted(0.0, 0.0)"
            )
        values = [loss, *(metrics[name] for name in self.metrics)]
        sums = [value.total if isinstance(value, Weighted) else value * examples for value in values]
        row = [examples, *sums, *(values[i].weight for i in self.weighted)]
        return jnp.stack([jnp.asarray(x, float) for x in row])
