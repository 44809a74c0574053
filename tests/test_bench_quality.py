"""The arithmetic of scripts/bench_quality.py, and a short run of it that a second call does not repeat."""

import json
import math
from pathlib import Path

import bench_quality as bench
import pytest
import quality_arms as arms

SCRIPTS = Path(__file__).parent.parent / "scripts"


def test_a_round_holds_whole_batches_and_at_least_one_of_the_slowest():
    assert arms.fitting((20.0, 20.0, 40.0, 80.0), 200) == (10, 10, 5, 2)
    assert arms.fitting((20.0, 120.0), 80) == (6, 1)


def test_the_time_to_a_target_lies_between_the_points_of_a_curve():
    curve = [(1000, 3.0), (2000, 2.0), (3000, 2.5)]
    assert bench.crossing(curve, 2.5) == pytest.approx(1.5)
    assert bench.crossing(curve, 3.5) == 1.0
    assert bench.crossing(curve, 1.0) == math.inf


def test_the_grid_is_searched_from_its_middle_until_both_neighbours_are_worse():
    losses, tried = {1: 5.0, 2: 4.0, 4: 3.0, 8: 3.5}, {}
    while (rate := bench.next_rate((1, 2, 4, 8), tried)) is not None:
        tried[rate] = losses[rate]
    assert list(tried) == [4, 8, 2]


def test_quadratic_rounds_grow_as_the_learning_rate_falls():
    rule = arms.qsr(160, 0.25, 1280)
    lengths = [rule(arms.Progress((20.0, 80.0), [], 0.0, decay))[1] for decay in (1.0, 0.5, 0.25, 0.01)]
    assert lengths == [2, 2, 8, 16]


def test_each_line_of_the_results_is_one_run_of_a_known_arm():
    lines = bench.RESULTS.read_text(encoding="utf8").splitlines()
    assert len(bench.Results(bench.RESULTS).rows) == len(lines)
    assert {json.loads(line)["arm"] for line in lines} <= set(arms.ARMS)


@pytest.mark.slow
def test_a_run_is_not_repeated(run_forked, tmp_path):
    words = ["--task", "digits", "--cells", "20/50@5", "--deadline", "1", "--grid", "2e-3", "--cache", tmp_path]
    words += ["--arms", "fast device alone", "160 ms, averaged", "--measures", "annealed", "constant", "averaged"]
    command = [SCRIPTS / "bench_quality.py", "--results", tmp_path / "results.jsonl", *words]
    done = run_forked(*command, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("seed 0") == 6
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["curve"][-1][0] <= 1000
        assert row["curve"][-1][1] == row["loss"]
    assert [row["batches"] for row in rows if row["arm"] == arms.BASELINE] == [50, 50, 50]
    ends = {(row["arm"], row["measure"]): row["loss"] for row in rows}
    assert ends[arms.BASELINE, "averaged"] != ends[arms.BASELINE, "constant"]
    again = run_forked(*command, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "seed 0" not in again.stdout
    shown = run_forked(*command, "--table", timeout=300)
    assert shown.returncode == 0, shown.stderr
    assert "| fast device alone (best plain) | 0.002* | 1 | 50 |" in shown.stdout
    losses = " | ".join(f"{ends[arms.BASELINE, measure]:.3f}" for measure in ("averaged", "constant", "annealed"))
    assert f"| digits, 20/50 at 5 ms | 1 | fast device alone | 0.002* | 1 | {losses} | 1.00 |" in shown.stdout
