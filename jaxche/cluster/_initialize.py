"""Joins the processes of one training run."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

import jax

# The public calls (jax.process_index, jax.devices) start the backend, which is what must not happen here.
from jax._src import distributed as _jax_distributed
from jax._src import xla_bridge as _xla_bridge

from jaxche.cluster._apart import keep_apart, know_everywhere, own_accelerators, why_apart
from jaxche.cluster._connect import ELASTIC, connect, local_devices, resolved
from jaxche.cluster._detect import detect
from jaxche.cluster._flags import ELASTIC_FLAGS, MIXED_FLAGS, PROCESS_FLAGS, with_flags
from jaxche.cluster._roll_call import cache_folder, devices_seen, own, refuse_mismatch, roll_call
from jaxche.cluster._share import share
from jaxche.distributed import farewell, stand_by, watch_lives

_log = logging.getLogger("jaxche")
_LEAST_ROLL_CALL_S = 5.0
_PREEMPTION_SERVICE = "JAX_ENABLE_PREEMPTION_SERVICE"


@dataclasses.dataclass(frozen=True)
class ClusterInfo:
    """This process among the processes of its run.

    Args:
      process_id: the number of this process.
      num_processes: how many processes train together.
      launcher: who said so: "arguments", "jaxche" (``jaxche launch``), "slurm", "ompi", "k8s", "jax" (the
        script called ``jax.distributed.initialize`` itself), or "none" for a process on its own.

    Example:
      >>> info = ClusterInfo(process_id=0, num_processes=2, launcher="slurm")
      >>> info.process_id == 0  # the one that speaks
      True
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
    elastic: bool | None = None,
) -> ClusterInfo:
    """Joins the other processes of this run, before any array; alone, it does nothing.

    The values come from the arguments, else from the variables that ``jaxche launch`` sets
    (``JAXCHE_COORDINATOR``, ``JAXCHE_NUM_PROCESSES``, ``JAXCHE_PROCESS_ID``), else from JAX's own detection
    under Open MPI, Slurm or an indexed Kubernetes job of more than one process. With none of these the script
    is on its own and runs unchanged. A second call returns what the first did.

    Right after joining the processes tell each other what they run: different versions of JAX, jaxlib, Flax, Optax,
    jaxche or Python, or different numbers of processes, are refused with a table of who differs. A process that sees
    GPUs of several kinds is refused too; kinds may differ between processes.

    Some processes may train on accelerators and others on the CPU (``JAX_PLATFORMS=cpu``, or no accelerator there), and
    several processes may share a GPU. No program can span the accelerators of such a run, so each process keeps its
    own to itself, JAX's default devices (``jax.devices()``) are the CPU's on all of them, and replicas, which are on
    :func:`jaxche.devices`, merge there. What a script computes outside of the trainer is then on the CPU too, unless it
    says ``jax.default_device``. Processes that share a GPU take an equal part of the 75 % of its memory that JAX takes,
    unless ``XLA_CLIENT_MEM_FRACTION`` or ``XLA_PYTHON_CLIENT_PREALLOCATE`` is set. In such a run JAX starts its devices
    here; in any other, later.

    Flags that ranks of different speeds need are added to ``XLA_FLAGS`` unless they are there: two hours of patience in
    CPU collectives (in an elastic run, which meets outside of them first, ten seconds for each MiB) and in a GPU
    program, and where device kinds differ no sharded GPU autotuning and, in the compilation cache that is configured, a
    folder a kind. A rank that ends by an exception leaves at once; by default JAX makes it wait at exit, up to 300 s,
    for the very ranks that wait for it. It still does after ``sys.exit(1)``, which Python shows to nobody: raise an
    exception instead.

    SIGTERM ends a process at once, also where it is the first of its container, until ``Trainer.fit`` has something to
    save. For that JAX's preemption service, which takes SIGTERM for a notice and goes on, is off, unless the variable
    ``JAX_ENABLE_PREEMPTION_SERVICE`` is set.

    Args:
      coordinator_address: ``host:port`` of process 0, which opens that port. Give all three or none.
      num_processes: how many processes train together.
      process_id: the number of this one, from 0. ``JAXCHE_PROCESS_ID`` may be left out where Slurm, MPI or an indexed
        Kubernetes job numbers the processes. With explicit values every process sees all its GPUs: set
        ``CUDA_VISIBLE_DEVICES`` or ``JAX_LOCAL_DEVICE_IDS`` where several share a machine.
      timeout_s: seconds to wait for process 0 to be there, and for process 0 to see all the others.
      elastic: whether the others go on in ``Trainer.fit`` where a process dies, other than process 0: with their own
        parameters, from the last round that all had merged. By default only where ``jaxche launch --elastic`` says so.
        One that is stopped for less than 15 s is waited for; after a longer stop it joins again by itself. Process 0
        opens a port of its own for this, besides the coordinator's, which the others reach at the same host; where they
        cannot, a death is detected after 15 s.
        A process that joins with the number of one that died takes its place: its ``Trainer.fit`` waits for the end of
        a round and goes on from there with the others, where they are in the first fit of the script, as it is. Only
        where replicas merge on CPU devices: a GPU collective does not come back from the death of a peer.

    Returns:
      The number of this process, how many there are, and who said so.

    Raises:
      ValueError: if the values are half given or make no sense, the port is taken, or this process sees GPUs of
        several kinds.
      RuntimeError: if JAX has started its backend already, the run was joined with other values, or the processes
        disagree on their number or their versions.
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
        if not _xla_bridge.backends_are_initialized():
            _one_kind(devices_seen(_environ()))
        return ClusterInfo(0, 1, found.launcher)
    if _xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "jaxche.initialize() came after JAX had started its devices, so this process can no longer join "
            "the others. Move the line `jaxche.initialize()` up, right after the imports: before the first "
            "jax.devices(), jax.device_count(), jnp.* or jax.random.* call."
        )
    deadline = time.monotonic() + timeout_s
    found = resolved(found, timeout_s)
    local_ids = local_devices(found)
    seen = devices_seen(_environ(), local_ids)
    kind = _one_kind(seen)
    elastic = ELASTIC in os.environ if elastic is None else elastic
    if elastic:
        jax.config.update("jax_enable_recoverability", True)
    flags = {**PROCESS_FLAGS, **(ELASTIC_FLAGS if elastic else {})}
    os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), flags)
    # By default CUDA puts the fastest card first, while the numbers of schedulers and of the driver go by slot.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if jax.config.values["jax_cpu_collectives_implementation"] in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if _PREEMPTION_SERVICE not in os.environ:
        # It would take SIGTERM for a notice from here on, and nothing but `Trainer.fit` would end the process.
        jax.config.update(_PREEMPTION_SERVICE.lower(), False)
    _die_of_sigterm_as_process_1()
    connect(found, local_ids, timeout_s, deadline)
    if elastic:
        atexit.register(farewell)
    # Called first at exit: then nobody waits for the others.
    _leave_at_once_after_an_exception()
    state = _jax_distributed.global_state
    assert state.client is not None
    left_s = max(_LEAST_ROLL_CALL_S, deadline - time.monotonic())
    life = watch_lives() if elastic else 1
    mine = own(state.num_processes, kind, [uuid for uuid, _ in seen])
    members = roll_call(state.client, state.process_id, mine, left_s, late=life > 1)
    try:
        refuse_mismatch(members)
    except RuntimeError:
        # All refuse, so all can leave together: one that went first would take the others' last words with it.
        jax.distributed.shutdown()
        raise
    if life > 1:
        stand_by(state.process_id, life)
    _suit_kinds([member.kind for member in members], kind)
    why = why_apart(members)
    if why is not None:
        platform = keep_apart(members, mine, _environ())
        _log.info("%s: replicas merge on the CPU devices of their processes", why)
        own_text = own_accelerators(platform)
        told = share("devices", state.process_id, state.num_processes, own_text, timeout_s, late=life > 1)
        know_everywhere(told, state.process_id, platform)
    _joined = ClusterInfo(state.process_id, state.num_processes, found.launcher)
    _log.info("joined %s at %s", _joined, state.coordinator_address)
    return _joined


def _environ() -> dict[str, str]:
    """The environment variables, and of ``JAX_PLATFORMS`` what JAX goes by: a script may have changed that."""
    return {**os.environ, "JAX_PLATFORMS": jax.config.values["jax_platforms"] or ""}


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


def _suit_kinds(kinds: Sequence[str], mine: str) -> None:
    """Sets what different kinds of device need. XLA reads its flags when the backend starts, which is later."""
    if len(set(kinds)) == 1:
        return
    os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), MIXED_FLAGS)
    folder = jax.config.values["jax_compilation_cache_dir"]
    if folder:
        jax.config.update("jax_compilation_cache_dir", cache_folder(folder, mine))


def _one_kind(seen: Sequence[tuple[str, str]]) -> str:
    kinds = [kind for _, kind in seen]
    if len(set(kinds)) == 1:
        return kinds[0]
    listed = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    raise ValueError(
        f"this process sees GPUs of several kinds ({listed}), and one compiled program runs on one kind. Start one "
        f"process a GPU: jaxche launch -n {len(kinds)} train.py, or choose: CUDA_DEVICE_ORDER=PCI_BUS_ID "
        "CUDA_VISIBLE_DEVICES=0 python train.py"
    )


def _die_of_sigterm_as_process_1() -> None:
    """The first process of a container gets no signal that it has no handler for."""
    is_main = threading.current_thread() is threading.main_thread()
    if os.getpid() == 1 and is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


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
