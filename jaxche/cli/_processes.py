"""The processes of a run: detect their launcher, join them, meet at a barrier."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxche.cluster import ClusterInfo


def launcher() -> str:
    """The launcher of this process, or "none".

    Unlike ``initialize`` this accepts GPUs of several kinds: each process that is started from here may take one.

    Raises:
      ValueError: the variables of a launcher are incomplete or invalid.
    """
    from jaxche.cluster import detect

    return detect(None, None, None, os.environ).launcher


def join(timeout_s: float = 300.0) -> ClusterInfo:
    """Joins the run, if there is one.

    Raises:
      ValueError: the processes are incompatible, so a restart fails too.
      TimeoutError: the processes cannot reach each other.
    """
    from jaxche.cluster import initialize

    try:
        return initialize(timeout_s=timeout_s)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def barrier(name: str) -> None:
    """Waits until all processes have called this."""
    import jax

    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def print_once(text: str) -> None:
    """Prints a line on process 0."""
    import jax

    if jax.process_index() == 0:
        print(text, flush=True)
