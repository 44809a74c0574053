"""The end of a round on the host: its merged statistics, its errors and the next state."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxche.averaging import merge_weights
from jaxche.cadence import (
    TUNERS,
    ApplyPolicy,
    DivergenceCorrection,
    ElChe,
    RoundPlan,
    Verdict,
    VirtualFleet,
    exposed_exchange_ms,
    exposed_ms,
    paused_ms,
)
from jaxche.distributed import Group
from jaxche.replicas import (
    BROKEN,
    DIFFERS,
    FAILED,
    HOST_COLUMNS,
    NOT_FINITE,
    ROW_MODULUS,
    SUMS,
    TINY_WEIGHT,
    Columns,
    HostColumns,
    LocalResult,
    Merged,
    Report,
)
from jaxche.reports import RoundInfo
from jaxche.training._non_finite import NonFiniteLossError, non_finite_error
from jaxche.training._plan import PlannedRound
from jaxche.training._state import TrainerState

# The time of a merge that costs nothing on a virtual fleet: 0 stands for one that is not known.
_FREE_MS = 1e-6


class PlanMismatchError(RuntimeError):
    """The hosts planned different rounds: their code, data length, seed or measurements differ.

    Example:
      >>> issubclass(PlanMismatchError, RuntimeError)
      True
    """


def host_rows(
    planned: PlannedRound, ranks: Sequence[int], results: Sequence[LocalResult], stop: int = 0, prepare_ms: float = 0.0
) -> np.ndarray:
    """The numbers that the hosts of these ranks add to the table, ``[ranks, HOST_COLUMNS]``."""
    state, plan = planned.state, planned.plan
    late = [None] * len(ranks) if state.unsent is None else state.unsent.errors
    # A merge in flight has ended by now.
    last_merge_ms = state.merge_ms if state.in_flight is None else state.in_flight.duration_ms
    ended = planned.reader.ended(plan, state, sum(result.steps for result in results))
    high, low = plan.digest_halves()

    def row(rank: int, result: LocalResult, late: Exception | None) -> HostColumns:
        failed = BROKEN if isinstance(late, NonFiniteLossError) else FAILED if late or result.error else 0
        # The count is a weight of the merge; after an error nothing is merged.
        steps = plan.counts[rank] if failed else result.steps
        return HostColumns(
            count=steps,
            batches=plan.batches[rank] if plan.shares else steps,
            wall_ms=result.wall_ms,
            group_ms=result.group_ms,
            compile_ms=result.compile_ms,
            prepare_ms=prepare_ms,
            last_sync_ms=state.sync_ms,
            last_merge_ms=last_merge_ms,
            last_exchange_ms=state.exchange_ms,
            failed=failed,
            stop=stop,
            accumulated=state.accumulated,
            rows=result.rows % ROW_MODULUS,
            divided=result.divided,
            ended=ended,
            plan_high=high,
            plan_low=low,
        )

    return np.array([row(*one) for one in zip(ranks, results, late, strict=True)])


class RoundStatistics:
    """The statistics of a round by name, from the merged table; equal on every host.

    Attributes:
      counts: steps of each replica: fewer than planned if it reached the time limit.
      wall_ms: time of the steps of each replica.
      group_ms: time of each replica in merges with its group, waits included.
      busy_ms: time of each replica to the end of its steps, both of them.
      compile_ms: time in which each replica compiled meanwhile, in neither of them.
      prepare_ms: the longest compilation before a round so far, of all processes.
      last_sync_ms: cost of the previous merge, the median over replicas. The minimum would miss the cost of sharing a
        core; the mean would follow a replica that started late, e.g. after an evaluation.
      last_merge_ms: the duration of the previous merge, also of what ran beside steps, the median too.
      last_exchange_ms: the duration of the previous exchange before a merge, the least: the others waited for that
        replica.
      stop: the most urgent request to stop.
      is_divided: whether a replica made a step on rows of several shapes.
      ended: for each rank 0, or a number of its stream, if that has no more batches in this epoch.
      examples: of each replica.
      weights: the weight of the loss of each replica, above 0 where there are examples.
      losses: mean loss of each replica, NaN without a step, or without weight.
      loss: mean loss over all replicas, NaN without weight.
      loss_weight: the weight of the loss of all replicas.
      metrics: means of the metrics over all replicas, NaN without weight.
    """

    def __init__(self, numbers: np.ndarray, columns: Columns):
        self._numbers, self._columns = np.asarray(numbers, np.float64), columns
        self._host = host = dict(zip(HOST_COLUMNS, self._numbers.T, strict=False))
        self._sums = sums = self._numbers[:, SUMS]
        self.counts = tuple(map(int, host["count"]))
        self.wall_ms = tuple(host["wall_ms"].tolist())
        self.group_ms = tuple(host["group_ms"].tolist())
        self.busy_ms = tuple((host["wall_ms"] + host["group_ms"]).tolist())
        self.compile_ms = tuple(host["compile_ms"].tolist())
        self.prepare_ms = float(host["prepare_ms"].max())
        self.last_sync_ms = statistics.median(host["last_sync_ms"].tolist())
        self.last_merge_ms = statistics.median(host["last_merge_ms"].tolist())
        self.last_exchange_ms = float(host["last_exchange_ms"].min())
        self.stop = int(host["stop"].max())
        self.is_divided = bool(host["divided"].any())
        self.ended = tuple(map(int, host["ended"]))
        # The sum of the examples, rounded, has the multiple of ROW_MODULUS.
        self.examples = host["rows"] + ROW_MODULUS * np.round((sums[:, 0] - host["rows"]) / ROW_MODULUS)
        # Of the loss, and of each metric.
        weights = [sums[:, column] for column in columns.weights]
        self.weights = self.examples
        if columns.weights[0] != 0:
            # The sums are of other steps if they were sent before the last ones.
            part = np.divide(self.examples, sums[:, 0], out=np.zeros_like(self.examples), where=sums[:, 0] > 0)
            self.weights = np.where(self.examples, (part * weights[0]).clip(TINY_WEIGHT), 0)
        self.losses = tuple(_ratio(sums[:, 1], weights[0]).tolist())
        self.loss, *metrics = (float(_ratio(sums[:, 1 + i].sum(), one.sum())) for i, one in enumerate(weights))
        self.metrics = dict(zip(columns.metrics, metrics, strict=True))
        self.loss_weight = float(weights[0].sum())

    def with_times(self, wall_ms: Sequence[float], group_ms: Sequence[float]) -> RoundStatistics:
        """The same statistics with other times."""
        numbers = self._numbers.copy()
        numbers[:, HOST_COLUMNS.index("wall_ms")] = wall_ms
        numbers[:, HOST_COLUMNS.index("group_ms")] = group_ms
        return RoundStatistics(numbers, self._columns)

    def check(self, planned: PlannedRound, group: Group, errors: Mapping[int, Exception], finite: bool) -> None:
        """Raise an error on all hosts if the round failed; ``errors`` are those of local replicas, by rank."""
        plan = planned.plan
        if (self._host["failed"] == FAILED).any():
            rank, error = next(iter(errors.items()), (0, None))
            group.raise_everywhere(error, rank, f"round {plan.round}", is_kept=not planned.given.donates)
        self._check_plans(plan)
        if not self.examples.any():
            raise ValueError(
                f"data has no batches in epoch {plan.epoch}; an iterator can be read once: give a function that "
                "makes a new one, jaxche.Stream(lambda epoch: batches(seed=epoch))"
            )
        self._check_finite(planned, finite)

    def _check_plans(self, plan: RoundPlan) -> None:
        digests = list(zip(self._host["plan_high"], self._host["plan_low"], strict=True))
        if len(set(digests)) > 1 or DIFFERS in digests:
            raise PlanMismatchError(
                f"round {plan.round}: hosts planned different rounds; this one planned counts={plan.counts} from batch "
                f"{plan.start} of {plan.epoch_size} in epoch {plan.epoch}, and ranks "
                f"{[r for r, d in enumerate(digests) if d != tuple(map(float, plan.digest_halves()))]} something else; "
                "use the same data, seed and settings on all of them"
            )

    def _check_finite(self, planned: PlannedRound, finite: bool) -> None:
        losses = self._sums[:, 1]
        bad = [rank for rank, n in enumerate(planned.plan.counts) if n and not np.isfinite(losses[rank])]
        broken = np.flatnonzero(self._numbers[:, NOT_FINITE] + (self._host["failed"] == BROKEN)).tolist()
        if bad:
            raise non_finite_error(planned, self.counts, f"the loss of rank {bad[0]} became {losses[bad[0]]}", bad[0])
        if broken:
            what = f"a gradient, a parameter or a state of rank {broken[0]} became NaN or infinite"
            raise non_finite_error(planned, self.counts, what, broken[0])
        if not finite:
            what = "the merged parameters or optimizer state became NaN or infinite"
            raise non_finite_error(planned, self.counts, what)


def errors_of(planned: PlannedRound, ranks: Sequence[int], results: Sequence[LocalResult]) -> dict[int, Exception]:
    """The errors of local replicas by rank; first those of steps after the table of the round before was sent.

    What came first is the reason: after a step that failed, a stream may be at another place.
    """
    late = planned.state.unsent.errors if planned.state.unsent else ()
    late = [None if isinstance(error, NonFiniteLossError) else error for error in late]
    errors: dict[int, Exception] = {}
    for found in (late, [result.error for result in results]):
        errors |= {rank: error for rank, error in zip(ranks, found, strict=False) if error and rank not in errors}
    return errors


def _ratio(sums: Any, weights: Any) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(sums, weights)


class RoundTimes(NamedTuple):
    """Times of a round, in milliseconds. Those of merges are of this process; the next merge sends them to all.

    Attributes:
      sync_ms: the time that its merge added to it.
      hidden_ms: the time that the merge of the round before it took beside its steps.
      exchange_ms: with overlap, the duration of the exchange of its measurements.
      last_merge_ms: the duration of its merge; 0 with overlap, because it has just begun.
      merge_ms: its merge on the clock of a virtual fleet, which knows it before the merge begins; else None.
      group_ms: the time that the merges within groups added to it.
      clock_ms: the time of all rounds so far, equal in all processes.
      clock_merge_ms: the part of it that stands for the last merge.
    """

    sync_ms: float
    hidden_ms: float = 0.0
    exchange_ms: float = 0.0
    last_merge_ms: float = 0.0
    merge_ms: float | None = None
    group_ms: float = 0.0
    clock_ms: float = 0.0
    clock_merge_ms: float = 0.0

    def with_clock(self, state: TrainerState, table: RoundStatistics, is_shared: bool) -> RoundTimes:
        """These times with the clock after a round that began at ``state``.

        If several processes share the clock, the cost of the last merge stands for that of this one, because all have
        it; the next round corrects it.
        """
        merge_ms = table.last_sync_ms if is_shared else self.sync_ms
        before_ms = state.clock_ms + (table.last_sync_ms - state.clock_merge_ms if is_shared else 0.0)
        clock_ms = before_ms + max(table.wall_ms) + self.group_ms + merge_ms
        # The clock never goes back: what a correction would take beyond this round is left to the next.
        late_ms = max(0.0, state.clock_ms - clock_ms)
        return self._replace(clock_ms=clock_ms + late_ms, clock_merge_ms=merge_ms + late_ms)


def measured_times(planned: PlannedRound, table: RoundStatistics, elapsed_ms: float, exchange_ms: float) -> RoundTimes:
    """The times of a round that took ``elapsed_ms``, and its exchange before a merge ``exchange_ms``."""
    # Replicas start a round together: the time beyond the slowest replica is that of the merge.
    sync_ms = elapsed_ms - max(map(sum, zip(table.busy_ms, table.compile_ms, strict=True)))
    return _round_times(planned, table, sync_ms, exchange_ms)


def fleet_times(
    planned: PlannedRound, table: RoundStatistics, fleet: VirtualFleet, batch_size: int, sent_bytes: int
) -> tuple[RoundStatistics, RoundTimes]:
    """The statistics and the times of a round on the clock of a virtual fleet.

    ``batch_size`` is the number of examples in a whole batch, and ``sent_bytes`` what a replica sends in the merge.
    """
    batches = table.examples / batch_size
    wall_ms, merge_ms = fleet.timings(table.counts, planned.plan.round, batches.tolist(), sent_bytes)
    groups, merges = planned.groups.ranks, planned.group_merges
    paused = paused_ms(groups, table.counts, wall_ms.tolist(), merges, fleet.group_sync_ms)
    table = table.with_times(wall_ms.tolist(), paused.tolist())
    sync_ms, exchange_ms = merge_ms, 0.0
    if planned.overlap:
        exchange_ms, sent = fleet.exchange_cost_ms, tuple(map(min, planned.sent_after or table.counts, table.counts))
        exposed = exposed_exchange_ms(table.busy_ms, table.counts, sent, exchange_ms)
        sync_ms = _waited_ms(planned, table) + exposed
    times, known_ms = _round_times(planned, table, sync_ms, exchange_ms), max(merge_ms, _FREE_MS)
    return table, times._replace(merge_ms=known_ms, last_merge_ms=0.0 if planned.overlap else known_ms)


def _waited_ms(planned: PlannedRound, table: RoundStatistics) -> float:
    """The part of the merge in flight that was not hidden by the steps beside it."""
    if (in_flight := planned.state.in_flight) is None:
        return 0.0
    overlapped = tuple(map(min, planned.overlapped, table.counts))
    return exposed_ms(table.busy_ms, table.counts, overlapped, in_flight.duration_ms)


def _round_times(planned: PlannedRound, table: RoundStatistics, sync_ms: float, exchange_ms: float) -> RoundTimes:
    in_flight = planned.state.in_flight
    hidden_ms = max(0.0, in_flight.duration_ms - _waited_ms(planned, table)) if in_flight else 0.0
    sync_ms = max(0.0, sync_ms) if len(table.counts) > 1 else 0.0
    last_merge_ms = 0.0 if planned.overlap else sync_ms
    group_ms = max(table.busy_ms) - max(table.wall_ms)
    return RoundTimes(sync_ms, hidden_ms, exchange_ms, last_merge_ms, group_ms=group_ms)


def advance(
    planned: PlannedRound, merged: Merged, table: RoundStatistics, times: RoundTimes
) -> tuple[TrainerState, RoundInfo]:
    """The state after a round and its record.

    The next plan depends on the plan and the table only, so it is the same on all hosts.
    """
    state, plan = planned.state, planned.plan
    che, correction, verdict = _report(planned, merged, table)
    info = _record(planned, merged, table, times, verdict)
    epoch, cursor = (state.epoch, state.cursor) if state.pending_batches else plan.end
    after = replace(
        state,
        local_states=merged.local_states,
        che=che,
        correction=correction,
        round=plan.round + 1,
        epoch=epoch,
        cursor=cursor,
        examples=info.examples_done,
        sync_ms=times.sync_ms,
        merge_ms=times.last_merge_ms,
        exchange_ms=times.exchange_ms,
        pending_batches=() if plan.shares else _pending_batches(state.pending_batches, plan, table.counts),
        accumulated=int(merged.report.accumulated),
        clock_ms=times.clock_ms,
        clock_merge_ms=times.clock_merge_ms,
        steps=info.steps_done,
        opt_states_differ=planned.opt_states_differ,
        in_flight=None,
        unsent=None,
    )
    after = planned.reader.advance(state, after, plan, table.counts, table.ended)
    if planned.groups.ranks:
        merges = planned.groups.next_merges(after, table.group_ms, planned.group_merges)
        after = replace(after, group_merges=merges)
    return after, info


def _report(
    planned: PlannedRound, merged: Merged, table: RoundStatistics
) -> tuple[ElChe | None, DivergenceCorrection, Verdict]:
    """The cadence after the report of a round, with its divergence correction and the verdict of that."""
    state, plan, counts = planned.state, planned.plan, table.counts
    before, correction = state.che, state.correction
    if before is None:
        return None, correction, Verdict.CALM
    # Without the times of merges a tuner learns from whole rounds only, and the end of an epoch may cut one short.
    learns = planned.policy is ApplyPolicy.SYNC or TUNERS[before.tuner].stores_merges
    is_whole = learns or counts == before.limited_counts
    wall_ms, reported = table.wall_ms, counts
    if plan.shares:
        # A cadence counts whole batches: report the time that one would have taken.
        wall_ms = state.row_shares.whole_ms(counts, table.examples.tolist(), plan.batches, wall_ms)
        is_whole, reported = True, [min(n, 1) for n in counts]
    last_merge_ms = table.last_merge_ms if is_whole else 0.0
    moved_ms = max(table.wall_ms) if merged.wall_ms is None else merged.wall_ms
    moved_ms = travel_ms(moved_ms, merged.report)
    che = before.report_timing(wall_ms, reported, last_merge_ms, moved_ms, table.last_exchange_ms)
    late = [n < m and not end for n, m, end in zip(counts, plan.counts, table.ended, strict=True)]
    if any(late) and not plan.shares:
        # A replica reached the time limit. Report twice, because a tuner may discard a single outlier.
        che = che.report_timing(wall_ms, counts, 0.0)
    if planned.policy is not ApplyPolicy.ASYNC:
        return che, correction, Verdict.CALM
    correction, che, verdict = correction.apply(before, che, merged.report.drift, max(counts))
    return che, correction, verdict


def _weights(planned: PlannedRound, table: RoundStatistics) -> tuple[tuple[float, ...], float]:
    """The weight of each replica in the merge, and its step towards their mean."""
    plan, counts = planned.plan, table.counts
    if planned.rule is None:
        return tuple((table.weights / table.weights.sum()).tolist()), 1.0
    sizes = [weight / max(n, 1) for weight, n in zip(table.weights, counts, strict=True)]
    return planned_weights(planned.rule, plan, counts, sizes)


def planned_weights(
    rule: str, plan: RoundPlan, counts: Sequence[int], batch_sizes: Sequence[float] | None = None
) -> tuple[tuple[float, ...], float]:
    """:func:`merge_weights` of replicas that took ``counts`` steps of a plan."""
    if rule == "steps" and plan.shares:
        return merge_weights(rule, [part if n else 0.0 for part, n in zip(plan.batches, counts, strict=True)])
    return merge_weights(rule, counts, batch_sizes)


def _record(
    planned: PlannedRound, merged: Merged, table: RoundStatistics, times: RoundTimes, verdict: Verdict
) -> RoundInfo:
    """The record of a round."""
    state, plan, counts = planned.state, planned.plan, table.counts
    (weights, alpha), report = _weights(planned, table), merged.report
    examples = int(table.examples.sum())
    return RoundInfo(
        round=plan.round,
        epoch=plan.epoch,
        cursor=plan.start,
        counts=counts,
        planned=plan.counts,
        weights=weights,
        wall_ms=table.wall_ms,
        sync_ms=times.sync_ms + times.group_ms,
        loss=table.loss,
        metrics=table.metrics,
        drift=report.drift,
        drift_dir=report.drift_direction,
        losses=table.losses,
        examples=examples,
        anchor=min(n for n in plan.counts if n),
        verdict=verdict.value,
        stop=table.stop,
        average="gradients" if planned.rule is None else "parameters",
        merge=planned.rule or "",
        policy=planned.policy.value,
        alpha=alpha,
        clock_ms=times.clock_ms,
        rows=tuple(map(int, table.examples)),
        shares=plan.shares,
        joined=plan.joined,
        steps_done=state.steps + sum(counts if not plan.shares else (plan.joined,)),
        examples_done=state.examples + examples,
        merge_bytes=merged.nbytes,
        wire=planned.wire,
        hidden_ms=times.hidden_ms,
        overlap=planned.overlap,
        overlapped=tuple(map(min, planned.overlapped, counts)),
        sent_after=planned.sent_after,
        groups=planned.groups.numbers(len(counts)) if planned.groups.ranks else (),
        group_merges=planned.group_merges,
        group_ms=times.group_ms,
        loss_weight=table.loss_weight,
        **merged.scaled._asdict(),
    )


def travel_ms(wall_ms: float, report: Report) -> float:
    """Time in which a replica moves as far as its parameters are long; 0 if not known.

    Replicas count by their batches, whatever their weights in the merge: a rule that gives slow replicas more weight
    must not make the fast ones look slower, and so rounds longer.
    """
    known = report.mean_params_sq > 0
    path = math.sqrt(report.squares_by_batches / report.mean_params_sq) if known else 0.0
    return wall_ms / path if path > 0 and math.isfinite(wall_ms / path) else 0.0


def _pending_batches(
    pending_batches: tuple[tuple[int, int, int], ...], plan: RoundPlan, counts: tuple[int, ...]
) -> tuple[tuple[int, int, int], ...]:
    """The pending batches after a round of this plan with these counts of steps."""
    after = []
    if pending_batches:
        (epoch, _, stop), *others = pending_batches
        start = plan.start + plan.total
        after = [*([(epoch, start, stop)] if start < stop else []), *others]
    late = [rank for rank, (done, planned) in enumerate(zip(counts, plan.counts, strict=True)) if done < planned]
    for rank in late:
        left = plan.share(rank)[counts[rank] :]
        for epoch in dict.fromkeys(e for e, _ in left):
            indices = [i for e, i in left if e == epoch]
            after.append((epoch, indices[0], indices[-1] + 1))
    return tuple(sorted(after))
