"""The handshake of processes."""

import json

import pytest

from jaxche.cluster import _handshake as module
from jaxche.cluster._handshake import (
    ProcessInfo,
    cache_folder,
    handshake,
    refuse_mismatch,
    versions,
    visible_devices,
)


def members(*changes, world=None):
    return [
        ProcessInfo(f"n{i}", "cpu", world or len(changes), {"jax": "1", "flax": "2"} | c) for i, c in enumerate(changes)
    ]


def test_table_of_differences_from_the_majority():
    with pytest.raises(RuntimeError) as refused:
        refuse_mismatch(members({}, {"jax": "3"}, {}))
    lines = str(refused.value).splitlines()
    assert lines[0] == "1 of 3 processes run other versions of jax:"
    assert [line.split() for line in lines[1:4]] == [["process", "host", "jax"], ["most", "1"], ["1", "n1", "3"]]
    assert lines[-1].endswith("There write: pip install jax==1")
    assert "flax" not in str(refused.value)


def test_process_0_decides_a_tie():
    with pytest.raises(RuntimeError, match="There write: pip install jax==1"):
        refuse_mismatch(members({}, {"jax": "3"}))
    with pytest.raises(RuntimeError, match=r"20 of 50 .*(.*\n)+  and 8 more\n.*start them with Python 3.11"):
        refuse_mismatch(members(*[{"python": "3.11"}] * 30, *[{"python": "3.12"}] * 20))


def test_missing_package_is_a_mismatch():
    odd = ProcessInfo("n1", "cpu", 2, {"jax": "1"})
    with pytest.raises(RuntimeError, match=r"1 +n1 +none"):
        refuse_mismatch([*members({}, world=2), odd])


def test_handshake_keeps_the_order(service):
    mine = ProcessInfo("n3", "cpu", 11, {})
    texts = {i: json.dumps(vars(mine) | {"host": f"n{i}"}) for i in (10, *range(10)) if i != 3}
    service(3, 11, "handshake", texts)
    heard = handshake(mine, 1.0)
    assert [member.host for member in heard] == ["n0", "n1", "n2", mine.host, *(f"n{i}" for i in range(4, 11))]


def test_handshake_timeout_names_processes(service):
    service(1, 3, "handshake", {}, RuntimeError("DEADLINE_EXCEEDED"))
    with pytest.raises(
        TimeoutError, match=r"process 0, 2 joined, but sent nothing for 'handshake' within 0 s.*jaxche.initialize\(\)"
    ):
        handshake(ProcessInfo("n1", "cpu", 3, {}), 0.01)


def test_other_errors_are_no_timeout(service):
    service(1, 3, "handshake", {}, RuntimeError("UNAVAILABLE"))
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        handshake(ProcessInfo("n1", "cpu", 3, {}), 60.0)


def test_visible_devices(monkeypatch):
    gpus = [("GPU-aa", "H100"), ("GPU-bb", "L4")]
    monkeypatch.setattr(module, "has_cuda", lambda: True)
    monkeypatch.setattr(module, "visible_gpus", lambda environ: gpus)
    assert visible_devices({}) == gpus
    assert visible_devices({}, [1]) == gpus[1:]
    assert visible_devices({"JAX_LOCAL_DEVICE_IDS": "1"}) == gpus[1:]
    assert visible_devices({"JAX_LOCAL_DEVICE_IDS": ""}) == gpus  # as JAX reads it
    assert visible_devices({"JAX_CUDA_VISIBLE_DEVICES": "0"}) == gpus[:1]
    assert visible_devices({"JAX_PLATFORMS": "cpu"}) == [("", "cpu")]
    assert visible_devices({"JAX_PLATFORMS": "cpu,cuda"}) == [("", "cpu")]
    assert visible_devices({"JAX_PLATFORMS": "tpu,cpu"}) == [("", "tpu")]
    # The machine has GPUs, JAX cannot use them.
    monkeypatch.setattr(module, "has_cuda", lambda: False)
    assert visible_devices({}) == [("", "cpu")]


def test_cache_in_an_object_store():
    assert cache_folder("gs://bucket/cache", "NVIDIA L4") == "gs://bucket/cache/nvidia-l4"


def test_version_of_the_imported_code():
    import jaxche

    assert versions()["jaxche"] == jaxche.__version__
