"""Count vectors: lead, total, ratio."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxche.cadence import clamp_counts, limit_lead
from jaxche.cadence._round_plan import interleave, round_half_away, split_by_ratio

COUNTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=12)


@given(counts=COUNTS, lead=st.none() | st.integers(0, 50))
def test_limit_lead_lowers_only_what_leads(counts, lead):
    limited = limit_lead(counts, lead)
    top = max(counts) if lead is None else min(counts) + lead
    assert limited == tuple(min(n, top) for n in counts)


@pytest.mark.parametrize("lead", [-1, 1.5, "3", True])
def test_limit_lead_refuses(lead):
    with pytest.raises(ValueError, match="max_batch_diff="):
        limit_lead((2, 1), lead)


@given(counts=COUNTS, total=st.integers(0, 10**6))
def test_clamp_counts(counts, total):
    clamped = clamp_counts(counts, total)
    assert sum(clamped) == min(total, sum(counts))
    if total >= len(counts):
        assert min(clamped) >= 1
    else:
        # The batches that are left go to the fastest, one each.
        assert set(clamped) <= {0, 1}
        idle = [n for n, c in zip(counts, clamped, strict=True) if c == 0]
        busy = [n for n, c in zip(counts, clamped, strict=True) if c == 1]
        assert not busy or not idle or min(busy) >= max(idle)
    for (n, c), (m, d) in zip(
        zip(counts, clamped, strict=True), reversed(list(zip(counts, clamped, strict=True))), strict=True
    ):
        # One each of what is left over goes by rank, so order holds up to one batch.
        assert n <= m or c >= d - 1


def test_clamp_counts_cases():
    assert clamp_counts((46, 20), 66) == (46, 20)
    assert clamp_counts((20, 46), 1) == (0, 1)
    assert clamp_counts((5, 5, 5), 2) == (1, 1, 0)
    # The original gives [2, 1, 1] here and reads past the end.
    assert clamp_counts((100, 1, 1), 3) == (1, 1, 1)
    # Ranks that were to idle still do.
    assert clamp_counts((1, 0, 0), 2) == (1, 0, 0)
    with pytest.raises(ValueError, match="max_total=-1"):
        clamp_counts((1, 1), -1)


def test_published_splits():
    assert split_by_ratio(100, [1, 1, 1]) == (34, 33, 33)
    assert split_by_ratio(900, [3, 2, 1]) == (450, 300, 150)
    assert split_by_ratio(100, [0, 0]) == (50, 50)
    # 3.45 and 6.55: the larger remainder is rounded up.
    assert split_by_ratio(10, [1, 1.9]) == (3, 7)
    # The shares in float64 come to one more than there is.
    assert sum(split_by_ratio(2**53 - 1, [14, 4])) == 2**53 - 1


@given(
    total=st.integers(0, 10**9),
    ratios=st.lists(st.floats(0, 1e300) | st.integers(0, 99), min_size=1, max_size=9),
)
def test_split_by_ratio_is_exact_and_fair(total, ratios):
    parts = split_by_ratio(total, ratios)
    assert sum(parts) == total
    assert min(parts) >= 0
    whole = sum(map(Fraction, ratios))
    for part, ratio in zip(parts, ratios, strict=True):
        fair = total * Fraction(ratio) / whole if whole else Fraction(total, len(ratios))
        # A part is its fair share rounded up or down; the slack is float64's at 10⁹.
        assert abs(part - fair) < 1 + 1e-5


@pytest.mark.parametrize("ratios", [[], [-1, 2], [math.nan, 1], [math.inf, 1], [[1, 2]]])
def test_split_by_ratio_refuses(ratios):
    with pytest.raises(ValueError, match="ratios="):
        split_by_ratio(10, ratios)


@given(x=st.floats(0, 2.0**53))
def test_round_half_away_is_exact(x):
    assert round_half_away(np.array([x]))[0] == math.floor(Fraction(x) + Fraction(1, 2))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_ranks_take_batches_in_the_order_in_which_they_finish_them(counts):
    places = interleave(counts)
    assert [len(own) for own in places] == counts
    assert sorted(place for own in places for place in own) == list(range(sum(counts)))
    for own, n in zip(places, counts, strict=True):
        assert list(own) == sorted(own)
        # No further from an even spread than one batch of each rank.
        assert all(abs(place - (i + 0.5) / n * sum(counts)) <= len(counts) for i, place in enumerate(own))
