"""Merges of groups within a round: their number, their places, and their time on a virtual clock."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxche.cadence import best_group_merges, group_cost_ms, merge_steps, most_group_merges, paused_ms

COUNTS = st.lists(st.integers(1, 40), min_size=2, max_size=5)


def test_the_best_number_has_the_most_progress():
    # Of a round of all replicas of √(C τ), cut into parts by merges of c: progress by the rule of the round length.
    for sync_ms, group_ms in ((200.0, 5.0), (1000.0, 2.0), (90.0, 10.0)):
        tau = 700.0
        part_ms = np.sqrt(sync_ms * tau) / np.arange(1, 60)
        progress = part_ms / (part_ms + group_ms) / (1 + part_ms / tau)
        assert best_group_merges(sync_ms, group_ms) == pytest.approx(1 + int(progress.argmax()), abs=1)
    assert best_group_merges(1.0, 50.0) == 2


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
