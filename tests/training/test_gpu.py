"""On GPUs the same numbers as in NumPy and on CPU devices.

JAX_PLATFORMS=cuda,cpu .venv/bin/python -m pytest -m gpu
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxche
from jaxche.cluster import launch
from jaxche.cluster._gpus import gpu_ids

pytestmark = pytest.mark.gpu
RATE = 0.3


@pytest.fixture(scope="module")
def gpus():
    """The first two GPUs, or the only one, on which replicas cannot merge with others."""
    return jax.devices("gpu")[:2]


@pytest.fixture(autouse=True)
def _no_tf32():
    """Which GPUs take for float32 products, with a thousandth of the precision."""
    before = jax.config.values["jax_default_matmul_precision"]
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_default_matmul_precision", before)


def gradient(params, batch):
    """The gradient of the problem's loss, by hand."""
    out = np.tanh(batch["x"] @ params["w"] + params["b"])
    slope = 2 * (out - batch["y"]) * (1 - out**2) / out.size
    return {"w": batch["x"].T @ slope, "b": slope.sum(0)}


def descended(params, grads):
    return {name: params[name] - RATE * grads[name] for name in params}


def mean(trees, weights):
    return {name: np.average([tree[name] for tree in trees], axis=0, weights=weights) for name in trees[0]}


def in_numpy(problem, average, rounds):
    """SGD by replicas in a loop; ``rounds`` are the counts of each, all in the first epoch."""
    params = {name: leaf.astype(np.float64) for name, leaf in problem.params.items()}
    batches = (problem.data.epoch(0)[i] for i in range(len(problem.data)))
    for counts in rounds:
        if average == "gradients":
            total = sum(counts)
            params = descended(params, mean([gradient(params, next(batches)) for _ in range(total)], [1] * total))
            continue
        ends = []
        for count in counts:
            end = params
            for _ in range(count):
                end = descended(end, gradient(end, next(batches)))
            ends.append(end)
        params = mean(ends, counts)
    return params


@pytest.mark.parametrize("backend", ["device", "host"])
@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_replicas_on_gpus_compute_what_numpy_does(problem, gpus, close, average, backend):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(RATE), average=average, backend=backend, replicas=gpus)
    state = trainer.init(problem.params)
    alone = len(gpus) == 1  # then it is a plain training loop
    rounds = [(8,), (4,)] if alone else [(3, 5), (1, 3)]
    for counts in rounds:
        state, info = trainer.round(state, problem.data, counts=counts)
        assert info.counts == counts
        assert all(ms > 0 for ms in info.wall_ms)
    wanted = in_numpy(problem, "parameters" if alone else average, rounds)
    close(jax.device_get(trainer.params(state)), wanted)


# The first rank on a GPU, the other beside it on the CPU; or both on that GPU.
@pytest.mark.parametrize("on_cpu", [1, 0], ids=["a GPU and a CPU", "two on one GPU"])
def test_unlike_processes_train_as_two_cpus_do(gpus, close, tmp_path, monkeypatch, on_cpu):
    path = Path(__file__).parents[1] / "multiprocess" / "program.py"
    spec = importlib.util.spec_from_file_location("program", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    # This process has most of the GPU's memory already.
    env = {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env["PYTHONPATH"] = os.pathsep.join([str(path.parents[2]), os.environ.get("PYTHONPATH", "")])
    env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids(os.environ)[:1] * 2)
    assert launch([sys.executable, str(path), "results", str(tmp_path)], 2, env=env, on_cpu=on_cpu) == 0
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert zero == one
    assert zero["private"] == [True, not on_cpu]
    for name in ("parameters", "gradients"):
        wanted = program.train(program.Problem(), replicas=jax.devices("cpu")[:2], **program.CONFIGURATIONS[name])
        for had, want in zip(zero[name]["trees"], wanted["trees"], strict=True):
            for leaf in want:
                close(np.array(had[leaf]), np.array(want[leaf]), rtol=1e-3, atol=1e-4)


def test_fit_on_gpus_ends_where_fit_on_cpus_does(problem, gpus, close):
    ends = []
    for replicas in (gpus, jax.devices("cpu")[: len(gpus)]):
        trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), policy="sync", rows="equal", replicas=replicas)
        state, history = trainer.fit(trainer.init(problem.params), problem.data, epochs=2, progress=False)
        ends.append((jax.device_get(trainer.params(state)), [info.loss for info in history]))
    (there, losses_there), (here, losses_here) = ends
    close(there, here, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(losses_there, losses_here, rtol=1e-4)
