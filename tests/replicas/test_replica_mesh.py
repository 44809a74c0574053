"""Where replicas meet: the same numbers on their own devices and on the host's."""

from types import SimpleNamespace

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxche
from jaxche.distributed import Group
from jaxche.replicas._placement import DevicePlacement, ShardedPlacement
from jaxche.replicas._replica_mesh import ReplicaMesh
from jaxche.sharding import FullShard, NoShard, ShardGradOp


@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_the_host_merges_to_the_same_numbers(problem, devices, average):
    ends = []
    for backend in ("device", "host"):
        trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), average=average, replicas=devices[:3], backend=backend)
        state = trainer.init(problem.params)
        for counts in ((1, 2, 3), (2, 0, 1)):
            state, info = trainer.round(state, problem.data, counts=counts)
        ends.append((jax.device_get(trainer.params(state)), info.loss))
        placements = [next(iter(local.params["w"].devices())) for local in state.local_states]
        assert placements == devices[:3]  # wherever they met, they are home again
        used = set(trainer._engine._replica_mesh.mesh.devices.flat)
        assert used == set(devices[:3] if backend == "device" else devices[3:6])
    chex.assert_trees_all_close(*ends, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (1, 1), (2, 1)], ids=str)
def test_islands_meet_on_the_host_too(problem, devices, sizes):
    ends = []
    for backend in ("device", "host"):
        strategy = ShardGradOp()
        meshes = [strategy.mesh(devices[: sizes[0]]), strategy.mesh(devices[sizes[0] : sum(sizes)])]
        trainer = jaxche.Trainer(
            problem.loss, optax.adam(0.05), strategy=strategy, replicas=meshes, backend=backend, opt_state="average"
        )
        state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(1, 3))
        ends.append(jax.device_get((trainer.params(state), state.opt_state)))
    chex.assert_trees_all_close(*ends, rtol=1e-6, atol=1e-8)


def test_large_whole_arrays_are_cut_along_the_first_axis_that_all_devices_divide(devices):
    strategy = NoShard()
    shapes = {
        "large": jax.ShapeDtypeStruct((1, 3, 256, 128), np.float32),  # 384 KiB
        "small": jax.ShapeDtypeStruct((1, 128, 511), np.float32),
        "odd": jax.ShapeDtypeStruct((1, 257, 257), np.float32),
        "cut": jax.ShapeDtypeStruct((1, 512, 512), np.float32),
    }
    specs = {"large": P(), "small": P(), "odd": P(), "cut": P(None, "shard")}

    def cut(*islands):
        placements = [ShardedPlacement(strategy.mesh(island), strategy, shapes) for island in islands]
        return ReplicaMesh(Group(), placements).cut(specs, shapes)

    assert cut(devices[:4], devices[4:]) == specs | {"large": P(None, ("copy", "shard"))}
    assert cut(devices[:1], devices[1:2]) == specs
    plain = ReplicaMesh(Group(), [DevicePlacement(device) for device in devices[:2]])
    assert plain.cut(P(), shapes) == P()


def test_too_few_cpu_devices_for_the_pieces_are_told(devices, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:1])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"process 0 has 1 of them for its 2 devices.*jax_num_cpu_devices', 2"):
        ReplicaMesh(Group(), [DevicePlacement(d) for d in devices[:2]], host=True)


def test_a_process_alone_makes_the_cpu_devices_that_it_lacks(devices, monkeypatch):
    placements = [DevicePlacement(d) for d in devices[:2]]
    shared = ReplicaMesh(Group(), placements, host=True)
    assert set(shared.mesh.devices.flat) <= set(jax.devices("cpu"))
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:1])
    own = ReplicaMesh(Group(), placements, host=True)
    assert len({*own.mesh.devices.flat} - set(devices)) == 2
    own.connect()


@pytest.mark.parametrize(("sizes", "width"), [((2, 4), 2), ((1, 1), 1), ((3, 2), 1)], ids=str)
def test_replicas_of_one_device_make_a_mesh_of_one_axis_and_islands_of_three(devices, sizes, width):
    assert ReplicaMesh(Group(), [DevicePlacement(d) for d in devices[:2]]).mesh.shape == {"replica": 2}
    strategy = FullShard()
    trainer = jaxche.Trainer(
        lambda p, b: (p * b).mean(),
        optax.sgd(0.1),
        strategy=strategy,
        replicas=[strategy.mesh(devices[: sizes[0]]), strategy.mesh(devices[sizes[0] : sum(sizes)])],
    )
    state = trainer.init(np.arange(12, dtype=np.float32))
    assert trainer._engine._replica_mesh.mesh.shape == {"replica": 2, "copy": 1, "shard": width}
    assert np.asarray(state.params).tolist() == [list(range(12))] * 2


@pytest.mark.parametrize(
    ("platforms", "host", "small"),
    [("cpu cpu", True, 1 << 16), ("gpu cpu", True, 1 << 21), ("cpu gpu", True, 1 << 21), ("gpu gpu", False, 1 << 16)],
)
def test_arrays_join_up_to_a_size_that_all_replicas_decide(devices, monkeypatch, platforms, host, small):
    monkeypatch.setattr(
        "jaxche.replicas._replica_mesh._host_devices", lambda *_: [np.array([[d]]) for d in devices[:2]]
    )
    own = [DevicePlacement(device) for device in devices[:2]]
    for placement, platform in zip(own, platforms.split(), strict=True):
        device = SimpleNamespace(platform=platform, process_index=0)
        placement.devices = np.array([[device]], dtype=object) if host else placement.devices
    assert ReplicaMesh(Group(), own, host).small_bytes == small


class Started:
    """An array that records when it is copied to the host."""

    def __init__(self, calls):
        self._calls = calls

    def copy_to_host_async(self):
        self._calls.append(self)


@pytest.mark.parametrize(("home", "starts"), [("accelerator", 3), ("cpu", 0)])
def test_all_arrays_that_leave_an_accelerator_start_at_once(devices, home, starts):
    mesh, calls = ReplicaMesh(Group(), [DevicePlacement(device) for device in devices[:2]]), []
    own, there = SimpleNamespace(client="cpu"), SimpleNamespace(client=home)
    mesh._rows = [([own], [there])]
    mesh._start_copies([{"params": [Started(calls), Started(calls)], "sums": Started(calls)}])
    assert len(calls) == starts
