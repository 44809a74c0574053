"""Fake devices, made once for all tests: they prove correctness, never speed."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxche.training import RoundInfo

DEVICES = 8
# Of `jaxche launch`, Slurm, Open MPI, MPICH and Kubernetes.
LAUNCHERS = ("JAXCHE_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "KUBERNETES_", "JOB_COMPLETION_INDEX")
# One for each of the processes that run tests side by side: JAX writes it without a lock.
_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax" / os.environ.get("PYTEST_XDIST_WORKER", "alone")

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
# The compiled programs of one test serve the next, also those that took no time: eager operations and small steps are
# compiled again and again, in every module and in every process a test starts. Child processes find the same cache.
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
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


@pytest.fixture
def close():
    """Compare two trees, tightly unless told otherwise."""

    def check(a, b, rtol=1e-5, atol=1e-6):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)

    return check


@pytest.fixture
def same():
    """Two trees are equal bit for bit."""

    def check(a, b):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))

    return check


@pytest.fixture(scope="session")
def round_info():
    """Makes the record of a round: of replicas that took 200 ms for so many steps, and merged in 10 ms."""

    def make(counts=(10, 4), **fields):
        values = {
            "round": 0,
            "epoch": 0,
            "cursor": 0,
            "counts": counts,
            "planned": counts,
            "weights": tuple(n / sum(counts) for n in counts),
            "wall_ms": (200.0,) * len(counts),
            "sync_ms": 10.0,
            "loss": 1.0,
            "metrics": {"accuracy": 0.5},
            "drift": 0.01,
            "drift_dir": 0.2,
            "losses": (1.0,) * len(counts),
            "examples": 32 * sum(counts),
            "anchor": min(counts),
            "verdict": "calm",
        }
        return RoundInfo(**values | fields)

    return make
