"""From an address to a run that has been joined, in the given time."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence

import jax

# Detection has no public call of its own, and its answer is needed before joining: to name what is in the way.
from jax._src import clusters as _jax_clusters

from jaxche.cluster._detect import Found
from jaxche.cluster._gpus import gpu_ids
from jaxche.distributed import is_loopback

# What gRPC reads, in small letters or large.
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
# Set by ``jaxche launch --elastic``.
ELASTIC = "JAXCHE_ELASTIC"
# Silence of a process that means its death to jaxlib, which then ends it, and the others where a run is not elastic.
_SILENT_S = 100


def resolved(found: Found, timeout_s: float) -> Found:
    """Fills in what only JAX's own detection knows: the address, the number of processes and of this one."""
    if found.address is not None:
        return found
    address, count, number, local = _jax_clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, found.launcher, max(1, math.ceil(timeout_s))
    )
    local_id = local[0] if local else None
    return dataclasses.replace(found, address=address, num_processes=count, process_id=number, local_id=local_id)


def local_devices(found: Found) -> list[int] | None:
    """The GPU of this process among those it sees, where a scheduler numbers the processes of a machine.

    Returns:
      One number, or None to take all that is visible.

    Raises:
      ValueError: if the machine has fewer GPUs than processes.
    """
    if found.local_id is None or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    platforms = os.environ.get("JAX_PLATFORMS", "").lower()
    gpus = gpu_ids(os.environ) if not platforms or "cuda" in platforms or "gpu" in platforms else []
    # A scheduler that binds GPUs shows each process its own, as number 0.
    if len(gpus) == 1:
        return [0]
    if gpus and found.local_id >= len(gpus):
        raise ValueError(
            f"process {found.process_id} is number {found.local_id} of this machine, which shows {len(gpus)} GPUs, "
            f"and each process takes one. Start {len(gpus)} processes here, e.g. srun --ntasks-per-node={len(gpus)}"
        )
    return [found.local_id]


def connect(found: Found, local_ids: Sequence[int] | None, timeout_s: float, deadline: float) -> None:
    """Joins the run.

    Args:
      found: with address, number of processes and process id.
      local_ids: the GPUs to take, or None.
      timeout_s: what the caller gave, for messages.
      deadline: on the monotonic clock.

    Raises:
      ValueError: if process 0 cannot open its port.
      TimeoutError: if process 0 does not answer.
    """
    assert found.address is not None
    assert found.process_id is not None
    host, _, port = found.address.rpartition(":")
    _bypass_proxy(host)
    alone_here = is_loopback(host) and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ
    if found.process_id == 0:
        _check_port_is_free(found.address, host.strip("[]") if alone_here else "", int(port))
    else:
        _wait_for_coordinator(found.address, host, int(port), timeout_s, deadline)
    left_s = max(2, math.ceil(deadline - time.monotonic()))
    # jaxlib aborts at the end of its wait, with no word on who waited for what: the last chance to say it.
    said = threading.Timer(left_s - 0.5, _say_who_waits, (found, timeout_s))
    said.daemon = True
    said.start()
    try:
        jax.distributed.initialize(
            found.address,
            found.num_processes,
            found.process_id,
            local_device_ids=local_ids,
            # JAX would ask the scheduler for what is not given, and listen on every network.
            cluster_detection_method="deactivate",
            coordinator_bind_address=found.address if alone_here else None,
            initialization_timeout=left_s,
            heartbeat_timeout_seconds=_SILENT_S,
        )
    finally:
        said.cancel()


def _say_who_waits(found: Found, timeout_s: float) -> None:
    sys.stderr.write(
        f"jaxche.initialize: process {found.process_id} of {found.num_processes} waited {timeout_s:g} s, and not all "
        f"processes came to {found.address}. Are all {found.num_processes} started, with the same address and number "
        "of processes? jaxlib ends this one now; initialize(timeout_s=...) waits longer.\n"
    )
    sys.stderr.flush()


def _bypass_proxy(host: str) -> None:
    # gRPC sends even loopback through a proxy named in the environment, and hangs there.
    if any(name.lower() in PROXIES for name in os.environ):
        for name in ("no_proxy", "no_grpc_proxy"):
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), host]))


def _check_port_is_free(address: str, host: str, port: int) -> None:
    # jaxlib crashes on a taken port. SO_REUSEADDR lets a port through that only lingers in TIME_WAIT.
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"coordinator_address={address!r}: process 0 cannot open port {port} here ({error.strerror}). "
                "Take another port, the same in every process; under Slurm or Open MPI: JAX_COORDINATOR_PORT; "
                "JAXCHE_COORDINATOR where that is set; PORT=61235 before a file of jaxche launch --emit that has PORT."
            ) from None


def _wait_for_coordinator(address: str, host: str, port: int, timeout_s: float, deadline: float) -> None:
    while True:
        left_s = deadline - time.monotonic()
        try:
            socket.create_connection((host.strip("[]"), port), timeout=min(5.0, max(0.1, left_s))).close()
            return
        except OSError as error:
            if deadline - time.monotonic() <= 0.2:
                raise TimeoutError(
                    f"coordinator_address={address!r}: nothing answered within timeout_s={timeout_s:g} "
                    f"({error}). Is process 0 running there, and is the port open between the machines?"
                ) from None
            time.sleep(0.2)
