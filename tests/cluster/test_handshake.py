"""What processes tell each other on joining: who differs is named, and nobody waits for ever."""

import json

import pytest

from jaxche.cluster import _handshake as module
from jaxche.cluster._handshake import (
    ProcessInfo,
    cache_folder,
    handshake,
    refuse_mismatch,
    this_process,
    versions,
    visible_devices,
)


def members(*changes, world=None):
    return [
        ProcessInfo(f"n{i}", "cpu", world or len(changes), {"jax": "1", "flax": "2"} | c) for i, c in enumerate(changes)
    ]


def test_the_table_shows_who_differs_from_the_most():
    with pytest.raises(RuntimeError) as refused:
        refuse_mismatch(members({}, {"jax": "3"}, {}))
    lines = str(refused.value).splitlines()
    assert lines[0] == "1 of 3 processes run other versions of jax:"
    assert [line.split() for line in lines[1:4]] == [["process", "host", "jax"], ["most", "1"], ["1", "n1", "3"]]
    assert lines[-1].endswith("There write: pip install jax==1")
    assert "flax" not in str(refused.value)


def test_a_tie_is_measured_against_process_0_and_many_are_counted():
    with pytest.raises(RuntimeError, match="There write: pip install jax==1"):
        refuse_mismatch(members({}, {"jax": "3"}))
    with pytest.raises(RuntimeError, match=r"20 of 50 .*(.*\n)+  and 8 more\n.*start them with Python 3.11"):
        refuse_mismatch(members(*[{"python": "3.11"}] * 30, *[{"python": "3.12"}] * 20))


def test_a_package_that_is_missing_differs():
    odd = ProcessInfo("n1", "cpu", 2, {"jax": "1"})
    with pytest.raises(RuntimeError, match=r"1 +n1 +none"):
        refuse_mismatch([*members({}, world=2), odd])


def test_all_are_heard_in_order(service):
    mine = this_process(11, "cpu")
    texts = {i: json.dumps(vars(mine) | {"host": f"n{i}"}) for i in (10, *range(10)) if i != 3}
    heard = handshake(service("handshake", texts), 3, mine, 1.0)
    assert [member.host for member in heard] == ["n0", "n1", "n2", mine.host, *(f"n{i}" for i in range(4, 11))]


def test_a_process_that_says_nothing_is_named(service):
    deaf = service("handshake", {}, RuntimeError("DEADLINE_EXCEEDED"))
    with pytest.raises(
        TimeoutError, match=r"process 0, 2 joined, but sent nothing for 'handshake' within 0 s.*jaxche.initialize\(\)"
    ):
        handshake(deaf, 1, this_process(3, "cpu"), 0.01)


def test_a_service_that_breaks_is_not_called_a_time_out(service):
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        handshake(service("handshake", {}, RuntimeError("UNAVAILABLE")), 1, this_process(3, "cpu"), 60.0)


def test_devices_seen(monkeypatch):
    gpus = [("GPU-aa", "H100"), ("GPU-bb", "L4")]
    monkeypatch.setattr(module, "has_cuda", lambda: True)
    monkeypatch.setattr(module, "visible_gpus", lambda environ: gpus)
    assert visible_devices({}) == gpus
    assert visible_devices({}, [1]) == gpus[1:]
    assert visible_devices({"JAX_LOCAL_DEVICE_IDS": "1"}) == gpus[1:]
    assert visible_devices({"JAX_CUDA_VISIBLE_DEVICES": "0"}) == gpus[:1]
    assert visible_devices({"JAX_PLATFORMS": "cpu"}) == [("", "cpu")]
    assert visible_devices({"JAX_PLATFORMS": "tpu,cpu"}) == [("", "tpu")]
    # The machine has GPUs, JAX cannot use them.
    monkeypatch.setattr(module, "has_cuda", lambda: False)
    assert visible_devices({}) == [("", "cpu")]


def test_a_cache_in_a_bucket():
    assert cache_folder("gs://bucket/cache", "NVIDIA L4") == "gs://bucket/cache/nvidia-l4"


def test_the_version_is_that_of_the_code_that_runs():
    import jaxche

    assert versions()["jaxche"] == jaxche.__version__
