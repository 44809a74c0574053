"""Divergence correction: hold a cadence back while the replicas drift apart, and let it recover."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jaxche.cadence._checks import finite_number, whole_number
from jaxche.cadence._elche import ElChe
from jaxche.cadence._guard import DivergenceGuard, GrowthGuard, Verdict


@dataclass(frozen=True)
class DivergenceCorrection:
    """A ceiling on the anchor of a cadence: set when the replicas drift apart, raised and dropped once they are calm.

    ============  =============================================================================================
    verdict       anchor
    ============  =============================================================================================
    suppress      may not grow: ceiling ← the anchor of the round
    nudge         shrinks: a ← ⌈factor · a⌉, ceiling ← a
    calm          from the ``patience``-th calm report in a row on: ceiling ← ceiling + max(1, ⌊ceiling/4⌋), until the
                  tuner's own choice lies below it; then it is dropped
    ============  =============================================================================================

    The correction wraps a cadence and knows nothing of its arithmetic. The seed tuner does not grow an anchor by itself
    while the overhead is within its target, so where a nudge has left it below its start the calm reports raise it, one
    batch each.

    Args:
      guard: what judges the drift, ``GrowthGuard`` or ``TrendGuard``.
      factor: what a nudge leaves of the anchor, 0.1 to 1.
      patience: calm reports in a row before the ceiling rises.
      ceiling: largest anchor for now; None is no ceiling. State, as is ``calm``.
      calm: calm reports in a row.

    Raises:
      ValueError: for a knob out of range, and in ``apply`` for a drift that is negative or not finite.

    References:
      flodl 0.4.0, whose guard never shrank the anchor; its later versions hold growth back for 5 calm reports.

    Example:
      >>> before = ElChe(2, 10).report_timing([100.0, 230.0], [10, 10], sync_ms=45.0)
      >>> correction = DivergenceCorrection()
      >>> for drift in (0.01, 0.1, 1.0, 10.0):  # ten times the drift every round
      ...     after = before.report_timing([460.0, 460.0], before.batch_counts, sync_ms=45.0)
      ...     correction, before, verdict = correction.apply(before, after, drift)
      >>> verdict.value, before.anchor, before.batch_counts, correction.ceiling
      ('nudge', 10, (23, 10), 10)
    """

    guard: DivergenceGuard = field(default_factory=GrowthGuard)
    factor: float = 0.5
    patience: int = 5
    ceiling: int | None = None
    calm: int = 0

    def __post_init__(self) -> None:
        whole_number("patience", self.patience, 1, "DivergenceCorrection(patience=5)")
        finite_number("factor", self.factor, "DivergenceCorrection(factor=0.5)")
        if not 0.1 <= self.factor <= 1.0:
            raise ValueError(f"factor={self.factor} lies outside [0.1, 1]; write e.g. DivergenceCorrection(factor=0.5)")
        if self.ceiling is not None:
            whole_number("ceiling", self.ceiling, 1, "ceiling=None to start afresh")

    def apply(self, before: ElChe, after: ElChe, drift: float) -> tuple[DivergenceCorrection, ElChe, Verdict]:
        """Judge a round and correct the cadence that its timings gave.

        Args:
          before: the cadence in force during the round.
          after: ``before.report_timing(...)`` with the round's timings.
          drift: how far the replicas drifted apart in it; the same measure every round, at least 0.

        Returns:
          (next correction, cadence for the next round, verdict).
        """
        guard, verdict = self.guard.observe(drift, max(before.batch_counts))
        calm = self.calm + 1 if verdict is Verdict.CALM else 0
        seen = replace(self, guard=guard, calm=calm)
        if verdict is Verdict.NUDGE:
            ceiling = after.capped(before.anchor).nudge_anchor_down(self.factor).anchor
            # The nudge of the seed tuner may leave counts behind (dead zone, max_batch_diff); capped does not.
            return replace(seen, ceiling=ceiling), after.capped(ceiling), verdict
        ceiling = self.ceiling
        if verdict is Verdict.SUPPRESS:
            ceiling = before.anchor if ceiling is None else min(ceiling, before.anchor)
        che = after
        if calm >= self.patience:
            if ceiling is not None:
                ceiling += max(1, ceiling // 4)
            if che.tuner == "seed" and che.anchor < che.min_anchor:
                che = che.relax_anchor_up()
            if ceiling is not None and che.anchor < ceiling:
                ceiling = None
        if ceiling is not None:
            che = che.capped(ceiling)
        return replace(seen, ceiling=ceiling), che, verdict
