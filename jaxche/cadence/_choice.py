"""The choice of ``policy="auto"``: exact sync or rounds of local steps, on which replicas, and how they merge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from statistics import median_low
from typing import Any

import numpy as np

from jaxche.cadence._elche import TUNERS, ElChe
from jaxche.cadence._options import LocalCosts, Option, alone_batches, options, whole_options
from jaxche.cadence._round_plan import ApplyPolicy, clamp_counts
from jaxche.cadence._row_shares import RowShares
from jaxche.cadence._shared_steps import more_steps
from jaxche.cadence._tuner_progress import USUAL, MergeCost, half_life_ms
from jaxche.cadence._wire_choice import is_long_merge

# Another choice must have this much more expected progress, because measurements vary. To leave out some of the
# replicas that take local steps needs only more.
_BETTER = 1.08
# Rounds of local steps of all replicas before the choice is made again; fewer where merges are long.
_TRIED, _TRIED_LONG = 4, 2
# Rounds of exact sync after which they are tried again, at first and at most; the number doubles. Replicas move fastest
# in the first rounds of a run.
_PATIENCE, _MOST_PATIENCE = 32, 512
# The time of an exchange of measurements before it is measured, relative to a merge, which takes more trips over the
# network.
_EXCHANGE = 0.5
# Replicas wait for merges after the median drift of so many merges beside steps was larger than this. At a learning
# rate with which they move so far apart they may diverge before the result of a merge comes in.
_DRIFTS, _APART = 16, 0.1
_APART_REASON = f"; beside merges the replicas drifted by more than {_APART:.0%}, so they wait for these"
# After so many rounds of exact sync the choice is made every so many rounds: a round is one update, and with many
# replicas a choice takes milliseconds.
_UPDATES = 16


class Kind(IntEnum):
    """The kinds of merges, which take different times: they send other trees, in other programs."""

    SYNC = 0
    WAITING = 1
    BESIDE = 2


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
      overlap: the part of a round of local steps that runs beside the merge of the round before it.
      merge_scales: relative times of a merge of each :class:`Kind`, as measured at changes; 0 if not measured.
      before_ms: time of a merge before the last change, until the merges after it are measured; then 0.
      before: the kind of that merge.
      since_ms: the clock at the last change of the policy or of ``joined``.
      compiled: policy and ``joined`` of each choice so far, because their programs are compiled.
      drifts: of the last merges beside steps.
      apart_at: the round after which merges are waited for, because their median was too large; 0 if it never was.
    """

    policy: ApplyPolicy = ApplyPolicy.SYNC
    joined: int = 0
    active: tuple[bool, ...] = ()
    reason: str = "not measured yet: exact sync"
    since: int = 0
    given_up: int = 0
    overlap: float = 0.0
    merge_scales: tuple[float, ...] = (0.0, 0.0, 0.0)
    before_ms: float = 0.0
    before: Kind = Kind.SYNC
    since_ms: float = 0.0
    compiled: tuple[tuple[str, int], ...] = ()
    drifts: tuple[float, ...] = ()
    apart_at: int = 0

    @property
    def is_local(self) -> bool:
        """Whether replicas take local steps."""
        return self.policy is ApplyPolicy.CADENCE

    @property
    def kind(self) -> Kind:
        """The kind of its merges."""
        if not self.is_local:
            return Kind.SYNC
        return Kind.BESIDE if self.overlap else Kind.WAITING

    @property
    def patience(self) -> int:
        """Rounds of exact sync after which local steps are tried again."""
        return min(_PATIENCE << max(self.given_up - 1, 0), _MOST_PATIENCE)

    def __repr__(self) -> str:
        """One line, without the reason."""
        unit = "an update" if self.policy is ApplyPolicy.SYNC else "a step"
        joined = f", {self.joined} batches {unit}" if self.joined else ""
        part = f", {sum(self.active)} of {len(self.active)} replicas" if self.active else ""
        beside = f", overlap {self.overlap:g}" if self.overlap else ""
        return f"Choice(policy {self.policy.value!r} since round {self.since}{joined}{part}{beside})"

    def to_dict(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self) | {"policy": self.policy.value}

    def has_lasted(self, che: ElChe, round: int) -> bool:
        """Whether it has lasted for enough rounds to be compared with others."""
        rounds = 1  # a round of some replicas alone is long
        if self.is_local and not self.active:
            rounds = _TRIED_LONG if is_long_merge(che) else _TRIED
        return round - self.since >= rounds

    def is_due(self, round: int) -> bool:
        """Whether it is compared with others after this round."""
        rounds = round - self.since
        return self.is_local or rounds <= _UPDATES or rounds % _UPDATES == 0

    def drifted(self, drift: float, round: int) -> Choice:
        """The choice after a round that reports this drift of the replicas."""
        if not self.overlap or math.isnan(drift):
            return self
        drifts = (*self.drifts, drift)[-_DRIFTS:]
        if len(drifts) == _DRIFTS and median_low(drifts) > _APART:
            return replace(self, drifts=(), apart_at=round)
        return replace(self, drifts=drifts)

    def is_apart(self, round: int) -> bool:
        """Whether merges are waited for because the replicas moved too far apart beside them."""
        return self.apart_at > 0 and round - self.apart_at < _MOST_PATIENCE

    def compared(self, sync_samples: Sequence[float], round: int) -> Choice:
        """The choice with the relative time of its merges, once all samples are of merges since the last change."""
        if not self.before_ms or round - self.since < _TRIED:
            return self
        scales, known = self._scales, list(self.merge_scales)
        known[self.before] = scales[self.before]
        known[self.kind] = scales[self.before] * median_low(sync_samples) / self.before_ms
        return replace(self, merge_scales=tuple(known), before_ms=0.0)

    @property
    def _scales(self) -> tuple[float, float, float]:
        """The relative times of merges; one of a kind that was not measured takes as long as one of the most alike."""
        sync, waiting, beside = self.merge_scales
        return sync or waiting or beside or 1.0, waiting or beside or sync or 1.0, beside or waiting or sync or 1.0

    def merges_ms(self, sync_samples: Sequence[float]) -> tuple[float, float, float]:
        """The times of a merge of each kind: one of them is measured, the others follow by their relative times."""
        # Until all samples are of merges since the change, the one before it counts.
        kind = self.before if self.before_ms else self.kind
        unit_ms = (self.before_ms or median_low(sync_samples)) / self._scales[kind]
        sync, waiting, beside = self._scales
        return unit_ms * sync, unit_ms * waiting, unit_ms * beside

    def local_costs(self, che: ElChe, overlaps: Sequence[float]) -> list[MergeCost]:
        """What a merge of local steps costs, for each of these parts of a round beside it."""
        times, found = self.merges_ms(che.sync_samples), []
        for overlap in overlaps:
            kind, exchanges = Kind.BESIDE if overlap else Kind.WAITING, che.exchange_samples
            if not exchanges and self.kind is not kind and not self.merge_scales[kind]:
                exchanges = (_EXCHANGE * times[kind],)  # not measured
            found.append(MergeCost.of((times[kind],), exchanges, overlap))
        return found

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
        before_ms = self.merges_ms(sync_samples)[self.kind]
        scales, known = self._scales, list(self.merge_scales)
        known[Kind.SYNC] = scales[Kind.SYNC]
        known[self.kind] = scales[self.kind]
        for kind in (Kind.WAITING, Kind.BESIDE):
            known[kind] *= local_ms / before_ms
        return replace(self, merge_scales=tuple(known), before_ms=0.0)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Choice:
        """The choice from the result of ``to_dict``."""
        found: dict[str, Any] = {one.name: saved[one.name] for one in fields(cls) if one.name in saved}
        found |= {name: tuple(found[name]) for name in ("active", "merge_scales", "drifts") if name in found}
        found |= {"compiled": tuple(map(tuple, found.get("compiled", ()))), "before": Kind(found.get("before", 0))}
        found["policy"] = ApplyPolicy(found["policy"])
        return cls(**found)


def choose(
    now: Choice,
    shares: RowShares,
    che: ElChe,
    batch_rows: int,
    round: int,
    unit: int = 1,
    clock_ms: float = 0.0,
    overlaps: Sequence[float] = (0.0,),
    drift: float = math.nan,
) -> Choice:
    """The choice after a round; ``now`` is kept unless another choice has clearly more expected progress.

    A choice whose programs are not compiled also has to be worth the time of the longest compilation so far.

    Under exact sync it is made after each of the first 16 updates, then after every 16th. Only rounds of local steps
    measure how fast replicas move apart. After many rounds of exact sync the measurement is discarded, so that local
    steps are tried again. Rows are shared in multiples of ``unit``, and ``overlaps`` are the parts of a round that may
    run beside a merge of local steps. If the replicas ``drift`` too far apart beside merges, they wait for 512 rounds.
    """
    now = now.drifted(drift, round)
    if not shares.is_measured or len(che.sync_samples) < 2 or not now.has_lasted(che, round):
        return now
    now = now.compared(che.sync_samples, round)
    if not now.is_due(round):
        return now
    is_apart = 0.0 in overlaps and now.is_apart(round)
    found = _expected(now, shares, che, batch_rows, round, unit, (0.0,) if is_apart else overlaps)
    best = _best(now, found, shares.compile_ms, clock_ms)
    after = replace(now, policy=best.policy, joined=best.joined, active=best.active, overlap=best.overlap)
    times, is_sync = now.merges_ms(che.sync_samples), not after.is_local
    changed = (after.policy, after.active, after.overlap) != (now.policy, now.active, now.overlap)
    changed |= not is_sync and bool(best.joined) != bool(now.joined)
    is_kept = (best.policy, best.joined) == (now.policy, now.joined)
    if after.kind is not now.kind:
        after = replace(after, before_ms=times[now.kind], before=now.kind)
    return replace(
        after,
        reason=_reason(best, found, times[after.kind]) + _APART_REASON * is_apart,
        since=round if changed or round - now.since >= now.patience else now.since,
        given_up=now.given_up + (now.is_local and is_sync),
        since_ms=now.since_ms if is_kept else clock_ms,
        compiled=tuple(dict.fromkeys((*now.compiled, (best.policy.value, best.joined)))),
    )


def _expected(
    now: Choice, shares: RowShares, che: ElChe, batch_rows: int, round: int, unit: int, overlaps: Sequence[float]
) -> list[Option]:
    """All options, with the progress that is expected from the measurements so far."""
    fast = min(ms for ms in che.ms_per_batch if ms)
    cuts, shared = shares.cuts(batch_rows, unit), 0
    if TUNERS[che.tuner].chooses_round_ms:
        shared = (shares if now.is_local else shares.without()).best_joined(batch_rows, unit, cuts)
    more = 1.0
    if shared and (now.joined or not now.is_local):  # measured while they share batches, or to be tried so
        fixed, slope = shares.fit()
        more = more_steps(1 / (fixed + slope * batch_rows), shared)
    is_known = che.travel_samples and (now.is_local or round - now.since < now.patience)
    tau_ms = more * (half_life_ms(median_low(che.travel_samples), fast, more) if is_known else USUAL * fast)
    sync_ms, *_ = now.merges_ms(che.sync_samples)
    local_costs = [LocalCosts(cost, tau_ms) for cost in now.local_costs(che, overlaps)]
    return options(shares, cuts, batch_rows, sync_ms, local_costs, shared)


def _best(now: Choice, found: Sequence[Option], compile_ms: float, clock_ms: float) -> Option:
    """The option with the most expected progress, or that of the present choice if none is clearly better."""
    best = max(found, key=lambda one: one.progress)
    chosen = (now.policy, now.joined, now.active, now.overlap)
    same = next((one for one in found if (one.policy, one.joined, one.active, one.overlap) == chosen), None)
    leaves_some_out = now.is_local and not now.active and best.policy is now.policy and best.active
    if same is None or leaves_some_out or now.gives_way_to(best, same, clock_ms, compile_ms):
        return best
    return same


def active_counts(che: ElChe, choice: Choice, left: int, due: Sequence[bool] = ()) -> tuple[int, ...]:
    """The batches of each replica where some are idle, at most ``left`` in all.

    Those of the idle replicas that are ``due`` are tried on one batch: they may have been slow for a while.
    """
    active = [rank for rank, takes_part in enumerate(choice.active) if takes_part]
    ms = [che.ms_per_batch[rank] for rank in active]
    wanted = [round(max(che.round_ms, *ms) / one) for one in ms]  # the slowest takes a step
    if len(active) == 1:
        cost = MergeCost.of(che.sync_samples, che.exchange_samples, che.overlap)
        number = alone_batches(cost, ms[0])
        wanted = [left if left < 2 * number else number]  # a shorter rest would not hide its merge
    tried = [rank for rank, is_due in enumerate(due) if is_due and not choice.active[rank]]
    found = dict(zip(active + tried, clamp_counts(wanted + [1] * len(tried), left), strict=True))
    return tuple(found.get(rank, 0) for rank in range(len(choice.active)))


def better_than_cadence(che: ElChe, batch_rows: int, unit: int = 1) -> str:
    """What ``policy="auto"`` would expect more progress of than of ``che``, whole batches on all replicas, in one line.

    Empty if there is nothing clearly better, or if merges and movement are not measured. Rows are shared in multiples
    of ``unit``.
    """
    if not (all(che.ms_per_batch) and che.sync_samples and che.travel_samples and TUNERS[che.tuner].chooses_round_ms):
        return ""
    now, shares, world_size = Choice(ApplyPolicy.CADENCE, overlap=che.overlap), RowShares(), che.world_size
    while not shares.is_measured:
        shares = shares.report([1] * world_size, [batch_rows] * world_size, che.ms_per_batch)
    best = max(_expected(now, shares, che, batch_rows, 0, unit, (che.overlap,)), key=lambda one: one.progress)
    cost = MergeCost.of(che.sync_samples, che.exchange_samples, che.overlap)
    tau_ms = half_life_ms(median_low(che.travel_samples), min(che.ms_per_batch))
    *_, same = whole_options(np.array(che.ms_per_batch), LocalCosts(cost, tau_ms))
    if best.progress < _BETTER * same.progress:
        return ""
    return f"policy='auto' expects {best.progress / same.progress:.2f} times the progress of {_described(best)}"


def _described(option: Option) -> str:
    """An option in a few words."""
    if option.policy is ApplyPolicy.SYNC:
        batches = "a batch" if option.joined == 1 else f"{option.joined} batches"
        return f"exact sync of {batches} in {option.round_ms:.3g} ms"
    if sum(option.active) == 1:
        return f"rank {option.active.index(True)} alone"
    return f"local steps{' that share batches' * bool(option.joined)} in rounds of {option.round_ms:.3g} ms"


def _reason(best: Option, found: Sequence[Option], sync_ms: float) -> str:
    """The choice and its rivals in one line."""
    rivals: dict[str, float] = {}
    for one in found:
        if not one.active:
            name = one.policy.value + f" with overlap={one.overlap:g}" * bool(one.overlap)
            rivals[name] = max(one.progress, rivals.get(name, 0.0))
    idle = [rank for rank, active in enumerate(best.active) if not active]
    others = ", ".join(f"{name} {progress:.2f}" for name, progress in rivals.items())
    beside = f" beside the first {best.overlap:.0%} of the next round" if best.overlap else ""
    out = f"; ranks {idle} would add nothing: leave them out, or give them evaluation" if idle else ""
    return (
        f"{_described(best)} and {round(sync_ms, 4):.3g} ms to merge{beside}: {best.rate:.0%} of the summed speed, "
        f"{best.progress:.2f} times the progress of the fastest alone ({others}){out}"
    )
