"""Who starts again after a failure."""

from jaxche.cluster._placement import Place
from jaxche.cluster._supervise import Berth, next_berths

ZERO, ONE, TWO = (Berth(Place(core=core), pace) for core, pace in ((0, 20.0), (0, 20.0), (1, 50.0)))


def test_a_berth_is_given_up_only_after_two_failures_in_a_row():
    berths = [ZERO, ONE, TWO]
    berths, blamed = next_berths(berths, 1, None, survivors=True)
    assert len(berths) == 3
    # Another one fails: the count begins anew.
    berths, blamed = next_berths(berths, 0, blamed, survivors=True)
    assert len(berths) == 3
    assert blamed is ZERO
    berths, blamed = next_berths(berths, 0, blamed, survivors=True)
    # Equal places on one core are different berths: the other stays.
    assert [berth is other for berth, other in zip(berths, (ONE, TWO), strict=True)] == [True, True]
    assert blamed is None


def test_the_last_process_and_a_run_without_survivors_keep_their_berths():
    assert next_berths([ONE], 0, ONE, survivors=True)[0] == [ONE]
    assert next_berths([ZERO, ONE], 0, ZERO, survivors=False)[0] == [ZERO, ONE]


def test_a_hang_blames_nobody():
    assert next_berths([ZERO, TWO], None, TWO, survivors=True) == ([ZERO, TWO], None)
