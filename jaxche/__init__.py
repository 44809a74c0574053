"""Train one Flax model on whatever mix of devices you have, as fast as all of them together."""

from jaxche.averaging import merge_weights, weighted_mean
from jaxche.cadence import ApplyPolicy, ElChe
from jaxche.cluster import initialize
from jaxche.protocols import (
    DataStore,
    Direct,
    Partitioned,
    Pipeline,
    balance_stages,
    measure_costs,
    order_partitions,
)
from jaxche.scaling import (
    AdamScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    SqrtScale,
    noise_scale,
    progress_schedule,
    scale_learning_rate,
)
from jaxche.training import (
    Batches,
    History,
    NNXLoss,
    NonFiniteLossError,
    PaceError,
    PlanMismatchError,
    RankError,
    ReplicaState,
    RoundInfo,
    Trainer,
    linen_loss,
)

__version__ = "0.1.0"

__all__ = [
    "AdaScale",
    "AdamScale",
    "ApplyPolicy",
    "Batches",
    "DataStore",
    "Direct",
    "ElChe",
    "History",
    "LEGWScale",
    "LinearScale",
    "NNXLoss",
    "NonFiniteLossError",
    "PaceError",
    "Partitioned",
    "Pipeline",
    "PlanMismatchError",
    "RankError",
    "ReplicaState",
    "RoundInfo",
    "SqrtScale",
    "Trainer",
    "balance_stages",
    "initialize",
    "linen_loss",
    "measure_costs",
    "merge_weights",
    "noise_scale",
    "order_partitions",
    "progress_schedule",
    "scale_learning_rate",
    "weighted_mean",
]
