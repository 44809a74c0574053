"""Layer 3, processes: the group of a run, its collectives, and the detection of processes that die."""

from jaxche.distributed._elastic_group import ElasticGroup, TakenForDeadError, process_group
from jaxche.distributed._environment import (
    EVENTS,
    HANG_TIMEOUT,
    HEARTBEAT,
    NUM_PROCESSES,
    PACE_MS,
    RESTART,
    scheduled,
)
from jaxche.distributed._group import Group, PeerLostError, RankError
from jaxche.distributed._listener import Listener, connect, is_loopback, own_address
from jaxche.distributed._shared_folder import shared_folder
from jaxche.distributed._watchdog import PREEMPTED_CODE, FileErrors, Watchdog, hang_timeout, on_sigterm

__all__ = [
    "EVENTS",
    "HANG_TIMEOUT",
    "HEARTBEAT",
    "NUM_PROCESSES",
    "PACE_MS",
    "PREEMPTED_CODE",
    "RESTART",
    "ElasticGroup",
    "FileErrors",
    "Group",
    "Listener",
    "PeerLostError",
    "RankError",
    "TakenForDeadError",
    "Watchdog",
    "connect",
    "hang_timeout",
    "is_loopback",
    "on_sigterm",
    "own_address",
    "process_group",
    "scheduled",
    "shared_folder",
]
