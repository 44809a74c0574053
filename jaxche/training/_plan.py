"""The plan of the next round, from the state: the batches, or rows of them, that each replica takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxche.cadence import (
    ApplyPolicy,
    ElChe,
    RoundPlan,
    RowShares,
    active_counts,
    choose,
    clamp_counts,
    limit_lead,
    split_by_ratio,
)
from jaxche.reports import RoundInfo, positive
from jaxche.training._state import TrainerState

# Steps in a round of a single replica. Nothing is merged there; a round only reports.
SOLO_ROUND = 50

# Rounds may take a few milliseconds, and a short delay of the machine must not cut them short.
_MIN_EXTRA_MS = 200.0


class End(NamedTuple):
    """Training ends at the first of these totals of a run, in the order of :class:`~jaxche.reports.Reached`.

    None is no limit. All processes compare equal numbers, so they end after the same round.
    """

    steps: int | None = None
    examples: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    @classmethod
    def of_fit(
        cls,
        state: TrainerState,
        epochs: int | None,
        max_steps: int | None,
        max_examples: int | None,
        max_time: float | None,
    ) -> End:
        """The end of a fit that starts from this state; ValueError for a number that is not above 0."""
        if epochs is None and max_steps is None and max_examples is None and max_time is None:
            epochs = 1
        done = state.reached._replace(epochs=state.epoch)

        def limit(name: str, number: Any, done: float, line: str) -> Any:
            return None if number is None else done + positive(name, number, line, whole=name != "max_time")

        return cls(
            steps=limit("max_steps", max_steps, done.steps, "max_steps=1000"),
            examples=limit("max_examples", max_examples, done.examples, "max_examples=100_000"),
            epochs=limit("epochs", epochs, done.epochs, "epochs=3"),
            seconds=limit("max_time", max_time, done.seconds, "max_time=3600"),
        )

    def is_reached(self, state: TrainerState) -> bool:
        """Whether the run of this state has ended."""
        return any(limit is not None and done >= limit for limit, done in zip(self, state.reached, strict=True))

    def batches_left(self, state: TrainerState, batch_size: int) -> int | None:
        """The most batches of the next round, at least one; None for no limit.

        Args:
          state: the state before the round.
          batch_size: examples in a whole batch; 0 if not known yet.
        """
        left = []
        if self.steps is not None:
            left.append(self.steps - state.steps)
        if self.examples is not None and batch_size:
            left.append(-(-(self.examples - state.examples) // batch_size))
        return max(1, min(left)) if left else None


class GivenRound(NamedTuple):
    """What is given for a round, and not planned: by a user, or by a record that is replayed.

    Attributes:
      counts: planned steps of each replica, without a time limit; None if the cadence plans them.
      done: steps that each takes of these, because it was out of time when the round was recorded.
      shares: rows of each replica, if batches are split, and ``joined``, the number of batches that are.
      after: steps of each before it takes in the merge in flight.
      group_merges: the merges of the round, those within groups included; None for those that the state plans.
    """

    counts: Sequence[int] | None = None
    done: Sequence[int] | None = None
    shares: tuple[int, ...] = ()
    joined: int = 0
    after: Sequence[int] = ()
    group_merges: int | None = None

    @classmethod
    def of(cls, info: RoundInfo) -> GivenRound:
        """A recorded round."""
        return cls(info.planned, info.counts, info.shares, info.joined, info.overlapped, info.group_merges)


def next_plan(
    state: TrainerState,
    size: int,
    policy: ApplyPolicy,
    world_size: int,
    last_epoch: int | None = None,
    solo_steps: int = SOLO_ROUND,
    joined: int | None = None,
    most: int | None = None,
) -> RoundPlan:
    """The plan of the next round, the same on every host; pending batches of earlier rounds come first.

    ``size`` is the number of batches in an epoch, ``solo_steps`` the number of steps of a single replica,
    ``joined`` the number of batches in an update under ``sync``, by default one a replica, and ``most`` the number of
    batches to the end of the run, if it is limited. At the end of an epoch and of the run the last rounds are of about
    equal length: the loss of a round of one batch, on one replica, would be noise.
    """
    pending, che = bool(state.pending_batches), state.che
    epoch, start, stop = (state.pending_batches or ((state.epoch, state.cursor, size),))[0]
    left = stop - start if most is None else min(stop - start, most)
    plan = RoundPlan(state.round, epoch, start, (0,) * world_size, size)
    shares = RowShares() if pending else state.row_shares
    if policy is ApplyPolicy.SYNC and not (pending or shares.rows or joined in (None, world_size)):
        # Before times are known, equal parts in steps of at most a batch.
        shares = RowShares((1,) * world_size, (-(-joined // world_size),) * world_size, joined)
    if shares.rows:
        plan = replace(plan, counts=shares.steps, shares=shares.rows, joined=shares.joined)
        return plan.cut(_even_total(shares.joined, left))
    if che is None:
        counts = (1,) * world_size if pending else (solo_steps,)
    elif pending or policy is not ApplyPolicy.SYNC:
        counts = che.batch_counts
    else:
        counts = (1,) * world_size
    if che is not None and state.choice is not None and state.choice.active and not pending:
        counts = active_counts(che, state.choice, left)
    elif policy is ApplyPolicy.ASYNC and not pending:
        ends = None if last_epoch is None else (last_epoch - epoch) * size - start
        left = min((end for end in (ends, most) if end is not None), default=None)
    lead = che.max_batch_diff if che else None
    return replace(plan, counts=_even_counts(counts, left, lead, stretches=policy is not ApplyPolicy.SYNC))


# A rest at the end is joined with the round before it if it is shorter than this part of that round.
_FRAGMENT = 0.25


def _even_total(whole: int, left: int, least: int = 1) -> int:
    """The batches of the next round: ``whole``, or half of those left if a fragment would remain after it."""
    return -(-left // 2) if 0 < left - whole < max(least, _FRAGMENT * whole) else min(whole, left)


def _even_counts(counts: Sequence[int], left: int | None, lead: int | None, stretches: bool = True) -> tuple[int, ...]:
    """The batches of each rank, of ``left`` in all that remain, so that no fragment of a round remains after them.

    ``stretches`` is whether a rank may take one batch more, so that no rank is idle in the last round. Ranks without
    batches in ``counts`` get none.
    """
    ranks = [rank for rank, n in enumerate(counts) if n]
    wanted = limit_lead([counts[rank] for rank in ranks], lead)
    total = sum(wanted)
    if left is not None and stretches and total < left < 2 * len(ranks) and lead != 0:
        total = left
    elif left is not None:
        # In lockstep a part of a round may not leave ranks out.
        total = min(total, left) if lead == 0 else _even_total(total, left, least=len(ranks))
    found = dict(zip(ranks, _dealt(wanted, total, lead), strict=True))
    return tuple(found.get(rank, 0) for rank in range(len(counts)))


def _dealt(wanted: Sequence[int], total: int, lead: int | None) -> list[int]:
    """``total`` batches in the proportion of ``wanted``, none of them leading by more than ``lead``."""
    parts = split_by_ratio(total, wanted) if total > sum(wanted) else clamp_counts(wanted, total)
    if min(parts) == 0:  # fewer batches than ranks
        return list(parts)
    dealt = list(limit_lead(parts, lead))
    while lead and sum(dealt) < total:
        dealt[min(range(len(dealt)), key=lambda rank: (dealt[rank], -wanted[rank]))] += 1
    return dealt


def plan_of_counts(
    state: TrainerState,
    size: int,
    policy: ApplyPolicy,
    world_size: int,
    counts: Sequence[int],
    shares: tuple[int, ...] = (),
    joined: int = 0,
) -> RoundPlan:
    """The plan of a round with given counts, e.g. recorded ones, cut at the end of the epoch."""
    if len(counts) != world_size or sum(counts) < 1:
        raise ValueError(
            f"counts={tuple(counts)} has {len(counts)} entries for {world_size} replicas; "
            "give each its number of steps, and at least one step in total"
        )
    epoch, start, stop = (state.pending_batches or ((state.epoch, state.cursor, size),))[0]
    if shares:
        return RoundPlan(state.round, epoch, start, tuple(counts), size, shares, min(joined, stop - start))
    left = sum(counts) if policy is ApplyPolicy.ASYNC and not state.pending_batches else stop - start
    return RoundPlan(state.round, epoch, start, clamp_counts(counts, left), size)


def time_limit_ms(che: ElChe | None, plan: RoundPlan) -> float | None:
    """The time limit of a round: a slow replica delays the others by at most the length of one round."""
    if che is None or plan.shares or not all(che.ms_per_batch):
        return None
    expected = max(n * ms for n, ms in zip(plan.counts, che.ms_per_batch, strict=True))
    return expected + max(expected, _MIN_EXTRA_MS)


# The shares of rows are multiples of a batch divided by this.
_SHARES_OF_A_BATCH = 64
# If the slowest replica has time for so many batches, a round of a cadence deals out whole batches.
_WHOLE_BATCHES = 4
# In a shorter round their number changes only if it is off by this part of the wanted number.
_CHANGE = 0.15


class RowRules(NamedTuple):
    """How the rows of batches are shared by speed.

    Attributes:
      joined: batches in an update under ``sync``, unless ``policy="auto"`` has chosen a number.
      unit: shares are multiples of it, because each device of a sharded replica takes as many rows.
    """

    joined: int
    unit: int


def next_shares(
    state: TrainerState,
    info: RoundInfo,
    rules: RowRules,
    policy_of: Callable[[TrainerState], ApplyPolicy],
    batch_size: int,
    limits: Callable[[], Sequence[float]],
) -> TrainerState:
    """The state with the shares of the rows that follow from the times of the round, and with the choice.

    ``limits`` are the most rows of a step of each replica.
    """
    shares, che, choice = state.row_shares, state.che, state.choice
    if che is None:
        return state
    shares = shares.report(info.counts, info.rows, info.wall_ms)
    unit = math.lcm(rules.unit, max(1, batch_size // _SHARES_OF_A_BATCH))
    if choice is not None:
        choice = choose(choice, shares, che, batch_size, info.round, unit)
        if choice.policy is ApplyPolicy.CADENCE and info.policy == ApplyPolicy.SYNC:
            che = replace(che, travel_samples=())
    state = replace(state, choice=choice, che=che)
    joined, local = (choice and choice.joined) or rules.joined, policy_of(state) is not ApplyPolicy.SYNC
    if local:
        # "auto" changes the length of a round often; whole batches need no other programs.
        if choice is not None or not 0 < che.round_ms < _WHOLE_BATCHES * max(che.ms_per_batch):
            return replace(state, row_shares=shares.without())
        exact = che.round_ms * sum(1 / ms for ms in che.ms_per_batch if ms)
        # Other sizes are compiled for, so the number stays while it is about right.
        joined = shares.joined if abs(shares.joined - exact) < _CHANGE * exact else max(1, round(exact))
    return replace(state, row_shares=shares.split(joined, batch_size, unit, limits(), local))
