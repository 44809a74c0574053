"""Evaluation over real processes: the numbers of one process, the same in all; errors of one are errors of all."""

import json
import sys
from pathlib import Path

import pytest

from jaxche.cluster import launch

PROGRAM = Path(__file__).with_name("program.py")
pytestmark = pytest.mark.usefixtures("forked")


@pytest.mark.parametrize(("what", "processes"), [("evaluate", 2), ("evaluate islands", 3)])
def test_processes_evaluate_what_one_does(load, tmp_path, devices, what, processes):
    code = launch([sys.executable, str(PROGRAM), what, str(tmp_path)], processes, env={"PYTHONWARNINGS": "error"})
    assert code == 0
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert len(results) == processes
    program = load("program")
    here = json.loads(json.dumps(program.evaluations(program.Problem(), replicas=devices[:2])[2]))
    for process, seen in enumerate(results):
        errors = {name: seen.pop(name) for name in ("torn", "torn at once", "function", "sizes", "iterable", "update")}
        zero = {name: value for name, value in results[0].items() if name in seen}
        assert seen == zero  # also the clock, and so what is due by it
        assert seen["means"] == seen["again"] == seen["after"]
        for name in ("means", "loss", "nnx", "merged", "few"):
            assert seen[name] == pytest.approx(here[name], rel=1e-6), name
        assert len(seen["fit"]) == 2
        assert seen["reached"] == here["reached"] == [26, 200]
        clocks = [clock for clock, _ in seen["clock"]]
        assert clocks == sorted(clocks)
        assert [clock >= 100 for clock in clocks] == [False] * (len(clocks) - 1) + [True]
        for name in ("torn", "torn at once"):
            assert errors[name][0] == ("OSError" if process == 1 else "RankError")
            assert "disk on fire" in errors[name][1]
        assert errors["function"][0] == ("RankError" if process == 0 else "ValueError")
        assert "metric 'bad' has shape" in errors["function"][1]
        assert errors["sizes"][0] == "ValueError"
        assert "different numbers of batches" in errors["sizes"][1]
        assert errors["iterable"][0] == "ValueError"
        assert "several processes share the batches of an evaluation by their index" in errors["iterable"][1]
        assert errors["update"][0] == "TypeError" if process == 0 else errors["update"][0] in ("TypeError", "RankError")
