"""What people see of a run: rounds, their history, its plot, advice, and callbacks that log."""

from jaxche.reports._advice import Advice, advise
from jaxche.reports._callbacks import LivePlot, TensorBoardLogger, WandbLogger, profile
from jaxche.reports._history import History, read_record, warn_of_damage
from jaxche.reports._round_info import RoundInfo

__all__ = [
    "Advice",
    "History",
    "LivePlot",
    "RoundInfo",
    "TensorBoardLogger",
    "WandbLogger",
    "advise",
    "profile",
    "read_record",
    "warn_of_damage",
]
