"""initialize() in one process; tests/multiprocess has several."""

import functools
import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace

import jax
import pytest

from jaxche.cluster import ClusterInfo, initialize
from jaxche.cluster import _connect as connecting
from jaxche.cluster import _handshake as handshake_module
from jaxche.cluster import _initialize as module
from jaxche.cluster._detect import Detected

ALONE = ClusterInfo(0, 1, "none")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(module, "process_group", functools.cache(module.process_group.__wrapped__))


def _idle_backend(monkeypatch):
    """As in a process that has not used JAX yet; XLA_FLAGS is restored afterwards."""
    monkeypatch.setattr(module._xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(module, "register_cpu_client", lambda: None)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


def test_single_process():
    jax.devices()
    flags = os.environ.get("XLA_FLAGS")
    assert initialize() == ALONE
    assert initialize() == ALONE
    assert os.environ.get("XLA_FLAGS") == flags
    assert not jax.distributed.is_initialized()


def test_error_after_the_backend_has_started():
    jax.devices()
    with pytest.raises(RuntimeError, match=r"Move the line `jaxche.initialize\(\)` up"):
        initialize("127.0.0.1:1", 2, 1)


def test_invalid_arguments():
    with pytest.raises(ValueError, match="give all three or none"):
        initialize(num_processes=2)
    for timeout_s in (0, math.inf):
        with pytest.raises(ValueError, match=f"timeout_s={timeout_s} must be positive seconds"):
            initialize(timeout_s=timeout_s)


def test_the_variable_of_an_elastic_run_is_a_flag(monkeypatch):
    _idle_backend(monkeypatch)
    for text, found in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("JAXCHE_ELASTIC", text)
        assert module._elastic_variable() is found
    monkeypatch.setenv("JAXCHE_ELASTIC", "no")
    with pytest.raises(ValueError, match="JAXCHE_ELASTIC='no' must be 1 or 0"):
        initialize("127.0.0.1:1", 2, 1)


def test_unreachable_coordinator(monkeypatch):
    """On a clock that only sleeps move on: a connection is refused at once, on however busy a machine."""
    _idle_backend(monkeypatch)
    slept = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + sum(slept), sleep=slept.append)
    for one in (module, connecting):
        monkeypatch.setattr(one, "time", clock)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # never listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=f"'{address}'.*timeout_s=0.5"):
            initialize(address, 2, 1, timeout_s=0.5)
    assert slept == [0.2, 0.2]
    slept.clear()
    with pytest.raises(TimeoutError, match=r"'node\.\.cluster:1234': nothing answered"):
        initialize("node..cluster:1234", 2, 1, timeout_s=0.1)


def test_port_in_use(monkeypatch):
    _idle_backend(monkeypatch)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="cannot open port"):
            initialize(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0)


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("localhost", True), ("[::1]", True), ("node1", False), ("10.0.0.1", False)],
)
def test_loopback_coordinator(monkeypatch, host, alone):
    calls, address = [], f"{host}:1234"
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append(kwargs))
    monkeypatch.setattr(connecting, "_check_port_is_free", lambda *args: None)
    connecting.connect(Detected("arguments", address, 2, 0), None, 300, time.monotonic() + 300)
    assert [call["coordinator_bind_address"] for call in calls] == [address if alone else "[::]:1234"]


@pytest.fixture
def join(monkeypatch, service):
    """Runs initialize() as process 1 of two under Slurm, with JAX's part played here; gives the calls of that part."""

    def joining(other, **environ):
        _idle_backend(monkeypatch)
        slurm = {"JOB_ID": "7", "STEP_NODELIST": "n[1-2]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
        for name, value in slurm.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        calls = []

        def joined(*args, **kwargs):
            calls.append((args, kwargs))
            service(1, 2, "handshake", {0: other}).coordinator_address = args[0]

        monkeypatch.setattr(jax.distributed, "initialize", joined)
        monkeypatch.setattr(jax.distributed, "shutdown", lambda: calls.append("left"))
        monkeypatch.setattr(connecting, "_wait_for_coordinator", lambda *args: None)
        monkeypatch.setattr(module, "_exit_at_once_after_exception", lambda: None)
        monkeypatch.setattr(module, "register_devices", lambda *args: None)
        return calls

    return joining


def _member(kind="cpu", world=2, gpus=(), **changed):
    said = {"host": "n1", "kind": kind, "num_processes": world, "gpus": gpus}
    return json.dumps(said | {"versions": handshake_module.versions() | changed})


def test_under_slurm_jax_detects_and_the_second_call_returns_the_first(monkeypatch, join):
    calls = join(_member(), JAX_PLATFORMS="cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_timeout_seconds=9")
    info = initialize(timeout_s=10)
    assert info == ClusterInfo(1, 2, "slurm")
    assert initialize() == info
    [(args, kwargs)] = calls
    assert args == (f"n1:{65535 - 2**12 + 1 + 7}", 2, 1)
    assert kwargs["cluster_detection_method"] == "deactivate"
    assert kwargs["local_device_ids"] == [0]
    assert kwargs["initialization_timeout"] == 10
    flags = os.environ["XLA_FLAGS"].split()
    assert "--xla_cpu_collective_timeout_seconds=9" in flags
    # All kinds are the same: nothing is given up for mixed ones.
    assert not any("shard_autotuning" in flag for flag in flags)
    with pytest.raises(RuntimeError, match="num_processes=3, but"):
        initialize("h:1", 3, 1)


class _Pod:
    """As the package ``kubernetes`` answers in a pod of the indexed job ``train``."""

    ApiException = LookupError

    def __init__(self, pods):
        self.config = self.client = self.exceptions = self
        self.spec = SimpleNamespace(parallelism=pods, subdomain="service")
        self.metadata = SimpleNamespace(name="train", labels={"job-name": "train"}, owner_references=[self])
        self.controller, self.kind, self.items = True, "Job", [self]
        self.CoreV1Api = self.BatchV1Api = lambda: self
        self.load_incluster_config = lambda: None
        self.list_namespaced_pod = self.read_namespaced_job = lambda **_: self


@pytest.mark.parametrize("pods", [2, 1])
def test_in_a_pod_jax_asks_kubernetes(monkeypatch, pods):
    monkeypatch.setitem(sys.modules, "kubernetes", _Pod(pods))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    cluster = connecting._CLUSTERS["k8s"]
    for name in ("_pod", "_job", "_controller"):  # JAX asks once in a process
        monkeypatch.setattr(cluster, name, classmethod(getattr(cluster, name).__func__.__wrapped__))
    monkeypatch.setattr(cluster, "_namespace", lambda: "default")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(pods - 1))
    monkeypatch.setenv("HOSTNAME", "train-1")
    if pods == 1:
        assert initialize() == ClusterInfo(0, 1, "k8s")
        return
    _idle_backend(monkeypatch)
    calls = []

    def connect(*arguments):
        calls.append(arguments)
        raise TimeoutError("far enough")

    monkeypatch.setattr(module, "connect", connect)
    with pytest.raises(TimeoutError, match="far enough"):
        initialize()
    assert calls[0][0] == Detected("k8s", "train-0.service:55527", 2, 1)


def test_flag_and_caches_of_mixed_kinds(join, tmp_path):
    join(_member("NVIDIA H100"), JAX_PLATFORMS="cpu")
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        initialize(timeout_s=10)
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "cpu")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert "--xla_gpu_shard_autotuning=false" in os.environ["XLA_FLAGS"].split()


def test_two_processes_on_one_gpu(monkeypatch, join):
    join(_member("NVIDIA L4", gpus=["GPU-aa"]), CUDA_VISIBLE_DEVICES="0")
    monkeypatch.setattr(module, "_environ", lambda: {"CUDA_VISIBLE_DEVICES": "0"})
    monkeypatch.setattr(handshake_module, "has_cuda", lambda: True)
    monkeypatch.setattr("jaxche.cluster._gpus.nvidia_smi", lambda *_: (0, "GPU 0: NVIDIA L4 (UUID: GPU-aa)"))
    set_, begun = {}, []
    monkeypatch.setattr(jax.config, "update", set_.__setitem__)
    monkeypatch.setattr(module, "describe_accelerators", lambda platform: begun.append(platform) or [])
    initialize(timeout_s=10)
    assert begun == ["cuda"]
    assert set_["jax_platforms"] == "cpu,cuda"
    assert set_["jax_pjrt_client_create_options"] == {"num_nodes": 1, "memory_fraction": 0.375}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"jax": "0.9.9"}, r"1 of 2 processes run other versions of jax:\n(.*\n)*.*0\.9\.9"),
        ({"world": 3}, "num_processes=3 on process 0; num_processes=2 on process 1"),
    ],
)
def test_mismatch_before_the_backend_starts(join, other, message):
    calls = join(_member(**other), JAX_PLATFORMS="cpu")
    with pytest.raises(RuntimeError, match=message):
        initialize(timeout_s=10)
    assert calls[-1] == "left"


def test_gpus_of_several_kinds_in_one_process_are_refused(monkeypatch):
    _idle_backend(monkeypatch)
    kinds = ["NVIDIA H100", "NVIDIA H100", "NVIDIA L4"]
    monkeypatch.setattr(module, "visible_devices", lambda *args: [("", kind) for kind in kinds])
    expected = r"2 x NVIDIA H100, 1 x NVIDIA L4.*jaxche launch -n 3 train.py"
    with pytest.raises(ValueError, match=expected):
        initialize()
    with pytest.raises(ValueError, match=expected):
        initialize("127.0.0.1:1", 2, 1)


@pytest.mark.parametrize(
    ("local_id", "visible", "ids"),
    [(1, "0,1", [1]), (1, "1", [0]), (1, "", [1]), (None, "0,1", None)],
    ids=["one of two", "bound by the scheduler", "no GPUs", "no local ids"],
)
def test_one_gpu_for_each_local_process(monkeypatch, local_id, visible, ids):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert connecting.local_device_ids(Detected("slurm", "h:1", 4, 3, local_id)) == ids
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "")
    assert connecting.local_device_ids(Detected("slurm", "h:1", 4, 3, local_id)) == ids
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0")
    assert connecting.local_device_ids(Detected("slurm", "h:1", 4, 3, local_id)) is None


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(
        ValueError, match=r"process 6 is number 2 on this machine.*has 2 visible GPUs.*ntasks-per-node=2"
    ):
        connecting.local_device_ids(Detected("slurm", "h:1", 8, 6, 2))


def test_a_proxy_is_bypassed(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "example.org")
    grpc = "no_grpc_proxy"  # in small letters, as gRPC reads it
    monkeypatch.delenv(grpc, raising=False)
    connecting._bypass_proxy("10.0.0.1")
    assert os.environ["no_proxy"] == "example.org,10.0.0.1"
    assert os.environ.get(grpc) == "10.0.0.1"
    connecting._bypass_proxy(Detected("jaxche", "[::1]:1234", 2, 0).host)  # with brackets gRPC uses the proxy
    assert os.environ.get(grpc) == "10.0.0.1,::1"
    monkeypatch.delenv(grpc)


def test_hosts_that_a_variable_in_capitals_excludes_stay_excluded(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "minio.corp")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.setenv(name, "")
    connecting._bypass_proxy("node1")
    assert os.environ["no_proxy"] == "minio.corp,node1"
    assert urllib.request.proxy_bypass("minio.corp")


def test_an_exception_is_an_exit_code():
    program = f"from {initialize.__module__} import _exit_at_once_after_exception as at_once\nat_once()\nraise "
    done = subprocess.run([sys.executable, "-c", program + "ValueError"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "ValueError" in done.stderr


@pytest.mark.parametrize("traceback", ["", "full"])
def test_ctrl_c_is_an_exit_code_and_the_line_of_the_user(tmp_path, traceback):
    """It waits for a thread, in frames of the standard library."""
    script = tmp_path / "train.py"
    script.write_text(f"""
from concurrent.futures import Future
from {initialize.__module__} import _exit_at_once_after_exception as at_once

at_once()
steps = Future()
steps.set_exception(KeyboardInterrupt())
steps.result()
""")
    environ = os.environ | {"JAXCHE_TRACEBACK": traceback}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=environ)
    told = done.stderr.splitlines()
    assert done.returncode == 130
    if traceback:
        assert told[0] == "Traceback (most recent call last):"
        assert len(told) > 3
    else:
        assert told == [f"KeyboardInterrupt in {script}, line 8; JAXCHE_TRACEBACK=full shows all frames"]


@pytest.mark.parametrize("asked", ["true", None])
def test_the_preemption_service_is_off_unless_its_variable_is_set(monkeypatch, asked):
    _idle_backend(monkeypatch)
    seen, name = [], "jax_enable_preemption_service"
    if asked:
        monkeypatch.setenv(name.upper(), asked)
    else:
        monkeypatch.delenv(name.upper(), raising=False)

    def connect(*_):
        seen.append(jax.config.values[name])
        raise TimeoutError("far enough")

    monkeypatch.setattr(module, "connect", connect)
    before = jax.config.values[name]
    jax.config.update(name, True)
    try:
        with pytest.raises(TimeoutError, match="far enough"):
            initialize("127.0.0.1:1", 2, 1)
    finally:
        jax.config.update(name, before)
    assert seen == [bool(asked)]


def test_elastic_runs_wait_in_a_collective_as_long_as_their_heartbeats(monkeypatch):
    _idle_backend(monkeypatch)
    monkeypatch.setattr(jax.config, "update", lambda *args: None)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAXCHE_HEARTBEAT_TIMEOUT", "4")
    module._configure(elastic=True)
    assert "--xla_cpu_collective_timeout_seconds=4" in os.environ["XLA_FLAGS"].split()
    monkeypatch.setenv("JAXCHE_HEARTBEAT_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="JAXCHE_HEARTBEAT_TIMEOUT='soon'"):
        module._configure(elastic=True)
    module._configure(elastic=False)  # it has no such heartbeats


def test_a_coordinator_that_cannot_be_asked_refuses_nobody(monkeypatch):
    monkeypatch.delenv("JAXCHE_LIVENESS", raising=False)
    monkeypatch.setattr(connecting, "is_alive", lambda *asked: pytest.fail(f"asked {asked}"))
    connecting._refuse_second(Detected("slurm", "node1:1234", 2, 1))


def test_sigterm_ends_a_process_that_is_the_first_of_its_container(monkeypatch):
    handlers, codes = {}, []
    monkeypatch.setattr(module.os, "getpid", lambda: 1)
    monkeypatch.setattr(module.os, "_exit", codes.append)
    monkeypatch.setattr(module.signal, "getsignal", lambda number: module.signal.SIG_DFL)
    monkeypatch.setattr(module.signal, "signal", handlers.__setitem__)
    module._exit_on_sigterm_as_process_1()
    handlers[module.signal.SIGTERM](module.signal.SIGTERM, None)
    assert codes == [143]
