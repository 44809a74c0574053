"""Joins the processes of a run."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

import jax

# The public functions (jax.process_index, jax.devices) start the backend.
from jax._src import distributed as _jax_distributed
from jax._src import xla_bridge as _xla_bridge

from jaxche.cluster._all_gather import all_gather
from jaxche.cluster._connect import connect, local_device_ids, resolve_scheduler
from jaxche.cluster._detect import Detected, detect
from jaxche.cluster._handshake import ProcessInfo, cache_folder, handshake, refuse_mismatch, versions, visible_devices
from jaxche.cluster._heterogeneous import (
    configure_platforms,
    describe_accelerators,
    heterogeneity_reason,
    register_devices,
)
from jaxche.cluster._xla_flags import MIXED_FLAGS, PROCESS_FLAGS, elastic_flags, with_flags
from jaxche.distributed import (
    ELASTIC,
    ElasticGroup,
    RankError,
    heartbeat_timeout_s,
    process_group,
    register_cpu_client,
    start_cpu_client,
)
from jaxche.messages import interruption

_log = logging.getLogger("jaxche")
_MIN_HANDSHAKE_S = 5.0
_PREEMPTION_SERVICE = "JAX_ENABLE_PREEMPTION_SERVICE"
# Set by a process that has joined: its pid, its number and the address of the run, for its children.
_JOINED = "JAXCHE_JOINED"
# A process that fails sets a key under _FAILED once it has printed its error. Process 0 waits for these keys: _PRINT_S
# seconds after an error of another process, _OWN_S after its own, which all may raise. Then it waits _EXIT_S.
_FAILED, _PRINT_S, _OWN_S, _EXIT_S = "jaxche/failed", 5.0, 1.0, 0.2


@dataclasses.dataclass(frozen=True)
class ClusterInfo:
    """This process and the number of processes of its run.

    Args:
      process_id: number of this process.
      num_processes: number of processes of the run.
      launcher: what set these values: "arguments", "jaxche" (``jaxche launch``), "slurm", "ompi", "k8s", "jax" (the
        script called ``jax.distributed.initialize``), or "none" for a single process.

    Example:
      >>> info = ClusterInfo(process_id=0, num_processes=2, launcher="slurm")
      >>> info.process_id == 0  # the one that prints
      True
    """

    process_id: int
    num_processes: int
    launcher: str


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: float = 300.0,
    elastic: bool | None = None,
) -> ClusterInfo:
    """Join the other processes of this run, before the first array; does nothing in a single process.

    The values come from the arguments, else from the variables that ``jaxche launch`` sets (``JAXCHE_COORDINATOR``,
    ``JAXCHE_NUM_PROCESSES``, ``JAXCHE_PROCESS_ID``), else from JAX's own detection under Open MPI, Slurm or an indexed
    Kubernetes job of more than one process. Without any of these the script runs as a single process. A second call
    returns the result of the first.

    After joining, the processes compare their versions of JAX, jaxlib, Flax, Optax, jaxche and Python and their number
    of processes; differences are refused with a table. A process that sees GPUs of several kinds is refused too; kinds
    may differ between processes.

    Some processes may train on accelerators and others on the CPU (``JAX_PLATFORMS=cpu``, or no accelerator), and
    several processes may share a GPU. No program can span the accelerators of such a run. JAX's default devices
    (``jax.devices()``) are then the CPU devices of all processes, accelerators are local to their process, and
    replicas, which use :func:`jaxche.devices`, merge on the CPU. Computations outside of the trainer then run on the
    CPU, unless the script sets ``jax.default_device``. Processes that share a GPU take equal parts of JAX's default of
    75 % of its memory, unless ``XLA_CLIENT_MEM_FRACTION`` or ``XLA_PYTHON_CLIENT_PREALLOCATE`` is set. In such a run
    this function starts JAX's devices; in other runs they start later.

    Flags for ranks of different speeds are added to ``XLA_FLAGS``, unless they are set: timeouts of two hours in CPU
    collectives and GPU programs (ten seconds for each MiB in an elastic run, which has a barrier before collectives).
    With several device kinds sharded GPU autotuning is off, and a configured compilation cache has a subdirectory for
    each kind. After an uncaught exception a rank exits at once; by default JAX waits at exit, up to 300 s, for the
    ranks that wait for this one. After ``sys.exit(1)``, which no hook of Python sees, it still waits: raise an
    exception instead.

    SIGTERM ends a process at once, also as the first process of a container, until ``Trainer.fit`` has a state to save.
    For this, JAX's preemption service, which handles SIGTERM, is off, unless ``JAX_ENABLE_PREEMPTION_SERVICE`` is set.

    Args:
      coordinator_address: ``host:port`` of process 0, which opens that port, or has a process opened it that survives
        process 0 (``elastic``). Give all three or none.
      num_processes: number of processes of the run.
      process_id: number of this process, from 0. ``JAXCHE_PROCESS_ID`` is optional under Slurm, MPI or an indexed
        Kubernetes job. With explicit values every process sees all its GPUs: set ``CUDA_VISIBLE_DEVICES`` or
        ``JAX_LOCAL_DEVICE_IDS`` if several share a machine.
      timeout_s: seconds to wait for process 0 and, on process 0, for all others.
      elastic: whether the other processes continue in ``Trainer.fit`` after the death of a process: with their own
        parameters, from the last merged round. The default is whether ``jaxche launch --elastic`` started this process.
        The others wait up to 15 s for a process that is stopped; after a longer stop it joins again by itself. The
        processes meet at a coordinator, which opens another port to detect deaths. ``jaxche launch`` starts it;
        otherwise process 0 does, detached from itself, and it ends after the last process. A process that joins with
        the number of a dead one replaces it: its ``Trainer.fit`` waits for the end of a round and continues from there;
        both must be in the first fit of the script. Requires replicas that merge on CPU devices: a GPU collective does
        not return after the death of a peer.

    Returns:
      The number of this process, the number of processes, and the launcher.

    Raises:
      ValueError: if the values are incomplete or invalid, the port is in use, or this process sees GPUs of several
        kinds.
      RuntimeError: if JAX has already started its backend, the run was joined with other values, the processes
        disagree on their number or their versions, this process is a child of one that has joined, or a process of an
        elastic run at this address has this number and is alive.
      TimeoutError: if process 0 does not answer within ``timeout_s``. If process 0 answers but other processes are
        missing, jaxlib ends the process, after a line on stderr.

    Example:
      >>> from jaxche.cluster import initialize
      >>> initialize()
      ClusterInfo(process_id=0, num_processes=1, launcher='none')
    """
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s!r} must be positive seconds. Write: timeout_s=300")
    if jax.distributed.is_initialized():
        group = process_group()
        joined = ClusterInfo(group.process_index, group.num_processes, group.launcher)
        _refuse_change(joined, num_processes, process_id)
        return joined

    deadline = time.monotonic() + timeout_s
    found = detect(os.environ, coordinator_address, num_processes, process_id)
    if not found.num_processes:
        found = resolve_scheduler(found, timeout_s)
    if found.num_processes == 1:
        if not _xla_bridge.backends_are_initialized():
            _single_kind(visible_devices(_environ()))
        return ClusterInfo(0, 1, found.launcher)
    if _xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "jaxche.initialize() came after JAX had started its devices, so this process can no longer join "
            "the others. Move the line `jaxche.initialize()` up, right after the imports: before the first "
            "jax.devices(), jax.device_count(), jnp.* or jax.random.* call."
        )
    _refuse_child(found)
    local_ids = local_device_ids(found)
    seen = visible_devices(_environ(), local_ids)
    kind = _single_kind(seen)
    elastic = _elastic_variable() if elastic is None else elastic
    _configure(elastic)
    connect(found, local_ids, timeout_s, deadline, elastic)
    os.environ[_JOINED] = f"{os.getpid()} {_member(found)}"
    group, replacement = process_group(), False
    atexit.register(group.leave)
    if isinstance(group, ElasticGroup) and group.incarnation > 1:
        replacement = True
        group.enter_standby()
    # Registered last, so that it runs first at exit.
    _exit_at_once_after_exception()
    state = _jax_distributed.global_state
    assert state.client is not None
    mine = ProcessInfo(socket.gethostname(), kind, state.num_processes, versions(), [uuid for uuid, _ in seen])
    processes = handshake(mine, max(_MIN_HANDSHAKE_S, deadline - time.monotonic()), replacement)
    try:
        refuse_mismatch(processes)
    except RuntimeError:
        # All processes raise, so shut down together: if one exits first, the others lose their error message.
        jax.distributed.shutdown()
        raise
    _configure_mixed_kinds([process.kind for process in processes], kind)
    why, platform = heterogeneity_reason(processes), None
    if why is not None:
        platform = configure_platforms(processes, mine, _environ())
        _log.info("%s: replicas merge on the CPU devices of their processes", why)
    if replacement and state.process_id == 0:
        start_cpu_client(state.client, _xla_bridge.backends)
    if why is not None:
        accelerators = all_gather("devices", describe_accelerators(platform), timeout_s, replacement)
        register_devices(accelerators, state.process_id, platform)
    group.launcher = found.launcher
    joined = ClusterInfo(state.process_id, state.num_processes, found.launcher)
    _log.info("joined %s at %s", joined, state.coordinator_address)
    return joined


def _elastic_variable() -> bool:
    """Whether a launcher, or who set its variable, asks for an elastic run."""
    text = os.environ.get(ELASTIC, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{ELASTIC}={text!r} must be 1 or 0. Write: export {ELASTIC}=1, or unset {ELASTIC}")
    return text == "1"


def _member(found: Detected) -> str:
    return f"{found.process_id} {found.address}"


def _refuse_child(found: Detected) -> None:
    """Refuse a child of a process of the run: it has the same number, and would end the run."""
    parent, _, member = os.environ.get(_JOINED, "").partition(" ")
    if member == _member(found) and parent != str(os.getpid()):
        raise RuntimeError(
            f"process {found.process_id} of the run has started this process, which cannot join it with the same "
            "number. A worker process of multiprocessing or a data loader imports the script again: write the script, "
            'from jaxche.initialize() on, under `if __name__ == "__main__":`'
        )


def _configure(elastic: bool) -> None:
    """Set the options of JAX and XLA for a run of several processes, before they connect."""
    flags = dict(PROCESS_FLAGS)
    if elastic:
        jax.config.update("jax_enable_recoverability", True)
        flags |= elastic_flags(heartbeat_timeout_s(os.environ))
    os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), flags)
    # By default CUDA numbers the fastest GPU 0, while schedulers and the driver number by slot.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if jax.config.values["jax_cpu_collectives_implementation"] == "gloo":
        register_cpu_client()
    if _PREEMPTION_SERVICE not in os.environ:
        # It handles SIGTERM, so that only `Trainer.fit` ends the process.
        jax.config.update(_PREEMPTION_SERVICE.lower(), False)
    _exit_on_sigterm_as_process_1()


def _environ() -> dict[str, str]:
    """The environment variables, with JAX's current value of ``JAX_PLATFORMS``."""
    return {**os.environ, "JAX_PLATFORMS": jax.config.values["jax_platforms"] or ""}


def _refuse_change(joined: ClusterInfo, num_processes: int | None, process_id: int | None) -> None:
    for name, asked in (("num_processes", num_processes), ("process_id", process_id)):
        current = getattr(joined, name)
        if asked not in (None, current):
            raise RuntimeError(
                f"{name}={asked!r}, but this process joined its run with {name}={current} already. "
                "Call jaxche.initialize(...) once."
            )


def _configure_mixed_kinds(kinds: Sequence[str], mine: str) -> None:
    """Configure XLA and the compilation cache for several device kinds, before the backend starts."""
    if len(set(kinds)) == 1:
        return
    os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), MIXED_FLAGS)
    folder = jax.config.values["jax_compilation_cache_dir"]
    if folder:
        jax.config.update("jax_compilation_cache_dir", cache_folder(folder, mine))


def _single_kind(seen: Sequence[tuple[str, str]]) -> str:
    kinds = [kind for _, kind in seen]
    if len(set(kinds)) == 1:
        return kinds[0]
    listed = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    raise ValueError(
        f"this process sees GPUs of several kinds ({listed}), and one compiled program runs on one kind. Start one "
        f"process a GPU: jaxche launch -n {len(kinds)} train.py, or choose: CUDA_DEVICE_ORDER=PCI_BUS_ID "
        "CUDA_VISIBLE_DEVICES=0 python train.py"
    )


def _exit_on_sigterm_as_process_1() -> None:
    """Exit on SIGTERM also as process 1 of a container, which has no default handlers."""
    is_main = threading.current_thread() is threading.main_thread()
    if os.getpid() == 1 and is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def _exit_at_once_after_exception() -> None:
    show, exits, ends = sys.excepthook, threading.Event(), []

    def hook(*exception) -> None:
        is_interrupt = isinstance(exception[1], KeyboardInterrupt)
        # A thread, because a call of a coordinator that is stopped has no end; started here, not while Python exits.
        wait = threading.Thread(target=_exit_last, args=(exception[1], exits), daemon=True)
        wait.start()
        ends.append((wait, 128 + signal.SIGINT if is_interrupt else 1))
        # Ctrl-C reaches all processes, and each would print where in a library it waited. A hook of the user is kept.
        if is_interrupt and show is sys.__excepthook__ and (line := interruption(exception[1])):
            print(line, file=sys.stderr)
        else:
            show(*exception)

    def leave() -> None:
        if ends:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            wait, code = ends[-1]
            exits.set()
            wait.join(_PRINT_S + _EXIT_S)
            os._exit(code)

    sys.excepthook = hook
    # Handlers run in reverse order: this one before JAX's own.
    atexit.register(leave)


def _exit_last(error: BaseException, exits: threading.Event) -> None:
    """At exit, process 0, which serves JAX's coordinator, waits until the other processes have printed their errors."""
    exits.wait()
    state = _jax_distributed.global_state
    if state.client is None or isinstance(process_group(), ElasticGroup):  # whose coordinator is another process
        return
    with contextlib.suppress(Exception):  # of JAX: the coordinator is gone, or a process has printed no error
        if state.process_id:
            state.client.key_value_set(f"{_FAILED}/{state.process_id}", "")
        else:
            deadline = time.monotonic() + (_PRINT_S if isinstance(error, RankError) else _OWN_S)
            for process in range(1, state.num_processes):
                left_s = deadline - time.monotonic()
                state.client.blocking_key_value_get(f"{_FAILED}/{process}", round(1e3 * left_s))
            time.sleep(_EXIT_S)
