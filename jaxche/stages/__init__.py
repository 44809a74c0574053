"""A model cut into stages, schedules of micro-batches, and wires for activations and gradients."""

from jaxche.stages._balance import balance_stages, measure_costs, order_partitions
from jaxche.stages._data_store import DataStore
from jaxche.stages._direct import Direct, Pipeline
from jaxche.stages._objects import probe as probe
from jaxche.stages._partition import Partitioned, PartitionedState
from jaxche.stages._program import Pace
from jaxche.stages._program import largest_micro_batch as largest_micro_batch
from jaxche.stages._schedule import (
    SCHEDULES,
    Simulation,
    Task,
    gpipe,
    one_f_one_b,
    simulate_schedule,
)
from jaxche.stages._stage import check_stage_params as check_stage_params
from jaxche.stages._tensors import DamagedObjectError
from jaxche.stages._wire import StageProtocol, Tag, Wire, WireClosedError

# For users; what is imported "as" itself is for the other packages.
__all__ = [
    "SCHEDULES",
    "DamagedObjectError",
    "DataStore",
    "Direct",
    "Pace",
    "Partitioned",
    "PartitionedState",
    "Pipeline",
    "Simulation",
    "StageProtocol",
    "Tag",
    "Task",
    "Wire",
    "WireClosedError",
    "balance_stages",
    "gpipe",
    "measure_costs",
    "one_f_one_b",
    "order_partitions",
    "simulate_schedule",
]
