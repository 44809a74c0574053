"""Checkpoints on file: written while a run trains on, checked when they are read, with the record of its rounds."""

from jaxche.checkpoints._folder_lock import FolderLock as FolderLock
from jaxche.checkpoints._metrics_log import MetricsLog as MetricsLog
from jaxche.checkpoints._reader import CheckpointReader as CheckpointReader
from jaxche.checkpoints._shared_folder import shared_folder as shared_folder
from jaxche.checkpoints._trees import leaf_shapes as leaf_shapes
from jaxche.checkpoints._writer import CheckpointWriter as CheckpointWriter

__all__ = []  # for the other packages; users have jaxche.Checkpoints
