"""initialize() in one process; that several find each other is in tests/multiprocess."""

import os
import socket
import time

import jax
import pytest

from jaxche.cluster import ClusterInfo, initialize
from jaxche.cluster import _initialize as module

ALONE = ClusterInfo(0, 1, "none")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("JAXCHE_", "SLURM_", "OMPI_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(module, "_joined", None)


def _idle_backend(monkeypatch):
    """As in a process that has not used JAX yet; XLA_FLAGS is restored afterwards."""
    monkeypatch.setattr(module._xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


def test_alone_it_does_nothing_even_after_jax_has_started():
    jax.devices()
    flags = os.environ.get("XLA_FLAGS")
    assert initialize() == ALONE
    assert initialize() == ALONE
    assert os.environ.get("XLA_FLAGS") == flags
    assert not jax.distributed.is_initialized()


def test_after_the_backend_it_says_which_line_to_move():
    jax.devices()
    with pytest.raises(RuntimeError, match=r"Move the line `jaxche.initialize\(\)` up"):
        initialize("127.0.0.1:1", 2, 1)


def test_half_given_and_nonsense_are_refused():
    with pytest.raises(ValueError, match="give all three or none"):
        initialize(num_processes=2)
    with pytest.raises(ValueError, match="timeout_s=0"):
        initialize(timeout_s=0)


def test_an_unreachable_coordinator_is_named_within_the_time_out(monkeypatch):
    _idle_backend(monkeypatch)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # never listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=f"'{address}'.*timeout_s=0.5"):
            initialize(address, 2, 1, timeout_s=0.5)
        assert time.monotonic() - start < 3


def test_a_taken_port_is_named_before_jaxlib_crashes_on_it(monkeypatch):
    _idle_backend(monkeypatch)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="cannot open port"):
            initialize(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0)


def test_under_slurm_jax_detects_and_the_second_call_returns_the_first(monkeypatch):
    _idle_backend(monkeypatch)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_timeout_seconds=9")
    for name, value in {"JOB_ID": "7", "STEP_NODELIST": "n1", "NTASKS": "2", "PROCID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    calls = []

    def joined(*args, **kwargs):
        calls.append((args, kwargs))
        monkeypatch.setattr(module._jax_distributed.global_state, "process_id", 1)
        monkeypatch.setattr(module._jax_distributed.global_state, "num_processes", 2)

    monkeypatch.setattr(jax.distributed, "initialize", joined)
    monkeypatch.setattr(module, "_leave_at_once_after_an_exception", lambda: None)
    info = initialize(timeout_s=10)
    assert info == ClusterInfo(1, 2, "slurm")
    assert initialize() is info
    [(args, kwargs)] = calls
    assert args == (None, None, None)
    assert kwargs["cluster_detection_method"] is None
    assert kwargs["initialization_timeout"] == 10
    flags = os.environ["XLA_FLAGS"].split()
    assert "--xla_cpu_collective_timeout_seconds=9" in flags
    assert "--xla_gpu_shard_autotuning=false" in flags
    with pytest.raises(RuntimeError, match="num_processes=3, but"):
        initialize("h:1", 3, 1)


def test_a_proxy_is_bypassed(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    module._bypass_proxy("10.0.0.1")
    assert os.environ["no_proxy"] == "example.org,10.0.0.1"
    assert os.environ.get("no_grpc_proxy") == "10.0.0.1"  # noqa: SIM112 (gRPC reads it in small letters)
    monkeypatch.delenv("no_grpc_proxy")
