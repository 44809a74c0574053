"""What follows from a merged round: the next cadence, the next state, the record."""

from __future__ import annotations

from dataclasses import replace

from jaxche.averaging import merge_weights
from jaxche.cadence import ApplyPolicy, RoundPlan, Verdict, limit_lead
from jaxche.training._merge import Merged
from jaxche.training._state import ReplicaState, RoundInfo
from jaxche.training._table import Table


def learn(
    state: ReplicaState,
    plan: RoundPlan,
    merged: Merged,
    table: Table,
    policy: ApplyPolicy,
    rule: str | None,
    sync_ms: float,
) -> tuple[ReplicaState, RoundInfo]:
    """The state after a round and its record.

    All that decides the next plan is a function of the plan and the table, so that all hosts go on alike.

    Args:
      state: the state before the round.
      plan: what was planned.
      merged: what the merge returned.
      table: the same with names.
      policy: when replicas meet; ``async`` corrects divergence.
      rule: merge rule of parameters, or None where gradients are averaged.
      sync_ms: what the merge cost this process; it reaches the others in the next merge.
    """
    counts = table.counts
    che, correction, verdict = state.che, state.correction, Verdict.CALM
    rel, direction = merged.drift
    if che is not None:
        # A round cut short by the end of an epoch says nothing of the overhead of a whole one.
        whole = counts == limit_lead(che.batch_counts, che.max_batch_diff)
        before = che
        che = before.report_timing(table.wall_ms, counts, table.last_sync_ms if whole else 0.0)
        if counts != plan.counts:
            # Somebody ran out of time. A tuner that leaves out a stray report would let that happen once more.
            che = che.report_timing(table.wall_ms, counts, 0.0)
        if policy is ApplyPolicy.ASYNC:
            correction, che, verdict = correction.apply(before, che, rel)
    examples = table.examples
    if rule is None:
        weights, alpha = tuple((examples / examples.sum()).tolist()), 1.0
    else:
        sizes = [e / max(n, 1) for e, n in zip(examples, counts, strict=True)]
        weights, alpha = merge_weights(rule, counts, batch_sizes=sizes)
    info = RoundInfo(
        round=plan.round,
        epoch=plan.epoch,
        cursor=plan.start,
        counts=counts,
        planned=plan.counts,
        weights=weights,
        wall_ms=table.wall_ms,
        sync_ms=sync_ms,
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
        alpha=alpha,
        **merged.scaled._asdict(),
    )
    epoch, cursor = (state.epoch, state.cursor) if state.owed else plan.end
    after = replace(
        state,
        locals=merged.locals,
        che=che,
        correction=correction,
        round=plan.round + 1,
        epoch=epoch,
        cursor=cursor,
        examples=state.examples + info.examples,
        sync_ms=sync_ms,
        owed=_owed(state.owed, plan, counts),
        pending=merged.pending,
    )
    return after, info


def _owed(
    owed: tuple[tuple[int, int, int], ...], plan: RoundPlan, counts: tuple[int, ...]
) -> tuple[tuple[int, int, int], ...]:
    """What is owed after a round of this plan in which so many steps were taken."""
    after = []
    if owed:
        (epoch, _, stop), *others = owed
        start = plan.start + plan.total
        after = [*([(epoch, start, stop)] if start < stop else []), *others]
    for rank, done in enumerate(counts):
        left = plan.share(rank)[done:]
        for epoch in dict.fromkeys(e for e, _ in left):
            indices = [i for e, i in left if e == epoch]
            after.append((epoch, indices[0], indices[-1] + 1))
    return tuple(sorted(after))
