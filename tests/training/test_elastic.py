"""Who goes on, in which order, with which cadence; tests/multiprocess does it with real processes."""

from types import SimpleNamespace

import pytest

from jaxche.cadence import ElChe
from jaxche.training import _elastic as elastic


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(elastic, "_met", {})


def test_those_who_met_meet_again_in_the_same_order_and_a_newcomer_in_another():
    homes = [(0,), (1,), (2,)]
    lives = {0: 10, 1: 11, 2: 12}
    assert elastic.fresh_order(homes, [0, 1, 2], lives) == [0, 1, 2]
    assert elastic.fresh_order(homes, [0, 2], lives) == [0, 2]
    again = lives | {1: 21}
    assert elastic.fresh_order(homes, [0, 1, 2], again) == [0, 2, 1]
    assert elastic.fresh_order(homes, [0, 2], again) == [0, 2]  # these two have not changed
    seen = [elastic.fresh_order(homes, [0, 1, 2], lives | {1: 30 + i}) for i in range(5)]
    assert sorted(map(tuple, seen[:4])) == [(1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    assert seen[4] == []


def test_replicas_of_one_process_stay_together_and_one_process_meets_nobody():
    homes = [(0,), (0,), (1,), (1,)]
    assert elastic.fresh_order(homes, [0, 1, 2, 3], {0: 1, 1: 2}) == [0, 1, 2, 3]
    assert elastic.fresh_order(homes, [0, 1, 2, 3], {0: 1, 1: 3}) == [2, 3, 0, 1]
    for life in range(3):
        assert elastic.fresh_order(homes, [0, 1], {0: life}) == [0, 1]


def trainer(che):
    return SimpleNamespace(_pace_of={}, _che=che, _engine=SimpleNamespace(order=list(range(che.world_size))))


def test_what_was_learnt_of_a_rank_outlives_its_absence():
    che = ElChe(3, 4, 0.1).report_timing([40.0, 80.0, 160.0], [4, 4, 4], 1.0)
    known = trainer(che)
    assert che.batch_counts[0] > che.batch_counts[2] > 0
    two = elastic.rearranged(known, che, [0, 2])
    assert (two.world_size, two.ms_per_batch) == (2, (10.0, 40.0))
    assert two.batch_counts == (che.batch_counts[0], che.batch_counts[2])
    known._engine.order = [0, 2]
    three = elastic.rearranged(known, two, [0, 2, 1])
    assert three.ms_per_batch == (10.0, 40.0, 20.0)
    # As many as fit into the time of the others.
    length = max(n * ms for n, ms in zip(two.batch_counts, two.ms_per_batch, strict=True))
    assert three.batch_counts == (*two.batch_counts, int(length / 20.0))
    assert elastic.rearranged(known, two, [0]) is None
    known._engine.order = [0]
    assert elastic.rearranged(known, None, [1, 0, 2]).ms_per_batch == (20.0, 10.0, 40.0)


def test_of_whom_nothing_is_known_all_are_measured_anew_from_the_same_anchor():
    che = ElChe(3, 4)
    unknown = trainer(che)
    unknown._engine.order = [0, 2]
    two = ElChe(2, 4, 0.1).report_timing([40.0, 80.0], [4, 4], 1.0)
    three = elastic.rearranged(unknown, two, [0, 2, 1])
    assert not three.is_calibrated
    assert three.batch_counts == (two.anchor,) * 3
