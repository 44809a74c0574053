"""Divergence guards: from the drift of each round to calm, suppress or nudge."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from jaxche.cadence._checks import finite_number, whole_number


class Verdict(StrEnum):
    """What a guard says of the drift: all is well, let the anchor not grow, or make it smaller.

    Example:
      >>> Verdict.NUDGE == "nudge"
      True
    """

    CALM = "calm"
    SUPPRESS = "suppress"
    NUDGE = "nudge"


class DivergenceGuard(Protocol):
    """The contract: a value that takes one round's drift and gives the next guard and a verdict.

    Example:
      >>> class Never:
      ...     def observe(self, drift, k_max):
      ...         return self, Verdict.CALM
      >>> guard: DivergenceGuard = Never()
      >>> guard.observe(0.5, 10)[1]
      <Verdict.CALM: 'calm'>
    """

    def observe(self, drift: float, k_max: int) -> tuple[DivergenceGuard, Verdict]:
        """``drift`` of the round (any one measure throughout, at least 0) and its most local steps ``k_max``."""
        ...


@dataclass(frozen=True)
class TrendGuard:
    """Stop growth when the drift of three rounds rises and the last passes a threshold.

    D_{t−2} < D_{t−1} < D_t and D_t > threshold → suppress

    The size of D_rel follows the learning rate, so one threshold does not serve a whole schedule; ``GrowthGuard`` needs
    none.

    Args:
      threshold: drift that is never worried about, in the units of the drift.
      recent: the last two drifts, oldest first; leave out to start afresh.

    Raises:
      ValueError: for a threshold, and in ``observe`` for a drift, that is negative or not finite.

    References:
      flodl 0.4.0, divergence trend guard.

    Example:
      >>> guard, verdicts = TrendGuard(threshold=0.01), []
      >>> for drift in (0.02, 0.03, 0.04):
      ...     guard, verdict = guard.observe(drift, k_max=4)
      ...     verdicts.append(verdict.value)
      >>> verdicts
      ['calm', 'calm', 'suppress']
    """

    threshold: float = 0.05
    recent: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        finite_number("threshold", self.threshold, "TrendGuard(threshold=0.05)", least=0.0)
        object.__setattr__(self, "recent", tuple(self.recent))

    def observe(self, drift: float, k_max: int) -> tuple[TrendGuard, Verdict]:
        """The next guard and its verdict on this round; ``k_max`` plays no part."""
        recent = (*self.recent, _checked(drift))[-3:]
        rising = len(recent) == 3 and recent[0] < recent[1] < recent[2]
        verdict = Verdict.SUPPRESS if rising and recent[-1] > self.threshold else Verdict.CALM
        return replace(self, recent=recent[-2:]), verdict


@dataclass(frozen=True)
class GrowthGuard:
    """Stop growth when the drift grows exponentially in local steps, and shrink the anchor when it grows fast.

    λ_t = ln(max(D_t, ε) / max(D_{t−1}, ε)) / k_max;   λ̄ its exponential mean, bias-corrected

    λ̄ above ``suppress_rate`` for ``patience`` reports in a row → suppress; above ``nudge_rate`` → nudge. A nudge starts
    its count again, because a shorter round shows its effect in the next drifts only.

    Args:
      suppress_rate: growth of ln D a local step that must not go on.
      nudge_rate: growth that calls for a smaller anchor.
      decay: memory of the mean, in [0, 1).
      floor: ε, below which drifts are not told apart.
      patience: reports in a row.
      last: last drift; this and the fields below are state, leave them out to start afresh.
      mean: exponential mean before its bias is corrected.
      reports: growths seen.
      rising: reports in a row above ``suppress_rate``.
      racing: reports in a row above ``nudge_rate``, since the last nudge.

    Raises:
      ValueError: for a knob out of range, and in ``observe`` for a drift that is negative or not finite, or k_max < 1.

    References:
      The Lyapunov-style divergence guard of later flodl versions, which however never shrank the anchor.

    Example:
      >>> guard, _ = GrowthGuard().observe(0.01, k_max=4)
      >>> guard, verdict = guard.observe(0.02, k_max=4)
      >>> round(guard.rate, 9) == round(math.log(2) / 4, 9), verdict.value
      (True, 'calm')
    """

    suppress_rate: float = 1e-3
    nudge_rate: float = 1e-2
    decay: float = 0.9
    floor: float = 1e-8
    patience: int = 3
    last: float | None = None
    mean: float = 0.0
    reports: int = 0
    rising: int = 0
    racing: int = 0

    def __post_init__(self) -> None:
        whole_number("patience", self.patience, 1, "GrowthGuard(patience=3)")
        finite_number("suppress_rate", self.suppress_rate, "GrowthGuard(suppress_rate=1e-3)", least=0.0)
        finite_number("nudge_rate", self.nudge_rate, "GrowthGuard(nudge_rate=1e-2)", least=0.0)
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"decay={self.decay} lies outside [0, 1); write e.g. GrowthGuard(decay=0.9)")
        if not 0.0 < self.floor < math.inf:
            raise ValueError(f"floor={self.floor} must be above 0; write e.g. GrowthGuard(floor=1e-8)")

    @property
    def rate(self) -> float:
        """Bias-corrected mean growth of ln D a local step; 0.0 before two drifts."""
        return self.mean / (1.0 - self.decay**self.reports) if self.reports else 0.0

    def observe(self, drift: float, k_max: int) -> tuple[GrowthGuard, Verdict]:
        """The next guard and its verdict on this round."""
        drift = _checked(drift)
        k_max = whole_number("k_max", k_max, 1, "k_max=max(counts)")
        if self.last is None:
            return replace(self, last=drift), Verdict.CALM
        growth = math.log(max(drift, self.floor) / max(self.last, self.floor)) / k_max
        mean = self.decay * self.mean + (1.0 - self.decay) * growth
        seen = replace(self, last=drift, mean=mean, reports=self.reports + 1)
        rising = self.rising + 1 if seen.rate > self.suppress_rate else 0
        racing = self.racing + 1 if seen.rate > self.nudge_rate else 0
        if racing >= self.patience:
            return replace(seen, rising=rising, racing=0), Verdict.NUDGE
        verdict = Verdict.SUPPRESS if rising >= self.patience else Verdict.CALM
        return replace(seen, rising=rising, racing=racing), verdict


def _checked(drift: float) -> float:
    return finite_number(
        "drift", drift, "the drift of a round, e.g. 0.02; a NaN means the parameters are lost", least=0.0
    )
