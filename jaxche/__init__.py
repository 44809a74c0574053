"""Train one JAX model on devices of different speeds, to a given quality in the least time."""

import pkgutil
from types import MappingProxyType

import lazy_loader

# The names are in __init__.pyi, for people and type checkers too. `import jaxche.cadence` needs no JAX this way.
_attribute, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
_packages = [module.name for module in pkgutil.iter_modules(__path__)]
__all__ = [name for name in _names if name not in _packages]  # pyright: ignore[reportUnsupportedDunderAll]

__version__ = "0.1.0"

# Names that were here once, and the package that has them now.
_MOVED = MappingProxyType(
    {
        "Advice": "jaxche.reports",
        "TensorBoardLogger": "jaxche.reports",
        "WandbLogger": "jaxche.reports",
        "profile": "jaxche.reports",
        "PaceError": "jaxche.training",
        "ReplicaState": "jaxche:TrainerState",
        "balance_stages": "jaxche.stages",
        "measure_costs": "jaxche.stages",
        "compare_strategies": "jaxche.sharding",
    }
)


def __getattr__(name: str):
    if name in _MOVED:
        package, _, new = _MOVED[name].partition(":")
        raise ImportError(f"jaxche.{name} has moved; write: from {package} import {new or name}")
    return _attribute(name)
