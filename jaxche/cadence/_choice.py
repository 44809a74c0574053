"""The choice of ``policy="auto"``: exact sync or rounds of local steps, and on which replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np

from jaxche.cadence._elche import TUNERS, ElChe
from jaxche.cadence._rounds import ApplyPolicy, clamp_counts
from jaxche.cadence._row_shares import Cut, RowShares
from jaxche.cadence._shared_steps import best_shared_ms, best_shared_steps, effective_ranks, more_steps, shared_worth
from jaxche.cadence._tuner_progress import MergeCost, best_round_ms, half_life_ms

# An update from k batches makes as much progress as k ** _AT_ONCE updates from one; so do k replicas of equal speed
# that take a step each and merge. Replicas of unequal speeds v count as (Σ v)² / Σ v² replicas.
_AT_ONCE = 0.75
# Progress of local steps beside merges, relative to steps that wait for them: moments are not merged. It falls further
# with the time until the result of a merge comes in.
_BESIDE = 0.92
# Another choice must have this much more expected progress, because measurements vary. To leave out some of the
# replicas that take local steps needs only more.
_BETTER = 1.08
# τ before it is measured, in batches of the fastest replica.
_USUAL = 50
# Rounds of local steps of all replicas before the choice is made again; fewer where a merge takes longer than so many
# batches of the fastest replica.
_TRIED, _TRIED_LONG, _LONG = 4, 2, 32
# Rounds of exact sync after which they are tried again, at first and at most; the number doubles. Replicas move fastest
# in the first rounds of a run.
_PATIENCE, _MOST_PATIENCE = 32, 512
# After so many rounds of exact sync the choice is made every so many rounds: a round is one update, and with many
# replicas a choice takes milliseconds.
_UPDATES = 16


@dataclass(frozen=True, repr=False)
class Choice:
    """The present choice of ``policy="auto"``.

    Attributes:
      policy: ``sync`` or ``cadence``.
      joined: batches in an update under ``sync``; under ``cadence`` the batches that replicas share in each local step,
        0 if each step is on a whole batch.
      active: whether each replica takes part; the others stay idle. Empty for all.
      reason: why, in one line.
      since: the round of the choice.
      given_up: how often local steps were given up.
      merge_ratio: time of a merge of local steps relative to that of exact sync, as measured at the last change.
      before_ms: time of a merge before the last change, until the merges after it are measured; then 0.
      since_ms: the clock at the last change of the policy or of ``joined``.
      compiled: policy and ``joined`` of each choice so far, because their programs are compiled.
    """

    policy: ApplyPolicy = ApplyPolicy.SYNC
    joined: int = 0
    active: tuple[bool, ...] = ()
    reason: str = "not measured yet: exact sync"
    since: int = 0
    given_up: int = 0
    merge_ratio: float = 1.0
    before_ms: float = 0.0
    since_ms: float = 0.0
    compiled: tuple[tuple[str, int], ...] = ()

    @property
    def patience(self) -> int:
        """Rounds of exact sync after which local steps are tried again."""
        return min(_PATIENCE << max(self.given_up - 1, 0), _MOST_PATIENCE)

    def __repr__(self) -> str:
        """One line, without the reason."""
        unit = "an update" if self.policy is ApplyPolicy.SYNC else "a step"
        joined = f", {self.joined} batches {unit}" if self.joined else ""
        part = f", {sum(self.active)} of {len(self.active)} replicas" if self.active else ""
        return f"Choice(policy {self.policy.value!r} since round {self.since}{joined}{part})"

    def to_dict(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self) | {"policy": self.policy.value}

    def compared(self, sync_samples: Sequence[float], round: int) -> Choice:
        """The choice with the relative time of merges, once all samples are of merges since the last change."""
        if not self.before_ms or round - self.since < _TRIED:
            return self
        ratio = median_low(sync_samples) / self.before_ms
        return replace(self, merge_ratio=ratio if self.policy is ApplyPolicy.CADENCE else 1 / ratio, before_ms=0.0)

    def merges_ms(self, sync_samples: Sequence[float]) -> tuple[float, float]:
        """The times of a merge of exact sync and of one of local steps.

        One of them is measured, and the other follows by their ratio: they send other trees, and possibly codes.
        """
        # Until all samples are of merges since the change, the one before it counts.
        measured_ms = self.before_ms or median_low(sync_samples)
        is_local = (self.policy is ApplyPolicy.CADENCE) != bool(self.before_ms)
        if is_local:
            return measured_ms / self.merge_ratio, measured_ms
        return measured_ms, measured_ms * self.merge_ratio

    def gives_way_to(self, best: Option, same: Option, clock_ms: float, compile_ms: float) -> bool:
        """Whether the best option is clearly better than ``same``, which is this choice, and worth its compilation.

        It is if it would have saved as much time since the last change. The first choice waits for nothing.
        """
        is_better = best.progress >= _BETTER * same.progress
        if not self.compiled or (best.policy.value, best.joined) in self.compiled:
            return is_better
        return is_better and (clock_ms - self.since_ms) * (1 - same.progress / best.progress) >= compile_ms

    def with_local_ms(self, sync_samples: Sequence[float], local_ms: float) -> Choice:
        """The choice where a merge of local steps takes another time from now on, with another wire."""
        return replace(self, merge_ratio=local_ms / self.merges_ms(sync_samples)[0])

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Choice:
        """The choice from the result of ``to_dict``."""
        tuples = {"active": tuple(saved["active"]), "compiled": tuple(map(tuple, saved.get("compiled", ())))}
        return cls(**{**saved, **tuples, "policy": ApplyPolicy(saved["policy"])})


@dataclass(frozen=True)
class Option:
    """A way to use the replicas, and its expected progress.

    ``progress`` is in steps of the fastest replica alone; ``rate`` is the share of the summed speeds.
    """

    policy: ApplyPolicy
    joined: int
    active: tuple[bool, ...]
    progress: float
    rate: float
    round_ms: float


class Costs(NamedTuple):
    """What the ways to use the replicas cost, in milliseconds.

    Attributes:
      sync_ms: a merge of exact sync.
      local: a merge of local steps.
      tau_ms: round length τ at which local steps on whole batches make half of their progress.
    """

    sync_ms: float
    local: MergeCost
    tau_ms: float

    def rate(self, round_ms: float) -> float:
        """The share of the time in which replicas take local steps on whole batches, T / (T + C)."""
        return round_ms / (round_ms + self.local.added_ms(round_ms))

    def worth(self, round_ms: float, tau_ms: float) -> float:
        """The progress of local steps beside merges, relative to steps that wait for them, 0.92 / (1 + f T / τ)."""
        overlap = self.local.overlap
        return _BESIDE / (1 + overlap * round_ms / tau_ms) if overlap else 1.0


def options(shares: RowShares, cuts: Mapping[int, Cut], batch_rows: int, costs: Costs, shared: int = 0) -> list[Option]:
    """All ways to use these replicas, with their progress.

    sync:     k^0.75 / (T_k + C),   T_k the time in which all replicas process the rows of k batches
    cadence:  0.93 k^0.75 / T_k · R D / (1 + (T / T₀)²),   T₀ = 0.65 τ / (ρ √N),   steps share k batches
    cadence:  N^-0.25 · Σ v_i · R D / (1 + T / τ),   T = √(C τ),   N = (Σ v)² / Σ v², on the m fastest

    R = T / (T + C) is the share of the time that is not spent on merges; with overlap C is what a merge adds, and
    D = 0.92 / (1 + f T / τ) what steps beside merges are worth, f the part of a round beside one; 1 without overlap.
    Replicas that share k batches in each step take ρ times as many steps in the same time, in the mean square over
    batches: ρ² = (Σ v)³ / Σ v³ / k². They move as much faster. Some of the replicas alone are an option where they make
    more progress than all on whole batches. ``cuts`` are those of :meth:`RowShares.cuts`, and ``shared`` is the number
    of batches that local steps share, 0 if they are on whole batches.
    """
    fixed, slope = shares.fit()
    ms = fixed + slope * batch_rows
    speed, world = 1 / ms, len(ms)
    fast, every = float(ms.min()), (True,) * world
    found = []
    # At most what all do while the fastest replica does one batch. Steps of few rows may take as long as those of many:
    # then that is measured, and other options win.
    most = math.ceil(fast * speed.sum() - 1e-9)
    for k, (_, wall) in cuts.items():
        if k <= most:
            progress, rate = k**_AT_ONCE / (wall + costs.sync_ms), k / (wall + costs.sync_ms) / speed.sum()
            found.append(Option(ApplyPolicy.SYNC, k, every, progress * fast, rate, wall))
    if shared:
        rows, wall = cuts[shared]
        alike, tau = effective_ranks(rows), costs.tau_ms / more_steps(speed, shared)
        number = max(1, round(best_shared_ms(costs.local, tau, alike) / wall))
        number = best_shared_steps(number, costs.local, tau, alike, wall)
        length = number * wall
        rate = shared / wall * length / (length + costs.local.added_to([length], [number]))
        progress = shared ** (_AT_ONCE - 1) * rate * fast
        progress *= shared_worth(length, tau, alike) * costs.worth(length, tau)
        found.append(Option(ApplyPolicy.CADENCE, shared, every, progress, rate / speed.sum(), length))
    order = np.argsort(ms, kind="stable")
    place = np.argsort(order)
    whole = []
    for m in range(1, world + 1):
        v = speed[order[:m]]
        length = max(best_round_ms(costs.local, costs.tau_ms), fast)
        length = length if m > 1 else alone_batches(costs.local.ms, fast) * fast
        rate = float(v.sum()) * costs.rate(length)
        worth = 1.0
        if m > 1:
            worth = (
                effective_ranks(v) ** (_AT_ONCE - 1) / (1 + length / costs.tau_ms) * costs.worth(length, costs.tau_ms)
            )
        active = every if m == world else tuple((place < m).tolist())
        whole.append(Option(ApplyPolicy.CADENCE, 0, active, rate * worth * fast, rate / speed.sum(), length))
    if shared:
        best = max(whole, key=lambda one: one.progress)
        whole = [] if all(best.active) else [best]
    return found + whole


def alone_batches(sync_ms: float, fast_ms: float) -> int:
    """Batches between the merges of a replica that trains alone; the merges take at most 1 % of the time.

    The choice is made again after each of them, so they are few: at the start of a run replicas move fast, and soon the
    others are worth having.
    """
    return max(20, math.ceil(100 * sync_ms / fast_ms))


def choose(
    now: Choice, shares: RowShares, che: ElChe, batch_rows: int, round: int, unit: int = 1, clock_ms: float = 0.0
) -> Choice:
    """The choice after a round; ``now`` is kept unless another choice has clearly more expected progress.

    A choice whose programs are not compiled also has to be worth the time of the longest compilation so far.
    Under exact sync it is made after each of the first 16 updates, then after every 16th. Only rounds of local steps
    measure how fast replicas move apart. After many rounds of exact sync the measurement is discarded, so that local
    steps are tried again. Rows are shared in multiples of ``unit``.
    """
    local = now.policy is ApplyPolicy.CADENCE
    if not shares.is_measured or len(che.sync_samples) < 2:
        return now
    fast = min(ms for ms in che.ms_per_batch if ms)
    tried = 1  # a round of some replicas alone is long
    if local and not now.active:
        tried = _TRIED_LONG if median_low(che.sync_samples) > _LONG * fast else _TRIED
    if round - now.since < tried:
        return now
    now = now.compared(che.sync_samples, round)
    if not local and round - now.since > _UPDATES and (round - now.since) % _UPDATES:
        return now
    sync_ms, local_ms = now.merges_ms(che.sync_samples)
    known = che.travel_samples and (local or round - now.since < now.patience)
    cuts, shared = shares.cuts(batch_rows, unit), 0
    if TUNERS[che.tuner].chooses_round_ms:
        shared = (shares if local else shares.without()).fewest_joined(batch_rows, unit, cuts)
    more = 1.0
    if shared and (now.joined or not local):  # measured while they share batches, or to be tried so
        fixed, slope = shares.fit()
        more = more_steps(1 / (fixed + slope * batch_rows), shared)
    tau_ms = more * (half_life_ms(median_low(che.travel_samples), fast, more) if known else _USUAL * fast)
    local_cost = MergeCost.of((local_ms,), che.exchange_samples, che.overlap)
    found = options(shares, cuts, batch_rows, Costs(sync_ms, local_cost, tau_ms), shared)
    best = max(found, key=lambda one: one.progress)
    same = [one for one in found if _is(one, now)]
    leaves_some_out = local and not now.active and best.policy is ApplyPolicy.CADENCE and not all(best.active)
    if same and not leaves_some_out and not now.gives_way_to(best, same[0], clock_ms, shares.compile_ms):
        best = same[0]
    active, is_sync = () if all(best.active) else best.active, best.policy is ApplyPolicy.SYNC
    changed = (best.policy, active) != (now.policy, now.active)
    changed |= not is_sync and bool(best.joined) != bool(now.joined)
    since = round if changed or round - now.since >= now.patience else now.since
    before_ms = now.before_ms if best.policy is now.policy else (local_ms if local else sync_ms)
    is_kept = (best.policy, best.joined) == (now.policy, now.joined)
    return replace(
        now,
        policy=best.policy,
        joined=best.joined,
        active=active,
        reason=_reason(best, found, sync_ms if is_sync else local_ms),
        since=since,
        given_up=now.given_up + (local and is_sync),
        before_ms=before_ms,
        since_ms=now.since_ms if is_kept else clock_ms,
        compiled=tuple(dict.fromkeys((*now.compiled, (best.policy.value, best.joined)))),
    )


def active_counts(che: ElChe, choice: Choice, left: int, due: Sequence[bool] = ()) -> tuple[int, ...]:
    """The batches of each replica where some are idle, at most ``left`` in all.

    Those of the idle replicas that are ``due`` are tried on one batch: they may have been slow for a while.
    """
    active = [rank for rank, takes_part in enumerate(choice.active) if takes_part]
    ms = [che.ms_per_batch[rank] for rank in active]
    wanted = [max(1, round(che.round_ms / one)) for one in ms]
    if len(active) == 1:
        wanted = [alone_batches(median_low(che.sync_samples), ms[0])]
    tried = [rank for rank, is_due in enumerate(due) if is_due and not choice.active[rank]]
    found = dict(zip(active + tried, clamp_counts(wanted + [1] * len(tried), left), strict=True))
    return tuple(found.get(rank, 0) for rank in range(len(choice.active)))


def _is(one: Option, choice: Choice) -> bool:
    active = () if all(one.active) else one.active
    return (one.policy, one.joined, active) == (choice.policy, choice.joined, choice.active)


def _reason(best: Option, found: Sequence[Option], sync_ms: float) -> str:
    """The choice and its rivals in one line."""
    rivals = {
        policy.value: max(one.progress for one in found if one.policy is policy and all(one.active))
        for policy in (ApplyPolicy.SYNC, ApplyPolicy.CADENCE)
    }
    if best.policy is ApplyPolicy.SYNC:
        what = f"exact sync of {best.joined} batches in {best.round_ms:.3g} ms"
    elif sum(best.active) == 1:
        what = f"rank {best.active.index(True)} alone"
    else:
        what = f"local steps{' that share batches' * bool(best.joined)} in rounds of {best.round_ms:.3g} ms"
    idle = [rank for rank, active in enumerate(best.active) if not active]
    others = ", ".join(f"{name} {progress:.2f}" for name, progress in rivals.items())
    out = f"; ranks {idle} would add nothing: leave them out, or give them evaluation" if idle else ""
    return (
        f"{what} and {sync_ms:.3g} ms to merge: {best.rate:.0%} of the summed speed, {best.progress:.2f} times the "
        f"progress of the fastest alone ({others}){out}"
    )
