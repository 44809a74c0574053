"""Detection of the launcher."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxche.cluster import _connect
from jaxche.cluster._detect import Detected, detect

LAUNCHED = {"JAXCHE_COORDINATOR": "127.0.0.1:1", "JAXCHE_NUM_PROCESSES": "2", "JAXCHE_PROCESS_ID": "1"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


def test_arguments_come_first_and_the_launcher_before_the_scheduler():
    everything = LAUNCHED | SLURM | OPEN_MPI
    assert detect(everything, "h:2", 3, 2) == Detected("arguments", "h:2", 3, 2)
    assert detect(everything) == Detected("jaxche", "127.0.0.1:1", 2, 1)
    # mpirun inside a Slurm job: Slurm's numbers are of the machines, not of the processes.
    assert detect(SLURM | OPEN_MPI) == Detected("ompi")
    assert detect(SLURM) == Detected("slurm")
    assert detect(SLURM | {"SLURM_STEP_NUM_TASKS": "2"}) == Detected("slurm")
    assert detect(SLURM | {"PMI_RANK": "1", "PMI_SIZE": "2"}) == Detected("slurm")  # srun --mpi=pmi2
    assert detect(OPEN_MPI) == Detected("ompi")
    assert detect({}) == Detected("none", num_processes=1)


@pytest.mark.parametrize(
    "environ",
    [
        SLURM | {"SLURM_NTASKS": "1"},
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"},  # inside sbatch
        SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # the shell of salloc
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # a notebook in a pod
    ],
)
def test_one_process_under_a_scheduler(environ):
    assert detect(environ) == Detected("none", num_processes=1)


def test_kubernetes_needs_its_package_or_the_variables(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install kubernetes.*JAXCHE_COORDINATOR="):
        detect(KUBERNETES)
    assert detect(KUBERNETES | LAUNCHED).launcher == "jaxche"
    assert detect(KUBERNETES | {"JAXCHE_NUM_PROCESSES": "1"}).num_processes == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert detect(KUBERNETES) == Detected("k8s")


def test_the_address_of_a_coordinator_alone_is_no_single_process():
    address = {"JAX_COORDINATOR_ADDRESS": "node1:1234"}
    for numbers in ({}, {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}):  # which JAX does not read
        with pytest.raises(ValueError, match=r"'node1:1234' is set, but .*JAXCHE_COORDINATOR=.*unset JAX_COORDINATOR"):
            detect(address | numbers)
    assert detect(address | {"JAXCHE_NUM_PROCESSES": "1"}) == Detected("jaxche", num_processes=1)
    for known in (LAUNCHED, SLURM, OPEN_MPI):
        assert detect(address | known) == detect(known)


def test_open_mpi_without_an_address():
    with pytest.raises(ValueError, match=r"mpirun -n 2 -x JAXCHE_COORDINATOR="):
        detect({"OMPI_COMM_WORLD_SIZE": "2"})


def test_mpich_has_no_address_either():
    mpich = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}
    # In a Slurm job its processes have the numbers of what started them on their machine.
    for environ in (mpich, SLURM | mpich):
        with pytest.raises(ValueError, match=r"Write: JAXCHE_COORDINATOR=.* JAXCHE_NUM_PROCESSES=2 mpirun -n 2"):
            detect(environ)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 2, None), r"num_processes=2 without coordinator_address and process_id"),
        (("h:1", None, 0), r"without num_processes.*Write: jaxche.initialize\("),
        (("h:1", 0, 0), "num_processes=0"),
        (("h:1", 2, 2), "process_id=2 must be one of 0 to 1"),
        (("h:1", 2, -1), "process_id=-1"),
        (("h:1", "2", 0), "num_processes='2' must be a whole number"),
        (("h", 2, 0), "coordinator_address='h' must be 'host:port'"),
        (("h:99999", 2, 0), "host:port"),
        (("fd00::1:1234", 2, 0), "brackets around an IPv6 address"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        detect({}, *arguments)


def test_numbers_may_come_from_numpy():
    found = detect({}, "h:1", np.int64(2), np.int64(1))
    assert found == Detected("arguments", "h:1", 2, 1)
    assert {type(found.num_processes), type(found.process_id)} == {int}


def test_wrong_variables_are_named():
    with pytest.raises(ValueError, match="JAXCHE_NUM_PROCESSES='two'"):
        detect(LAUNCHED | {"JAXCHE_NUM_PROCESSES": "two"})
    with pytest.raises(ValueError, match="without JAXCHE_NUM_PROCESSES and JAXCHE_PROCESS_ID"):
        detect({"JAXCHE_COORDINATOR": "h:1"})


@pytest.mark.parametrize(
    ("scheduler", "local_id"),
    [
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, 0),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
        ({"PMI_RANK": "1", "MPI_LOCALRANKID": "1"}, 1),
        ({"JOB_COMPLETION_INDEX": "1"}, None),
        # mpirun inside a Slurm job: every process of a machine has the Slurm number of what started them there.
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "1"}
            | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
            1,
        ),
        ({"PMI_RANK": "1", "MPI_LOCALRANKID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, 1),
        # srun --mpi=pmix
        ({"PMIX_RANK": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, 0),
    ],
)
def test_process_numbers_from_the_scheduler(scheduler, local_id):
    told = {"JAXCHE_COORDINATOR": "h:1", "JAXCHE_NUM_PROCESSES": "2"}
    assert detect(told | scheduler) == Detected("jaxche", "h:1", 2, 1, local_id)
    # The number of `jaxche launch` counts, also inside a job of one task.
    assert detect(LAUNCHED | scheduler | {"SLURM_PROCID": "0"}) == Detected("jaxche", "127.0.0.1:1", 2, 1)


def test_a_number_of_processes_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE='4x' must be the number of processes"):
        detect(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4x"})


def test_a_scheduler_that_jax_does_not_find_is_an_error(monkeypatch):
    cluster = SimpleNamespace(is_env_present=lambda: False)
    monkeypatch.setitem(_connect._CLUSTERS, "k8s", cluster)
    with pytest.raises(RuntimeError, match="JAX does not find the scheduler 'k8s' in this process"):
        _connect.resolve_scheduler(Detected("k8s"), 10.0)
