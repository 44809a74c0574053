"""Row shares: the rows of a joined batch that each rank can do in the same time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxche.cadence._rank_times import RankTimes
from jaxche.messages import per_rank

# The shares change if that makes the round shorter by this part of it and by this number of ms. The first change needs
# more, so that equal devices whose times jitter keep whole batches.
_GAIN, _FIRST_GAIN, _GAIN_MS = 0.04, 0.10, 0.5
# An update from k batches makes as much progress as k ** AT_ONCE updates from one.
AT_ONCE = 0.75
# How much longer a batch may take in smaller local steps, and the gain in progress from another number of batches.
_LONGER, _MORE = 0.5, 1.05
# Shares that are stored because their programs are compiled.
_USED = 8
# Numbers of joined batches that are compared: all of these, then each an eighth larger than the one before.
_ALL_NUMBERS = 16


class Split(NamedTuple):
    """The rows of each rank, the steps in which it runs them, and the batches of the joined batch."""

    rows: tuple[int, ...]
    steps: tuple[int, ...]
    joined: int


class Cut(NamedTuple):
    """The rows of each rank of some joined batches, and the milliseconds of a step on them."""

    rows: np.ndarray
    ms: float


@dataclass(frozen=True, repr=False)
class RowShares:
    """The rows of a joined batch for each rank, in proportion to its measured speed.

    t_i(b) = f_i + s_i · b,   max_i n_i f_i + s_i r_i → min with Σ r_i the rows of the joined batch

    with ``b`` rows in a step, ``f`` the part of its time that does not depend on them, ``r_i`` the rows of rank i and
    ``n_i`` its steps. Immutable: a report returns the next value, the same on every host.

    Steps of other sizes need compilation. After the first change, new shares are taken once the rounds without them
    have lost as much time as the longest compilation took, so that of varying times compilation costs at most as much
    as the best shares save. Shares that were used before are taken at once: their programs are compiled.

    Attributes:
      rows: rows of each rank in the next round; empty for whole batches.
      steps: steps of each rank in which it runs them.
      joined: batches of the joined batch.
      ranks: the measured times of each rank.
      used: the shares so far, newest first; the last are those of the start, in which every rank has rows.
      compile_ms: the longest compilation of steps.
      lost_ms: what the rounds since the last new shares have lost against the best ones.
      shapes_differ: whether steps have joined rows of different shapes; local steps then take whole batches.
    """

    rows: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    joined: int = 0
    ranks: tuple[RankTimes, ...] = ()
    used: tuple[Split, ...] = ()
    compile_ms: float = 0.0
    lost_ms: float = 0.0
    shapes_differ: bool = False

    def __repr__(self) -> str:
        """One line, without the measured times."""
        if not self.rows:
            return "RowShares(whole batches)"
        return f"RowShares({per_rank(self.rows)} rows of {self.joined} batches, in {per_rank(self.steps)} steps)"

    def report(
        self, steps: Sequence[int], rows: Sequence[float], wall_ms: Sequence[float], compile_ms: float = 0.0
    ) -> RowShares:
        """The shares with the steps of each rank in a round, its rows and its time in all of them.

        ``compile_ms`` is the longest compilation of steps so far.
        """
        ranks, round_ms = self.ranks or (RankTimes(),) * len(wall_ms), max(wall_ms)
        given = zip(ranks, steps, rows, wall_ms, strict=True)
        ranks = tuple(one.report(n, r, wall, round_ms) for one, n, r, wall in given)
        return replace(self, ranks=ranks, compile_ms=max(self.compile_ms, compile_ms))

    def whole_ms(
        self, steps: Sequence[int], rows: Sequence[float], batches: Sequence[float], wall_ms: Sequence[float]
    ) -> list[float]:
        """The time of each rank for a whole batch, by that for its steps on these rows of so many batches."""
        ranks = self.ranks or (RankTimes(),) * len(steps)
        given = zip(ranks, steps, rows, batches, wall_ms, strict=True)
        return [one.scaled(wall / n, r / n, r / part) if n and r else 0.0 for one, n, r, part, wall in given]

    def due(self) -> tuple[bool, ...]:
        """Whether each rank is to be tried again, because it has long been idle."""
        return tuple(one.is_due for one in self.ranks)

    @property
    def is_measured(self) -> bool:
        """Whether every rank has reported often enough."""
        return bool(self.ranks) and all(one.is_measured for one in self.ranks)

    def fit(self) -> tuple[np.ndarray, np.ndarray]:
        """``(f, s)``: milliseconds of a step without rows, and milliseconds a row, of each rank."""
        lines = np.array([one.line for one in self.ranks])
        return lines[:, 0], lines[:, 1]

    def times(self) -> np.ndarray:
        """Expected milliseconds of each rank in the next round."""
        return _times(*self.fit(), self.rows, self.steps)

    def split(
        self,
        joined: int,
        batch_rows: int,
        unit: int = 1,
        max_rows: Sequence[float] | None = None,
    ) -> RowShares:
        """The shares of ``joined`` batches, unchanged if others gain little; all but one are multiples of ``unit``.

        A share of more than its ``max_rows`` takes a rank several steps. Of fewer rows than ranks, those that are to be
        measured get one each.
        """
        is_few = unit == 1 and joined * batch_rows < len(self.ranks)
        if not self.is_measured:
            return self._measuring([not one.is_measured for one in self.ranks], joined, batch_rows) if is_few else self
        fixed, slope = self.fit()
        most = np.array(max_rows if max_rows is not None else [math.inf] * len(fixed))

        def round_ms(split: Split) -> float:
            return float(_times(fixed, slope, split.rows, split.steps).max())

        best = _best(fixed, slope, joined, batch_rows, unit, most)
        kept, now, gain = self, math.inf, _GAIN
        if self.rows and self.joined == joined:
            now = round_ms(Split(self.rows, self.steps, self.joined))
        elif not self.rows and joined == len(fixed):
            now, gain = float((fixed + slope * batch_rows).max()), _FIRST_GAIN
        due = [rank for rank, is_due in enumerate(self.due()) if is_due]
        if not due and round_ms(best) > _limit(now, gain):
            return self
        compiled = [
            one
            for one in self.used
            if one.joined == joined and sum(one.rows) == joined * batch_rows and _fits(one, most)
        ]
        if tried := [one for one in compiled if due and all(one.rows[rank] for rank in due)]:
            return self._taking(min(tried, key=round_ms))
        if due and is_few:
            return self._measuring(self.due(), joined, batch_rows)
        # First those whose programs are compiled.
        known = min(compiled, key=round_ms, default=None)
        if known is not None and round_ms(known) <= _limit(now, gain):
            kept, now, gain = self._taking(known), round_ms(known), _GAIN
        if round_ms(best) > _limit(now, gain):
            return kept
        # The first change, and shares for joined batches of another length, wait for nothing.
        if self.used and now < math.inf:
            lost_ms = self.lost_ms + now - round_ms(best)
            if lost_ms < self.compile_ms:
                return replace(kept, lost_ms=lost_ms)
        *used, first = self.used or (_equal(joined, batch_rows, len(fixed)),)
        return replace(self._taking(best), used=(best, *used[: _USED - 2], first), lost_ms=0.0)

    def cuts(self, batch_rows: int, unit: int = 1) -> dict[int, Cut]:
        """How to cut 1 to R joined batches so that a step takes the shortest time, by their number."""
        fixed, slope = self.fit()
        numbers = [*range(1, min(len(fixed), _ALL_NUMBERS) + 1)]
        while numbers[-1] < len(fixed):
            numbers.append(min(numbers[-1] + numbers[-1] // 8, len(fixed)))
        found = {}
        for n in numbers:
            rows = fill(n * batch_rows, fixed, slope, unit)
            found[n] = Cut(rows, float((fixed + slope * rows)[rows > 0].max()))
        return found

    def best_joined(self, batch_rows: int, unit: int = 1, cuts: Mapping[int, Cut] | None = None) -> int:
        """The number k of batches that local steps of all ranks should share; 0 if each rank takes whole batches.

        The k of most progress, k^0.75 / T_k. Fewer batches make more steps. They take longer a batch: by the part of a
        step that does not depend on its rows, and because rows are whole. The present number stays while no other has
        5 % more progress. No step is larger than a batch, and a batch takes at most half longer than with the best
        number. Rows of different shapes are not shared: each cut of a batch would need programs of its own. ``cuts``
        are those of :meth:`cuts`.
        """
        if self.shapes_differ or not self.is_measured:
            return 0
        cuts = cuts or self.cuts(batch_rows, unit)
        longest = (1 + _LONGER) * min(cut.ms / n for n, cut in cuts.items())
        progress = {
            n: n**AT_ONCE / cut.ms for n, cut in cuts.items() if cut.ms / n <= longest and cut.rows.max() <= batch_rows
        }
        most = max(progress.values(), default=0.0)
        if self.rows and progress.get(self.joined, 0.0) > most / _MORE:
            return self.joined
        return next((n for n, one in progress.items() if one == most), 0)

    def _measuring(self, wanted: Sequence[bool], joined: int, batch_rows: int) -> RowShares:
        """Shares of one row, first for the ranks that are wanted."""
        first = np.argsort(np.logical_not(wanted), kind="stable")[: joined * batch_rows]
        rows = tuple(np.isin(range(len(wanted)), first).astype(int).tolist())
        return self._taking(Split(rows, rows, joined))

    def _taking(self, split: Split) -> RowShares:
        return replace(self, rows=split.rows, steps=split.steps, joined=split.joined)

    def without(self) -> RowShares:
        """Shares of whole batches, with the measured times."""
        return replace(self, rows=(), steps=(), joined=0)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> RowShares:
        """The shares from the result of ``dataclasses.asdict``, also after a round trip through JSON."""
        ranks = tuple(map(RankTimes.from_dict, saved["ranks"]))
        used = tuple(Split(tuple(rows), tuple(steps), joined) for rows, steps, joined in saved["used"])
        return cls(
            **{**saved, "rows": tuple(saved["rows"]), "steps": tuple(saved["steps"]), "ranks": ranks, "used": used}
        )


def _best(fixed: np.ndarray, slope: np.ndarray, joined: int, batch_rows: int, unit: int, most: np.ndarray) -> Split:
    """The split that takes the shortest time."""
    total = joined * batch_rows
    steps = np.ones(len(fixed), np.int64)
    rows = fill(total, fixed, slope, unit)
    for _ in range(4):
        needed = np.maximum(np.ceil(rows / most), 1)
        if (needed == steps).all():
            break
        steps = needed.astype(np.int64)
        rows = fill(total, steps * fixed, slope, unit)
    steps = np.where(rows > 0, np.maximum(steps, np.ceil(rows / most)), 0).astype(np.int64)
    return Split(tuple(rows.tolist()), tuple(steps.tolist()), joined)


def _equal(joined: int, batch_rows: int, world: int) -> Split:
    """Equal parts in steps of at most a batch, as before times are known; with a batch for each rank, whole batches."""
    rows = fill(joined * batch_rows, np.zeros(world), np.ones(world))
    return Split(tuple(rows.tolist()), (-(-joined // world),) * world, joined)


def _limit(now_ms: float, gain: float) -> float:
    """The longest round for which shares change, where the present ones take ``now_ms``."""
    return min((1 - gain) * now_ms, now_ms - _GAIN_MS)


def _fits(split: Split, most: np.ndarray) -> bool:
    """Whether every rank has memory for its steps."""
    return all(r <= n * m for r, n, m in zip(split.rows, split.steps, most, strict=True) if r)


def _times(fixed: np.ndarray, slope: np.ndarray, rows: Any, steps: Any) -> np.ndarray:
    return np.array(steps) * fixed + slope * np.array(rows)


def fill(total: int, fixed: np.ndarray, slope: np.ndarray, unit: int = 1) -> np.ndarray:
    """Whole rows of each rank, Σ = ``total``, so that the last rank ends as early as possible.

    A rank gets none if even its fixed time is longer than the others need.
    """
    # The time at which the fastest m ranks finish all rows; ranks that start later get none.
    order = np.argsort(fixed, kind="stable")
    speed = 1 / np.maximum(slope[order], 1e-9)
    ends = (total + np.cumsum(fixed[order] * speed)) / np.cumsum(speed)
    starts = np.append(fixed[order][1:], np.inf)
    end = ends[np.argmax(ends <= starts)]
    exact = np.maximum(end - fixed, 0) / np.maximum(slope, 1e-9)
    rows = (np.floor(exact / unit + 1e-9) * unit).astype(np.int64)
    # The rest goes, unit by unit, to the rank that ends first with one more; at once to all that end with one before
    # any would with two.
    left = total - int(rows.sum())
    while left > 0:
        ends = fixed + slope * (rows + unit)
        first = np.argsort(ends, kind="stable")[: -(-left // unit)]
        taking = first[ends[first] < (ends + slope * unit).min()]
        taking = taking if taking.size else first[:1]
        rows[taking] += unit
        left -= unit * taking.size
        rows[taking[-1]] += min(left, 0)  # a part of the last unit
    return rows
