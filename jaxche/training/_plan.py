"""The plan of the next round, from the state: the batches, or rows of them, that each replica takes."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxche.cadence import (
    TUNERS,
    ApplyPolicy,
    ElChe,
    RoundPlan,
    RowShares,
    active_counts,
    choose,
    clamp_counts,
    limit_lead,
    sent_after,
    shared_steps,
    split_by_ratio,
)
from jaxche.data import Key, Reader
from jaxche.messages import positive
from jaxche.replicas import LocalState, MergeScale
from jaxche.reports import RoundInfo
from jaxche.training._groups import Groups
from jaxche.training._state import TrainerState

# A single replica merges nothing, and a round only reports. It has so many steps, or as many as take so long.
SOLO_ROUND = 50
_SOLO_MS = 2000.0

# Rounds may take a few milliseconds, and a short delay of the machine must not cut them short.
_MIN_EXTRA_MS = 200.0


class End(NamedTuple):
    """Training ends at the first of these totals of a run, in the order of :class:`~jaxche.reports.Reached`.

    None is no limit. All processes compare equal numbers, so they end after the same round. A round of a single
    replica, which merges nothing, also ends at each multiple of the numbers of steps in ``stops``.
    """

    steps: int | None = None
    examples: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    stops: tuple[int, ...] = ()

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
        return any(limit is not None and done >= limit for limit, done in zip(self[:-1], state.reached, strict=True))

    def is_passed(self, state: TrainerState) -> bool:
        """Whether the run of this state has trained beyond an end in epochs or steps, which are exact."""
        further = self.epochs is not None and (state.epoch, state.cursor) > (self.epochs, 0)
        return further or (self.steps is not None and state.steps > self.steps)

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
      overlapped: steps of each before it takes in the merge in flight.
      sent_after: steps of each before it sends its row of the table, none if all do at the end; None for those planned.
      group_merges: the merges of the round, those within groups included; None for those that the state plans.
      keeps: whether its batches stay ready, for another round on them.
      donates: whether it takes the arrays of the state before it, which is not kept then.
      settles: whether what follows it waits for its merge, as a checkpoint does.
    """

    counts: Sequence[int] | None = None
    done: Sequence[int] | None = None
    shares: tuple[int, ...] = ()
    joined: int = 0
    overlapped: Sequence[int] = ()
    sent_after: tuple[int, ...] | None = None
    group_merges: int | None = None
    keeps: bool = False
    donates: bool = False
    settles: bool = False

    @classmethod
    def of(cls, info: RoundInfo) -> GivenRound:
        """A recorded round."""
        beside = info.overlapped, info.sent_after
        return cls(info.planned, info.counts, info.shares, info.joined, *beside, info.group_merges)


# Nothing is given: the cadence plans the round.
PLANNED = GivenRound()


class PlanRules(NamedTuple):
    """The rules by which the rounds of a trainer are planned.

    Attributes:
      policy: as given; under ``"auto"`` the state has the present one.
      world_size: the number of replicas.
      joined: batches in an update under ``sync``, unless ``"auto"`` has chosen a number.
      unit: shares of rows are multiples of it, because each device of a sharded replica takes as many rows.
      solo_steps: steps in a round of a single replica; None for :data:`SOLO_ROUND`, or more where steps are short.
      newcomers: the ranks whose state is on its way; in a round of local steps they take none.
      ema: the mean age of the parameters in a moving average, as a part of the run so far; None without one.
    """

    policy: ApplyPolicy
    world_size: int
    joined: int
    unit: int = 1
    solo_steps: int | None = None
    newcomers: tuple[int, ...] = ()
    ema: float | None = None

    def policy_of(self, state: TrainerState) -> ApplyPolicy:
        """The policy of the next round."""
        return self.policy if state.choice is None else state.choice.policy


class PlannedRound(NamedTuple):
    """A round as planned, before it runs.

    Attributes:
      state: the state before it.
      plan: the batches of each replica.
      reader: reads them.
      given: what was given for it.
      policy: when its replicas average.
      rule: the weights of averaged parameters, or None if gradients are averaged.
      wire: how its merge sends the change of the parameters.
      scale: of its merge, for the rule of the learning rate.
      time_limit_ms: after it a replica begins no further step; None for no limit.
      overlap: the part of the next round that runs beside its merge.
      overlapped: with a merge in flight, the steps of each replica before it takes in the result.
      sent_after: the steps of each replica before it sends its row of the table; none if all do at the end.
      groups: the replicas that merge among themselves within it.
      group_merges: its merges, the last one of all replicas included.
      opt_states_differ: whether its merge leaves each replica an optimizer state of its own.
    """

    state: TrainerState
    plan: RoundPlan
    reader: Reader
    given: GivenRound = GivenRound()
    policy: ApplyPolicy = ApplyPolicy.CADENCE
    rule: str | None = "steps"
    wire: str = "float32"
    scale: MergeScale = MergeScale()
    time_limit_ms: float | None = None
    overlap: float = 0.0
    overlapped: tuple[int, ...] = ()
    sent_after: tuple[int, ...] = ()
    groups: Groups = Groups()
    group_merges: int = 1
    opt_states_differ: bool = False

    @property
    def starts(self) -> tuple[LocalState, ...]:
        """The local states after the last merge, for which it waits if that is in flight; raises its error."""
        in_flight = self.state.in_flight
        return self.state.local_states if in_flight is None else in_flight.result().local_states

    def batches(self, rank: int) -> tuple[Key, ...]:
        """The batches of a rank."""
        return self.reader.share(self.plan, self.state, rank)

    def group_of(self, rank: int) -> Sequence[int]:
        """The ranks that merge with this one within the round, itself included."""
        groups = self.groups.ranks if self.group_merges > 1 else ()
        return next((group for group in groups if rank in group), (rank,))


ENDLESS = End()


def next_plan(state: TrainerState, size: int, rules: PlanRules, end: End = ENDLESS, batch_size: int = 0) -> RoundPlan:
    """The plan of the next round, the same on every host; pending batches of earlier rounds come first.

    ``size`` is the number of batches in an epoch, and ``batch_size`` that of examples in a whole batch, 0 if not known
    yet. At the end of an epoch and of the run the last rounds are of about equal length: the loss of a round of one
    batch, on one replica, would be noise.
    """
    epoch, start, stop = (state.pending_batches or ((state.epoch, state.cursor, size),))[0]
    most = end.batches_left(state, batch_size)
    left = stop - start if most is None else min(stop - start, most)
    plan = RoundPlan(state.round, epoch, start, (0,) * rules.world_size, size)
    shares = _shares(state, rules)
    if shares.rows:
        number = 1 if rules.policy_of(state) is ApplyPolicy.SYNC else _steps_of_shares(state, shares, rules)
        steps, joined = tuple(n * number for n in shares.steps), shares.joined * number
        plan = replace(plan, counts=steps, shares=shares.rows, joined=joined)
        total = _even_total(joined, left)
        # Whole steps, so that each has as many rows; the rest comes last.
        return plan.cut(total - total % shares.joined if total > shares.joined else total)
    policy, counts = rules.policy_of(state), _whole_counts(state, rules, left, end.stops)
    if policy is not ApplyPolicy.SYNC:
        counts = [0 if rank in rules.newcomers else n for rank, n in enumerate(counts)]
    if policy is ApplyPolicy.ASYNC and not state.pending_batches:  # rounds cross the end of an epoch
        whole = None if end.epochs is None else (end.epochs - epoch) * size - start
        left = min((limit for limit in (whole, most) if limit is not None), default=None)
    lead = state.che.max_batch_diff if state.che else None
    return replace(plan, counts=_even_counts(counts, left, lead, stretches=policy is not ApplyPolicy.SYNC))


def _shares(state: TrainerState, rules: PlanRules) -> RowShares:
    """The rows of each rank, none for whole batches."""
    world_size, joined = rules.world_size, rules.joined
    if state.pending_batches:
        return RowShares()
    if state.row_shares.rows or rules.policy_of(state) is not ApplyPolicy.SYNC or joined == world_size:
        return state.row_shares
    # Before times are known, equal parts in steps of at most a batch.
    return RowShares((1,) * world_size, (-(-joined // world_size),) * world_size, joined)


def _steps_of_shares(state: TrainerState, shares: RowShares, rules: PlanRules) -> int:
    """The steps of all ranks, each on joined batches, in a round of the best length for such steps."""
    if state.che is None or not shares.is_measured:
        return 1
    # Asynchronous rounds have a lower anchor while replicas drift apart.
    most_ms = state.che.anchor_wall_ms if rules.policy is ApplyPolicy.ASYNC else math.inf
    return shared_steps(state.che, shares.rows, shares.joined, max(shares.times()), most_ms)


def _whole_counts(state: TrainerState, rules: PlanRules, left: int, stops: Sequence[int]) -> Sequence[int]:
    """The batches of each rank in a whole round; ``left`` are those to the end of the epoch or of the run."""
    che, pending, one_each = state.che, state.pending_batches, (1,) * rules.world_size
    if che is None:
        return one_each if pending else (_solo_steps(state, rules, stops),)
    if pending:
        return che.batch_counts
    if state.choice is not None and state.choice.active:
        return active_counts(che, state.choice, left, state.row_shares.due())
    return one_each if rules.policy_of(state) is ApplyPolicy.SYNC else che.batch_counts


# Rounds of a single replica within the mean age of a moving average.
_EMA_ROUNDS = 2


def _solo_steps(state: TrainerState, rules: PlanRules, stops: Sequence[int]) -> int:
    """The steps of a single replica in a whole round, by the mean time of those before; they double at most."""
    number = rules.solo_steps
    if number is None:
        lasting = _SOLO_MS * state.steps / state.clock_ms if state.clock_ms else 0
        number = max(SOLO_ROUND, min(state.steps, int(lasting)))
    if rules.ema is not None:  # it takes in the parameters at the end of a round
        number = min(number, max(1, int(rules.ema * state.steps / _EMA_ROUNDS)))
    return min([number, *(every - state.steps % every for every in stops)])


# A rest at the end is joined with the round before it if it is shorter than this part of that round.
_FRAGMENT = 0.25


def _even_total(whole: int, left: int, least: int = 1) -> int:
    """The batches of the next round: ``whole``, or half of those left if a fragment would remain after it."""
    return -(-left // 2) if 0 < left - whole < max(least, _FRAGMENT * whole) else min(whole, left)


def _even_counts(counts: Sequence[int], left: int | None, lead: int | None, stretches: bool) -> tuple[int, ...]:
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


def given_plan(state: TrainerState, size: int, rules: PlanRules, given: GivenRound) -> RoundPlan:
    """The plan of a round with given counts, e.g. recorded ones, cut at the end of the epoch."""
    asked: Any = given.counts
    try:
        counts = tuple(map(operator.index, asked))
    except TypeError:
        raise ValueError(
            f"counts={asked!r} must be whole numbers, the steps of each replica; write e.g. "
            f"counts={(4,) * rules.world_size}"
        ) from None
    if len(counts) != rules.world_size or sum(counts) < 1:
        raise ValueError(
            f"counts={counts} has {len(counts)} entries for {rules.world_size} replicas; "
            "give each its number of steps, and at least one step in total"
        )
    epoch, start, stop = (state.pending_batches or ((state.epoch, state.cursor, size),))[0]
    if given.shares:
        joined = min(given.joined, stop - start)
        return RoundPlan(state.round, epoch, start, counts, size, given.shares, joined)
    crosses = rules.policy_of(state) is ApplyPolicy.ASYNC and not state.pending_batches
    left = sum(counts) if crosses else stop - start
    cut = iter(clamp_counts([n for n in counts if n], left))  # gives each at least one, and idle ranks stay so
    return RoundPlan(state.round, epoch, start, tuple(next(cut) if n else 0 for n in counts), size)


def time_limit_ms(che: ElChe | None, plan: RoundPlan) -> float | None:
    """The time limit of a round: a slow replica delays the others by at most the length of one round."""
    if che is None or plan.shares or not all(che.ms_per_batch):
        return None
    expected = max(n * ms for n, ms in zip(plan.counts, che.ms_per_batch, strict=True))
    return expected + max(expected, _MIN_EXTRA_MS)


def overlapped_steps(state: TrainerState, plan: RoundPlan, given: GivenRound, overlap: float) -> tuple[int, ...]:
    """With a merge in flight, the steps of each replica before it takes in the result."""
    if state.in_flight is None:
        return ()
    return tuple(given.overlapped or (int(overlap * n) for n in plan.counts))


def steps_sent(
    state: TrainerState, plan: RoundPlan, given: GivenRound, end: End, overlapped: Sequence[int], batch_size: int
) -> tuple[int, ...]:
    """The steps of each replica before it sends its measurements, none if all do at the end of the round.

    What the last steps measure is a part of the next table: so not in the last round, and not if a checkpoint follows
    each round, which leaves no merge in flight.
    """
    if given.sent_after is not None:
        return given.sent_after
    che = state.che
    if not overlapped or state.pending_batches or che is None or not che.exchange_samples:
        return ()
    if end.is_reached(expected(state, plan, batch_size)):
        return ()
    wall_ms = [n * ms for n, ms in zip(plan.batches, che.ms_per_batch, strict=True)]
    sent = sent_after(wall_ms, plan.counts, overlapped, statistics.median_low(che.exchange_samples))
    return () if sent == plan.counts else sent


def expected(state: TrainerState, plan: RoundPlan, batch_size: int) -> TrainerState:
    """The state with its place after a round of this plan, if it goes as planned."""
    (epoch, cursor), steps = plan.end, state.steps + plan.total
    examples = state.examples + plan.total * batch_size
    return replace(state, round=plan.round + 1, epoch=epoch, cursor=cursor, steps=steps, examples=examples)


# The shares of rows are multiples of a batch divided by this.
_SHARES_OF_A_BATCH = 64


def unit_of_shares(unit: int, batch_size: int) -> int:
    """The rows of which shares are multiples, where those of the replicas are multiples of ``unit``."""
    return math.lcm(unit, max(1, batch_size // _SHARES_OF_A_BATCH))


def next_shares(
    state: TrainerState,
    info: RoundInfo,
    rules: PlanRules,
    batch_size: int,
    max_rows: Sequence[float],
    compile_ms: float,
    overlaps: Sequence[float] = (0.0,),
) -> TrainerState:
    """The state with the shares of the rows that follow from the times of the round, and with the choice.

    ``max_rows`` are the most rows of a step of each replica; ``compile_ms`` is the longest compilation so far, and
    ``overlaps`` are the parts of a round that may run beside a merge of local steps.
    """
    shares, che, choice = state.row_shares, state.che, state.choice
    if che is None:
        return state
    shares = shares.report(info.counts, info.rows, info.wall_ms, compile_ms)
    unit = unit_of_shares(rules.unit, batch_size)
    if choice is not None:
        choice = choose(choice, shares, che, batch_size, info.round, unit, state.clock_ms, overlaps, info.drift)
        if choice.policy is ApplyPolicy.CADENCE and info.policy == ApplyPolicy.SYNC:
            che = replace(che, travel_samples=())
    state = replace(state, choice=choice, che=che)
    joined = (choice and choice.joined) or rules.joined
    if rules.policy_of(state) is not ApplyPolicy.SYNC:
        joined = shares.best_joined(batch_size, unit) if choice is None else choice.joined
        # Tuners that choose no length of a round take whole batches.
        if not joined or not TUNERS[che.tuner].chooses_round_ms or shares.shapes_differ:
            return replace(state, row_shares=shares.without())
    return replace(state, row_shares=shares.split(joined, batch_size, unit, max_rows))
