"""Joins the processes of one training run."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import math
import os
import socket
import sys
import threading
import time

import jax

# The public calls (jax.process_index, jax.devices) start the backend, which is what must not happen here.
from jax._src import distributed as _jax_distributed
from jax._src import xla_bridge as _xla_bridge

from jaxche.cluster._detect import Found, detect
from jaxche.cluster._flags import PROCESS_FLAGS, with_flags

_log = logging.getLogger("jaxche")
_LOOPBACK = ("127.0.0.1", "localhost")


@dataclasses.dataclass(frozen=True)
class ClusterInfo:
    """This process among the processes of its run.

    Args:
      process_id: the number of this process.
      num_processes: how many processes train together.
      launcher: who said so: "arguments", "jaxche" (``jaxche launch``), "slurm", "ompi", "k8s", "jax" (the
        script called ``jax.distributed.initialize`` itself), or "none" for a process on its own.
    """

    process_id: int
    num_processes: int
    launcher: str


_joined: ClusterInfo | None = None


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: float = 300.0,
) -> ClusterInfo:
    """Joins the other processes of this run, before any array; alone, it does nothing.

    The values come from the arguments, else from the variables that ``jaxche launch`` sets
    (``JAXCHE_COORDINATOR``, ``JAXCHE_NUM_PROCESSES``, ``JAXCHE_PROCESS_ID``), else from JAX's own detection
    under Slurm, Open MPI or an indexed Kubernetes job of more than one process. With none of these the script
    is on its own and runs unchanged. A second call returns what the first did.

    Flags that ranks of different speeds need are added to ``XLA_FLAGS`` unless they are there: two hours of
    patience in CPU collectives, no sharded GPU autotuning. A rank that ends by an exception leaves at once;
    by default JAX makes it wait at exit, up to 300 s, for the very ranks that wait for it. It still does after
    ``sys.exit(1)``, which Python shows to nobody: raise an exception instead.

    Args:
      coordinator_address: ``host:port`` of process 0, which opens that port. Give all three or none.
      num_processes: how many processes train together.
      process_id: the number of this one, from 0. With explicit values every process sees all its GPUs: set
        ``CUDA_VISIBLE_DEVICES`` or ``JAX_LOCAL_DEVICE_IDS`` where several share a machine.
      timeout_s: seconds to wait for process 0 to be there, and for process 0 to see all the others.

    Returns:
      The number of this process, how many there are, and who said so.

    Raises:
      ValueError: if the values are half given or make no sense, or the port is taken.
      RuntimeError: if JAX has started its backend already, or the run was joined with other values.
      TimeoutError: if process 0 cannot be reached within ``timeout_s``. Where process 0 answers but not all
        ranks come, jaxlib ends the process, after a line on stderr that says so.

    Example:
      >>> from jaxche.cluster import initialize
      >>> initialize()
      ClusterInfo(process_id=0, num_processes=1, launcher='none')
    """
    global _joined
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s!r} must be positive seconds. Write: timeout_s=300")
    if _joined is None and jax.distributed.is_initialized():
        state = _jax_distributed.global_state
        _joined = ClusterInfo(state.process_id, state.num_processes, "jax")
    if _joined is not None:
        _refuse_change(_joined, num_processes, process_id)
        return _joined

    found = detect(coordinator_address, num_processes, process_id, os.environ)
    if found.num_processes == 1:
        return ClusterInfo(0, 1, found.launcher)
    if _xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "jaxche.initialize() came after JAX had started its devices, so this process can no longer join "
            "the others. Move the line `jaxche.initialize()` up, right after the imports: before the first "
            "jax.devices(), jax.device_count(), jnp.* or jax.random.* call."
        )
    os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), PROCESS_FLAGS)
    if jax.config.values["jax_cpu_collectives_implementation"] in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _connect(found, timeout_s)
    _leave_at_once_after_an_exception()
    state = _jax_distributed.global_state
    _joined = ClusterInfo(state.process_id, state.num_processes, found.launcher)
    _log.info("joined %s at %s", _joined, state.coordinator_address)
    return _joined


def _refuse_change(joined: ClusterInfo, num_processes: int | None, process_id: int | None) -> None:
    for name, asked, have in (
        ("num_processes", num_processes, joined.num_processes),
        ("process_id", process_id, joined.process_id),
    ):
        if asked is not None and asked != have:
            raise RuntimeError(
                f"{name}={asked!r}, but this process joined its run with {name}={have} already. "
                "Call jaxche.initialize(...) once."
            )


def _connect(found: Found, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    method = bind = None
    if found.address is not None:
        host, _, port = found.address.rpartition(":")
        _bypass_proxy(host)
        if found.process_id == 0:
            _check_port_is_free(found.address, int(port))
        else:
            _wait_for_coordinator(found.address, host, int(port), timeout_s, deadline)
        # JAX would ask the scheduler for what is not given (the local devices), and listen on every network.
        method = "deactivate"
        if host in _LOOPBACK and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
            bind = found.address
    left_s = max(2, math.ceil(deadline - time.monotonic()))
    # jaxlib aborts at the end of its wait, with no word on who waited for what: the last chance to say it.
    said = threading.Timer(left_s - 0.5, _say_who_waits, (timeout_s,))
    said.daemon = True
    said.start()
    try:
        jax.distributed.initialize(
            found.address,
            found.num_processes,
            found.process_id,
            cluster_detection_method=method,
            coordinator_bind_address=bind,
            initialization_timeout=left_s,
        )
    finally:
        said.cancel()


def _say_who_waits(timeout_s: float) -> None:
    state = _jax_distributed.global_state
    sys.stderr.write(
        f"jaxche.initialize: process {state.process_id} waited {timeout_s:g} s, and not all processes came to "
        f"{state.coordinator_address}. Are they all started, with the same address and number of processes? "
        "jaxlib ends this one now; initialize(timeout_s=...) waits longer.\n"
    )
    sys.stderr.flush()


def _bypass_proxy(host: str) -> None:
    # gRPC sends even loopback through a proxy named in the environment, and hangs there.
    if any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy") for name in os.environ):
        for name in ("no_proxy", "no_grpc_proxy"):
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), host]))


def _check_port_is_free(address: str, port: int) -> None:
    # jaxlib crashes on a taken port. SO_REUSEADDR lets a port through that only lingers in TIME_WAIT.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"coordinator_address={address!r}: process 0 cannot open port {port} here ({error.strerror}). "
                "Take another port, the same in every process."
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


def _leave_at_once_after_an_exception() -> None:
    show, crashed = sys.excepthook, threading.Event()

    def hook(*exception) -> None:
        crashed.set()
        show(*exception)

    def leave() -> None:
        if crashed.is_set():
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(1)

    sys.excepthook = hook
    # Runs before JAX's own handler, which was registered earlier, and after those registered later.
    atexit.register(leave)
