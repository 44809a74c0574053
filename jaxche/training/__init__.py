"""Rounds of local steps on every replica, one merge, and the next plan."""

from jaxche.data import Batches, Stream, process_shard
from jaxche.replicas import BatchOutputs, MergeMismatchError, PaceError
from jaxche.training._arguments import default_cadence as default_cadence
from jaxche.training._checkpoints import Checkpoints
from jaxche.training._flax import NNXLoss, linen_loss
from jaxche.training._non_finite import NonFiniteLossError
from jaxche.training._round_end import PlanMismatchError
from jaxche.training._state import TrainerState
from jaxche.training._trainer import Trainer

__all__ = [
    "BatchOutputs",
    "Batches",
    "Checkpoints",
    "MergeMismatchError",
    "NNXLoss",
    "NonFiniteLossError",
    "PaceError",
    "PlanMismatchError",
    "Stream",
    "Trainer",
    "TrainerState",
    "linen_loss",
    "process_shard",
]
