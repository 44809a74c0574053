"""The names of the package, each of which is imported when it is first used."""

from ._all_gather import all_gather as all_gather
from ._connect import PROXIES as PROXIES
from ._detect import detect as detect
from ._fake_devices import fake_devices
from ._gpus import count_gpus
from ._gpus import cuda_plugins as cuda_plugins
from ._gpus import default_gpus as default_gpus
from ._gpus import has_cuda as has_cuda
from ._gpus import nvidia_smi as nvidia_smi
from ._gpus import wants_gpus as wants_gpus
from ._handshake import versions as versions
from ._initialize import ClusterInfo, initialize
from ._launch import launch
from ._links import Clock as Clock
from ._links import clocks as clocks
from ._links import measure_all_reduce as measure_all_reduce
from ._scheduler_files import SCHEDULERS as SCHEDULERS
from ._scheduler_files import emit
from ._tunables import TUNABLES as TUNABLES
from ._tunables import with_tunables as with_tunables
from ._xla_flags import UNRUN_FLAGS as UNRUN_FLAGS
from ._xla_flags import with_flags as with_flags

__all__ = ["ClusterInfo", "count_gpus", "emit", "fake_devices", "initialize", "launch"]
