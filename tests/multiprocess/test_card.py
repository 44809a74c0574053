"""The README's commands for processes on one card, with CPU devices of a second client as "cuda" and an nvidia-smi."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxche.cluster import has_cuda

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(has_cuda(), reason="JAX has CUDA: the tests marked gpu do this")

SCRIPT = """
import json, os
import jax, jax.numpy as jnp, numpy as np, optax
import jaxche

jaxche.initialize()
x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
data = jaxche.Batches({"x": x, "y": x[:, 0]}, batch_size=4)
results = {}
for overlap in (0.0, 0.5):
    loss = lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), opt_state="local", overlap=overlap)
    state = trainer.init(jnp.zeros(4))
    for counts in ((2, 2), (3, 1), (2, 2)):
        state, info = trainer.round(state, data, counts=counts)
    results[str(overlap)] = np.asarray(trainer.params(state)).tolist()
own = [device for device in jaxche.devices() if device.process_index == jax.process_index()]
result = {"params": results, "apart": own[0] not in jax.devices("cpu")}
result["visible"] = os.environ.get("CUDA_VISIBLE_DEVICES")
result["options"] = json.loads(os.environ.get("CARD_OPTIONS", "null"))
print(json.dumps(result))
"""


def on_the_card():
    """The variables of a machine with one card."""
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), str(HERE / "card")])
    return env | {"PATH": os.pathsep.join([str(HERE / "card"), env["PATH"]])}


@pytest.mark.slow
@pytest.mark.parametrize("on_cpu", [0, 1], ids=["two on one card", "a card and its CPU"])
def test_processes_on_one_card_merge_through_the_host(tmp_path, on_cpu):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    env = on_the_card()
    if on_cpu:
        # The process on the CPU needs a second device to merge on.
        path.write_text(SCRIPT.replace("for overlap in (0.0, 0.5)", "for overlap in (0.0,)"))
    else:
        env["CUDA_VISIBLE_DEVICES"] = "0,0"
    command = [sys.executable, "-m", "jaxche", "launch", "-n", "2", "--on-cpu", str(on_cpu), str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    zero, one = (json.loads(line[4:]) for line in sorted(done.stdout.splitlines()) if line[:5] in ("[0] {", "[1] {"))
    assert zero["params"] == one["params"]
    assert any(zero["params"]["0.0"])
    assert zero["apart"]
    assert zero["visible"] == ("GPU-11111111-2222-3333-4444-555555555555" if on_cpu else "0")
    # Each takes its part of the memory, and a client of its own.
    assert zero["options"]["num_nodes"] == 1
    if on_cpu:
        assert (one["apart"], one["options"]) == (False, None)
        assert "memory_fraction" not in zero["options"]
    else:
        assert zero["options"]["memory_fraction"] == one["options"]["memory_fraction"] == 0.375
        assert one["apart"]


@pytest.mark.slow
def test_the_tests_marked_gpu_run():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "tests/training/test_gpu.py",
        # The same as that of a GPU and a CPU but for the placement, which the test above has.
        "--deselect",
        "tests/training/test_gpu.py::test_unlike_processes_train_as_two_cpus_do[two on one GPU]",
    ]
    env = on_the_card() | {"JAX_PLATFORMS": "cuda,cpu"}
    done = subprocess.run(command, env=env, cwd=HERE.parents[1], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 6 passed" in f" {done.stdout.splitlines()[-1]}"
