"""`jaxche doctor` in one process."""

import importlib.metadata
import socket
import subprocess
import sys

import jax
import pytest

from jaxche.cli import _doctor, _doctor_checks, _doctor_devices, main
from jaxche.cli._doctor_checks import Finding
from jaxche.cluster import Clock, ClusterInfo, with_tunables


def test_a_healthy_machine(capsys, tmp_path):
    assert main(["doctor", "--store", str(tmp_path / "store")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert [line.split()[1] for line in lines if line.startswith("ok")] == [
        "versions",
        "machine",
        "devices",
        "launcher",
        "variables",
        "memory",
        "proxies",
        "ports",
        "compile",
        "cache",
        "store",
    ]
    assert f"jax {jax.__version__}" in lines[0]
    assert lines[-1].startswith("healthy. Next: jaxche doctor -n 2")
    assert list((tmp_path / "store").iterdir()) == []


def test_problem_with_fix_and_exit_code(capsys, monkeypatch):
    long = "a line " * 30
    monkeypatch.setattr(_doctor_checks, "ports", lambda: Finding("ports", long, "a line in /etc/hosts"))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert sum(line.startswith("BAD") for line in lines) == 1
    assert "write: a line in /etc/hosts" in "\n".join(lines)
    assert lines[-1] == "1 problem(s). Next: a line in /etc/hosts"


def test_failure_to_join(capsys, monkeypatch):
    monkeypatch.setenv("JAXCHE_COORDINATOR", "127.0.0.1:1")
    assert main(["doctor"]) == 1
    assert "JAXCHE_COORDINATOR='127.0.0.1:1' without JAXCHE_NUM_PROCESSES" in capsys.readouterr().err


def test_gpus_of_several_kinds(monkeypatch, capsys):
    monkeypatch.setattr("jaxche.cluster._initialize.visible_devices", lambda *_: [("", "H100"), ("", "L4")])
    monkeypatch.setattr(_doctor, "_examine", lambda store, launcher, errors: [Finding("launcher", launcher)])
    assert main(["doctor"]) == 0
    started = []
    monkeypatch.setattr("jaxche.cluster.launch", lambda command, processes, **_: started.append(processes) or 0)
    assert main(["doctor", "-n", "2"]) == 0
    assert started == [2]
    assert capsys.readouterr().err == ""


def test_unused_gpus(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr("jaxche.cluster.has_cuda", lambda: False)
    found = _doctor_devices.device_finding()
    assert "the driver shows 4 GPU(s), but JAX is installed without CUDA" in found.text
    assert found.fix.startswith("pip install 'jaxche[cuda13]'")  # the driver is not known here
    monkeypatch.setattr("jaxche.cluster.has_cuda", lambda: True)
    assert _doctor_devices.device_finding().fix.startswith("JAX_PLATFORMS=cuda jaxche doctor")
    for platforms in ("cpu", "cpu,cuda"):
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        assert not _doctor_devices.device_finding().fix


def test_plugin_version(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.1.0" if name == "jax-cuda12-plugin" else real(name)
    )
    found = _doctor_checks.versions()
    assert "jax-cuda12-plugin 0.1.0" in found.text
    assert found.fix == f"pip install 'jax[cuda12]=={real('jax')}'"


def test_proxies_without_passwords():
    found = _doctor_checks.proxies({"HTTPS_PROXY": "http://me:secret@proxy:3128"})
    assert found.text.startswith("HTTPS_PROXY: jaxche.initialize() bypasses them")
    assert "secret" not in found.text


def test_whether_memory_is_kept(monkeypatch):
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    found = _doctor_checks.allocation({"GLIBC_TUNABLES": "glibc.malloc.check=0"})
    assert "jaxche launch keeps it" in found.text
    assert not found.fix
    launched = {"GLIBC_TUNABLES": with_tunables("glibc.malloc.check=0")}
    assert _doctor_checks.allocation(launched).text == "kept or returned as GLIBC_TUNABLES says"
    monkeypatch.setattr("platform.libc_ver", lambda: ("musl", "1.2"))
    assert "C library" in _doctor_checks.allocation({}).text


def test_variables():
    found = _doctor_checks.variables({"XLA_FLAGS": "--a=1", "HOME": "/root", "NCCL_ALGO": "Ring"})
    assert found.text == "NCCL_ALGO=Ring  XLA_FLAGS=--a=1"


def test_unresolved_host_name(monkeypatch):
    def unknown(host, port):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = _doctor_checks.ports()
    assert "cannot reach itself as" in found.text
    assert "/etc/hosts" in found.fix


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_machine_may_have_an_address_of_either_version(monkeypatch, address):
    monkeypatch.setattr(socket, "gethostname", lambda: address)
    found = _doctor_checks.ports()
    assert not found.fix
    assert found.text == f"open; {address} is {address} (on this machine alone)"


def test_wrong_gradient(monkeypatch):
    monkeypatch.setattr(jax, "grad", lambda f: f)
    monkeypatch.setattr("jax.numpy.tanh", lambda x: 0 * x)
    found = _doctor_checks.compilation()
    assert "is wrong" in found.text
    assert found.fix


def test_unwritable_cache(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    (tmp_path / "file").touch()
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "file" / "cache"))
        assert "cannot be written" in _doctor_checks.cache().text
        assert _doctor_checks.cache().fix
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
        assert not _doctor_checks.cache().fix
        assert list((tmp_path / "cache").iterdir()) == []
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
        assert _doctor_checks.cache() == Finding("cache", "gs://bucket/cache")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_store_in_memory_is_one():
    found = _doctor_checks.store("memory://run")
    assert (found.name, found.fix) == ("store", "")
    assert found.text.startswith("memory://run: 4 KiB written in ")


def test_a_store_is_opened_as_by_stages(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/new/folder"
    assert not _doctor_checks.store(url).fix
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert _doctor_checks.store(url).fix == "pip install 'jaxche[store]'"


@pytest.mark.parametrize("url", ["nonsense://bucket", "/proc/nowhere/store"])
def test_invalid_store(url):
    found = _doctor_checks.store(url)
    assert url in found.text
    assert "names no store" in found.text or "making the folder failed" in found.text
    assert found.fix == "check the URL and credentials"


def test_store_with_wrong_bytes_or_without_conditional_writes(tmp_path, monkeypatch):
    import obstore

    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda *args, mode=None, **more: put(*args, **more))
    assert "ignores conditional writes" in _doctor_checks.store(str(tmp_path)).text
    monkeypatch.setattr(obstore, "put", lambda store, key, data, **more: put(store, key, bytes(data)[:-1], **more))
    found = _doctor_checks.store(str(tmp_path))
    assert "other bytes came back" in found.text
    assert found.fix
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_unreadable_store_is_cleaned_up(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no right to read")

    monkeypatch.setattr("obstore.get", refuse)
    assert "reading" in _doctor_checks.store(str(tmp_path)).text
    assert list(tmp_path.iterdir()) == []


def test_timeout_of_devices():
    program = """
import time
import jaxche.sharding
from jaxche.cli import main

jaxche.sharding.local_devices = lambda: time.sleep(600)
main(["doctor", "--timeout", "0.5"])
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert found.returncode == 1
    assert "has not started them in 0.5 s" in found.stdout
    assert "JAX_PLATFORMS=cpu jaxche doctor" in found.stdout


def test_many_processes_with_clocks_apart(monkeypatch, capsys):
    report = {"host": "node", "kind": "cpu", "devices": 1, "free": 2.0, "problems": []}
    clocks = [Clock(0.0, 0.0), *[Clock(1.0, 0.5)] * 16, Clock(-5000.0, 1.0)]
    monkeypatch.setattr("jaxche.cluster.all_gather", lambda name, mine, timeout_s: [report] * 18)
    monkeypatch.setattr("jaxche.cluster.clocks", lambda timeout_s: clocks)
    monkeypatch.setattr("jaxche.cluster.measure_all_reduce", lambda sizes, devices: dict.fromkeys(sizes, 1.0))
    monkeypatch.setattr("jax.distributed.shutdown", lambda: None)
    assert _doctor._together([], ClusterInfo(1, 18, "slurm"), 1.0) == 0
    assert capsys.readouterr().out == ""
    assert _doctor._together([], ClusterInfo(0, 18, "slurm"), 1.0) == 1
    out = capsys.readouterr().out
    assert "clocks     process 17 is -5.0 s ahead of process 0" in out
    assert "  and 2 more\n" in out
    assert out.endswith("1 problem(s). Next: chronyd -q\n")


def test_devices_that_do_not_start_say_why(monkeypatch):
    def fails():
        raise RuntimeError("Unable to initialize backend 'cuda'\nand more")

    monkeypatch.setattr("jaxche.sharding.local_devices", fails)
    found = _doctor_devices.device_finding()
    assert found.text == "JAX does not start: Unable to initialize backend 'cuda'"
    assert found.fix == "JAX_PLATFORMS=cpu jaxche doctor"
