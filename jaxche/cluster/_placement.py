"""Where each rank of a launch runs: its GPU or its core, and the variables that say so."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping

from jaxche.cluster._detect import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from jaxche.cluster._flags import with_flags
from jaxche.cluster._gpus import gpu_ids
from jaxche.distributed import PACE_MS

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of one rank: a GPU, a core, all cores beside ranks on GPUs, or devices that ``JAX_PLATFORMS`` names."""

    gpu: str | None = None
    core: int | None = None
    platform: str = ""
    beside: bool = False

    def __str__(self) -> str:
        if self.gpu is not None:
            return f"GPU {self.gpu}"
        if self.core is not None:
            return f"CPU core {self.core}"
        return "CPU" if self.beside else self.platform


_BESIDE = Place(platform="cpu", beside=True)


def places(processes: int, environ: Mapping[str, str], on_cpu: int = 0) -> list[Place]:
    """Gives each rank a GPU of its own, or a core where there are no GPUs or ``JAX_PLATFORMS`` wants none.

    Args:
      processes: how many ranks.
      environ: the variables the ranks will start from.
      on_cpu: how many, the last ones, train on the CPU beside those on accelerators.

    Returns:
      One place a rank, in order.

    Raises:
      ValueError: if there are GPUs, but fewer than ranks for them, or none beside which to train on the CPU.

    Example:
      >>> [str(place) for place in places(3, {"CUDA_VISIBLE_DEVICES": "1,3"}, on_cpu=1)]
      ['GPU 1', 'GPU 3', 'CPU']
    """
    wanted = [word.strip().lower() for word in environ.get("JAX_PLATFORMS", "").split(",") if word.strip()]
    if wanted and not {"cuda", "gpu"} & set(wanted):
        if wanted[0] != "cpu":
            return [Place(platform=wanted[0])] * (processes - on_cpu) + [_BESIDE] * on_cpu
        ids = []
    else:
        ids = gpu_ids(environ)
    if not ids and not wanted:
        wanted = ["cpu"]
    if wanted[:1] == ["cpu"] and not ids:
        if on_cpu:
            raise ValueError(
                f"on_cpu={on_cpu}, but there are no accelerators here, or JAX_PLATFORMS wants none: all {processes} "
                f"processes train on the CPU. Write: jaxche launch -n {processes}"
            )
        cores = _cores()
        return [Place(core=cores[r % len(cores)] if cores else None, platform="cpu") for r in range(processes)]
    on_gpus = processes - on_cpu
    if len(ids) < on_gpus:
        fewer = f"jaxche launch -n {len(ids)}, or " if ids else ""
        more = f"; --on-cpu {processes - len(ids)} puts the others on the CPU, " if ids else ""
        more += f"CUDA_VISIBLE_DEVICES={','.join([ids[0]] * on_gpus)} all on one GPU" if ids else ""
        raise ValueError(
            f"processes={processes}, but this machine shows {len(ids)} GPU(s) and each process takes one. "
            f"Write: {fewer}JAX_PLATFORMS=cpu jaxche launch -n {processes} to run on CPU cores{more}."
        )
    return [Place(gpu=ids[rank], platform="cuda") for rank in range(on_gpus)] + [_BESIDE] * on_cpu


def rank_environment(
    base: Mapping[str, str],
    rank: int,
    processes: int,
    coordinator: str,
    place: Place,
    pace_ms: float | None = None,
) -> dict[str, str]:
    """Composes the variables of one rank.

    Args:
      base: the variables to start from; the XLA flags and thread counts found there are kept.
      rank: the number of the process.
      processes: how many there are.
      coordinator: ``host:port`` of rank 0.
      place: where the rank runs.
      pace_ms: wall time in ms each local step is padded to, or None.

    Returns:
      All variables of the rank.

    Example:
      >>> rank_environment({}, 1, 2, "127.0.0.1:1234", Place(gpu="GPU-aa"), pace_ms=20)["JAXCHE_PACE_MS"]
      '20'
    """
    variables = dict(base)
    variables[COORDINATOR] = coordinator
    variables[NUM_PROCESSES] = str(processes)
    variables[PROCESS_ID] = str(rank)
    if pace_ms is not None:
        variables[PACE_MS] = f"{pace_ms:g}"
    variables["PYTHONUNBUFFERED"] = "1"
    # Through a pipe each redraw of a progress bar is a line.
    variables.setdefault("TQDM_MININTERVAL", "5")
    if place.gpu is not None:
        variables["CUDA_VISIBLE_DEVICES"] = place.gpu
        # A number means the same card to CUDA and to the driver's tools.
        variables.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    elif place.beside:
        variables["JAX_PLATFORMS"] = "cpu"
    elif place.platform == "cpu":
        variables.setdefault("JAX_PLATFORMS", "cpu")
        # Changes nothing on a rank pinned to a core; where the system cannot pin, it keeps a rank to one thread.
        variables["XLA_FLAGS"] = with_flags(variables.get("XLA_FLAGS", ""), {"xla_cpu_multi_thread_eigen": "false"})
        for name in _ONE_THREAD:
            variables.setdefault(name, "1")
    return variables


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Pins this thread, and so what it spawns, to a core until the block ends; nothing where that cannot be."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cores() -> list[int]:
    # macOS and Windows do not pin.
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
