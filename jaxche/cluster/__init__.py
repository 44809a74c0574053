"""Join, launch, restart and stop the processes of a run, and files for schedulers."""

# pyright: reportUnsupportedDunderAll=false

import lazy_loader

# The names are in __init__.pyi. `jaxche launch` needs only those that import no JAX.
__getattr__, __dir__, _ = lazy_loader.attach_stub(__name__, __file__)

# The names of the reference; the other names are for the command line.
__all__ = ["ClusterInfo", "count_gpus", "emit", "fake_devices", "initialize", "launch"]
