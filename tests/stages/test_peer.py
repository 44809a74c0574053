"""Wires of two processes in this one, over a store that is a dict; the sockets between them are real."""

import threading

import jax
import numpy as np
import pytest

from jaxche.stages import Tag
from jaxche.stages import _peer as module

LIKE = jax.ShapeDtypeStruct((64,), np.float32)


@pytest.fixture
def wires(monkeypatch, store, coordinator, devices):
    for name, value in {"client": store, "coordinator_address": coordinator}.items():
        monkeypatch.setattr(module._jax_distributed.global_state, name, value)
    made = {}
    monkeypatch.setattr(module, "_NUMBER", iter([0, 0]))  # each process counts its own
    other = threading.Thread(target=make_wire, args=(made, 1, devices))
    other.start()
    make_wire(made, 0, devices)
    other.join()
    yield made
    for wire in made.values():
        wire.close()


def make_wire(made, stage, devices):
    places = [devices[stage] if i == stage else None for i in range(2)]
    made[stage] = module.PeerWire([stage], 2, places, 60.0)


def there_and_back(wires, devices, step):
    forward, backward = Tag(step, 0, "forward", 0), Tag(step, 0, "backward", 1)
    x = jax.device_put(np.full(64, step, np.float32), devices[0])
    wires[0].send(forward, x)
    wires[1].send(backward, wires[1].receive(forward, LIKE, devices[1]) + 1)
    assert (wires[0].receive(backward, LIKE, devices[0]) == step + 1).all()


def test_a_stage_listens_at_the_address_of_the_run(wires):
    for wire in wires.values():
        assert wire._listener.address[0] == "127.0.0.1"
        assert wire._listener._servers[0].getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("stage", [0, 1])
def test_strangers_do_not_disturb_a_pipeline(wires, devices, strangers, stage):
    there_and_back(wires, devices, 0)
    done, steps = threading.Event(), [1]

    def train():
        while not done.is_set():
            there_and_back(wires, devices, steps[0])
            steps[0] += 1
            done.wait(0.01)

    training = threading.Thread(target=train)
    training.start()
    used = strangers(wires[stage]._listener.address, seed=stage)
    done.set()
    training.join()
    assert steps[0] > 10
    assert used["threads"] <= 1  # the one that trains
    assert used["files"] <= 100
    assert used["kib"] < 30_000
    there_and_back(wires, devices, steps[0])
    assert [len(wire._incoming) for wire in wires.values()] == [1, 1]
