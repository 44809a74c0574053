"""Lists the GPUs of this machine without starting CUDA."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pathlib
import re
import subprocess
from collections.abc import Mapping

_DRIVER = pathlib.Path("/proc/driver/nvidia/gpus")


def count_gpus() -> int:
    """Count the GPUs that are visible to a process started here, without starting CUDA.

    Returns:
      The number of entries of ``CUDA_VISIBLE_DEVICES`` if it is set, else the number of GPUs in ``nvidia-smi -L`` (with
      MIG the number of partitions) or, without that program, in ``/proc/driver/nvidia``, else 0.

    Example:
      >>> count_gpus() >= 0
      True
    """
    return len(gpu_ids(os.environ))


def gpu_ids(environ: Mapping[str, str]) -> list[str]:
    """The visible GPUs as entries of ``CUDA_VISIBLE_DEVICES``."""
    visible = _visible(environ)
    if visible is not None:
        return visible
    # Numbers, because the driver has "GPU-????????-..." for a GPU that is not in use.
    return [uuid for uuid, _ in _listed()] or [str(i) for i in range(len(_driver_files()))]


def visible_gpus(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """UUID and kind of each GPU that these variables make visible; ("", "GPU") if the driver does not list it."""
    visible = _visible(environ)
    if visible == []:
        return []
    there = _listed() or _driver_files()
    return there if visible is None else [_gpu(word, there) for word in visible]


def parse_listing(listing: str) -> list[tuple[str, str]]:
    """UUID and kind of each GPU in the output of ``nvidia-smi -L``; with MIG of each partition."""
    found: list[tuple[str, str]] = []
    whole, model = False, ""
    line = r"^\s*(GPU|MIG)\s+([^\n]*?)\s*\(UUID: ([^)\s]+)\)"
    for kind, text, uuid in re.findall(line, listing, re.MULTILINE):
        if kind == "MIG":
            if whole:
                found.pop()
            found.append((uuid, f"{model} MIG {text.split()[0]}"))
        else:
            model = text.partition(": ")[2]
            found.append((uuid, model))
        whole = kind == "GPU"
    return found


def default_gpus(environ: Mapping[str, str]) -> list[str]:
    """The :func:`gpu_ids` if JAX's default devices are GPUs."""
    return gpu_ids(environ) if default_platform(environ) == "cuda" else []


def default_platform(environ: Mapping[str, str]) -> str:
    """The platform that JAX tries first for its default devices: the first one in ``JAX_PLATFORMS``, else CUDA."""
    first = environ.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    return "cuda" if first in ("", "gpu") else first


def wants_gpus(environ: Mapping[str, str]) -> bool:
    """Whether ``JAX_PLATFORMS`` lets JAX start GPUs of NVIDIA."""
    wanted = environ.get("JAX_PLATFORMS", "").lower()
    return not wanted or "cuda" in wanted or "gpu" in wanted


def cuda_plugins() -> list[int]:
    """The CUDA versions for which a plugin of JAX is installed, the one that JAX prefers first."""
    return [version for version in (13, 12) if importlib.util.find_spec(f"jax_cuda{version}_plugin")]


def has_cuda() -> bool:
    """Whether a CUDA plugin of JAX is installed."""
    return bool(cuda_plugins())


def _visible(environ: Mapping[str, str]) -> list[str] | None:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    ids = [word.strip() for word in visible.split(",")]
    # CUDA ignores the first invalid entry, usually "-1" or "", and all entries after it.
    return list(itertools.takewhile(lambda word: word not in ("", "-1", "NoDevFiles"), ids))


def _gpu(word: str, there: list[tuple[str, str]]) -> tuple[str, str]:
    unlisted = ("", "GPU")
    if word.isdigit():
        return there[int(word)] if int(word) < len(there) else unlisted
    # CUDA accepts a prefix of a UUID.
    return next((gpu for gpu in there if gpu[0].startswith(word)), unlisted)


def nvidia_smi(*options: str) -> tuple[int | None, str]:
    """Exit code and output of ``nvidia-smi``; the code is None where the program is missing."""
    try:
        done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return None, ""
    except subprocess.TimeoutExpired:
        return 124, "no answer in 30 s"
    return done.returncode, done.stdout or done.stderr


def _listed() -> list[tuple[str, str]]:
    # It lists the others if one GPU has a fault, and then ends with an error.
    return parse_listing(nvidia_smi("-L")[1])


def _driver_files() -> list[tuple[str, str]]:
    # For containers without nvidia-smi. The directories sort by PCI address, as nvidia-smi does.
    found = []
    for path in sorted(_DRIVER.glob("*/information")):
        with contextlib.suppress(OSError):
            lines = (line.partition(":") for line in path.read_text().splitlines())
            fields = {name.strip(): value.strip() for name, _, value in lines}
            uuid = fields.get("GPU UUID", "")
            found.append(("" if "?" in uuid else uuid, fields.get("Model", "GPU")))
    return found
