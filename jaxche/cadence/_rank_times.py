"""The measured times of a rank: of its steps, by their rows; and when a rank that is idle is tried again."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, NamedTuple

from jaxche.cadence._tuner import JUMP, MEMORY

# Sizes of a step whose times are stored.
_SIZES = 8
# Reports before the times count. A first one may include compilation.
_REPORTS = 3
# An idle rank is tried again after so many times its longest step, which takes at most 2 % of the time; and if it stays
# idle, each time after twice as long.
_PATIENCE = 50
# The standard deviation of normal numbers, relative to the median of their distances from the mean.
_DEVIATION = 1.48
# Times whose distances from a line say how noisy they are.
_KNOWN = 4

# Milliseconds of steps of one size: (rows of a step, the last times, newest first).
Sample = tuple[float, tuple[float, ...]]


class _Fit(NamedTuple):
    """The least-squares line through samples.

    Attributes:
      number: of the times.
      rows: mean size b̄.
      ms: mean time t̄.
      squares: Σ n d² of the distances d from the mean size; 0 with one size.
      products: Σ n d t.
      noise: standard deviation of the times from the line, relative to their mean; by the median, for outliers.
    """

    number: int
    rows: float
    ms: float
    squares: float = 0.0
    products: float = 0.0
    noise: float = 0.0

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Fit:
        # A few numbers, for which plain Python is faster than NumPy; fsum adds alike in every Python.
        size, ms = [float(rows) for rows, _ in samples], [median_low(times) for _, times in samples]
        if len(size) == 1:
            return cls(len(samples[0][1]), size[0], ms[0])
        number = [len(times) for _, times in samples]
        mean, mean_ms = (math.fsum(map(operator.mul, number, of)) / sum(number) for of in (size, ms))
        spread = [n * (b - mean) for n, b in zip(number, size, strict=True)]
        squares, products = (math.fsum(map(operator.mul, spread, of)) for of in (size, ms))
        away = [abs(t - mean_ms - products / squares * (b - mean)) for b, times in samples for t in times]
        noise = _DEVIATION * median_low(sorted(away)[2:] or [0.0])  # two of them determine the line
        return cls(sum(number), mean, mean_ms, squares, products, noise / mean_ms)

    def error(self, size: float, number: int) -> float:
        """Three standard errors of the mean of so many times of this size against the line, relative to the mean."""
        if not self.squares or self.number < _KNOWN:
            return math.inf
        return 3 * self.noise * math.sqrt(1 / number + 1 / self.number + (size - self.rows) ** 2 / self.squares)


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
        """``(f, s)``: milliseconds of a step without rows, and milliseconds a row; both at least 0.

        s = (Σ n d t + κ t̄ / b̄) / (Σ n d² + κ),   f = t̄ - s b̄,   κ = (2 σ b̄)²,   d = b - b̄

        of the n times of each size b with their median t, and their means over all times. Without noise σ that is the
        least-squares line. Sizes that are alike say little of the slope where times are noisy: then the line goes
        through the origin, as it does with one size.
        """
        fit = _Fit.of(self.samples)
        prior, most = (2 * fit.noise * fit.rows) ** 2, fit.ms / fit.rows
        slope = (fit.products + prior * most) / (fit.squares + prior) if fit.squares else most
        slope = min(max(slope, 0.05 * most), most)
        return fit.ms - slope * fit.rows, slope

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
            part = median_low(times) / (fixed + slope * size)
            if abs(part - 1) > min(JUMP, _Fit.of(self.samples).error(size, len(times))):
                found = {b: tuple(t * part for t in old) for b, old in found.items()}
        return ((size, times), *list(found.items())[: _SIZES - 1])

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> RankTimes:
        """The times from the result of ``dataclasses.asdict``, also after a round trip through JSON."""
        return cls(**{**saved, "samples": tuple((rows, tuple(times)) for rows, times in saved["samples"])})
