"""Fake devices, made once for all tests: they prove correctness, never speed."""

import os
from pathlib import Path

import jax
import pytest

DEVICES = 8
# Of `jaxche launch`, Slurm, Open MPI, MPICH and Kubernetes.
LAUNCHERS = ("JAXCHE_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "KUBERNETES_", "JOB_COMPLETION_INDEX")
_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax"

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
# The compiled programs of one run serve the next. Child processes of a test find the same cache.
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
# Tests report to nobody.
os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}


@pytest.fixture(scope="module", autouse=True)
def _no_launcher():
    """Whatever started the tests: they and the processes that they start are on their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def devices():
    """The fake devices."""
    return jax.devices()
