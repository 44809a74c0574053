"""Merges of groups within a round: their number, their places, and their time on a virtual clock."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxche.cadence import (
    ElChe,
    best_group_merges,
    group_cost_ms,
    half_life_of,
    merge_steps,
    most_group_merges,
    paused_ms,
)

COUNTS = st.lists(st.integers(1, 40), min_size=2, max_size=5)


def reported(**options):
    """A cadence of two ranks of 20 ms that moves as far as its parameters are long in 2 s, with merges of 200 ms."""
    che = ElChe(2, 1, tuner="progress", **options)
    for _ in range(6):
        che = che.report_timing([n * 20.0 for n in che.batch_counts], che.batch_counts, 200.0, 2000.0)
    return che


def test_the_parts_of_a_round_are_as_long_as_rounds_whose_merges_cost_as_much():
    che, alone = reported(), ElChe(2, 1, tuner="progress")
    for _ in range(6):
        alone = alone.report_timing([n * 20.0 for n in alone.batch_counts], alone.batch_counts, 5.0, 2000.0)
    merges = best_group_merges(che, 5.0)
    assert max(che.batch_counts) / merges == pytest.approx(max(alone.batch_counts), rel=0.25)
    assert best_group_merges(che, 1e6) == 2
    # Nothing is known of how fast replicas move.
    assert best_group_merges(ElChe(2, 10, tuner="steady"), 5.0) == 2


def test_rounds_are_longer_where_groups_merge_within_them():
    # √3 of the length.
    factor = half_life_of([(0, 1), (2, 3)], 4)
    ratio = max(reported(half_life=factor).batch_counts) / max(reported().batch_counts)
    assert ratio == pytest.approx(np.sqrt(3), rel=0.1)
    assert half_life_of([(0, 1, 2)], 4) == 3.0
    assert half_life_of([(0, 1)], 4) == 1.5


@given(COUNTS, st.data())
def test_between_two_merges_every_replica_takes_a_step(counts, data):
    merges = data.draw(st.integers(1, most_group_merges([range(len(counts))], counts)))
    for count, ends in zip(counts, merge_steps(counts, merges), strict=True):
        assert len(ends) == merges - 1
        assert np.diff([0, *ends, count]).min() >= 1
        # As far in its part of the round as the slowest, to half a step.
        slow = merge_steps([min(counts)], merges)[0]
        assert all(abs(end - count * at / min(counts)) <= 0.5 for end, at in zip(ends, slow, strict=True))


def test_the_replica_with_the_fewest_steps_limits_their_number():
    assert most_group_merges([(0, 1), (2, 3)], (10, 4, 9, 3)) == 3
    assert most_group_merges([(0, 1)], (10, 0, 9, 3)) == 10
    assert most_group_merges([], (10, 4)) == 1


@given(COUNTS, st.lists(st.floats(1, 80), min_size=5, max_size=5), st.integers(2, 5), st.floats(0, 20))
def test_the_clock_is_that_of_a_slow_twin(counts, ms, merges, cost_ms):
    merges = min(merges, min(counts))
    wall_ms = [n * one for n, one in zip(counts, ms, strict=False)]
    now, done = 0.0, [0] * len(counts)
    for ends in zip(*merge_steps(counts, merges), strict=True):
        now += max((end - n) * one for end, n, one in zip(ends, done, ms, strict=False)) + cost_ms
        done = ends
    wanted = [now - n * one for n, one in zip(done, ms, strict=False)]
    found = paused_ms([range(len(counts))], counts, wall_ms, merges, cost_ms)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_replicas_without_a_group_or_without_steps_do_not_pause():
    found = paused_ms([(0, 1), (3, 4)], (10, 4, 5, 6, 0), (200.0, 200.0, 100.0, 60.0, 0.0), 4, 5.0)
    assert (found > 0).tolist() == [True, True, False, False, False]


def test_the_cost_is_that_of_the_member_that_waited_least_in_the_dearest_group():
    assert group_cost_ms([(0, 1), (2, 3)], (20.0, 8.0, 30.0, 12.0), 5) == 3.0
    # A replica without steps was not there.
    assert group_cost_ms([(0, 1, 2)], (20.0, 8.0, 0.0), 3) == 4.0
    assert group_cost_ms([(0, 1)], (0.0, 0.0), 1) == 0.0
    assert group_cost_ms([], (1.0, 1.0), 4) == 0.0
