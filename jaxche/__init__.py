"""Train one Flax model on whatever mix of devices you have, as fast as all of them together."""

import lazy_loader

# The names are in __init__.pyi, for people and type checkers too. `import jaxche.cadence` needs no JAX this way.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
