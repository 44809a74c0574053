"""Train one JAX model on devices of different speeds, to a given quality in the least time."""

import pkgutil

import lazy_loader

# The names are in __init__.pyi, for people and type checkers too. `import jaxche.cadence` needs no JAX this way.
__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
_packages = [module.name for module in pkgutil.iter_modules(__path__)]
__all__ = [name for name in _names if name not in _packages]  # pyright: ignore[reportUnsupportedDunderAll]

__version__ = "0.1.0"
