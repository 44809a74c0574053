"""Layer 4, stages: a model cut into stages, and how their activations and gradients travel."""

from jaxche.stages._balance import balance_stages, measure_costs
from jaxche.stages._base import Protocol_, Tag, Wire, WireClosedError
from jaxche.stages._checks import check_stage_params
from jaxche.stages._data_store import DataStore
from jaxche.stages._direct import Direct, Pipeline
from jaxche.stages._execute import Pace
from jaxche.stages._order import order_partitions
from jaxche.stages._partition import Partitioned, PartitionedState
from jaxche.stages._schedule import (
    SCHEDULES,
    Simulation,
    Task,
    gpipe,
    one_f_one_b,
    simulate_schedule,
)
from jaxche.stages._tensors import DamagedObjectError

__all__ = [
    "SCHEDULES",
    "DamagedObjectError",
    "DataStore",
    "Direct",
    "Pace",
    "Partitioned",
    "PartitionedState",
    "Pipeline",
    "Protocol_",
    "Simulation",
    "Tag",
    "Task",
    "Wire",
    "WireClosedError",
    "balance_stages",
    "check_stage_params",
    "gpipe",
    "measure_costs",
    "one_f_one_b",
    "order_partitions",
    "simulate_schedule",
]
