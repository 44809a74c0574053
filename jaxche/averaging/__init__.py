"""Means of trees over a named axis. Replicas that took different numbers of steps are merged into one."""

from jaxche.averaging._ema import ema_init as ema_init
from jaxche.averaging._ema import ema_step as ema_step
from jaxche.averaging._ema import ema_values as ema_values
from jaxche.averaging._ema import ema_weight as ema_weight
from jaxche.averaging._mean import exchange as exchange
from jaxche.averaging._mean import in_buckets as in_buckets
from jaxche.averaging._mean import measure_drift, weighted_mean
from jaxche.averaging._mean import psum_buckets as psum_buckets
from jaxche.averaging._outer import outer_init, outer_step
from jaxche.averaging._statistics import from_moments, to_moments
from jaxche.averaging._trees import Weighted
from jaxche.averaging._trees import add_weighted as add_weighted
from jaxche.averaging._trees import change as change
from jaxche.averaging._trees import escape_name as escape_name
from jaxche.averaging._trees import is_float as is_float
from jaxche.averaging._trees import path_names as path_names
from jaxche.averaging._trees import split_like as split_like
from jaxche.averaging._trees import sum_dtype as sum_dtype
from jaxche.averaging._trees import weighted as weighted
from jaxche.averaging._trees import zero_sums as zero_sums
from jaxche.averaging._weights import MERGE_RULES, merge_weights
from jaxche.averaging._wire import WIRES as WIRES
from jaxche.averaging._wire import blocks_size as blocks_size
from jaxche.averaging._wire import exchange_means as exchange_means
from jaxche.averaging._wire import gather_means as gather_means
from jaxche.averaging._wire import is_gathered as is_gathered
from jaxche.averaging._wire import part_size as part_size

# For users, on a page of the reference; what is imported "as" itself is for the other packages.
__all__ = [
    "MERGE_RULES",
    "Weighted",
    "from_moments",
    "measure_drift",
    "merge_weights",
    "outer_init",
    "outer_step",
    "to_moments",
    "weighted_mean",
]
