"""The XLA flags that processes of different speeds need, added without touching the user's."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import pathlib
from collections.abc import Mapping

import jaxlib

# A fast rank waits for a slow one inside a collective. XLA's defaults end the process after 60 s (devices of
# one process) or fail the collective after 30 min (gloo, between processes). A rank that dies is noticed
# anyway, at once by its closed sockets or within 100 s by the heartbeat, so patience is safe.
_PATIENCE_S = 7200
_WARN_S = 300

PROCESS_FLAGS: Mapping[str, str] = {
    "xla_cpu_collective_timeout_seconds": str(_PATIENCE_S),
    "xla_cpu_collective_call_terminate_timeout_seconds": str(_PATIENCE_S),
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": str(_WARN_S),
    # By default a GPU waits for ever for a peer that hangs. This ends the process, and the launcher the others.
    "xla_gpu_execution_terminate_timeout": f"{_PATIENCE_S}s",
}

# An elastic run meets outside of collectives first, so nobody is late inside. In a ring only the neighbours of the dead
# see a socket close; those further away wait for them until their patience ends. It is for a piece of a MiB at most,
# not for the whole: a link of 2 Mbit/s is fast enough.
ELASTIC_FLAGS: Mapping[str, str] = {"xla_cpu_collective_timeout_seconds": "10"}

# Sharded autotuning waits for a peer that compiles the same program for the same kind of GPU.
MIXED_FLAGS: Mapping[str, str] = {"xla_gpu_shard_autotuning": "false"}

# Every flag used by jaxche is known to these jaxlib versions; in a later one it is looked for first.
_CHECKED_JAXLIB = (0, 12)


def with_flags(current: str, flags: Mapping[str, str]) -> str:
    """Appends the flags that ``current`` does not set.

    Args:
      current: the value of ``XLA_FLAGS``.
      flags: names without dashes, and their values.

    Returns:
      The new value of ``XLA_FLAGS``. A flag that is already there keeps its value, and the name of a file of
      flags (XLA reads one where the value does not start with a dash) is returned as it is.

    Example:
      >>> with_flags("--xla_gpu_shard_autotuning=true", {"xla_gpu_shard_autotuning": "false"})
      '--xla_gpu_shard_autotuning=true'
      >>> with_flags("", {"xla_cpu_multi_thread_eigen": "false"})
      '--xla_cpu_multi_thread_eigen=false'
    """
    words = current.split()
    if words and not words[0].startswith("-"):
        return current
    taken = {word.lstrip("-").partition("=")[0] for word in words}
    missing = [name for name in flags if name not in taken]
    return " ".join(words + [f"--{name}={flags[name]}" for name in missing if _is_known(name)])


def _is_known(name: str) -> bool:
    # XLA aborts the process on a flag it does not know, and has no call that asks.
    version = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])
    if version <= _CHECKED_JAXLIB:
        return True
    return any(_mentions(library, name) for library in pathlib.Path(jaxlib.__path__[0]).glob("*.so"))


def _mentions(library: pathlib.Path, name: str) -> bool:
    with (
        open(library, "rb") as file,
        mmap.mmap(file.fileno(), os.path.getsize(library), access=mmap.ACCESS_READ) as text,
    ):
        return text.find(name.encode()) >= 0
