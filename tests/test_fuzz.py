"""Some cases of scripts/fuzz.py, and mistakes that it has to notice."""

from dataclasses import replace

import fuzz
import pytest

import jaxche
from jaxche.training import _state_dict

pytestmark = pytest.mark.slow


# Sharded replicas under "auto", model state and an end in steps, overlap, averaged gradients with outputs, an outer
# optimizer, real time with outputs, accumulated gradients on a ragged epoch, random keys, rates of a schedule in a
# state that merges reset.
@pytest.mark.parametrize("number", [3, 13, 16, 20, 24, 30, 34, 36, 5127])
def test_an_interrupted_run_and_a_replay_end_as_the_whole_run(number):
    case = fuzz.Case.of(number)
    assert fuzz.refusal(case) is None
    assert fuzz.failures(case) == []


def test_a_refused_combination_is_no_failure():
    case = fuzz.Case.of(16)
    assert "max_rows" in fuzz.refusal(replace(case, options=case.options | {"rows": "equal"}))


def test_a_checkpoint_without_a_field_of_the_state_is_noticed(monkeypatch):
    monkeypatch.setattr(_state_dict, "_FIELDS", tuple(name for name in _state_dict._FIELDS if name != "steps"))
    found = fuzz.failures(fuzz.Case.of(20))
    assert any("and the whole run at" in one for one in found)


def test_a_replay_that_trains_nothing_is_noticed(monkeypatch):
    monkeypatch.setattr(jaxche.Trainer, "replay", lambda self, state, data, rounds: (state, rounds))
    found = fuzz.failures(fuzz.Case.of(20))
    assert found == [f"the replay of the {run} run ended with other arrays" for run in ("whole", "cut")]


def test_an_example_that_was_not_taken_is_noticed(tmp_path):
    case = fuzz.Case.of(20)
    run = case.train(tmp_path, start=0)
    case.outputs[-1] = case.outputs[0]
    assert fuzz.of_end(case, run) == ["examples were taken 1 to 3 times"]
