"""The ranks of the next start after a failure."""

from jaxche.cluster._launch import next_placements
from jaxche.cluster._placement import Placement

ZERO, ONE, TWO = (Placement(core=core, pace_ms=pace) for core, pace in ((0, 20.0), (0, 20.0), (1, 50.0)))


def test_removal_after_two_failures_in_a_row():
    placements = [ZERO, ONE, TWO]
    placements, blamed = next_placements(placements, 1, None, survivors=True)
    assert len(placements) == 3
    # Another one fails: the count begins again.
    placements, blamed = next_placements(placements, 0, blamed, survivors=True)
    assert len(placements) == 3
    assert blamed == 0
    placements, blamed = next_placements(placements, 0, blamed, survivors=True)
    # Equal placements on one core are different placements: the other stays.
    assert [placement is other for placement, other in zip(placements, (ONE, TWO), strict=True)] == [True, True]
    assert blamed is None


def test_no_removal_of_the_last_process_or_without_survivors():
    assert next_placements([ONE], 0, 0, survivors=True)[0] == [ONE]
    assert next_placements([ZERO, ONE], 0, 0, survivors=False)[0] == [ZERO, ONE]


def test_a_hang_removes_no_rank():
    assert next_placements([ZERO, TWO], None, 1, survivors=True) == ([ZERO, TWO], None)
