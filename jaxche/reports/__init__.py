"""Reports of a run: rounds, history, plot, advice on the batch, and callbacks that log."""

from jaxche.reports._advice import Advice, Choice, advise
from jaxche.reports._callbacks import LivePlot, Logger, TensorBoardLogger, WandbLogger, profile
from jaxche.reports._every import Every
from jaxche.reports._every import Reached as Reached
from jaxche.reports._every import as_every as as_every
from jaxche.reports._history import History
from jaxche.reports._history import read_record as read_record
from jaxche.reports._history import text_rows as text_rows
from jaxche.reports._history import warn_of_damage as warn_of_damage
from jaxche.reports._round_info import RoundInfo

# The names of the reference; the other names are for fit and its checkpoints.
__all__ = [
    "Advice",
    "Choice",
    "Every",
    "History",
    "LivePlot",
    "Logger",
    "RoundInfo",
    "TensorBoardLogger",
    "WandbLogger",
    "advise",
    "profile",
]
