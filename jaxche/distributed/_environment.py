"""Environment variables of launchers."""

from __future__ import annotations

from collections.abc import Mapping

# Set by ``jaxche launch``: ``host:port`` of the coordinator, the number of processes and that of this one.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = "JAXCHE_COORDINATOR", "JAXCHE_NUM_PROCESSES", "JAXCHE_PROCESS_ID"
# Set by ``jaxche launch --pace``: the milliseconds of a training step of this process.
PACE_MS = "JAXCHE_PACE_MS"
# Set by ``jaxche launch``: the file to touch after each round, the file of events, and the number of restarts.
HEARTBEAT, EVENTS, RESTART = "JAXCHE_HEARTBEAT", "JAXCHE_EVENTS", "JAXCHE_RESTART"
# Set by ``jaxche launch --elastic``: that the run is elastic, and the address of its liveness server.
ELASTIC, LIVENESS = "JAXCHE_ELASTIC", "JAXCHE_LIVENESS"
# Set by ``jaxche launch --heartbeat-timeout``: seconds without a heartbeat until a process of an elastic run counts as
# dead.
HEARTBEAT_TIMEOUT = "JAXCHE_HEARTBEAT_TIMEOUT"
# Seconds for a round, where nothing reads heartbeats.
HANG_TIMEOUT = "JAXCHE_HANG_TIMEOUT"


def scheduled(environ: Mapping[str, str]) -> tuple[str, int]:
    """The variable of MPI or Slurm with the number of processes, and that number; ("", 1) for a single process.

    The number must be above 1: ``srun --pty bash``, ``mpirun -n 1``, the shell of an allocation and the script of a job
    are single processes. In a Slurm job that of mpirun comes first, because Slurm then starts one process a machine.
    """
    counts = {"OMPI_COMM_WORLD_SIZE": environ.get("OMPI_COMM_WORLD_SIZE")}
    if "MPI_LOCALRANKID" in environ:  # only mpirun of MPICH and Intel MPI sets that; srun sets PMI_SIZE too
        counts["PMI_SIZE"] = environ.get("PMI_SIZE")
    if environ.get("SLURM_JOB_ID") and "SLURM_STEP_NODELIST" in environ and "SLURM_PROCID" in environ:
        # As in JAX. But the shell of salloc, which is a step of one task, has the number of its job.
        counts["SLURM_NTASKS"] = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")
    for name, count in counts.items():
        if count and not count.isdecimal():
            raise ValueError(f"{name}={count!r} must be the number of processes. Write: unset {name}")
        if count and int(count) > 1:
            return name, int(count)
    return "", 1
