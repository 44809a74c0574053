"""Layer 4, starts: join, launch, restart and stop the processes of a run, and files for schedulers."""

from jaxche.cluster._all_gather import share as share
from jaxche.cluster._connect import PROXIES as PROXIES
from jaxche.cluster._detect import detect as detect
from jaxche.cluster._fake_devices import fake_devices
from jaxche.cluster._gpus import count_gpus
from jaxche.cluster._gpus import has_cuda as has_cuda
from jaxche.cluster._handshake import versions as versions
from jaxche.cluster._initialize import ClusterInfo, initialize
from jaxche.cluster._launch import launch
from jaxche.cluster._links import clocks as clocks
from jaxche.cluster._links import measure_all_reduce as measure_all_reduce
from jaxche.cluster._scheduler_files import emit

# The names of the reference; the other names are for the command line.
__all__ = [
    "ClusterInfo",
    "count_gpus",
    "emit",
    "fake_devices",
    "initialize",
    "launch",
]
