"""Detects the launcher of this process from arguments and environment variables."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping

from jaxche.distributed import COORDINATOR, NUM_PROCESSES, PROCESS_ID, host_and_port, scheduled
from jaxche.messages import whole_number

_ARGUMENTS = ("coordinator_address", "num_processes", "process_id")
_VARIABLES = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
_CALL = 'jaxche.initialize("10.0.0.1:1234", num_processes=2, process_id=0)'
_EXPORT = f"{COORDINATOR}=10.0.0.1:1234 {NUM_PROCESSES}=2 {PROCESS_ID}=0"

# Process numbers of schedulers, in the run and on one machine, for variables without JAXCHE_PROCESS_ID. MPI comes
# before Slurm: in a Slurm job all processes that mpirun starts on a machine have one Slurm number.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclasses.dataclass(frozen=True)
class Detected:
    """The launcher and its values; ``num_processes`` is 0 if JAX's own detection must complete them."""

    launcher: str
    address: str = ""  # none for a single process
    num_processes: int = 0
    process_id: int = 0
    local_id: int | None = None  # number among the processes of this machine, if a scheduler sets it

    @property
    def host(self) -> str:
        """The host of the address, without the brackets of an IPv6 address."""
        return host_and_port(self.address)[0]

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(host_and_port(self.address)[1])


def detect(
    environ: Mapping[str, str],
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Detected:
    """Detect the launcher: arguments, then ``JAXCHE_*`` variables, then Open MPI, Slurm or Kubernetes."""
    arguments = (coordinator_address, num_processes, process_id)
    if any(value is not None for value in arguments):
        return _explicit("arguments", dict(zip(_ARGUMENTS, arguments, strict=True)), _CALL)
    if any(name in environ for name in _VARIABLES):
        # One process: ignore the scheduler.
        if environ.get(NUM_PROCESSES) == "1":
            return Detected("jaxche", num_processes=1)
        count, number, local_id = _number(environ, NUM_PROCESSES), _number(environ, PROCESS_ID), None
        if number is None:
            number, local_id = _number(environ, *_RANKS), _number(environ, *_LOCAL_RANKS)
        given = {COORDINATOR: environ.get(COORDINATOR), NUM_PROCESSES: count, PROCESS_ID: number}
        found = _explicit("jaxche", given, _EXPORT)
        return dataclasses.replace(found, local_id=local_id)
    return _scheduler(environ)


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The number in the first of these variables that is set."""
    for name in names:
        if name in environ:
            try:
                return int(environ[name])
            except ValueError:
                raise ValueError(f"{name}={environ[name]!r} is not a number. Write: {_EXPORT}") from None
    return None


def _explicit(launcher: str, given: dict[str, str | int | None], write: str) -> Detected:
    missing = [name for name, value in given.items() if value is None]
    if missing:
        there = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        raise ValueError(f"Got {there} without {' and '.join(missing)}: give all three or none. Write: {write}")
    (address_name, address), (count_name, count), (id_name, number) = given.items()
    count, number = whole_number(count_name, count, 1, write), whole_number(id_name, number, 0, write)
    if number >= count:
        raise ValueError(f"{id_name}={number!r} must be one of 0 to {count - 1} ({count_name}={count}).")
    if not isinstance(address, str) or not _is_address(address):
        raise ValueError(
            f"{address_name}={address!r} must be 'host:port', with brackets around an IPv6 address. Write: {write}"
        )
    return Detected(launcher, address, count, number)


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    is_host = bool(host) and (":" not in host or (host[0], host[-1]) == ("[", "]"))
    return is_host and port.isdigit() and 0 < int(port) < 65536


def _scheduler(environ: Mapping[str, str]) -> Detected:
    name, count = scheduled(environ)
    if name == "OMPI_COMM_WORLD_SIZE":
        if "OMPI_MCA_orte_hnp_uri" in environ:
            return Detected("ompi")
        # Open MPI 5 does not set the address of mpirun. Without this error each rank trains its own model.
        raise ValueError(
            f"OMPI_COMM_WORLD_SIZE={count}, but this Open MPI does not set the address of mpirun, so JAX "
            f"cannot find process 0. Write: mpirun -n {count} -x {COORDINATOR}=<host of rank 0>:1234 "
            f"-x {NUM_PROCESSES}={count} python train.py"
        )
    if name == "PMI_SIZE":
        raise ValueError(
            f"PMI_SIZE={count}: JAX cannot find process 0 of the mpirun of MPICH or Intel MPI. Write: "
            f"{COORDINATOR}=<host of rank 0>:1234 {NUM_PROCESSES}={count} mpirun -n {count} python train.py"
        )
    if name == "SLURM_NTASKS":
        return Detected("slurm")
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        if importlib.util.find_spec("kubernetes") is None:
            raise ValueError(
                f"JOB_COMPLETION_INDEX={environ['JOB_COMPLETION_INDEX']!r}: this is one pod of an indexed "
                f"Kubernetes job. Either pip install kubernetes, or set in the manifest {_EXPORT} "
                f"({NUM_PROCESSES}=1 if each pod trains a model of its own)."
            )
        return Detected("k8s")
    if "JAX_COORDINATOR_ADDRESS" in environ:
        # Without this error each process trains its own model.
        address = environ["JAX_COORDINATOR_ADDRESS"]
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS={address!r} is set, but not how many processes meet there. Write: "
            f"{COORDINATOR}=$JAX_COORDINATOR_ADDRESS {NUM_PROCESSES}=2 {PROCESS_ID}=0, or for a single process: unset "
            "JAX_COORDINATOR_ADDRESS"
        )
    return Detected("none", num_processes=1)
