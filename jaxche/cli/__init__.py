"""The command line: `jaxche train | report | launch | coordinator | doctor | simulate | plan | completion`."""

from jaxche.cli._main import main

__all__ = ["main"]
