"""Which batches the next round takes, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence

from jaxche.cadence import ApplyPolicy, ElChe, RoundPlan, clamp_counts, limit_lead, plan_round
from jaxche.training._state import ReplicaState

# Steps in a round of a single replica: nothing is merged there, it is only how often the loop reports.
SOLO_ROUND = 50

# Rounds may be a few milliseconds long, and a hiccup of the machine is no reason to cut one short.
_LEAST_PATIENCE_MS = 200.0


def next_plan(
    state: ReplicaState,
    size: int,
    policy: ApplyPolicy,
    world_size: int,
    last_epoch: int | None = None,
    alone: int = SOLO_ROUND,
) -> RoundPlan:
    """The round that follows from a state; batches that replicas owe from an earlier one come first.

    Args:
      state: the same on every host.
      size: batches in an epoch.
      policy: when replicas meet.
      world_size: replicas.
      last_epoch: where training ends, for a round that crosses epochs.
      alone: steps of a single replica.
    """
    lead = state.che.max_batch_diff if state.che else None
    if state.owed:
        epoch, start, stop = state.owed[0]
        wanted = limit_lead(state.che.batch_counts if state.che else (1,) * world_size, lead)
        return RoundPlan(state.round, epoch, start, clamp_counts(wanted, stop - start), size)
    if state.che is None:
        counts = (alone,)
    else:
        counts = (1,) * world_size if policy is ApplyPolicy.SYNC else state.che.batch_counts
    return plan_round(
        counts,
        round=state.round,
        epoch=state.epoch,
        cursor=state.cursor,
        epoch_size=size,
        max_batch_diff=lead,
        crosses_epochs=policy is ApplyPolicy.ASYNC,
        last_epoch=last_epoch,
    )


def forced_plan(
    state: ReplicaState, size: int, policy: ApplyPolicy, world_size: int, counts: Sequence[int]
) -> RoundPlan:
    """A round of counts given from outside, e.g. recorded ones; cut only where the epoch ends.

    Raises:
      ValueError: counts for another number of replicas, or none.
    """
    if len(counts) != world_size or sum(counts) < 1:
        raise ValueError(
            f"counts={tuple(counts)} has {len(counts)} entries for {world_size} replicas; "
            "give each its number of steps, at least one in all"
        )
    epoch, start, stop = (state.owed or ((state.epoch, state.cursor, size),))[0]
    left = sum(counts) if policy is ApplyPolicy.ASYNC and not state.owed else stop - start
    return RoundPlan(state.round, epoch, start, clamp_counts(counts, left), size)


def limit_ms(che: ElChe | None, plan: RoundPlan) -> float | None:
    """When a replica stops short of its plan: it holds up the others by the length of one round, not more."""
    if che is None or not all(che.ms_per_batch):
        return None
    expected = max(n * ms for n, ms in zip(plan.counts, che.ms_per_batch, strict=True))
    return expected + max(expected, _LEAST_PATIENCE_MS)
