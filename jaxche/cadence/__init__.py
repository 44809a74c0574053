"""Layer 0: how many batches each replica runs before the next merge. Host numbers; imports no jax."""

from jaxche.cadence._correction import DivergenceCorrection
from jaxche.cadence._counts import clamp_counts, limit_lead, split_by_ratio
from jaxche.cadence._elche import ElChe
from jaxche.cadence._guard import DivergenceGuard, GrowthGuard, TrendGuard, Verdict
from jaxche.cadence._policy import ApplyPolicy
from jaxche.cadence._rounds import RoundPlan, plan_round
from jaxche.cadence._simulate import FleetRun, Slowdown, VirtualFleet

__all__ = [
    "ApplyPolicy",
    "DivergenceCorrection",
    "DivergenceGuard",
    "ElChe",
    "FleetRun",
    "GrowthGuard",
    "RoundPlan",
    "Slowdown",
    "TrendGuard",
    "Verdict",
    "VirtualFleet",
    "clamp_counts",
    "limit_lead",
    "plan_round",
    "split_by_ratio",
]
