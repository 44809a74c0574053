"""The devices of a run in which no process knows all accelerators."""

import functools

import pytest

import jaxche
from jaxche.sharding import RemoteDevice, is_private, local_devices, set_devices
from jaxche.sharding import _devices as module

REMOTE = RemoteDevice(process_index=1, platform="gpu", device_kind="NVIDIA L4", id=0)


@pytest.fixture
def apart(devices, monkeypatch):
    """Devices as process 0 of two sees them, which has CPUs while the other has a GPU."""
    monkeypatch.setattr(module, "_devices_of_run", functools.cache(dict))
    set_devices([devices[0], REMOTE])


def test_the_accelerators_of_others_are_among_the_devices(apart, devices):
    assert jaxche.devices() == [devices[0], REMOTE]
    assert local_devices() == devices[:1]
    assert [is_private(device) for device in (*devices[:2], REMOTE)] == [False, False, True]


def test_islands_of_others_are_meshes_too(apart):
    strategy = jaxche.FullShard()
    assert strategy.mesh([REMOTE]) == strategy.mesh([RemoteDevice(1, "gpu", "NVIDIA L4", 0)])


def test_a_caller_cannot_change_the_list(apart):
    jaxche.devices().clear()
    assert len(jaxche.devices()) == 2
