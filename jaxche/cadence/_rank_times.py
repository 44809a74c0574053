"""The measured times of a rank: of its steps, by their rows; and when a rank that is idle is tried again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

from jaxche.cadence._tuner import JUMP, MEMORY

# Sizes of a step whose times are stored.
_SIZES = 4
# Reports before the times count. A first one may include compilation.
_REPORTS = 3
# An idle rank is tried again after so many times its longest step, which takes at most 2 % of the time; and if it stays
# idle, each time after twice as long.
_PATIENCE = 50

# Milliseconds of steps of one size: (rows of a step, the last times, newest first).
Sample = tuple[float, tuple[float, ...]]


@dataclass(frozen=True)
class RankTimes:
    """The measured times of a rank.

    Attributes:
      samples: the times by the size of the step, newest first.
      idle_ms: the time of rounds since it last took part.
      tries: how often it was tried again since it is idle.
    """

    samples: tuple[Sample, ...] = ()
    idle_ms: float = 0.0
    tries: int = 0

    def report(self, steps: int, rows: float, wall_ms: float, round_ms: float) -> RankTimes:
        """The times with those of a round: its steps, its rows in all of them, and its time in them."""
        if not (steps and wall_ms > 0 and rows):
            return replace(self, idle_ms=self.idle_ms + round_ms)
        if self.is_due:  # the times from before it was idle are forgotten
            return RankTimes(((rows / steps, (wall_ms / steps,) * _REPORTS),), tries=self.tries + 1)
        return RankTimes(self._pushed(rows / steps, wall_ms / steps))

    @property
    def is_due(self) -> bool:
        """Whether it is to be tried again, because it has long been idle: it may have been slow for a while."""
        if not (self.samples and self.idle_ms > 0):
            return False
        longest = max(median_low(times) for _, times in self.samples)
        return self.idle_ms >= _PATIENCE * 2**self.tries * longest

    @property
    def is_measured(self) -> bool:
        """Whether it has reported often enough."""
        return sum(len(times) for _, times in self.samples) >= _REPORTS

    @property
    def line(self) -> tuple[float, float]:
        """``(f, s)``: milliseconds of a step without rows, and milliseconds a row.

        Of the least-squares line through the samples, both at least 0; without two sizes f is 0.
        """
        # A few numbers, for which plain Python is faster than NumPy; fsum adds alike in every Python.
        size, ms = [float(rows) for rows, _ in self.samples], [median_low(times) for _, times in self.samples]
        slope = math.inf
        if len(size) > 1:
            mean = math.fsum(size) / len(size)
            spread = [b - mean for b in size]
            slope = math.fsum(d * t for d, t in zip(spread, ms, strict=True)) / math.fsum(d * d for d in spread)
        # The newest sample counts most: the line goes through it.
        slope = min(max(slope, 0.05 * ms[0] / size[0]), ms[0] / size[0])
        return ms[0] - slope * size[0], slope

    def scaled(self, ms: float, rows: float, wanted: float) -> float:
        """The time of a step on ``wanted`` rows, where one on ``rows`` took ``ms``."""
        fixed, slope = self.line if self.samples else (0.0, 1.0)
        return ms * (fixed + slope * wanted) / (fixed + slope * rows)

    def _pushed(self, size: float, ms: float) -> tuple[Sample, ...]:
        """The samples with one more time of steps of ``size`` rows; a change of speed rescales the other sizes too."""
        found = dict(self.samples)
        times = (ms, *found.pop(size, ()))[:MEMORY]
        if len(times) > 1:
            fixed, slope = self.line
            expected, seen = fixed + slope * size, median_low(times)
            if abs(seen - expected) > JUMP * expected:
                found = {b: tuple(t * seen / expected for t in old) for b, old in found.items()}
        return ((size, times), *list(found.items())[: _SIZES - 1])

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> RankTimes:
        """The times from the result of ``dataclasses.asdict``, also after a round trip through JSON."""
        return cls(**{**saved, "samples": tuple((rows, tuple(times)) for rows, times in saved["samples"])})
