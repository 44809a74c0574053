"""The group of a run, its collectives, and the detection of processes that die."""

import lazy_loader

# The names are in __init__.pyi. `jaxche launch` needs only those that import no JAX.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
