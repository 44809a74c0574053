"""XLA flags for ranks of different speeds; flags of the user take precedence."""

from __future__ import annotations

import importlib.metadata
import math
import mmap
import pathlib
from collections.abc import Mapping

import jaxlib

# A fast rank waits for a slow one inside a collective. XLA's defaults end the process after 60 s (devices of one
# process) or fail the collective after 30 min (gloo, between processes). A long timeout is safe: the death of a rank
# closes its sockets, or the heartbeat detects it within 100 s.
_TIMEOUT_S = 7200
_WARN_S = 300

PROCESS_FLAGS: Mapping[str, str] = {
    "xla_cpu_collective_timeout_seconds": str(_TIMEOUT_S),
    "xla_cpu_collective_call_terminate_timeout_seconds": str(_TIMEOUT_S),
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": str(_WARN_S),
    # By default a GPU waits for ever for a peer that hangs.
    "xla_gpu_execution_terminate_timeout": f"{_TIMEOUT_S}s",
}

# An elastic run has a barrier before each collective, so all ranks start it together. In a ring only the neighbours of
# a dead process see its socket close; the others wait for a timeout within these limits. It applies to each MiB that a
# rank sends, so 10 s need links of 2 Mbit/s, and 3 s of 7 Mbit/s.
_LEAST_ELASTIC_S, _MOST_ELASTIC_S = 3, 10

# Sharded autotuning waits for a peer that compiles the same program for the same kind of GPU.
MIXED_FLAGS: Mapping[str, str] = {"xla_gpu_shard_autotuning": "false"}

# For programs that are compiled for their memory and traffic, and never run: the compilation takes half as long.
UNRUN_FLAGS: Mapping[str, str] = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": "true"}

# jaxlib up to this version supports all these flags. In a later one, search the library for each flag.
_CHECKED_JAXLIB = (0, 12)


def elastic_flags(heartbeat_timeout_s: float) -> Mapping[str, str]:
    """The flags of an elastic run: a collective waits no longer than the heartbeats, if that is no shorter than 3 s."""
    timeout_s = min(max(math.ceil(heartbeat_timeout_s), _LEAST_ELASTIC_S), _MOST_ELASTIC_S)
    return {"xla_cpu_collective_timeout_seconds": str(timeout_s)}


def with_flags(current: str, flags: Mapping[str, str]) -> str:
    """Append ``--name=value`` to the value of ``XLA_FLAGS`` for each flag that it does not set."""
    words = current.split()
    if words and not words[0].startswith("-"):  # the name of a file of flags
        return current
    taken = {word.lstrip("-").partition("=")[0] for word in words}
    missing = [name for name in flags if name not in taken]
    return " ".join(words + [f"--{name}={flags[name]}" for name in missing if _is_supported(name)])


def _is_supported(name: str) -> bool:
    # XLA aborts on an unknown flag, and has no function that lists its flags.
    version = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])
    if version <= _CHECKED_JAXLIB:
        return True
    for library in pathlib.Path(jaxlib.__path__[0]).glob("*.so"):
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if text.find(name.encode()) >= 0:
                return True
    return False
