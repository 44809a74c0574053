"""Runs on heterogeneous platforms."""

import jax
import pytest

from jaxche.cluster import _heterogeneous as module
from jaxche.cluster._handshake import ProcessInfo
from jaxche.cluster._heterogeneous import (
    configure_platforms,
    describe_accelerators,
    heterogeneity_reason,
    register_devices,
)


def member(kind, *gpus):
    return ProcessInfo("n1", kind, 2, {}, gpus)


CPU, H100, L4, L4_TOO = member("cpu", ""), member("H100", "GPU-a"), member("L4", "GPU-b"), member("L4", "GPU-b")
UNLISTED = member("GPU", "")


@pytest.fixture
def told(monkeypatch):
    """The configuration of JAX."""
    values = {}
    monkeypatch.setattr(jax.config, "update", values.__setitem__)
    return values


def test_heterogeneity_reason():
    assert heterogeneity_reason([CPU, CPU]) is None
    assert heterogeneity_reason([H100, L4]) is None
    assert heterogeneity_reason([UNLISTED, UNLISTED]) is None  # unknown
    assert heterogeneity_reason([L4, CPU, CPU]) == "some processes train on the CPU"
    assert heterogeneity_reason([H100, L4, L4_TOO]) == "processes share a GPU"


@pytest.mark.parametrize(
    ("wanted", "platforms"), [("", "cpu,cuda"), ("gpu", "cpu,cuda"), ("cuda,cpu", "cpu,cuda"), ("tpu", "cpu,tpu")]
)
def test_accelerators_are_a_second_platform_of_their_process(told, wanted, platforms):
    assert configure_platforms([L4, CPU], L4, {"JAX_PLATFORMS": wanted}) == platforms[4:]
    assert told == {"jax_platforms": platforms, "jax_pjrt_client_create_options": {"num_nodes": 1}}


def test_a_process_on_the_cpu_starts_no_accelerators(told):
    assert configure_platforms([L4, CPU], CPU, {"JAX_PLATFORMS": "cpu,cuda"}) is None
    assert told == {"jax_platforms": "cpu"}


def test_processes_on_one_gpu_share_its_memory(told):
    configure_platforms([L4, L4_TOO], L4, {})
    assert told["jax_pjrt_client_create_options"] == {"num_nodes": 1, "memory_fraction": 0.375}
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        configure_platforms([L4, L4_TOO], L4, {name: "0.2"})
        assert told["jax_pjrt_client_create_options"] == {"num_nodes": 1}


@pytest.mark.parametrize("given", [{"a": "1", "num_nodes": 2}, "a:1;num_nodes:2"])
def test_other_options_stay(told, monkeypatch, given):
    monkeypatch.setattr(type(jax.config), "values", {"jax_pjrt_client_create_options": given})
    configure_platforms([L4, CPU], L4, {})
    assert told["jax_pjrt_client_create_options"] == {"a": "1", "num_nodes": 1}


def test_one_cpu_device_for_each_gpu(told, monkeypatch):
    several = member("L4", "GPU-b", "GPU-c")
    set_so_far = {"jax_pjrt_client_create_options": None, "jax_num_cpu_devices": -1}
    monkeypatch.setattr(type(jax.config), "values", set_so_far)
    configure_platforms([several, CPU], several, {})
    assert told["jax_num_cpu_devices"] == 2


def test_devices_of_all_processes(devices, monkeypatch):
    heard = []
    monkeypatch.setattr(module, "set_devices", heard.extend)
    there = [{"process_index": 1, "platform": "gpu", "device_kind": "L4", "id": 0}]
    register_devices([describe_accelerators(None), there], 0, None)
    assert heard[:-1] == devices
    assert (heard[-1].process_index, heard[-1].device_kind) == (1, "L4")
    # On the process with the accelerators they are themselves; here CPU devices play them.
    assert describe_accelerators("cpu")[1]["id"] == devices[1].id
    heard.clear()
    register_devices([describe_accelerators("cpu")], 0, "cpu")
    assert heard == devices
