"""Reports of a run: rounds, history, plot, advice on the batch, and callbacks that log."""

from jaxche.reports._advice import Advice, Choice, advise
from jaxche.reports._callbacks import LivePlot, TensorBoardLogger, WandbLogger, profile
from jaxche.reports._history import History
from jaxche.reports._history import read_record as read_record
from jaxche.reports._history import warn_of_damage as warn_of_damage
from jaxche.reports._round_info import RoundInfo

# The names of the reference; the other names are for checkpoints.
__all__ = [
    "Advice",
    "Choice",
    "History",
    "LivePlot",
    "RoundInfo",
    "TensorBoardLogger",
    "WandbLogger",
    "advise",
    "profile",
]
