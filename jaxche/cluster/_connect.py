"""Connects to the coordinator of a run within a timeout."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import jax

# JAX has no public call for detection alone. Error messages need its result before joining.
from jax._src import clusters as _jax_clusters

# JAX has no option for a coordination service in another process.
from jaxlib import _jax as _jax_lib  # pyright: ignore[reportAttributeAccessIssue]

from jaxche.cluster._detect import Detected
from jaxche.cluster._gpus import gpu_ids, wants_gpus
from jaxche.distributed import (
    JAX_HEARTBEAT_TIMEOUT_S,
    LIVENESS,
    coordinator_bind,
    host_and_port,
    is_alive,
    is_loopback,
    liveness_here,
    start_coordinator,
)

# Variables of gRPC, in lower or upper case.
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
_CLUSTERS = {"ompi": _jax_clusters.OmpiCluster, "slurm": _jax_clusters.SlurmCluster, "k8s": _jax_clusters.K8sCluster}
# A coordinator that process 0 starts waits so many seconds longer than ``timeout_s`` for its first process.
_START_S = 60.0


def resolve_scheduler(found: Detected, timeout_s: float) -> Detected:
    """Complete the address and process numbers by JAX's own detection."""
    # Not by name, because JAX has none for Kubernetes.
    cluster = _CLUSTERS[found.launcher]
    if not cluster.is_env_present():  # a pod reads its job there
        raise RuntimeError(f"JAX does not find the scheduler {found.launcher!r} in this process")
    count = cluster.get_process_count()
    if count == 1:
        return dataclasses.replace(found, num_processes=1, process_id=0)
    return dataclasses.replace(
        found,
        address=cluster.get_coordinator_address(max(1, math.ceil(timeout_s)), os.environ.get("JAX_COORDINATOR_PORT")),
        num_processes=count,
        process_id=cluster.get_process_id(),
        local_id=cluster.get_local_process_id(),
    )


def local_device_ids(found: Detected) -> list[int] | None:
    """The GPU of this process, if a scheduler numbers the processes of a machine; None for all visible GPUs."""
    if found.local_id is None or os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    gpus = gpu_ids(os.environ) if wants_gpus(os.environ) else []
    # If the scheduler binds GPUs, each process sees only its own, as number 0.
    if len(gpus) == 1:
        return [0]
    if gpus and found.local_id >= len(gpus):
        raise ValueError(
            f"process {found.process_id} is number {found.local_id} on this machine, which has {len(gpus)} visible "
            f"GPUs, and each process takes one. Start {len(gpus)} processes here, e.g. "
            f"srun --ntasks-per-node={len(gpus)}"
        )
    return [found.local_id]


def connect(
    found: Detected, local_ids: Sequence[int] | None, timeout_s: float, deadline: float, elastic: bool = False
) -> None:
    """Join the run before ``deadline`` (on the monotonic clock); ``timeout_s`` is for messages."""
    _bypass_proxy(found.host)
    bind, service = coordinator_bind(found.address, os.environ), contextlib.nullcontext()
    if elastic:
        if found.process_id == 0:
            service = _no_service()
            if LIVENESS not in os.environ:
                _start_coordinator(found, bind, timeout_s)
        _wait_for_coordinator(found, timeout_s, deadline)
        _refuse_second(found)
    elif found.process_id == 0:
        _check_port_is_free(found, bind)
    else:
        _wait_for_coordinator(found, timeout_s, deadline)
    left_s = max(2, math.ceil(deadline - time.monotonic()))
    # jaxlib aborts at its timeout without a message about the missing processes, so print one before.
    timer = threading.Timer(left_s - 0.5, _print_timeout, (found, timeout_s))
    timer.daemon = True
    timer.start()
    try:
        with service:
            jax.distributed.initialize(
                found.address,
                found.num_processes,
                found.process_id,
                local_device_ids=local_ids,
                # By default JAX detects missing values, and listens on all network interfaces.
                cluster_detection_method="deactivate",
                coordinator_bind_address=bind,
                initialization_timeout=left_s,
                heartbeat_timeout_seconds=JAX_HEARTBEAT_TIMEOUT_S,
            )
    finally:
        timer.cancel()


def _start_coordinator(found: Detected, bind: str, timeout_s: float) -> None:
    """Start the coordinator on process 0, unless this process replaces the one that did."""
    if liveness_here(found.port):
        return
    _check_port_is_free(found, bind)
    started = start_coordinator(found.address, found.num_processes, bind, timeout_s + _START_S)
    os.environ[LIVENESS] = json.dumps(started.liveness)


def _refuse_second(found: Detected) -> None:
    """Refuse, before JAX connects, to take the place of a live process, which JAX would end some minutes later."""
    liveness = os.environ.get(LIVENESS)
    if liveness is None and (found.process_id == 0 or is_loopback(found.host)):
        liveness = liveness_here(found.port)
    if not liveness:
        return
    with contextlib.suppress(OSError):  # a coordinator that has just started has no processes
        if is_alive(json.loads(liveness), found.process_id):
            raise RuntimeError(
                f"coordinator_address={found.address!r}: process {found.process_id} of a run at this address is alive. "
                "A second run needs another address, the same in all its processes (JAXCHE_COORDINATOR or "
                "coordinator_address=), or has to wait until the first one has ended."
            )


@contextlib.contextmanager
def _no_service() -> Iterator[None]:
    """Keep JAX from starting its coordination service in process 0, where another process has it."""
    start = _jax_lib.get_distributed_runtime_service
    _jax_lib.get_distributed_runtime_service = lambda *args, **options: None
    try:
        yield
    finally:
        _jax_lib.get_distributed_runtime_service = start


def _print_timeout(found: Detected, timeout_s: float) -> None:
    sys.stderr.write(
        f"jaxche.initialize: process {found.process_id} of {found.num_processes} waited {timeout_s:g} s, and not all "
        f"processes connected to {found.address}. Are all {found.num_processes} started, with the same address and "
        "number of processes? jaxlib ends this one now; initialize(timeout_s=...) waits longer.\n"
    )
    sys.stderr.flush()


def _bypass_proxy(host: str) -> None:
    # gRPC uses a proxy even for loopback addresses, and then hangs. It compares hosts without brackets.
    if any(name.lower() in PROXIES for name in os.environ):
        for name in ("no_proxy", "no_grpc_proxy"):
            others = os.environ.get(name) or os.environ.get(name.upper())  # Python reads the lower case first
            os.environ[name] = ",".join(filter(None, [others, host]))


def _check_port_is_free(found: Detected, bind: str) -> None:
    host, _ = host_and_port(bind)
    host = host if is_loopback(host) else ""
    # jaxlib crashes if the port is in use. SO_REUSEADDR accepts a port in TIME_WAIT.
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, found.port))
        except OSError as error:
            raise ValueError(
                f"coordinator_address={found.address!r}: process 0 cannot open port {found.port} here "
                f"({error.strerror}). Take another port, the same in every process; under Slurm or Open MPI: "
                "JAX_COORDINATOR_PORT; otherwise JAXCHE_COORDINATOR; for a file of jaxche launch --emit write "
                "PORT=61235 before it."
            ) from None


def _wait_for_coordinator(found: Detected, timeout_s: float, deadline: float) -> None:
    while True:
        left_s = deadline - time.monotonic()
        try:
            socket.create_connection((found.host, found.port), timeout=min(5.0, max(0.1, left_s))).close()
            return
        except (OSError, UnicodeError) as error:  # the latter for a name with two dots in a row
            if deadline - time.monotonic() <= 0.2:
                raise TimeoutError(
                    f"coordinator_address={found.address!r}: nothing answered within timeout_s={timeout_s:g} "
                    f"({error}). Is process 0 running there, and is the port open between the machines?"
                ) from None
            time.sleep(0.2)
