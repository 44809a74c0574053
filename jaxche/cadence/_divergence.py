"""Divergence correction of the policy ``async``: the anchor is limited while the replicas drift apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from jaxche.cadence._elche import TUNERS, ElChe
from jaxche.messages import finite_number

# Growth of ln(drift) a local step: above the first the anchor may not grow, above the second it shrinks.
SUPPRESS_RATE, NUDGE_RATE = 1e-3, 1e-2
# Decay of the mean growth, and the drift below which drifts are taken as equal.
DECAY, FLOOR = 0.9, 1e-8
# Reports in a row above a rate before it has an effect; calm reports in a row before the ceiling rises.
PATIENCE, CALM_PATIENCE = 3, 5
# A nudge makes the anchor this part of itself.
NUDGE_FACTOR = 0.5


class Verdict(StrEnum):
    """The effect of a round's drift on the anchor: none, no growth, or a smaller anchor."""

    CALM = "calm"
    SUPPRESS = "suppress"
    NUDGE = "nudge"


@dataclass(frozen=True)
class GrowthGuard:
    """Detects drift D that grows exponentially with the local steps.

    λ_t = ln(max(D_t, ε) / max(D_{t−1}, ε)) / k_max;   λ̄ its exponential mean, bias-corrected

    λ̄ above ``SUPPRESS_RATE`` for ``PATIENCE`` reports in a row → suppress; above ``NUDGE_RATE`` → nudge. A nudge resets
    its own count, because the effect of a shorter round is only in the next drifts. Reference: the Lyapunov guard of
    later flodl versions, which never shrank the anchor.

    Attributes:
      last: the last drift.
      mean: exponential mean before its bias correction.
      reports: number of growths in the mean.
      rising: reports in a row above ``SUPPRESS_RATE``.
      racing: reports in a row above ``NUDGE_RATE`` since the last nudge.
    """

    last: float | None = None
    mean: float = 0.0
    reports: int = 0
    rising: int = 0
    racing: int = 0

    @property
    def rate(self) -> float:
        """Bias-corrected mean growth of ln D a local step; 0.0 before two drifts."""
        return self.mean / (1.0 - DECAY**self.reports) if self.reports else 0.0

    def observe(self, drift: float, k_max: int) -> tuple[GrowthGuard, Verdict]:
        """The next guard, and its verdict on a round of this drift whose fastest replica took ``k_max`` steps."""
        drift = finite_number("drift", drift, "the drift of a round, e.g. 0.02; NaN parameters cannot be mended", 0.0)
        if self.last is None:
            return replace(self, last=drift), Verdict.CALM
        growth = math.log(max(drift, FLOOR) / max(self.last, FLOOR)) / k_max
        mean = DECAY * self.mean + (1.0 - DECAY) * growth
        seen = replace(self, last=drift, mean=mean, reports=self.reports + 1)
        rising = self.rising + 1 if seen.rate > SUPPRESS_RATE else 0
        racing = self.racing + 1 if seen.rate > NUDGE_RATE else 0
        if racing >= PATIENCE:
            return replace(seen, rising=rising, racing=0), Verdict.NUDGE
        verdict = Verdict.SUPPRESS if rising >= PATIENCE else Verdict.CALM
        return replace(seen, rising=rising, racing=racing), verdict


@dataclass(frozen=True, repr=False)
class DivergenceCorrection:
    """A ceiling on the anchor: set while the replicas drift apart, raised and removed when they no longer do.

    ============  =============================================================================================
    verdict       anchor
    ============  =============================================================================================
    suppress      may not grow: ceiling ← the anchor of the round
    nudge         shrinks: a ← ⌈factor · a⌉, ceiling ← a
    calm          from ``CALM_PATIENCE`` calm reports in a row on: ceiling ← ceiling + max(1, ⌊ceiling/4⌋), until the
                  tuner's own choice lies below it; then it is removed
    ============  =============================================================================================

    The correction wraps a cadence and reads only its anchor. The seed tuner does not grow an anchor while the overhead
    is within its target. If a nudge has left the anchor below its start, calm reports raise it, one batch each.

    Attributes:
      guard: the detector of growing drift.
      ceiling: largest anchor for now, or None.
      calm: calm reports in a row.
    """

    guard: GrowthGuard = field(default_factory=GrowthGuard)
    ceiling: int | None = None
    calm: int = 0

    def __repr__(self) -> str:
        """One line: the ceiling of the anchor, and the growth that the guard has measured."""
        return f"DivergenceCorrection(ceiling={self.ceiling}, calm={self.calm}, growth={self.guard.rate:.4g} a step)"

    def apply(
        self, before: ElChe, after: ElChe, drift: float, k_max: int
    ) -> tuple[DivergenceCorrection, ElChe, Verdict]:
        """Check the drift of a round whose fastest replica took ``k_max`` steps, and limit the anchor of the next.

        ``before`` is the cadence of the round, and ``after`` that of the next round by its timings alone.
        """
        guard, verdict = self.guard.observe(drift, k_max)
        calm = self.calm + 1 if verdict is Verdict.CALM else 0
        seen = replace(self, guard=guard, calm=calm)
        if verdict is Verdict.NUDGE:
            ceiling = math.ceil(NUDGE_FACTOR * min(before.anchor, after.anchor))
            return replace(seen, ceiling=ceiling), after.capped(ceiling), verdict
        ceiling = self.ceiling
        if verdict is Verdict.SUPPRESS:
            ceiling = before.anchor if ceiling is None else min(ceiling, before.anchor)
        che = after
        if calm >= CALM_PATIENCE:
            if ceiling is not None:
                ceiling += max(1, ceiling // 4)
            if TUNERS[che.tuner].has_min_anchor and che.anchor < che.min_anchor:
                che = che.relax_anchor_up()
            if ceiling is not None and che.anchor < ceiling:
                ceiling = None
        if ceiling is not None:
            che = che.capped(ceiling)
        return replace(seen, ceiling=ceiling), che, verdict

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> DivergenceCorrection:
        """The correction from the result of ``dataclasses.asdict``."""
        guard = GrowthGuard(**{f.name: saved["guard"][f.name] for f in fields(GrowthGuard)})
        return cls(guard, saved["ceiling"], saved["calm"])
