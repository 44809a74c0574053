"""Who started this process, and how it joins the others."""

from __future__ import annotations

import os

from jaxche.cluster import ClusterInfo, detect, initialize


def launcher() -> str:
    """Who started this process: "none" where nobody did.

    Unlike ``initialize`` it does not look at the GPUs: they may be of several kinds where each process that is started
    from here takes one of them.

    Raises:
      ValueError: variables of a launcher that are half given or make no sense.
    """
    return detect(None, None, None, os.environ).launcher


def joined(timeout_s: float = 300.0) -> ClusterInfo:
    """Joins the run, or is alone.

    Raises:
      ValueError: processes that refuse each other; starting again changes nothing.
      TimeoutError: they cannot reach each other.
    """
    try:
        return initialize(timeout_s=timeout_s)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
