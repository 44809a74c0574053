"""Layer 5, training: rounds. Local steps on every replica, one merge, one next plan."""

from jaxche.training._advice import Advice
from jaxche.training._checkpoints import Checkpoints
from jaxche.training._data import Batches
from jaxche.training._doors import NNXLoss, linen_loss
from jaxche.training._errors import NonFiniteLossError, PlanMismatchError
from jaxche.training._fit import fit
from jaxche.training._goodput import advise
from jaxche.training._history import History
from jaxche.training._live import LivePlot
from jaxche.training._loggers import TensorBoardLogger, WandbLogger, profile
from jaxche.training._replica import PaceError
from jaxche.training._state import ReplicaState, RoundInfo
from jaxche.training._trainer import DEFAULT_CADENCE, Trainer

__all__ = [
    "DEFAULT_CADENCE",
    "Advice",
    "Batches",
    "Checkpoints",
    "History",
    "LivePlot",
    "NNXLoss",
    "NonFiniteLossError",
    "PaceError",
    "PlanMismatchError",
    "ReplicaState",
    "RoundInfo",
    "TensorBoardLogger",
    "Trainer",
    "WandbLogger",
    "advise",
    "fit",
    "linen_loss",
    "profile",
]
