"""How many batches each replica runs before the next merge. Host numbers; imports no jax."""

from jaxche.cadence._choice import Choice as Choice
from jaxche.cadence._choice import active_counts as active_counts
from jaxche.cadence._choice import better_than_cadence as better_than_cadence
from jaxche.cadence._choice import choose as choose
from jaxche.cadence._divergence import DivergenceCorrection as DivergenceCorrection
from jaxche.cadence._divergence import Verdict as Verdict
from jaxche.cadence._elche import TUNERS as TUNERS
from jaxche.cadence._elche import ElChe
from jaxche.cadence._groups import LEAST_MERGES as LEAST_MERGES
from jaxche.cadence._groups import best_group_merges as best_group_merges
from jaxche.cadence._groups import group_cost_ms as group_cost_ms
from jaxche.cadence._groups import half_life_of as half_life_of
from jaxche.cadence._groups import merge_steps as merge_steps
from jaxche.cadence._groups import most_group_merges as most_group_merges
from jaxche.cadence._groups import paused_ms as paused_ms
from jaxche.cadence._round_plan import ApplyPolicy, RoundPlan, clamp_counts, limit_lead, plan_round
from jaxche.cadence._round_plan import Piece as Piece
from jaxche.cadence._round_plan import interleave as interleave
from jaxche.cadence._round_plan import split_by_ratio as split_by_ratio
from jaxche.cadence._row_shares import RowShares as RowShares
from jaxche.cadence._shared_steps import shared_steps as shared_steps
from jaxche.cadence._simulate import FleetRun, Slowdown, VirtualFleet
from jaxche.cadence._tuner_progress import exposed_exchange_ms as exposed_exchange_ms
from jaxche.cadence._tuner_progress import exposed_ms as exposed_ms
from jaxche.cadence._tuner_progress import sent_after as sent_after
from jaxche.cadence._wire_choice import AUTO_WIRES as AUTO_WIRES
from jaxche.cadence._wire_choice import DEAR as DEAR
from jaxche.cadence._wire_choice import WireChoice as WireChoice
from jaxche.cadence._wire_choice import choose_wire as choose_wire
from jaxche.cadence._wire_choice import is_long_merge as is_long_merge
from jaxche.cadence._wire_choice import merge_share as merge_share

# For users, on a page of the reference; what is imported "as" itself is for the other packages.
__all__ = [
    "ApplyPolicy",
    "ElChe",
    "FleetRun",
    "RoundPlan",
    "Slowdown",
    "VirtualFleet",
    "clamp_counts",
    "limit_lead",
    "plan_round",
]
