"""Layer 4, starts: join, launch, restart and stop the processes of a run, and files for schedulers."""

from jaxche.cluster._all_gather import share
from jaxche.cluster._connect import PROXIES
from jaxche.cluster._detect import detect
from jaxche.cluster._fake_devices import fake_devices
from jaxche.cluster._gpus import count_gpus, has_cuda
from jaxche.cluster._handshake import versions
from jaxche.cluster._initialize import ClusterInfo, initialize
from jaxche.cluster._launch import launch
from jaxche.cluster._links import clocks, measure_all_reduce
from jaxche.cluster._scheduler_files import emit

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
