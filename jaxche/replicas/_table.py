"""The table of a merge: one row of each replica, which all processes receive.

A row has the columns of the host, then ``not_finite``, then those of the loss function (:class:`Columns`).
"""

from __future__ import annotations

from typing import NamedTuple

# Exact in float32, and far larger than the error of a sum of examples.
ROW_MODULUS = 2**23


class HostColumns(NamedTuple):
    """The numbers that the host of a replica adds to its row.

    Counts, flags and halves of digests are exact in float32; times and parts of batches are rounded.

    Attributes:
      count: steps.
      batches: batches of these steps: a step may run a part of a batch. The parts of joined batches add up to them, and
        a replica may have one without rows, and no step.
      wall_ms: time of the steps.
      group_ms: time in merges with its group, waits included.
      compile_ms: time in which it compiled for batches of other shapes, in neither ``wall_ms`` nor ``group_ms``.
      prepare_ms: time in which its process compiled before the round, for new shares of rows.
      last_sync_ms: cost of the merge before this one.
      last_hidden_ms: the part of it that ran beside steps.
      last_exchange_ms: the part of it in which measurements were exchanged.
      failed: whether a step raised an error.
      stop: the most urgent request to stop.
      accumulated: batches accumulated by MultiSteps and not applied.
      rows: rows of its batches, modulo ``ROW_MODULUS``: the sum of examples on devices is rounded from 2**24 on.
      divided: steps on rows of several shapes.
      ended: 0, or where the stream of the process has ended, 1 more than its batches, modulo 2**23.
      plan_high: a half of the digest of the plan.
      plan_low: the other half.
    """

    count: float
    batches: float
    wall_ms: float
    group_ms: float
    compile_ms: float
    prepare_ms: float
    last_sync_ms: float
    last_hidden_ms: float
    last_exchange_ms: float
    failed: float
    stop: float
    accumulated: float
    rows: float
    divided: float
    ended: float
    plan_high: float
    plan_low: float


HOST_COLUMNS = HostColumns._fields
NOT_FINITE = len(HOST_COLUMNS)
SUMS = slice(NOT_FINITE + 1, None)
