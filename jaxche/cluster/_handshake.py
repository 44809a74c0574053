"""The handshake after joining: compares versions, device kinds and the number of processes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping, Sequence

from jaxche.cluster._all_gather import all_gather
from jaxche.cluster._gpus import default_platform, has_cuda, visible_gpus
from jaxche.messages import format_ranks, odd_ones

_PACKAGES = ("jax", "jaxlib", "flax", "optax")
_ROWS = 12
# Variables that select GPUs of this process.
_SELECTION = ("JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES")


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """Host, device kind, expected number of processes, versions and GPU UUIDs of one process."""

    host: str
    kind: str
    num_processes: int
    versions: dict[str, str]
    gpus: Sequence[str] = ()  # UUIDs, "" if unknown


def versions() -> dict[str, str]:
    """The versions that must be equal in all processes of a run; of Python the minor version."""
    found = {package: importlib.metadata.version(package) for package in _PACKAGES}
    # Not from the metadata: a checkout on PYTHONPATH has none, or that of another version.
    found["jaxche"] = sys.modules[__name__.partition(".")[0]].__version__
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    return found


def visible_devices(environ: Mapping[str, str], local_ids: Sequence[int] | None = None) -> list[tuple[str, str]]:
    """UUID and kind of each GPU that JAX will use (of ``local_ids``, or all), before it starts; else ("", platform)."""
    platform = default_platform(environ)
    if platform != "cuda":
        return [("", platform)]
    gpus = visible_gpus(environ) if has_cuda() else []
    for name in _SELECTION:
        if local_ids is None and environ.get(name, "") not in ("", "all"):
            local_ids = [int(number) for number in environ[name].split(",")]
    if local_ids is not None:
        gpus = [gpus[i] for i in local_ids if i < len(gpus)]
    return gpus or [("", "cpu")]


def handshake(mine: ProcessInfo, timeout_s: float, replacement: bool = False) -> list[ProcessInfo]:
    """Gather the values of all processes; ``replacement`` as in :func:`all_gather`."""
    try:
        return [ProcessInfo(**one) for one in all_gather("handshake", vars(mine), timeout_s, replacement)]
    except TimeoutError as error:
        raise TimeoutError(
            f"{error}. Does it call jaxche.initialize(), of this version, and not jax.distributed.initialize()?"
        ) from None


def refuse_mismatch(processes: Sequence[ProcessInfo]) -> None:
    """Refuse different versions or numbers of processes."""
    worlds = [process.num_processes for process in processes]
    if len(set(worlds)) > 1:
        listed = "; ".join(
            f"num_processes={world} on process {format_ranks([i for i, own in enumerate(worlds) if own == world])}"
            for world in dict.fromkeys(worlds)
        )
        raise RuntimeError(
            f"the processes of this run disagree on their number: {listed}. Start all with the same number "
            "(JAXCHE_NUM_PROCESSES or num_processes=)."
        )
    columns = {name: [process.versions.get(name, "none") for process in processes] for name in processes[0].versions}
    odd = odd_ones(columns, range(len(processes)), {"host": [process.host for process in processes]}, _ROWS)
    if not odd.processes:
        return
    packages = " ".join(f"{name}=={value}" for name, value in odd.majority.items() if name != "python")
    fix = f"write: pip install {packages}" if packages else f"start them with Python {odd.majority['python']}."
    raise RuntimeError(
        f"{len(odd.processes)} of {len(processes)} processes run other versions of {', '.join(odd.majority)}:\n"
        f"{odd.table}\nDifferent versions compile different programs, whose ranks hang or diverge. There {fix}"
    )


def cache_folder(folder: str, kind: str) -> str:
    """The compilation cache of one device kind, inside the configured directory."""
    name = "".join(letter if letter.isalnum() else "-" for letter in kind.lower())
    # The URL of an object store has slashes on every system.
    return f"{folder}/{name}" if "://" in folder else os.path.join(folder, name)
