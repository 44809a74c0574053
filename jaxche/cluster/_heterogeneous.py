"""Runs on heterogeneous platforms: the accelerators of each process are a second, local backend.

JAX starts a backend over all processes, or not at all. A process without an accelerator would block the others, and
NCCL refuses two processes on one GPU. So the CPU backend becomes the default one, which spans all processes and in
which replicas merge, and the backend of the accelerators is local to each process.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxche.cluster._gpus import default_platform
from jaxche.cluster._handshake import ProcessInfo
from jaxche.sharding import RemoteDevice, set_devices

_log = logging.getLogger("jaxche")

# JAX's default fraction of GPU memory, and the variables that change it.
_MEMORY_FRACTION = 0.75
_MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")


def heterogeneity_reason(processes: Sequence[ProcessInfo]) -> str | None:
    """The reason why no backend can span the accelerators of all processes, or None."""
    on_cpu = {process.kind == "cpu" for process in processes}
    if len(on_cpu) == 2:
        return "some processes train on the CPU"
    return "processes share a GPU" if any(n > 1 for n in _users(processes).values()) else None


def configure_platforms(processes: Sequence[ProcessInfo], mine: ProcessInfo, environ: Mapping[str, str]) -> str | None:
    """Make the accelerators local to this process, before JAX starts; returns their platform, or None on the CPU."""
    if mine.kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return None
    platform = default_platform(environ)
    # The first platform is the default.
    jax.config.update("jax_platforms", f"cpu,{platform}")
    given = jax.config.values["jax_pjrt_client_create_options"] or {}
    if isinstance(given, str):  # "key:value;key:value"
        given = dict(part.split(":", 1) for part in given.split(";"))
    options = {**given, "num_nodes": 1}
    users = max((_users(processes)[gpu] for gpu in mine.gpus), default=1)
    if users > 1 and not any(name in environ for name in _MEMORY):
        options["memory_fraction"] = _MEMORY_FRACTION / users
        _log.info("%d processes share a GPU: this one takes %.0f %% of it", users, 100 * _MEMORY_FRACTION / users)
    jax.config.update("jax_pjrt_client_create_options", options)
    if len(mine.gpus) > 1 and jax.config.values["jax_num_cpu_devices"] < 0:
        # Each GPU needs a CPU device to merge on.
        jax.config.update("jax_num_cpu_devices", len(mine.gpus))
    return platform


def describe_accelerators(platform: str | None) -> list[dict[str, Any]]:
    """The accelerators of this process as dicts for :func:`register_devices`; starts JAX's backends."""
    jax.devices()  # on every process, because the CPU backend waits for all
    own = [] if platform is None else jax.devices(platform)
    return [vars(RemoteDevice(d.process_index, d.platform, d.device_kind, d.id)) for d in own]


def register_devices(accelerators: Sequence[Sequence[dict[str, Any]]], process_id: int, platform: str | None) -> None:
    """Set ``jaxche.devices()`` from the :func:`describe_accelerators` of all processes."""
    everywhere: list[Any] = []
    for process, listed in enumerate(accelerators):
        remote = [RemoteDevice(**device) for device in listed]
        if not remote:
            everywhere += jax.local_devices(process)
        else:
            everywhere += jax.devices(platform) if process == process_id else remote
    set_devices(everywhere)


def _users(processes: Sequence[ProcessInfo]) -> collections.Counter[str]:
    """The number of processes that see each GPU."""
    return collections.Counter(gpu for process in processes for gpu in process.gpus if gpu)
