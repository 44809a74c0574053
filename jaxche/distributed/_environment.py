"""What launchers say in the environment of a process."""

from __future__ import annotations

from collections.abc import Mapping

# Set by ``jaxche launch``, the first by its ``--pace``.
PACE_MS, NUM_PROCESSES = "JAXCHE_PACE_MS", "JAXCHE_NUM_PROCESSES"


def scheduled(environ: Mapping[str, str]) -> tuple[str, int]:
    """How many processes Open MPI or Slurm started together with this one, and the variable that says so.

    The conditions and their order are JAX's own, and the count on top: ``srun --pty bash`` or ``mpirun -n 1`` is a
    process on its own, and so are the shell of an allocation and a job's own script, which are in no step.

    Args:
      environ: environment variables.

    Returns:
      The name and the count; ("", 1) where nobody started several.

    Example:
      >>> scheduled({"OMPI_COMM_WORLD_SIZE": "4"}), scheduled({"SLURM_NTASKS": "8"})
      (('OMPI_COMM_WORLD_SIZE', 4), ('', 1))
    """
    names = ["OMPI_COMM_WORLD_SIZE"]
    if environ.get("SLURM_JOB_ID") and "SLURM_STEP_NODELIST" in environ and "SLURM_PROCID" in environ:
        names.append("SLURM_NTASKS")
    counts = ((name, int(environ.get(name, "1"))) for name in names)
    return next(((name, count) for name, count in counts if count > 1), ("", 1))
