"""The type of ``--fleet``, ms a batch of each device."""

from __future__ import annotations

import argparse
import math
import re


def fleet(text: str) -> tuple[float, ...]:
    """Times as in ``20,50``, or in ``20/50`` as the tables have them; anything else is an error of the parser."""
    try:
        times = tuple(map(float, re.split("[,/]", text)))
    except ValueError:
        times = ()
    if not times or not all(0 < ms < math.inf for ms in times):
        raise argparse.ArgumentTypeError(f"{text!r} has no ms a batch of each device; write 20,50")
    return times


def title(times: tuple[float, ...]) -> str:
    """The fleet as the tables have it."""
    return "/".join(f"{ms:g}" for ms in times)
