"""The public names, each of which is imported when it is first used."""

from . import averaging as averaging
from . import cadence as cadence
from . import cluster as cluster
from . import data as data
from . import reports as reports
from . import scaling as scaling
from . import sharding as sharding
from . import stages as stages
from . import training as training
from .averaging import Weighted, merge_weights, weighted_mean
from .cadence import ApplyPolicy, ElChe, VirtualFleet
from .cluster import fake_devices, initialize
from .data import Batches, Stream, process_shard
from .distributed import PeerLostError, RankError
from .reports import Every, History, LivePlot, RoundInfo
from .scaling import (
    AdamScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    SqrtScale,
    noise_scale,
    progress_schedule,
    scale_learning_rate,
)
from .sharding import (
    FullShard,
    HybridShard,
    HybridShardGradOp,
    NoShard,
    ShardedState,
    ShardGradOp,
    devices,
    sharded_step,
)
from .stages import (
    DataStore,
    Direct,
    Partitioned,
    Pipeline,
    order_partitions,
)
from .training import (
    Checkpoints,
    NNXLoss,
    NonFiniteLossError,
    PlanMismatchError,
    Trainer,
    TrainerState,
    linen_loss,
)

__version__: str

__all__ = [
    "AdaScale",
    "AdamScale",
    "ApplyPolicy",
    "Batches",
    "Checkpoints",
    "DataStore",
    "Direct",
    "ElChe",
    "Every",
    "FullShard",
    "History",
    "HybridShard",
    "HybridShardGradOp",
    "LEGWScale",
    "LinearScale",
    "LivePlot",
    "NNXLoss",
    "NoShard",
    "NonFiniteLossError",
    "Partitioned",
    "PeerLostError",
    "Pipeline",
    "PlanMismatchError",
    "RankError",
    "RoundInfo",
    "ShardGradOp",
    "ShardedState",
    "SqrtScale",
    "Stream",
    "Trainer",
    "TrainerState",
    "VirtualFleet",
    "Weighted",
    "devices",
    "fake_devices",
    "initialize",
    "linen_loss",
    "merge_weights",
    "noise_scale",
    "order_partitions",
    "process_shard",
    "progress_schedule",
    "scale_learning_rate",
    "sharded_step",
    "weighted_mean",
]
