"""Rounds: when the replicas average, how many batches each of them runs until then, and which."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from jaxche.cadence._tuner import LARGEST_COUNT
from jaxche.messages import brief, whole_number

# A prime near 2**32 over the golden ratio: modulo 2**32, a million of its multiples are at least 1,600 apart.
_FAR_APART = 2654435761


class ApplyPolicy(StrEnum):
    """When the replicas average.

    =========  ==========================================  ===========================================
    policy     the replicas average                        further differences
    =========  ==========================================  ===========================================
    SYNC       after every step; each takes rows in        equals standard synchronous data
               proportion to its speed                     parallelism: gradients are averaged, so
                                                           Adam matches one device on the joined batch
    CADENCE    when the slowest replica has done           all replicas change epoch together
               ``anchor`` batches; faster ones do more
               batches in the same time
    ASYNC      as CADENCE                                  divergence correction lowers the anchor and
                                                           raises it again; fast replicas continue into
                                                           the next epoch
    AUTO       as SYNC or as CADENCE                       from measured speeds, merges and movement;
                                                           ``Trainer.explain`` returns the reason
    =========  ==========================================  ===========================================

    Members are strings, so ``"sync"`` is as good as ``ApplyPolicy.SYNC``.

    Raises:
      ValueError: any other string; the message lists the policies.

    References:
      flodl 0.4.0, ``ApplyPolicy``.

    Example:
      >>> ApplyPolicy("cadence") is ApplyPolicy.CADENCE
      True
      >>> ApplyPolicy.ASYNC == "async"
      True
    """

    SYNC = "sync"
    CADENCE = "cadence"
    ASYNC = "async"
    AUTO = "auto"

    @classmethod
    def _missing_(cls, value: object) -> ApplyPolicy:
        names = ", ".join(f'"{member.value}"' for member in cls)
        raise ValueError(f'policy={value!r} is not a policy; write one of {names}, e.g. policy="cadence"')


class Piece(NamedTuple):
    """The rows of a batch from ``begin / of`` to ``end / of`` of its size, rounded; the whole batch by default."""

    key: tuple[int, int]  # (epoch, index in the epoch)
    begin: int = 0
    end: int = 1
    of: int = 1

    def rows(self, size: int) -> slice:
        """These rows of a batch of ``size`` rows; pieces that touch share no row and leave none out."""
        # Rounds half up, in whole numbers.
        first, last = ((2 * edge * size + self.of) // (2 * self.of) for edge in (self.begin, self.end))
        return slice(first, last)


@dataclass(frozen=True)
class RoundPlan:
    """The batches of each rank in one round.

    Rank r runs the batches [start + Σ_{j<r} n_j, start + Σ_{j≤r} n_j), which may extend into the next epochs. With
    ``shares`` the batches of the round are joined, and their rows are divided in proportion to the shares. Rank r runs
    its part in ``counts[r]`` equal steps.

    Args:
      round: number of the round.
      epoch: epoch of the first batch.
      start: index of the first batch in that epoch, below ``epoch_size``.
      counts: batches of each rank; with ``shares``, its steps.
      epoch_size: batches in an epoch.
      shares: parts of the rows of each rank, whole numbers; empty for whole batches.
      joined: batches of a round with ``shares``.

    Raises:
      ValueError: a number that is negative or not whole, an empty data set, a start past the end of the epoch, or
        shares that do not fit the counts.

    References:
      The global-cursor epoch cut of flodl 0.4.0.

    Example:
      >>> plan = RoundPlan(round=7, epoch=0, start=5, counts=(3, 2), epoch_size=8)
      >>> plan.share(0), plan.share(1), plan.end
      (((0, 5), (0, 6), (0, 7)), ((1, 0), (1, 1)), (1, 2))
    """

    round: int
    epoch: int
    start: int
    counts: tuple[int, ...]
    epoch_size: int
    shares: tuple[int, ...] = ()
    joined: int = 0

    def __post_init__(self) -> None:
        for name in ("round", "epoch", "start"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 0, f"{name}=0"))
        object.__setattr__(self, "epoch_size", check_epoch_size(self.epoch_size))
        for name in ("counts", "shares"):
            object.__setattr__(self, name, _whole_numbers(name, getattr(self, name)))
        if self.shares and (len(self.shares) != len(self.counts) or not any(self.shares)):
            raise ValueError(
                f"shares={brief(self.shares)} for counts={brief(self.counts)}: give each rank its part of the rows, "
                "and not 0 to all; write e.g. counts=(1, 1), shares=(23, 9), joined=2"
            )
        object.__setattr__(self, "joined", whole_number("joined", self.joined, int(bool(self.shares)), "joined=2"))
        if self.start >= self.epoch_size:
            raise ValueError(
                f"start={self.start} is past the end of an epoch of epoch_size={self.epoch_size} batches; write "
                f"epoch={self.epoch + 1}, start=0 for the next one"
            )

    @property
    def total(self) -> int:
        """Batches of all ranks."""
        return self.joined if self.shares else sum(self.counts)

    @property
    def batches(self) -> tuple[float, ...]:
        """Batches of each rank; with ``shares``, its part of their rows."""
        if not self.shares:
            return tuple(map(float, self.counts))
        return tuple(self.joined * share / sum(self.shares) for share in self.shares)

    @property
    def end(self) -> tuple[int, int]:
        """(epoch, cursor) of the first batch after the round, the cursor below ``epoch_size``."""
        epochs, cursor = divmod(self.start + self.total, self.epoch_size)
        return self.epoch + epochs, cursor

    def number(self, rank: int) -> int:
        """The number of the first step of ``rank`` for random keys; its other steps have the numbers that follow."""
        if self.shares:
            # Ranks may share their first batch, but not their random keys: each begins far from all others.
            place = (self.epoch * self.epoch_size + self.start) * len(self.counts) + rank
            return place * _FAR_APART % 2**32
        epoch, index = self._key(self.start + sum(self.counts[:rank]))
        return epoch * self.epoch_size + index

    def cut(self, left: int) -> RoundPlan:
        """The plan with at most ``left`` joined batches, and fewer steps, so that each has as many rows."""
        joined = min(self.joined, left)
        steps = tuple(n and max(1, round(n * joined / self.joined)) for n in self.counts)
        return replace(self, counts=steps, joined=joined)

    def share(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The (epoch, index) of each batch of ``rank``, in order; ValueError for a rank that does not exist."""
        return tuple(dict.fromkeys(piece.key for step in self.steps(rank) for piece in step))

    def steps(self, rank: int) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of batches in each step of ``rank``; ValueError for a rank that does not exist."""
        rank = whole_number("rank", rank, 0, "rank=0")
        if rank >= len(self.counts):
            raise ValueError(f"rank={rank} is not one of {len(self.counts)} ranks; write 0 to {len(self.counts) - 1}")
        n = self.counts[rank]
        if not self.shares:
            first = self.start + sum(self.counts[:rank])
            return tuple((Piece(self._key(first + i)),) for i in range(n))
        # Cuts are fractions of the joined batches, so no rank needs the sizes of batches that it does not read.
        of = sum(self.shares) * max(n, 1)
        first, own = self.joined * sum(self.shares[:rank]) * n, self.joined * self.shares[rank]
        return tuple(self._cut(first + own * i, first + own * (i + 1), of) for i in range(n if own else 0))

    def _cut(self, begin: int, end: int, of: int) -> tuple[Piece, ...]:
        """The pieces from ``begin / of`` to ``end / of`` of the joined batches."""
        return tuple(
            Piece(self._key(self.start + i), max(begin - i * of, 0), min(end - i * of, of), of)
            for i in range(begin // of, -(-end // of))
        )

    def _key(self, place: int) -> tuple[int, int]:
        epochs, index = divmod(place, self.epoch_size)
        return self.epoch + epochs, index

    def digest(self) -> int:
        """A 46-bit hash of all fields, equal on every machine and in every Python; hosts compare it in the merge."""
        fields = [self.round, self.epoch, self.start, self.epoch_size, *self.counts]
        if self.shares:
            fields += [self.joined, *self.shares]
        numbers = np.array(fields, dtype="<i8")
        return int.from_bytes(hashlib.sha256(numbers.tobytes()).digest()[:8], "big") >> 18

    def digest_halves(self) -> tuple[int, int]:
        """The digest as two 23-bit halves, high first; each is exact in float32, so that a ``psum`` can carry it."""
        return divmod(self.digest(), 2**23)


def _whole_numbers(name: str, row: Any) -> tuple[int, ...]:
    """As ints, so that counts from NumPy and from JSON give equal plans; ValueError for negative or broken numbers."""
    try:
        numbers = tuple(map(operator.index, row))
    except TypeError:
        raise ValueError(f"{name}={brief(row)} must be whole numbers, one a rank; write e.g. {name}=(5, 2)") from None
    if min(numbers, default=0) < 0:
        rank = min(range(len(numbers)), key=numbers.__getitem__)
        raise ValueError(f"{name}[{rank}]={numbers[rank]} must be at least 0; write 0 for an idle rank")
    return numbers


def round_half_away(x: np.ndarray) -> np.ndarray:
    """Round non-negative numbers as Rust does, halves up; NumPy and Python round halves to even."""
    whole = np.floor(x)
    return whole + (x - whole >= 0.5)


def speed_ratios(ms: np.ndarray) -> np.ndarray:
    """t_slow / t_i: exactly 1 for the slowest rank, and 1 for one never measured."""
    with np.errstate(over="ignore"):
        return np.minimum(np.divide(ms.max(), ms, out=np.ones_like(ms), where=ms > 0), LARGEST_COUNT)


def ratio_counts(anchor: int, ratio: np.ndarray, max_lead: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(exact, whole) counts that fill the time of ``anchor`` slow batches: a t_slow / t_i, at most a + max_lead."""
    exact = np.minimum(anchor * ratio, LARGEST_COUNT if max_lead is None else float(anchor + max_lead))
    # Ratios are at least 1, so no count rounds to 0.
    return exact, round_half_away(exact)


def limit_lead(counts: Sequence[int], max_batch_diff: int | None) -> tuple[int, ...]:
    """Lower the counts that lead the smallest one by more than ``max_batch_diff``.

    n_i ← min(n_i, min_j n_j + max_batch_diff)

    Args:
      counts: batches of each rank in a round.
      max_batch_diff: largest lead in batches; 0 for equal counts, None for no limit.

    Returns:
      The limited counts, one int per rank.

    Raises:
      ValueError: if ``max_batch_diff`` is negative or not a whole number.

    References:
      flodl 0.4.0, ``ElChe::with_max_batch_diff``: documented as this limit; its code only limits the change of a
      count in one report.

    Example:
      >>> limit_lead((46, 20), 10)
      (30, 20)
      >>> limit_lead((46, 20), 0)
      (20, 20)
    """
    if max_batch_diff is None or not counts:
        return tuple(counts)
    top = min(counts) + whole_number("max_batch_diff", max_batch_diff, 0, "max_batch_diff=10, or None for no limit")
    return tuple(n if n < top else top for n in counts)


def clamp_counts(counts: Sequence[int], max_total: int) -> tuple[int, ...]:
    """Clamp counts to a sum of at most ``max_total``, in proportion.

    Each rank gets at least one batch. If there are fewer batches than ranks, the ranks with the largest counts (the
    fastest) get one each and the others 0.

    Args:
      counts: batches of each rank, at least 1 each.
      max_total: number of batches left, at least 0.

    Returns:
      One int per rank, with the sum min(Σ n_i, max_total).

    Raises:
      ValueError: if ``max_total`` is negative or not a whole number.

    References:
      flodl 0.4.0, ``ElChe::clamp_total``, which gives every rank 1 even past the end of an epoch.

    Example:
      >>> clamp_counts((46, 20), 33), clamp_counts((46, 20), 1), clamp_counts((100, 1, 1), 5)
      ((23, 10), (1, 0), (3, 1, 1))
    """
    max_total = whole_number("max_total", max_total, 0, "max_total=100")
    world_size = len(counts)
    if max_total < min(world_size, sum(counts)):
        ones = np.zeros(world_size, np.int64)
        ones[np.argsort(-np.asarray(counts), kind="stable")[:max_total]] = 1
        return tuple(ones.tolist())
    clamped = proportional_clamp(counts, max_total)
    if sum(clamped) > max_total:
        spare = split_by_ratio(max_total - world_size, counts)
        clamped = tuple(1 + extra for extra in spare)
    return clamped


def proportional_clamp(counts: Sequence[int], max_total: int) -> tuple[int, ...]:
    """The rule of flodl 0.4.0: scale and floor, at least 1 a rank; the remainder goes one each to the first ranks.

    The sum can exceed ``max_total``, because every rank gets at least 1; ``clamp_counts`` corrects that.
    """
    total = sum(counts)
    if total <= max_total:
        return tuple(counts)
    scaled = np.maximum(np.floor(np.asarray(counts, np.float64) * (max_total / total)), 1).astype(np.int64)
    scaled[: max(max_total - int(scaled.sum()), 0)] += 1
    return tuple(scaled.tolist())


def split_by_ratio(total: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Split ``total`` into whole parts proportional to ``ratios``, by largest remainder, as flodl 0.4.0 splits epochs.

    Ties go to the lower rank; ratios that are all zero give equal parts.
    """
    total = whole_number("total", total, 0, "total=100")
    share = np.asarray(ratios, np.float64)
    if share.ndim != 1 or not share.size or not np.isfinite(share).all() or (share < 0).any():
        raise ValueError(f"ratios={ratios!r} must be finite and at least 0, one a part; write e.g. ratios=[3, 2, 1]")
    # Dividing by the largest first keeps the sum of huge ratios finite.
    share = share / share.max() if share.max() > 0 else np.ones_like(share)
    exact = total * (share / share.sum())
    parts = np.floor(exact).astype(np.int64)
    short = total - int(parts.sum())
    # Stable, so equal remainders favour the lower rank. A remainder of −1 can only come from rounding just above total.
    order = np.argsort(parts - exact, kind="stable")
    parts[order[: max(short, 0)]] += 1
    if short < 0:
        parts[np.argmax(parts)] += short
    return tuple(parts.tolist())


def interleave(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The places of the batches of each rank, in the order in which ranks of these counts finish them.

    Batch i of n ends at (i + 1/2) / n of the round; ties go to the lower rank: ((0, 2, 3, 5), (1, 4)) for (4, 2).
    """
    order = sorted(((i + 0.5) / n, rank) for rank, n in enumerate(counts) for i in range(n))
    places: list[list[int]] = [[] for _ in counts]
    for place, (_, rank) in enumerate(order):
        places[rank].append(place)
    return tuple(map(tuple, places))


def plan_round(
    counts: Sequence[int],
    *,
    round: int,
    epoch: int,
    cursor: int,
    epoch_size: int,
    max_batch_diff: int | None = None,
    crosses_epochs: bool = False,
    last_epoch: int | None = None,
) -> RoundPlan:
    """Plan the next round from the end of the last one.

    The lead in the given counts is limited, then the counts are clamped to the batches that are left. If each round
    starts at the ``end`` of the one before, every batch of every epoch is read exactly once, for any counts.

    The limit of the lead holds at the end of an epoch too; the batches that remain go to one more round. Only if fewer
    batches than ranks are left, it cannot hold: the ranks with the largest counts get one batch each.

    Args:
      counts: desired batches of each rank, at least 1 each: ``ElChe.batch_counts``, or 1 each for policy "sync".
      round: number of the round.
      epoch: epoch of the next batch.
      cursor: index of the next batch in that epoch, below ``epoch_size``.
      epoch_size: batches in an epoch.
      max_batch_diff: largest lead in batches over the smallest count; 0 for equal counts, None for no limit.
      crosses_epochs: whether fast ranks continue into the next epoch (policy "async"), or all change epoch together.
      last_epoch: number of epochs of the run; None for no end.

    Returns:
      The plan, with at least one batch.

    Raises:
      ValueError: an empty data set, a count below 1, a cursor past the end, or an epoch past the last one.

    Example:
      >>> plan_round((46, 20), round=0, epoch=0, cursor=0, epoch_size=99).counts
      (46, 20)
      >>> plan_round((46, 20), round=1, epoch=0, cursor=66, epoch_size=99).counts
      (23, 10)
      >>> plan_round((46, 20), round=1, epoch=0, cursor=66, epoch_size=99, crosses_epochs=True).end
      (1, 33)
    """
    epoch_size, counts = check_epoch_size(epoch_size), _whole_numbers("counts", counts)
    if min(counts, default=0) < 1:
        raise ValueError(f"counts={counts} must be at least 1 for every rank; write e.g. counts=(23, 10)")
    if last_epoch is not None and epoch >= last_epoch:
        raise ValueError(
            f"epoch={epoch} is past the last epoch, last_epoch={last_epoch}; stop, or write a larger last_epoch"
        )
    wanted = limit_lead(counts, max_batch_diff)
    if not crosses_epochs:
        left = epoch_size - cursor
    elif last_epoch is not None:
        left = (last_epoch - epoch) * epoch_size - cursor
    else:
        left = sum(wanted)
    # A cursor past the end leaves nothing; RoundPlan raises the error.
    cut = clamp_counts(wanted, max(left, 0))
    if min(cut) > 0:
        cut = limit_lead(cut, max_batch_diff)
    return RoundPlan(round=round, epoch=epoch, start=cursor, counts=cut, epoch_size=epoch_size)


def check_epoch_size(epoch_size: int) -> int:
    """``epoch_size`` as an int; ValueError below 1."""
    if epoch_size == 0:
        raise ValueError("epoch_size=0: the data set is empty; give data with at least one batch, len(data) >= 1")
    return whole_number("epoch_size", epoch_size, 1, "epoch_size=len(data)")
