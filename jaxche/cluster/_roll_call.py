"""What each process of a run is made of, told to all right after joining: mismatches end there, not in round 900."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxche.cluster._gpus import has_cuda, visible_gpus
from jaxche.cluster._output import listed
from jaxche.cluster._share import share
from jaxche.drawing import odd_ones

_PACKAGES = ("jax", "jaxlib", "flax", "optax")
_ROWS = 12
# What JAX_PLATFORMS begins with where its first devices may be CUDA's.
_CUDA = ("", "cuda", "gpu")
# In which a user may say which of the visible GPUs are this process's.
_OURS = ("JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES")


@dataclasses.dataclass(frozen=True)
class Member:
    """One process: its machine, the kind of its devices, how many processes it expects, its versions, and its GPUs."""

    host: str
    kind: str
    num_processes: int
    versions: dict[str, str]
    gpus: Sequence[str] = ()  # their UUIDs, as far as the driver gives them


def own(num_processes: int, kind: str, gpus: Sequence[str] = ()) -> Member:
    """This process."""
    return Member(socket.gethostname(), kind, num_processes, versions(), gpus)


def versions() -> dict[str, str]:
    """The versions that have to be the same in all processes of a run; of Python the minor one.

    Returns:
      Names of packages, and "python", with their versions.

    Example:
      >>> sorted(versions())
      ['flax', 'jax', 'jaxche', 'jaxlib', 'optax', 'python']
    """
    found = {package: importlib.metadata.version(package) for package in _PACKAGES}
    # Not the metadata's: a checkout on PYTHONPATH has none, or another's.
    found["jaxche"] = sys.modules[__name__.partition(".")[0]].__version__
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    return found


def devices_seen(environ: Mapping[str, str], local_ids: Sequence[int] | None = None) -> list[tuple[str, str]]:
    """The devices that JAX will find in this process, without starting it.

    Args:
      environ: environment variables.
      local_ids: numbers of the visible GPUs that JAX is told to take, or None for all.

    Returns:
      UUID and kind of each GPU, in order; else, without UUID, the one platform named in ``JAX_PLATFORMS``, else "cpu".

    Example:
      >>> devices_seen({"JAX_PLATFORMS": "cpu"})
      [('', 'cpu')]
    """
    wanted = environ.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    if wanted not in _CUDA:
        return [("", wanted)]
    gpus = visible_gpus(environ) if has_cuda() else []
    for name in _OURS:
        if local_ids is None and environ.get(name, "all") != "all":
            local_ids = [int(number) for number in environ[name].split(",")]
    if local_ids is not None:
        gpus = [gpus[i] for i in local_ids if i < len(gpus)]
    return gpus or [("", "cpu")]


def roll_call(client: Any, process_id: int, mine: Member, timeout_s: float, late: bool = False) -> list[Member]:
    """Tells all processes what this one is, and hears the same of them.

    Args:
      client: JAX's client of the coordination service.
      process_id: the number of this process.
      mine: what to tell.
      timeout_s: how long to wait for the others.
      late: takes the place of one that told this before: it hears what the others said, and nobody waits for it.

    Returns:
      One member a process, in order.

    Raises:
      TimeoutError: if one did not answer; names it.
    """
    text = json.dumps(dataclasses.asdict(mine))
    try:
        told = share("roll_call", process_id, mine.num_processes, text, timeout_s, client, late)
    except TimeoutError as error:
        raise TimeoutError(
            f"{error}. Does it call jaxche.initialize(), of this version, and not jax.distributed.initialize()?"
        ) from None
    return [Member(**json.loads(text)) for text in told]


def refuse_mismatch(members: Sequence[Member]) -> None:
    """Refuses processes that expect different worlds or run different versions.

    Raises:
      RuntimeError: with a table of who differs from the most.

    Example:
      >>> refuse_mismatch([Member("a", "cpu", 2, {"jax": "1"}), Member("b", "cpu", 2, {"jax": "1"})])
    """
    worlds = [str(member.num_processes) for member in members]
    if len(set(worlds)) > 1:
        raise RuntimeError(
            "the processes of this run disagree on how many they are: "
            + "; ".join(
                f"num_processes={world} on process {listed([i for i, other in enumerate(worlds) if other == world])}"
                for world in dict.fromkeys(worlds)
            )
            + ". Start all with the same number (JAXCHE_NUM_PROCESSES or num_processes=)."
        )
    columns = {name: [member.versions.get(name, "none") for member in members] for name in members[0].versions}
    odd = odd_ones(columns, range(len(members)), {"host": [member.host for member in members]}, _ROWS)
    if not odd.who:
        return
    fix = " ".join(f"{name}=={value}" for name, value in odd.usual.items() if name != "python")
    raise RuntimeError(
        f"{len(odd.who)} of {len(members)} processes run other versions of {', '.join(odd.usual)}:\n{odd.table}\n"
        "Programs of different versions are not the same program, and their ranks hang or diverge. "
        + (f"There write: pip install {fix}" if fix else f"There start them with Python {odd.usual['python']}.")
    )


def cache_folder(folder: str, kind: str) -> str:
    """The compilation cache of one kind of device, in the folder that is configured for all.

    Example:
      >>> cache_folder("/cache", "NVIDIA H100 80GB HBM3")
      '/cache/nvidia-h100-80gb-hbm3'
    """
    name = "".join(letter if letter.isalnum() else "-" for letter in kind.lower())
    # An object store's address is not a path of this system, but it too has slashes.
    return f"{folder}/{name}" if "://" in folder else os.path.join(folder, name)
