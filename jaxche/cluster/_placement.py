"""The GPU or CPU core of each rank of a launch, and the environment variables that select it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping

from jaxche.cluster._gpus import default_gpus, default_platform
from jaxche.cluster._tunables import TUNABLES, with_tunables
from jaxche.cluster._xla_flags import with_flags
from jaxche.distributed import COORDINATOR, NUM_PROCESSES, PACE_MS, PROCESS_ID

# More processes a core are a mistake: each needs some hundred MB, and the machine would stop responding.
_MOST_PER_CORE = 16
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class Placement:
    """A GPU, a core, all cores (next to ranks on GPUs), or the devices of a platform; and the pace of steps there."""

    gpu: str | None = None
    core: int | None = None
    platform: str = ""
    shared_cpu: bool = False
    # The wall time in ms to which the trainer pads each local step.
    pace_ms: float | None = None

    def __str__(self) -> str:
        if self.gpu is not None:
            return f"GPU {self.gpu}"
        if self.core is not None:
            return f"CPU core {self.core}"
        return "CPU" if self.shared_cpu else self.platform


_SHARED_CPU = Placement(platform="cpu", shared_cpu=True)


def assign_placements(processes: int, environ: Mapping[str, str], on_cpu: int = 0) -> list[Placement]:
    """Assign each rank a GPU, or a core without GPUs; the last ``on_cpu`` ranks share the CPU."""
    platform = default_platform(environ)
    ids = default_gpus(environ)
    _check_number(processes, len(ids))
    if platform == "cpu" or not (ids or environ.get("JAX_PLATFORMS")):
        if on_cpu:
            raise ValueError(
                f"on_cpu={on_cpu}, but there are no accelerators, or JAX_PLATFORMS excludes them: all {processes} "
                f"processes train on the CPU. Write: jaxche launch -n {processes}"
            )
        cores = _cores()
        return [Placement(core=cores[r % len(cores)] if cores else None, platform="cpu") for r in range(processes)]
    on_gpus = processes - on_cpu
    if platform != "cuda":
        return [Placement(platform=platform)] * on_gpus + [_SHARED_CPU] * on_cpu
    if len(ids) < on_gpus:
        write = f"JAX_PLATFORMS=cpu jaxche launch -n {processes} to run on CPU cores"
        if ids:
            write = (
                f"jaxche launch -n {len(ids)}, or {write}; --on-cpu {processes - len(ids)} puts the others on the CPU, "
                f"CUDA_VISIBLE_DEVICES={','.join([ids[0]] * on_gpus)} all on one GPU"
            )
        raise ValueError(
            f"processes={processes}, but this machine shows {len(ids)} GPU(s) and each process takes one. "
            f"Write: {write}."
        )
    return [Placement(gpu=ids[rank], platform="cuda") for rank in range(on_gpus)] + [_SHARED_CPU] * on_cpu


def rank_environment(
    base: Mapping[str, str], rank: int, processes: int, coordinator: str, placement: Placement
) -> dict[str, str]:
    """The environment variables of one rank; XLA flags, thread counts and tunables in ``base`` take precedence."""
    variables = dict(base) | {COORDINATOR: coordinator, NUM_PROCESSES: str(processes), PROCESS_ID: str(rank)}
    if placement.pace_ms is not None:
        variables[PACE_MS] = f"{placement.pace_ms:g}"
    variables["PYTHONUNBUFFERED"] = "1"
    variables[TUNABLES] = with_tunables(variables.get(TUNABLES, ""))
    # In a pipe each update of a progress bar is a line.
    variables.setdefault("TQDM_MININTERVAL", "5")
    if placement.gpu is not None:
        variables["CUDA_VISIBLE_DEVICES"] = placement.gpu
        # CUDA then numbers the GPUs as nvidia-smi does.
        variables.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    elif placement.shared_cpu:
        variables["JAX_PLATFORMS"] = "cpu"
    elif placement.platform == "cpu":
        variables.setdefault("JAX_PLATFORMS", "cpu")
        # One thread, also on systems that cannot pin a process to a core.
        variables["XLA_FLAGS"] = with_flags(variables.get("XLA_FLAGS", ""), {"xla_cpu_multi_thread_eigen": "false"})
        for name in _ONE_THREAD:
            variables.setdefault(name, "1")
    return variables


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Pin this thread and its child processes to a core inside the context."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _check_number(processes: int, gpus: int) -> None:
    """Refuse processes that no machine with these GPUs and cores is meant for."""
    cores = len(_cores()) or os.cpu_count() or 1
    if processes > gpus + _MOST_PER_CORE * cores:
        number = gpus or cores
        raise ValueError(
            f"processes={processes}, but this machine has {gpus} GPU(s) and {cores} CPU core(s), and starts at most "
            f"{_MOST_PER_CORE} processes a core beside those on GPUs. Write: -n {number} (processes={number})"
        )


def _cores() -> list[int]:
    # macOS and Windows cannot pin a process.
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
