"""The GPUs of this machine, without starting CUDA."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping


def count_gpus() -> int:
    """Counts the GPUs that a process started here would see, without starting CUDA.

    Returns:
      The number of entries of ``CUDA_VISIBLE_DEVICES`` where that is set, else what ``nvidia-smi -L`` lists
      (a partitioned GPU counts once a partition), else 0.

    Example:
      >>> count_gpus() >= 0
      True
    """
    return len(gpu_ids(os.environ))


def gpu_ids(environ: Mapping[str, str]) -> list[str]:
    """Lists the GPUs in the words ``CUDA_VISIBLE_DEVICES`` takes.

    Example:
      >>> gpu_ids({"CUDA_VISIBLE_DEVICES": "0,2"})
      ['0', '2']
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return parse_listing(_nvidia_smi())
    ids = [word.strip() for word in visible.split(",")]
    # CUDA reads the list up to its first entry that names no device, for which "-1" and "" are customary.
    end = next((i for i, word in enumerate(ids) if word in ("", "-1", "NoDevFiles")), len(ids))
    return ids[:end]


def parse_listing(listing: str) -> list[str]:
    """Reads the output of ``nvidia-smi -L``: each GPU by its UUID, a partitioned one by those of its parts.

    Example:
      >>> parse_listing("GPU 0: NVIDIA H100 (UUID: GPU-aa)\\nGPU 1: NVIDIA L4 (UUID: GPU-bb)")
      ['GPU-aa', 'GPU-bb']
    """
    ids: list[str] = []
    whole = False
    for kind, uuid in re.findall(r"^\s*(GPU|MIG)\b.*\(UUID: ([^)\s]+)\)", listing, re.MULTILINE):
        if kind == "MIG" and whole:
            ids.pop()
        whole = kind == "GPU"
        ids.append(uuid)
    return ids


def _nvidia_smi() -> str:
    try:
        asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout if asked.returncode == 0 else ""
