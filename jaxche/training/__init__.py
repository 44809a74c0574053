"""Layer 4, training: rounds. Local steps on every replica, one merge, one next plan."""

from jaxche.training._advice import Advice
from jaxche.training._agree import NonFiniteLossError, PlanMismatchError, RankError, farewell
from jaxche.training._checkpoints import Checkpoints
from jaxche.training._checks import NUM_PROCESSES, PACE_MS, scheduled
from jaxche.training._data import Batches
from jaxche.training._doors import NNXLoss, linen_loss
from jaxche.training._fit import fit
from jaxche.training._goodput import advise
from jaxche.training._history import History
from jaxche.training._join import stand_by
from jaxche.training._live import LivePlot
from jaxche.training._lives import PeerLostError, watch_lives
from jaxche.training._loggers import TensorBoardLogger, WandbLogger, profile
from jaxche.training._replica import PaceError
from jaxche.training._state import ReplicaState, RoundInfo
from jaxche.training._trainer import DEFAULT_CADENCE, Trainer
from jaxche.training._watched import EVENTS, HANG_TIMEOUT, HEARTBEAT, RESTART, unless_full

__all__ = [
    "DEFAULT_CADENCE",
    "EVENTS",
    "HANG_TIMEOUT",
    "HEARTBEAT",
    "NUM_PROCESSES",
    "PACE_MS",
    "RESTART",
    "Advice",
    "Batches",
    "Checkpoints",
    "History",
    "LivePlot",
    "NNXLoss",
    "NonFiniteLossError",
    "PaceError",
    "PeerLostError",
    "PlanMismatchError",
    "RankError",
    "ReplicaState",
    "RoundInfo",
    "TensorBoardLogger",
    "Trainer",
    "WandbLogger",
    "advise",
    "farewell",
    "fit",
    "linen_loss",
    "profile",
    "scheduled",
    "stand_by",
    "unless_full",
    "watch_lives",
]
