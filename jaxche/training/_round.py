"""The end of a round on the host: its merged statistics, its errors and the next state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from jaxche.averaging import merge_weights
from jaxche.cadence import ApplyPolicy, RoundPlan, Verdict, limit_lead
from jaxche.distributed import Group
from jaxche.replicas import DIFFERS, HOST_COLUMNS, TINY_WEIGHT, Columns, LocalResult, Merged
from jaxche.reports import RoundInfo
from jaxche.training._state import TrainerState


class PlanMismatchError(RuntimeError):
    """The hosts planned different rounds: their code, data length, seed or measurements differ.

    Example:
      >>> issubclass(PlanMismatchError, RuntimeError)
      True
    """


class NonFiniteLossError(FloatingPointError):
    """A loss, a gradient or a number of the training state became NaN or infinite.

    Attributes:
      rank: rank of the replica, or None if all replicas were finite and the merged state is not.
      round: number of the round; it is not merged.
      state: the state before that round.
      batches: ``(epoch, index)`` of the batches of that replica, or of all replicas, in the round.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> data = jaxche.Batches(np.full((4, 2), np.nan, np.float32), batch_size=2)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1))
      >>> try:
      ...     _ = trainer.fit(trainer.init(jnp.zeros(2)), data, progress=False)
      ... except jaxche.NonFiniteLossError as error:
      ...     trainer.params(error.state).tolist(), error.batches[0]
      ([0.0, 0.0], (0, 0))
    """

    def __init__(
        self, message: str, rank: int | None, round: int, state: Any, batches: tuple[tuple[int, int], ...] = ()
    ):
        super().__init__(message)
        self.rank, self.round, self.state, self.batches = rank, round, state, batches


class RoundTimes(NamedTuple):
    """Times of a round, in milliseconds.

    Attributes:
      sync_ms: the time that its merge added to it.
      hidden_ms: the time that the merge of the round before it took beside its steps.
      merge_ms: its merge on the clock of a virtual fleet, which knows it before the merge begins; else 0.
      group_ms: the time that the merges within groups added to it.
    """

    sync_ms: float
    hidden_ms: float = 0.0
    merge_ms: float = 0.0
    group_ms: float = 0.0


_COLUMN = {name: i for i, name in enumerate(HOST_COLUMNS)}
_NOT_FINITE = len(HOST_COLUMNS)
_SUMS = _NOT_FINITE + 1


def host_row(
    state: TrainerState, plan: RoundPlan, rank: int, result: LocalResult, stop: int = 0, ended: int = 0
) -> list[float]:
    """The numbers that the host of a replica adds to the table, in the order of ``HOST_COLUMNS``."""
    failed = result.error is not None
    # The count is a weight of the merge; after an error nothing is merged.
    steps = plan.counts[rank] if failed else result.steps
    return [
        steps,
        plan.batches[rank] if plan.shares and steps else steps,
        result.wall_ms,
        result.group_ms,
        state.sync_ms,
        state.hidden_ms,
        failed,
        stop,
        state.accumulated,
        ended,
        *plan.digest_halves(),
    ]


class RoundStatistics:
    """The statistics of a round by name, from the merged table; equal on every host.

    Attributes:
      counts: steps of each replica: fewer than planned if it reached the time limit.
      wall_ms: time of the steps of each replica.
      group_ms: time of each replica in merges with its group, waits included.
      busy_ms: time of each replica to the end of its steps, both of them.
      last_sync_ms: cost of the previous merge, the median over replicas. The minimum would miss the cost of sharing a
        core; the mean would follow a replica that started late, e.g. after an evaluation.
      last_hidden_ms: the part of the previous merge that ran beside steps, the median too.
      stop: the most urgent request to stop.
      ended: for each rank 0, or a number of its stream, if that has no more batches in this epoch.
      examples: of each replica.
      weights: the weight of the loss of each replica, above 0 where there are examples.
      losses: mean loss of each replica, NaN without a step, or without weight.
      loss: mean loss over all replicas, NaN without weight.
      metrics: means of the metrics over all replicas, NaN without weight.
    """

    def __init__(self, numbers: np.ndarray, columns: Columns):
        self._numbers, self._columns = np.asarray(numbers, np.float64), columns
        host = dict(zip(HOST_COLUMNS, self._numbers.T, strict=False))
        self._sums = sums = self._numbers[:, _SUMS:]
        self.counts = tuple(map(int, host["count"]))
        self.wall_ms = tuple(host["wall_ms"].tolist())
        self.group_ms = tuple(host["group_ms"].tolist())
        self.busy_ms = tuple((host["wall_ms"] + host["group_ms"]).tolist())
        self.last_sync_ms = float(np.median(host["last_sync_ms"]))
        self.last_hidden_ms = float(np.median(host["last_hidden_ms"]))
        self.stop = int(host["stop"].max())
        self.ended = tuple(map(int, host["ended"]))
        self.examples = sums[:, 0]
        # Of the loss, and of each metric.
        weights = [sums[:, columns.weight_of(position)] for position in range(1 + len(columns.metrics))]
        own = columns.weight_of(0) != 0
        self.weights = np.where(self.examples, weights[0].clip(TINY_WEIGHT), 0) if own else weights[0]
        self.losses = tuple(_ratio(sums[:, 1], weights[0]).tolist())
        self.loss, *metrics = (float(_ratio(sums[:, 1 + i].sum(), one.sum())) for i, one in enumerate(weights))
        self.metrics = dict(zip(columns.metrics, metrics, strict=True))

    def with_times(self, wall_ms: Sequence[float], group_ms: Sequence[float]) -> RoundStatistics:
        """The same statistics with other times."""
        numbers = self._numbers.copy()
        numbers[:, _COLUMN["wall_ms"]] = wall_ms
        numbers[:, _COLUMN["group_ms"]] = group_ms
        return RoundStatistics(numbers, self._columns)

    def check(
        self,
        group: Group,
        state: TrainerState,
        plan: RoundPlan,
        ranks: Sequence[int],
        results: Sequence[LocalResult],
        finite: bool,
        share: Callable[[int], Sequence[tuple[int, int]]] | None = None,
        look: Callable[[Sequence[tuple[int, int]]], str | None] = lambda keys: "",
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        """Raise an error on all hosts if the round failed; ``finite`` is the flag of the merge.

        ``share`` returns the batches of a rank, by default those of the plan. ``look`` finds the numbers of batches
        that are not finite, as text; None if the batches cannot be read again. Ranks of the same one of the ``groups``
        have merged within the round.

        Raises:
          Exception: the error of a local replica.
          RankError: a replica of another process failed.
          PlanMismatchError: the hosts planned different rounds.
          NonFiniteLossError: a loss, a gradient, a local state or the merged state is NaN or infinite.
        """
        if self._numbers[:, _COLUMN["failed"]].any():
            errors = [(result.error, rank) for rank, result in zip(ranks, results, strict=True) if result.error]
            group.raise_everywhere(*(errors[0] if errors else (None, ranks[0])), f"round {plan.round}")
        digests = [tuple(row) for row in self._numbers[:, [_COLUMN["plan_high"], _COLUMN["plan_low"]]]]
        if len(set(digests)) > 1 or DIFFERS in digests:
            raise PlanMismatchError(
                f"round {plan.round}: hosts planned different rounds; this one planned counts={plan.counts} from batch "
                f"{plan.start} of {plan.epoch_size} in epoch {plan.epoch}, and ranks "
                f"{[r for r, d in enumerate(digests) if d != tuple(map(float, plan.digest_halves()))]} something else; "
                "use the same data, seed and settings on all of them"
            )
        if not self.examples.any():
            raise ValueError(
                f"data has no batches in epoch {plan.epoch}; an iterator can be read once: give a function that "
                "makes a new one, jaxche.Stream(lambda epoch: batches(seed=epoch))"
            )
        losses = self._sums[:, 1]
        bad = [r for r, n in enumerate(plan.counts) if n and not np.isfinite(losses[r])]
        broken = np.flatnonzero(self._numbers[:, _NOT_FINITE]).tolist()
        if bad:
            rank, what = bad[0], f"the loss of rank {bad[0]} became {losses[bad[0]]}"
        elif broken:
            rank, what = broken[0], f"a gradient, a parameter or a state of rank {broken[0]} became NaN or infinite"
        elif not finite:
            rank, what = None, "the merged parameters or optimizer state became NaN or infinite"
        else:
            return
        share = share or plan.share
        suspects: Sequence[int] = range(len(plan.counts))
        if rank is not None:
            suspects = next((group for group in groups if rank in group), [rank])
        if 1 < len(suspects) < len(plan.counts):
            what += f", or that of another replica of its group {tuple(suspects)} did before they merged,"
        ends = [None if plan.shares else self.counts[r] for r in suspects]
        batches = tuple(dict.fromkeys(batch for r, end in zip(suspects, ends, strict=True) for batch in share(r)[:end]))
        self._refuse_numbers(state, plan, rank, what, batches, look(batches))

    def _refuse_numbers(
        self,
        state: TrainerState,
        plan: RoundPlan,
        rank: int | None,
        what: str,
        batches: tuple[tuple[int, int], ...],
        found: str | None,
    ) -> NoReturn:
        advice = (
            "Try a lower learning rate or tx=optax.chain(optax.clip_by_global_norm(1.0), tx), and look for a gradient "
            "that is not finite although the loss is (sqrt or log at 0, a mean of nothing)"
        )
        if found:
            advice = f"The data has {found}; take these examples out, or write np.nan_to_num(x)"
        elif found == "":
            advice = f"The numbers in these batches are finite. {advice}"
        else:
            advice = f"Look for NaN and infinite values in these batches. {advice}"
        raise NonFiniteLossError(
            f"{what} in round {plan.round}, which trained on {_batch_names(batches)}. {advice}. The round was not "
            "merged; this error's .state is the one before it",
            rank,
            plan.round,
            state,
            batches,
        )


def _ratio(sums: Any, weights: Any) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(sums, weights)


def _batch_names(batches: Sequence[tuple[int, int]]) -> str:
    """The batches as text, e.g. ``batches 3 to 7 of epoch 0, batch 0 of epoch 1``."""
    by_epoch: dict[int, list[int]] = {}
    for epoch, index in batches:
        by_epoch.setdefault(epoch, []).append(index)
    return ", ".join(
        f"batch{'es' * (len(found) > 1)} {_ranges(sorted(found))} of epoch {epoch}" for epoch, found in by_epoch.items()
    )


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " and ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)


def advance(
    state: TrainerState,
    plan: RoundPlan,
    merged: Merged,
    table: RoundStatistics,
    policy: ApplyPolicy,
    rule: str | None,
    times: RoundTimes,
    shared: bool = False,
    group_merges: int = 1,
) -> tuple[TrainerState, RoundInfo]:
    """The state after a round and its record.

    The next plan depends on the plan and the table only, so it is the same on all hosts. ``rule`` is the merge rule of
    parameters, or None if gradients are averaged. The ``times`` of the merge are those of this process; the next merge
    sends them to all. If the clock is ``shared`` by several processes, it takes the cost of the last merge for this one
    until then, because all have that.
    """
    counts, sync_ms, group_ms = table.counts, times.sync_ms, times.group_ms
    before, correction, verdict = state.che, state.correction, Verdict.CALM
    che = before
    rel, direction = merged.drift
    if che is not None and before is not None:
        # A round that the end of an epoch cuts short does not measure the overhead of a whole round.
        whole = counts == limit_lead(che.batch_counts, che.max_batch_diff)
        whole = whole or policy is ApplyPolicy.SYNC
        last_merge_ms = table.last_sync_ms + table.last_hidden_ms
        wall_ms, last_sync_ms, reported = table.wall_ms, last_merge_ms if whole else 0.0, counts
        if plan.shares:
            # A cadence counts whole batches: report the time that one would have taken.
            wall_ms = [wall / part if n else 0.0 for wall, part, n in zip(wall_ms, plan.batches, counts, strict=True)]
            last_sync_ms, reported = last_merge_ms, [min(n, 1) for n in counts]
        moved_ms = max(table.wall_ms) if merged.wall_ms is None else merged.wall_ms
        che = che.report_timing(wall_ms, reported, last_sync_ms, travel_ms(moved_ms, merged.squares))
        late = [n < m and not end for n, m, end in zip(counts, plan.counts, table.ended, strict=True)]
        if any(late) and not plan.shares:
            # A replica reached the time limit. Report twice, because a tuner may discard a single outlier.
            che = che.report_timing(wall_ms, counts, 0.0)
        if policy is ApplyPolicy.ASYNC:
            correction, che, verdict = correction.apply(before, che, rel)
    examples = table.examples
    if rule is None:
        weights, alpha = tuple((table.weights / table.weights.sum()).tolist()), 1.0
    else:
        sizes = [weight / max(n, 1) for weight, n in zip(table.weights, counts, strict=True)]
        parts = [part if n else 0.0 for part, n in zip(plan.batches, counts, strict=True)] if plan.shares else counts
        weights, alpha = merge_weights(rule, parts if rule == "steps" else counts, batch_sizes=sizes)
    merge_ms = table.last_sync_ms if shared else sync_ms
    before_ms = state.clock_ms + (table.last_sync_ms - state.clock_merge_ms if shared else 0.0)
    clock_ms = before_ms + max(table.wall_ms) + group_ms + merge_ms
    info = RoundInfo(
        round=plan.round,
        epoch=plan.epoch,
        cursor=plan.start,
        counts=counts,
        planned=plan.counts,
        weights=weights,
        wall_ms=table.wall_ms,
        sync_ms=sync_ms + group_ms,
        loss=table.loss,
        metrics=table.metrics,
        drift=rel,
        drift_dir=direction,
        losses=table.losses,
        examples=int(examples.sum()),
        anchor=min(n for n in plan.counts if n),
        verdict=verdict.value,
        stop=table.stop,
        average="gradients" if rule is None else "parameters",
        merge=rule or "",
        policy=policy.value,
        alpha=alpha,
        clock_ms=clock_ms,
        rows=tuple(map(int, examples)),
        shares=plan.shares,
        joined=plan.joined,
        steps_done=state.steps + sum(counts if not plan.shares else (plan.joined,)),
        examples_done=state.examples + int(examples.sum()),
        merge_bytes=merged.nbytes,
        hidden_ms=times.hidden_ms,
        group_merges=group_merges,
        group_ms=group_ms,
        **merged.scaled._asdict(),
    )
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
        sync_ms=sync_ms,
        hidden_ms=times.hidden_ms,
        pending_batches=() if plan.shares else _pending_batches(state.pending_batches, plan, counts),
        accumulated=merged.accumulated,
        clock_ms=clock_ms,
        clock_merge_ms=merge_ms,
        steps=info.steps_done,
        in_flight=None,
    )
    return after, info


def travel_ms(wall_ms: float, squares: tuple[float, ...]) -> float:
    """Time in which a replica moves as far as its parameters are long; 0 if not known.

    ``squares`` are those of :class:`Merged`. Replicas count by their batches, whatever their weights in the merge:
    a rule that gives slow replicas more weight must not make the fast ones look slower, and so rounds longer.
    """
    _, _, mean_params_sq, by_batches = squares
    path = math.sqrt(by_batches / mean_params_sq) if mean_params_sq > 0 else 0.0
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
