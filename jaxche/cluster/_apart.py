"""Runs in which no program can span the accelerators of all processes: each then knows its own only.

JAX starts a backend over all processes, or not at all: one whose accelerators only some processes have would wait for
the others for ever, and NCCL refuses two processes on one GPU. What is left to all is the CPU backend. It becomes the
default, over which processes count and replicas merge, and the accelerators a second one, local to its process.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxche.cluster._roll_call import Member
from jaxche.sharding import RemoteDevice, know_devices

_log = logging.getLogger("jaxche")

# What JAX takes of a GPU by default, and what says otherwise.
_SHARE = 0.75
_MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")


def why_apart(members: Sequence[Member]) -> str | None:
    """Why the accelerators of a run have to be kept apart, or None where they need not be.

    Example:
      >>> gpu, cpu = Member("a", "NVIDIA L4", 2, {}, ["GPU-aa"]), Member("b", "cpu", 2, {})
      >>> why_apart([gpu, cpu]), why_apart([gpu, gpu]), why_apart([cpu, cpu])
      ('some processes train on the CPU', 'processes share a GPU', None)
    """
    on_cpu = {member.kind == "cpu" for member in members}
    if len(on_cpu) == 2:
        return "some processes train on the CPU"
    return "processes share a GPU" if any(n > 1 for n in _users(members).values()) else None


def keep_apart(members: Sequence[Member], mine: Member, environ: Mapping[str, str]) -> str | None:
    """Tells JAX, before it starts its backends, that the accelerators here are this process's own.

    Args:
      members: all processes.
      mine: this one.
      environ: environment variables.

    Returns:
      The platform of the accelerators, or None where this process trains on the CPU.
    """
    if mine.kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return None
    named = [word.strip().lower() for word in environ.get("JAX_PLATFORMS", "").split(",")]
    platform = "cuda" if named[0] in ("", "gpu") else named[0]
    # The first one is the default, which is to be that of all processes.
    jax.config.update("jax_platforms", f"cpu,{platform}")
    options = _given_options() | {"num_nodes": 1}
    users = max((_users(members)[gpu] for gpu in mine.gpus), default=1)
    if users > 1 and not any(name in environ for name in _MEMORY):
        options["memory_fraction"] = _SHARE / users
        _log.info("%d processes share a GPU: this one takes %.0f %% of it", users, 100 * _SHARE / users)
    jax.config.update("jax_pjrt_client_create_options", options)
    if len(mine.gpus) > 1 and jax.config.values["jax_num_cpu_devices"] < 0:
        # Where they merge, one each.
        jax.config.update("jax_num_cpu_devices", len(mine.gpus))
    return platform


def own_accelerators(platform: str | None) -> str:
    """What :func:`know_everywhere` has to hear of this process; starts JAX's backends."""
    jax.devices()  # everywhere: the CPU backend is that of all, and waits for all
    own = [] if platform is None else jax.devices(platform)
    return json.dumps([dataclasses.asdict(RemoteDevice(d.process_index, d.platform, d.device_kind, d.id)) for d in own])


def know_everywhere(told: Sequence[str], process_id: int, platform: str | None) -> None:
    """Makes the list of ``jaxche.devices()`` of what every process told.

    Args:
      told: by :func:`own_accelerators`, by number of the process.
      process_id: of this one.
      platform: of its accelerators, if it has some.
    """
    everywhere: list[Any] = []
    for process, text in enumerate(told):
        accelerators = [RemoteDevice(**device) for device in json.loads(text)]
        if not accelerators:
            everywhere += jax.local_devices(process)
        else:
            everywhere += jax.devices(platform) if process == process_id else accelerators
    know_devices(everywhere)


def _users(members: Sequence[Member]) -> collections.Counter[str]:
    """How many processes see each GPU."""
    return collections.Counter(gpu for member in members for gpu in member.gpus if gpu)


def _given_options() -> dict[str, Any]:
    """What the user set, a dict or ``"key:value;key:value"``."""
    given = jax.config.values["jax_pjrt_client_create_options"] or {}
    if isinstance(given, str):
        return dict(part.split(":", 1) for part in given.split(";"))
    return dict(given)
