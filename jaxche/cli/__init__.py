"""Layer 6, the command line: `jaxche train | launch | doctor | simulate`."""

from jaxche.cli._main import main

__all__ = ["main"]
