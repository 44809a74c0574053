"""policy="auto" in elastic runs of real processes: all plan the same rounds, and the choice is made again."""

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxche.cluster import launch
from jaxche.reports import History

PROGRAM = Path(__file__).with_name("auto.py")
pytestmark = pytest.mark.usefixtures("forked")


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["float32", "int4"])
def test_the_choice_is_made_again_after_deaths_and_admissions(load, tmp_path, devices, capfd, wire):
    program, world = load("auto"), 3
    code = launch([sys.executable, str(PROGRAM), str(tmp_path), wire, "1", "0"], world, elastic=True, max_restarts=2)
    err = capfd.readouterr().err
    assert code == 0, err
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    # The state after each round is the same on all that were there.
    for one, other in itertools.combinations(results, 2):
        assert one["params"] == other["params"]
        for number in one["states"].keys() & other["states"].keys():
            assert one["states"][number] == other["states"][number]
    history = History.from_json(results[2]["history"])
    parts = [list(part) for _, part in itertools.groupby(history, lambda info: len(info.counts))]
    assert [len(part[0].counts) for part in parts] == [3, 2, 3, 2, 3]
    for number, part in enumerate(parts):
        last = parts[number - 1][-1].round
        if number in (2, 4) and results[2]["states"][str(last)]["choice"]["policy"] == "cadence":
            # Local steps of the others, while the replacement gets its state.
            assert (part[0].policy, part[0].counts.count(0), part[0].counts[int(number == 2)]) == ("cadence", 1, 0)
            part = part[1:]
        policies = [info.policy for info in part]
        # A wire says that the link is slow.
        first = "sync" if number or wire == "float32" else "cadence"
        assert policies[:3] == [first] * min(3, len(part))
    reasons = [results[2]["states"][str(part[-1].round)]["choice"]["reason"] for part in parts[::2]]
    assert not [reason for reason in reasons if "not measured" in reason]
    assert {info.policy for part in parts[2::2] for info in part} == {"sync", "cadence"}
    assert any(max(info.counts) > 1 for info in history if info.shares)  # rows in several steps
    # Each batch is used once.
    used = np.cumsum([0] + [info.joined or sum(info.counts) for info in history])[:-1]
    size = len(program.Problem().data)
    assert [(info.epoch, info.cursor) for info in history] == [divmod(n, size) for n in used.tolist()]
    assert {info.wire for info in history if info.policy == "cadence"} == {wire}
    if wire != "float32":  # a process that replaces another starts without rounding errors, and a replay with those
        return
    # The record, run again on devices of one process.
    problem = program.Problem()
    trainer = state = None
    for part in parts:
        before, trainer = trainer, problem.trainer(devices[: len(part[0].counts)])
        started = trainer.init(problem.params)
        if before is not None:
            opt_state = jax.tree.map(lambda rows: rows[0], jax.device_get(state.opt_state))
            started = trainer.init(before.params(state), opt_state=opt_state)
            place = {name: getattr(state, name) for name in ("round", "epoch", "cursor", "steps", "examples")}
            started = dataclasses.replace(started, **place)
        state, again = trainer.replay(started, problem.data, part)
        np.testing.assert_allclose([info.loss for info in again], [info.loss for info in part], rtol=1e-4)
    here = jax.device_get(trainer.params(state))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, np.float32(b), rtol=1e-3, atol=1e-5), here, results[0]["params"]
    )
