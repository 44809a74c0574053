"""What is saved of a state besides its arrays, and what becomes of it in a trainer of as many replicas or of others."""

import json
from dataclasses import replace

import pytest

from jaxche.cadence import DivergenceCorrection, ElChe
from jaxche.training._state import TrainerState
from jaxche.training._state_dict import metadata, with_metadata


def state(che, **more):
    return TrainerState((), che, DivergenceCorrection(), **more)


@pytest.fixture
def saved():
    """A state in mid-run, and its numbers as they come back from a file."""
    che = ElChe(2, 4, tuner="steady", max_anchor=40, max_batch_diff=90)
    for _ in range(3):
        che = che.report_timing([40.0 * che.batch_counts[0], 100.0 * che.batch_counts[1]], che.batch_counts, 300.0)
    correction = DivergenceCorrection()
    for drift in (0.1, 0.11, 0.12):
        correction, che, _ = correction.apply(che, che, drift, 10)
    place = {
        "round": 7,
        "epoch": 2,
        "cursor": 5,
        "examples": 640,
        "sync_ms": 3.5,
        "pending_batches": ((1, 8, 9), (2, 1, 3)),
    }
    left = replace(state(che, **place), correction=correction)
    return left, json.loads(json.dumps(metadata(left)))


def test_as_many_replicas_go_on_as_if_nothing_had_been_between(saved):
    left, found = saved
    assert left.che.anchor > 4
    assert left.correction.guard.reports > 0
    assert with_metadata(state(ElChe(2, 4, tuner="steady", max_anchor=40, max_batch_diff=90)), found) == left


def test_as_many_replicas_go_on_under_the_settings_of_the_new_trainer(saved):
    left, found = saved
    che = ElChe(2, 2, 0.1, tuner="progress", max_anchor=20, max_batch_diff=0)
    after = with_metadata(state(che), found).che
    settings = (after.overhead_target, after.tuner, after.max_anchor, after.max_batch_diff, after.min_anchor)
    assert settings == (0.1, "progress", 20, 0, 2)
    assert (after.ms_per_batch, after.sync_samples) == (left.che.ms_per_batch, left.che.sync_samples)
    assert (after.anchor, after.batch_counts) == (20, (20, 20))


@pytest.mark.parametrize(("low", "high", "anchor"), [(4, 40, 30), (4, 20, 20), (35, 40, 35)])
def test_others_begin_at_its_anchor_within_their_limits_and_measure_anew(saved, low, high, anchor):
    left, found = saved
    assert left.che.anchor == 30
    after = with_metadata(state(ElChe(3, low, tuner="steady", max_anchor=high)), found)
    assert (after.che.anchor, after.che.batch_counts, after.che.is_calibrated) == (anchor, (anchor,) * 3, False)
    assert (after.round, after.epoch, after.cursor, after.pending_batches) == (7, 2, 5, left.pending_batches)
    assert after.correction == left.correction


def test_a_single_replica_has_no_cadence_to_go_on_with(saved):
    left, found = saved
    after = with_metadata(state(None), found)
    assert after.che is None
    assert after.examples == left.examples
