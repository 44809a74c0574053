"""Replicas: their devices, compiled local steps and optimizer state, and the merge of all of them."""

from jaxche.replicas._coded_merge import are_coded as are_coded
from jaxche.replicas._coded_merge import fitted as fitted
from jaxche.replicas._coded_merge import zero_residual as zero_residual
from jaxche.replicas._group_merge import GroupPause as GroupPause
from jaxche.replicas._group_merge import group_pauses as group_pauses
from jaxche.replicas._group_merge import merge_carries as merge_carries
from jaxche.replicas._merge import DIFFERS as DIFFERS
from jaxche.replicas._merge import Merge as Merge
from jaxche.replicas._merge import Merged as Merged
from jaxche.replicas._merge import MergeMismatchError
from jaxche.replicas._merge import SingleReplica as SingleReplica
from jaxche.replicas._merge import ToMerge as ToMerge
from jaxche.replicas._merge_program import TINY_WEIGHT as TINY_WEIGHT
from jaxche.replicas._merge_program import MergeRules as MergeRules
from jaxche.replicas._merge_program import Report as Report
from jaxche.replicas._opt_state import are_accumulators as are_accumulators
from jaxche.replicas._opt_state import are_hyperparams as are_hyperparams
from jaxche.replicas._opt_state import are_keys as are_keys
from jaxche.replicas._opt_state import are_plateaus as are_plateaus
from jaxche.replicas._opt_state import are_schedules as are_schedules
from jaxche.replicas._opt_state import are_subspaces as are_subspaces
from jaxche.replicas._opt_state import counts_of as counts_of
from jaxche.replicas._opt_state import is_merged as is_merged
from jaxche.replicas._opt_state import stepped_params as stepped_params
from jaxche.replicas._opt_state import update_in_round as update_in_round
from jaxche.replicas._overlap import Correction as Correction
from jaxche.replicas._overlap import Exchanged as Exchanged
from jaxche.replicas._overlap import MergeInFlight as MergeInFlight
from jaxche.replicas._overlap import OverlappedMerge as OverlappedMerge
from jaxche.replicas._packing import marked as marked
from jaxche.replicas._packing import with_large as with_large
from jaxche.replicas._packing import without_large as without_large
from jaxche.replicas._placement import TREES as TREES
from jaxche.replicas._placement import BatchPlacement as BatchPlacement
from jaxche.replicas._placement import Begin as Begin
from jaxche.replicas._placement import DevicePlacement as DevicePlacement
from jaxche.replicas._placement import Placement as Placement
from jaxche.replicas._placement import add_replica_axis as add_replica_axis
from jaxche.replicas._placement import check_local_devices as check_local_devices
from jaxche.replicas._placement import devices_by_process as devices_by_process
from jaxche.replicas._placement import drop_replica_axis as drop_replica_axis
from jaxche.replicas._placement import is_local as is_local
from jaxche.replicas._placement import make_placements as make_placements
from jaxche.replicas._placement import merges_on_host as merges_on_host
from jaxche.replicas._placement import spans_processes as spans_processes
from jaxche.replicas._placement import without_replica_axis as without_replica_axis
from jaxche.replicas._programs import Carry as Carry
from jaxche.replicas._programs import Constants as Constants
from jaxche.replicas._programs import FrozenArrays as FrozenArrays
from jaxche.replicas._programs import LocalPrograms as LocalPrograms
from jaxche.replicas._programs import LocalState as LocalState
from jaxche.replicas._programs import Programs as Programs
from jaxche.replicas._programs import Steps as Steps
from jaxche.replicas._programs import free as free
from jaxche.replicas._programs import stayed_finite as stayed_finite
from jaxche.replicas._replica import LocalRound as LocalRound
from jaxche.replicas._replica import PaceError
from jaxche.replicas._replica import Replica as Replica
from jaxche.replicas._replica import free_rates as free_rates
from jaxche.replicas._replica import numeric_settings as numeric_settings
from jaxche.replicas._replica import row_limit as row_limit
from jaxche.replicas._replica_mesh import ReplicaMesh as ReplicaMesh
from jaxche.replicas._results import BatchOutputs
from jaxche.replicas._results import EarlyResult as EarlyResult
from jaxche.replicas._results import LocalResult as LocalResult
from jaxche.replicas._results import Unsent as Unsent
from jaxche.replicas._results import check_rows as check_rows
from jaxche.replicas._results import in_order as in_order
from jaxche.replicas._results import unsent_of as unsent_of
from jaxche.replicas._results import without_sums as without_sums
from jaxche.replicas._scaling import MergeScale as MergeScale
from jaxche.replicas._scaling import Scaling as Scaling
from jaxche.replicas._scaling import with_previous_gradient as with_previous_gradient
from jaxche.replicas._table import BROKEN as BROKEN
from jaxche.replicas._table import FAILED as FAILED
from jaxche.replicas._table import HOST_COLUMNS as HOST_COLUMNS
from jaxche.replicas._table import NOT_FINITE as NOT_FINITE
from jaxche.replicas._table import ROW_MODULUS as ROW_MODULUS
from jaxche.replicas._table import SUMS as SUMS
from jaxche.replicas._table import Columns as Columns
from jaxche.replicas._table import HostColumns as HostColumns

# For users, who find them in jaxche.training; what is imported "as" itself is for the other packages.
__all__ = ["BatchOutputs", "MergeMismatchError", "PaceError"]
