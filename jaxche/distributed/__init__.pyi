"""The names of the package, each of which is imported when it is first used."""

from ._coordinator import (
    JAX_HEARTBEAT_TIMEOUT_S,
    Coordinator,
    coordinator_bind,
    heartbeat_timeout_s,
    liveness_here,
    serve_coordinator,
    start_coordinator,
)
from ._cpu_client import register_cpu_client, start_cpu_client
from ._elastic_group import ElasticGroup, TakenForDeadError, process_group
from ._environment import (
    COORDINATOR,
    ELASTIC,
    EVENTS,
    HANG_TIMEOUT,
    HEARTBEAT,
    HEARTBEAT_TIMEOUT,
    LIVENESS,
    NUM_PROCESSES,
    PACE_MS,
    PROCESS_ID,
    RESTART,
    scheduled,
)
from ._group import Group, PeerLostError, RankError
from ._listener import Listener, connect, is_loopback, own_address
from ._liveness import is_alive
from ._liveness_server import LEAST_TIMEOUT_S
from ._transfer import aligned, padded
from ._watchdog import PREEMPTED_CODE, FileErrors, hang_timeout, on_sigterm

__all__ = [
    "COORDINATOR",
    "ELASTIC",
    "EVENTS",
    "HANG_TIMEOUT",
    "HEARTBEAT",
    "HEARTBEAT_TIMEOUT",
    "JAX_HEARTBEAT_TIMEOUT_S",
    "LEAST_TIMEOUT_S",
    "LIVENESS",
    "NUM_PROCESSES",
    "PACE_MS",
    "PREEMPTED_CODE",
    "PROCESS_ID",
    "RESTART",
    "Coordinator",
    "ElasticGroup",
    "FileErrors",
    "Group",
    "Listener",
    "PeerLostError",
    "RankError",
    "TakenForDeadError",
    "aligned",
    "connect",
    "coordinator_bind",
    "hang_timeout",
    "heartbeat_timeout_s",
    "is_alive",
    "is_loopback",
    "liveness_here",
    "on_sigterm",
    "own_address",
    "padded",
    "process_group",
    "register_cpu_client",
    "scheduled",
    "serve_coordinator",
    "start_coordinator",
    "start_cpu_client",
]
