"""Processes: how they start, find each other, and end."""

from jaxche.cluster._connect import PROXIES
from jaxche.cluster._detect import detect
from jaxche.cluster._emit import emit
from jaxche.cluster._fake import fake_devices
from jaxche.cluster._gpus import count_gpus, has_cuda
from jaxche.cluster._initialize import ClusterInfo, initialize
from jaxche.cluster._launch import launch
from jaxche.cluster._links import clocks, measure_all_reduce
from jaxche.cluster._roll_call import versions
from jaxche.cluster._share import share

__all__ = [
    "PROXIES",
    "ClusterInfo",
    "clocks",
    "count_gpus",
    "detect",
    "emit",
    "fake_devices",
    "has_cuda",
    "initialize",
    "launch",
    "measure_all_reduce",
    "share",
    "versions",
]
