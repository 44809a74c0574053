"""A paced stage computes the same, and each of its tasks is padded to the given wall time."""

import types

import pytest

import jaxche
from jaxche.stages import Pace
from jaxche.stages import _program as module


@pytest.mark.parametrize("took_s", [0.0, 1.5])
def test_tasks_of_a_paced_stage_are_padded_and_compute_the_same(took_s, make_model, same, monkeypatch):
    model, slept, clock = make_model("trees", 2), [], iter([8.0, 8.0 + took_s] * 8)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(sleep=slept.append, perf_counter=lambda: next(clock)))
    paces = [None, Pace(forward_ms=1000.0, backward_ms=2000.0)]
    paced = jaxche.Partitioned(model.stages, model.loss, jaxche.Pipeline(3), paces=paces)
    plain = jaxche.Partitioned(model.stages, model.loss, jaxche.Pipeline(3))
    same(paced.value_and_grad(model.params, model.batch), plain.value_and_grad(model.params, model.batch))
    assert slept == [max(0.0, 1 - took_s), 2 - took_s] * 4  # the last stage alternates between forward and backward
