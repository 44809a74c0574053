"""Layer 1, averaging: trees on a named axis. How replicas that took different numbers of steps become one."""

from jaxche.averaging._drift import Drift, drift_from_gram, gram_matrix, measure_drift
from jaxche.averaging._mean import is_float, psum_buckets, weighted_mean
from jaxche.averaging._outer import outer_init, outer_step
from jaxche.averaging._statistics import escape_name, from_moments, path_names, to_moments
from jaxche.averaging._sums import add_weighted, sum_dtype, weighted, zero_sums
from jaxche.averaging._weights import MERGE_RULES, merge_weights

__all__ = [
    "MERGE_RULES",
    "Drift",
    "add_weighted",
    "drift_from_gram",
    "escape_name",
    "from_moments",
    "gram_matrix",
    "is_float",
    "measure_drift",
    "merge_weights",
    "outer_init",
    "outer_step",
    "path_names",
    "psum_buckets",
    "sum_dtype",
    "to_moments",
    "weighted",
    "weighted_mean",
    "zero_sums",
]
