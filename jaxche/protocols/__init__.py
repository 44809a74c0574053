"""Layer 4, stages: a model cut into stages, and how their activations and gradients travel."""

from jaxche.protocols._balance import balance_stages, measure_costs
from jaxche.protocols._base import Protocol_, Tag, Wire, WireClosedError
from jaxche.protocols._checks import check_stage_params
from jaxche.protocols._data_store import DataStore
from jaxche.protocols._direct import Direct, Pipeline
from jaxche.protocols._execute import Pace
from jaxche.protocols._order import order_partitions
from jaxche.protocols._partition import Partitioned, PartitionedState
from jaxche.protocols._schedule import (
    SCHEDULES,
    Simulation,
    Task,
    gpipe,
    one_f_one_b,
    simulate_schedule,
)
from jaxche.protocols._tensors import DamagedObjectError

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
