"""Overlapped merges: the first steps of a round run while the merge of the round before it does.

A replica ends a round at :math:`y_i` and continues from there, while the merge computes the common :math:`x'` from the
changes of all replicas. After a number of steps that is fixed before the round begins, each replica waits for
:math:`x'`, if it has not arrived, and corrects its parameters:

.. math:: x_i \\leftarrow x_i + (x' - y_i)

So no local step is lost, and the changes of a round are those since the last :math:`x'`, which all replicas have: the
merge itself is the ordinary one. The table of the round is exchanged before the next round begins, because the next
plan follows from it: beside the last steps, from results that are sent before them.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.averaging import change, is_float
from jaxche.data import Threads, called_now
from jaxche.replicas._merge import Merge, Merged, ToMerge, reduce_rows
from jaxche.replicas._merge_program import MergeProgram, MergeRules, Report
from jaxche.replicas._opt_state import are_accumulators, are_schedules, counts_of, with_counts
from jaxche.replicas._programs import Carry, LocalState
from jaxche.replicas._replica_mesh import AXIS, ReplicaMesh
from jaxche.replicas._results import split_sums


@dataclass(frozen=True, eq=False)
class MergeInFlight:
    """A merge that runs while its replicas train on."""

    wall_ms: float  # duration of the steps of its round
    cost_ms: float | None  # its own duration on the clock of a virtual fleet, or None if its time is measured
    _finished: Future[tuple[Merged, float]]

    @property
    def is_finished(self) -> bool:
        """Whether its result is there."""
        return self._finished.done()

    def result(self) -> Merged:
        """Wait for its result; raises the error of a merge that failed."""
        return self._finished.result()[0]

    def seen_by(self, exchanged: Merged) -> Merged:
        """An exchanged table with the drift and flags of this merge: the round after a merge reports them."""
        found = self.result()
        return exchanged._replace(report=found.report, wall_ms=self.wall_ms, nbytes=found.nbytes)

    @property
    def duration_ms(self) -> float:
        """How long it took, in this process if that is measured; waits for its end then."""
        return self._finished.result()[1] if self.cost_ms is None else self.cost_ms


class Correction(NamedTuple):
    """The correction of a replica by the result of the merge in flight, after ``after`` steps of a round."""

    after: int
    merge: MergeInFlight
    index: int  # of the replica in this process
    start: Callable[[], Any] | None = None  # the parameters that are corrected, if not those of the start of the round

    def apply(self, local: LocalState, carry: Carry, steps: int) -> tuple[Carry, float]:
        """The corrected carry of the round that began at ``local``, and the seconds that the replica waited."""
        if not self.merge.is_finished:
            jax.block_until_ready(carry.params)  # steps that are under way are no wait
        clock = time.perf_counter()
        merged = self.merge.result().local_states[self.index]
        waited_s = time.perf_counter() - clock
        local = local if self.start is None else local._replace(params=self.start())
        return corrected(local, carry, merged), waited_s


def corrected(local: LocalState, carry: Carry, merged: LocalState) -> Carry:
    """The carry of a round that began at ``local``, corrected by the merged parameters, with the merged statistics."""
    params, model_state = _corrected(carry.params, carry.model_state, local.params, merged.params, merged.model_state)
    return carry._replace(params=params, model_state=model_state)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _corrected(params: Any, model_state: Any, snapshot: Any, mean: Any, merged_state: Any) -> tuple[Any, Any]:
    # A copy, because the next step takes the buffers of the carry.
    newest = jax.tree.map(lambda x, m: jnp.copy(m) if is_float(x) else x, model_state, merged_state)
    moved = change(mean, snapshot)
    return jax.tree.map(lambda x, c: (x.astype(c.dtype) + c).astype(x.dtype), params, moved), newest


class Exchanged(NamedTuple):
    """The exchange of a table: the table, the counts of each replica of this process, and how long it took."""

    table: np.ndarray
    counts: tuple[dict[str, Any], ...]
    took_ms: float


class OverlappedMerge:
    """Exchanges the table of a round, and merges its trees on a thread.

    Called like :class:`Merge` it does both, one after the other. One program with collectives is in flight at a time:
    the replicas are corrected by the result of a merge before they exchange their next table.
    """

    takes = ()  # a merge in flight and the next round have the same arrays

    def __init__(self, replica_mesh: ReplicaMesh, rules: MergeRules, local: LocalState, in_background: bool):
        self._replica_mesh, self._compiled = replica_mesh, False
        self._merge = Merge(replica_mesh, rules, local)
        self._schedules = are_schedules(local.opt_state)
        self._has_schedules = any(self._schedules)
        # The counts after the last steps are known before them, unless an update is made of several.
        self.can_exchange_early = not (self._has_schedules and any(are_accumulators(local.opt_state)))
        mapped = jax.shard_map(
            MergeProgram(replica_mesh, rules, local, {}).numbers,
            mesh=replica_mesh.mesh,
            in_specs=(P(AXIS), P(AXIS), P(AXIS)),
            out_specs=(P(AXIS), P()),
            axis_names={AXIS},
            check_vma=False,
        )
        counts = {"counts": replica_mesh.shardings("counts", counts_of(local.opt_state))} if self._has_schedules else {}
        self._numbers = jax.jit(mapped, out_shardings=(counts, NamedSharding(replica_mesh.mesh, P())))
        self._pool = Threads(1, thread_name_prefix="jaxche-merge") if in_background else None
        self._last: Future[Any] | None = None

    @property
    def nbytes(self) -> int | None:
        """The bytes that each replica sends in a merge, once it is compiled."""
        return self._merge.nbytes

    def __call__(self, given: ToMerge, donates: bool = False) -> Merged:
        """Exchange the table, then merge, and wait for both."""
        self.exchange(lambda: given)()
        merged = self._merge(self._copied(given))
        for local, carry, one in zip(given.starts, self._copied(given).carries, merged.local_states, strict=True):
            split_sums(carry, 0)  # compiles this, and what follows, before any clock starts
            corrected(local, carry, one)
        return merged

    def prepare(self, given: ToMerge, donates: bool = False) -> None:
        """Compile the programs and connect the processes; see :meth:`Merge.prepare`."""
        self.exchange(lambda: given)()
        self._merge.prepare(given)
        for carry in given.carries:
            split_sums(carry, 0)

    def wait(self) -> None:
        """Wait for a merge in flight, also for one of a state that was dropped."""
        if self._last is not None:
            wait([self._last])

    def exchange(self, ready: Callable[[], ToMerge]) -> Callable[[], Exchanged]:
        """Begin to exchange the table of the round, once all replicas of this process are ``ready``.

        On the thread, after a merge that is in flight; returns a function that waits for the end. Without a thread that
        function makes the exchange.
        """
        if self._pool is None:
            return lambda: self._exchange(ready())
        self._last = future = self._pool.submit(lambda: self._exchange(ready()))
        return future.result

    def _exchange(self, given: ToMerge) -> Exchanged:
        (starts, carries, rows), stack = given, self._replica_mesh.stack
        measured = [carry.measured for carry in carries]
        before: list[dict[str, Any]] = [{} for _ in starts]
        if self._has_schedules:
            before = [{"counts": start.counts} for start in starts]
            own = [{"counts": counts_of(carry.opt_state)} for carry in carries]
            measured = [one | counts for one, counts in zip(measured, own, strict=True)]
        arguments = (stack(before), stack(measured), self._replica_mesh.rows(rows))
        if not self._compiled:
            self._replica_mesh.compile_everywhere(self._numbers, arguments)
            self._compiled = True
        clock = time.perf_counter()
        with self._replica_mesh.collective():
            counts, table = self._numbers(*arguments)
            table = reduce_rows(np.asarray(table))
        took_ms = 1e3 * (time.perf_counter() - clock)
        return Exchanged(table, tuple(self._replica_mesh.unstack(counts)), took_ms)

    def ended(self, starts: Sequence[LocalState], carries: Sequence[Carry], exchanged: Exchanged) -> Merged:
        """The replicas as they are at the end of a round, which are not merged yet, with its table."""
        unknown = Report(drift=math.nan, drift_direction=math.nan)
        states = map(self._snapshot, starts, carries, exchanged.counts)
        return Merged(tuple(states), exchanged.table, unknown, exchange_ms=exchanged.took_ms)

    def _snapshot(self, start: LocalState, carry: Carry, merged: dict[str, Any]) -> LocalState:
        """A replica at the end of a round, whose schedules have the steps of all replicas."""
        opt_state = carry.opt_state
        if "counts" in merged:
            pairs = zip(self._schedules, merged["counts"], counts_of(opt_state), strict=True)
            opt_state = with_counts(opt_state, [new if scheduled else own for scheduled, new, own in pairs])
        return start._replace(params=carry.params, model_state=carry.model_state, opt_state=opt_state)

    def start(
        self,
        given: ToMerge,
        wall_ms: float,
        cost_ms: float | None,
        then: Callable[[Sequence[LocalState]], tuple[LocalState, ...]] | None = None,
    ) -> MergeInFlight:
        """Begin to merge; times are those of :class:`MergeInFlight`.

        ``then`` makes the local states of the result from the merged ones.
        """

        def merge() -> tuple[Merged, float]:
            clock = time.perf_counter()
            # On CPU devices beside those of the replicas it takes copies already.
            merged = self._merge(given if self._pool else self._copied(given))
            took_ms = 1e3 * (time.perf_counter() - clock)
            return merged if then is None else merged._replace(local_states=then(merged.local_states)), took_ms

        self._last = called_now(merge) if self._pool is None else self._pool.submit(merge)
        return MergeInFlight(wall_ms, cost_ms, self._last)

    def _copied(self, given: ToMerge) -> ToMerge:
        """Copies of carries for a merge, which takes their buffers: the replicas continue with the carries."""
        sent = [{name: getattr(carry, name) for name in self._merge.sent} for carry in given.carries]
        pairs = zip(given.carries, sent, strict=True)
        return given._replace(carries=[carry._replace(**jax.tree.map(jnp.copy, own)) for carry, own in pairs])
