"""Guards: the published cases, streaks, and what is refused."""

import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxche.cadence import GrowthGuard, TrendGuard, Verdict

CALM, SUPPRESS, NUDGE = Verdict.CALM, Verdict.SUPPRESS, Verdict.NUDGE


def verdicts(guard, drifts, k_max=1):
    seen = []
    for drift in drifts:
        guard, verdict = guard.observe(drift, k_max)
        seen.append(verdict)
    return seen


@pytest.mark.parametrize(
    ("threshold", "drifts", "last"),
    [
        (0.01, (0.02, 0.03, 0.04), SUPPRESS),
        (0.01, (0.05, 0.04, 0.06), CALM),
        (0.10, (0.01, 0.02, 0.03), CALM),
        (0.04, (0.02, 0.03, 0.04), CALM),
        (0.01, (0.02, 0.02, 0.03), CALM),
    ],
)
def test_trend_cases(threshold, drifts, last):
    assert verdicts(TrendGuard(threshold), drifts) == [CALM, CALM, last]


def test_trend_goes_on_while_the_drift_rises():
    assert verdicts(TrendGuard(0.01), (0.02, 0.03, 0.04, 0.05, 0.05, 0.06, 0.07))[2:] == [
        SUPPRESS, SUPPRESS, CALM, CALM, SUPPRESS,
    ]  # fmt: skip


def test_growth_case():
    guard, _ = GrowthGuard().observe(0.01, 4)
    assert guard.rate == 0.0
    guard, verdict = guard.observe(0.02, 4)
    assert guard.rate == pytest.approx(math.log(2) / 4, rel=1e-12)
    assert verdict is CALM


def exponential(rate, rounds, k_max):
    return [1e-3 * math.exp(rate * k_max * k) for k in range(rounds)]


def test_growth_suppresses_after_three():
    assert verdicts(GrowthGuard(), exponential(2e-3, 7, 5), 5) == [CALM] * 3 + [SUPPRESS] * 4


def test_growth_nudges_after_three_and_then_every_third():
    assert verdicts(GrowthGuard(), exponential(2e-2, 10, 5), 5) == [CALM] * 3 + [NUDGE, SUPPRESS, SUPPRESS] * 2 + [
        NUDGE
    ]


def test_growth_is_per_step():
    # The same drifts over longer rounds are slower growth.
    drifts = exponential(2e-2, 8, 1)
    assert verdicts(GrowthGuard(), drifts, 1)[-1] is not CALM
    assert set(verdicts(GrowthGuard(), drifts, 1000)) == {CALM}


def test_growth_is_calm_on_a_plateau_and_below_the_floor():
    assert set(verdicts(GrowthGuard(), [0.3] * 9)) == {CALM}
    assert set(verdicts(GrowthGuard(), [0.0, 1e-12, 1e-10, 1e-9, 5e-9])) == {CALM}
    assert set(verdicts(GrowthGuard(suppress_rate=0.0, nudge_rate=0.0), [0.3] * 9)) == {CALM}


@given(drifts=st.lists(st.floats(0, 1e3), min_size=1, max_size=30), k_max=st.integers(1, 50))
def test_growth_mean_against_a_plain_sum(drifts, k_max):
    guard = GrowthGuard()
    for drift in drifts:
        guard, _ = guard.observe(drift, k_max)
    logs = [math.log(max(drift, 1e-8)) for drift in drifts]
    rates = [(b - a) / k_max for a, b in itertools.pairwise(logs)]
    weights = [0.9 ** (len(rates) - 1 - i) for i in range(len(rates))]
    mean = sum(w * r for w, r in zip(weights, rates, strict=True)) / sum(weights) if rates else 0.0
    assert guard.rate == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize("guard", [TrendGuard(), GrowthGuard()])
@pytest.mark.parametrize("drift", [math.nan, math.inf, -1e-9, None])
def test_bad_drift(guard, drift):
    with pytest.raises(ValueError, match="drift="):
        guard.observe(drift, 1)


@pytest.mark.parametrize("guard", [TrendGuard(), GrowthGuard()])
def test_guards_are_values(guard):
    once = guard.observe(0.1, 3)
    assert once == guard.observe(0.1, 3)
    saved = json.loads(json.dumps(dataclasses.asdict(once[0])))
    assert type(guard)(**saved) == once[0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TrendGuard(-1), "threshold=-1"),
        (lambda: GrowthGuard(suppress_rate=math.nan), "suppress_rate=nan"),
        (lambda: GrowthGuard(nudge_rate=-1), "nudge_rate=-1"),
        (lambda: GrowthGuard(decay=1.0), "decay=1.0"),
        (lambda: GrowthGuard(floor=0.0), "floor=0.0"),
        (lambda: GrowthGuard(patience=0), "patience=0"),
        (lambda: GrowthGuard().observe(0.1, 0), "k_max=0"),
    ],
)
def test_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
