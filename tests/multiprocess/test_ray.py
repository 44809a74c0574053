"""A run over the workers of a real Ray, as examples/ray_workers.py starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--actors",)], ids=["Ray Train", "actors"])
def test_the_workers_of_ray_train_one_model(tmp_path, words):
    done = subprocess.run(
        [sys.executable, ROOT / "examples/ray_workers.py", *words],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["process"] for result in results] == ([0, 1] if words else [0]), done.stderr[-3000:]
    for result in results:
        assert sum(result["batches"]) == 4 * 32  # every batch of every epoch, once
        assert min(result["batches"]) > 0
        assert result["params"] == results[0]["params"] == pytest.approx([0, 1, 2, 3], abs=0.02)
