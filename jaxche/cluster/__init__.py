"""Processes: how they start, find each other, and end."""

from jaxche.cluster._emit import emit
from jaxche.cluster._gpus import count_gpus, has_cuda
from jaxche.cluster._initialize import ClusterInfo, initialize
from jaxche.cluster._launch import launch

__all__ = ["ClusterInfo", "count_gpus", "emit", "has_cuda", "initialize", "launch"]
