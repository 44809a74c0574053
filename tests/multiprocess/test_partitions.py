"""Stages in several processes: the results of one process, and errors that name missing processes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxche.cluster import launch

PROGRAM = Path(__file__).with_name("partitions.py")
pytestmark = pytest.mark.usefixtures("forked")


def run(what, folder, processes):
    code = launch([sys.executable, str(PROGRAM), what, str(folder)], processes, env={"PYTHONWARNINGS": "error"})
    return code, [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


@pytest.fixture(scope="module")
def program(load):
    return load("partitions")


@pytest.mark.parametrize("processes", [2, 3])
def test_stages_in_processes_compute_what_stages_in_one_process_do(processes, program, tmp_path):
    code, told = run("results", tmp_path, processes)
    assert code == 0
    n_stages, places = program.PLACES[processes]
    for name, there in told[0].items():
        model = program.make_model(name, n_stages)
        here = program.train(model, program.PROTOCOLS[name](), remat=name == "gpipe")
        here = json.loads(json.dumps(here))
        assert all(one[name]["losses"] == there["losses"] for one in told)
        np.testing.assert_allclose(there["losses"], here["losses"], rtol=1e-5)
        for stage in range(n_stages):
            owner = next(i for i, stages in enumerate(places) if stage in stages)
            assert told[owner][name]["peaks"][stage] == here["peaks"][stage]
            for what in ("grads", "params"):
                assert all((one[name][what][stage] is None) == (i != owner) for i, one in enumerate(told))
                compare(told[owner][name][what][stage], here[what][stage], f"{name} {what} of stage {stage}")


def compare(a, b, name):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            compare(a[key], b[key], f"{name} {key}")
    else:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)


def test_what_goes_wrong_between_processes_says_who_and_what(tmp_path):
    code, (zero, one) = run("faults", tmp_path, 2)
    assert code == 0
    assert zero["shapes"] == one["shapes"] == zero["known"] == one["known"]
    assert zero["unknown"][0] == "ValueError"
    assert zero["unknown"][1].startswith("params[1] is None")
    assert one["unknown"][1].startswith("params[0] is None")
    assert one["late"][0] == "TimeoutError"
    assert one["late"][1].startswith("stage 1 waited 2 s for the activation of micro-batch 0 in step 2 from stage 0")
    assert one["differs"][0] == "ValueError"
    assert "stage 1 waited for the activation" in one["differs"][1]
    assert "float32[12, 6], and got float32[6, 6]" in one["differs"][1].replace("[0] ", "")
    assert zero["differs"][0] == "ConnectionError"
    assert "the process of stage 1 is lost" in zero["differs"][1]
    twice = [told["twice"] for told in (zero, one) if told["twice"] is not None]
    assert [kind for kind, text in twice if "stage 0 is in another process already" in text] == ["ValueError"]
    assert all(kind == "TimeoutError" for kind, text in twice if "stage 0 is" not in text)
