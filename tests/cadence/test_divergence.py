"""Divergence: the guard's published cases and streaks; the correction limits the anchor and lets it recover."""

import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxche.cadence import DivergenceCorrection, ElChe, Verdict, VirtualFleet
from jaxche.cadence import _divergence as divergence
from jaxche.cadence._divergence import GrowthGuard

TUNERS = ("seed", "steady")
CALM, SUPPRESS, NUDGE = Verdict.CALM, Verdict.SUPPRESS, Verdict.NUDGE


def verdicts(guard, drifts, k_max=1):
    seen = []
    for drift in drifts:
        guard, verdict = guard.observe(drift, k_max)
        seen.append(verdict)
    return seen


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


def test_growth_at_a_rate_is_not_above_it(monkeypatch):
    monkeypatch.setattr(divergence, "SUPPRESS_RATE", 0.0)
    monkeypatch.setattr(divergence, "NUDGE_RATE", 0.0)
    assert set(verdicts(GrowthGuard(), [0.3] * 9)) == {CALM}


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


@pytest.mark.parametrize("drift", [math.nan, math.inf, -1e-9, None])
def test_bad_drift(drift):
    with pytest.raises(ValueError, match="drift="):
        DivergenceCorrection().apply(ElChe(), ElChe(), drift, 10)


def test_it_is_saved_and_restored_also_from_earlier_versions():
    correction, _, _ = DivergenceCorrection(ceiling=7, calm=2).apply(ElChe(), ElChe(), 0.1, 10)
    assert correction == DivergenceCorrection(ceiling=7, calm=2).apply(ElChe(), ElChe(), 0.1, 10)[0]
    saved = json.loads(json.dumps(dataclasses.asdict(correction)))
    assert DivergenceCorrection.from_dict(saved) == correction
    # They also saved the settings.
    saved["guard"] |= {"suppress_rate": 1e-3, "nudge_rate": 1e-2, "decay": 0.9, "floor": 1e-8, "patience": 3}
    assert DivergenceCorrection.from_dict(saved | {"factor": 0.5, "patience": 5}) == correction


@dataclasses.dataclass(frozen=True)
class Script:
    """A guard that reads its verdicts from a list, calm after its end."""

    left: tuple[Verdict, ...] = ()

    def observe(self, drift, k_max):
        verdict, *left = self.left or (CALM,)
        return Script(tuple(left)), verdict


def drive(fleet, che, correction, rounds, drift=lambda k, counts: 0.01):
    """Rounds of the fleet under the correction: all cadences, the last correction, all verdicts."""
    cadences, verdicts = [che], []
    for k in range(rounds):
        wall, sync = fleet.timings(che.batch_counts, k)
        after = che.report_timing(wall, che.batch_counts, sync)
        correction, che, verdict = correction.apply(che, after, drift(k, che.batch_counts), max(che.batch_counts))
        if correction.ceiling is not None:
            assert che.anchor <= correction.ceiling
            # The dead zone of the seed tuner lets counts trail an anchor that it lowers by itself.
            assert 0.9 * min(che.batch_counts) <= correction.ceiling
        cadences.append(che)
        verdicts.append(verdict)
    return cadences, correction, verdicts


FLEET = VirtualFleet([10.0, 20.0], sync_ms=40.0)


@pytest.mark.parametrize("tuner", TUNERS)
def test_suppress_stops_growth(tuner):
    che = ElChe(2, 10, tuner=tuner)
    free, _, _ = drive(FLEET, che, DivergenceCorrection(Script()), 5)
    assert free[-1].anchor > 10
    held, correction, _ = drive(FLEET, che, DivergenceCorrection(Script((SUPPRESS,) * 5)), 5)
    assert [c.anchor for c in held] == [10] * 6
    assert held[-1].batch_counts == (20, 10)
    assert correction.ceiling == 10


@pytest.mark.parametrize("tuner", TUNERS)
def test_suppress_does_not_stop_shrinking(tuner):
    fleet = VirtualFleet([10.0, 20.0], sync_ms=1.0)
    grown = ElChe(2, 5, tuner=tuner)
    for k in range(2):
        grown = grown.report_timing(FLEET.timings(grown.batch_counts, k)[0], grown.batch_counts, 40)
    assert grown.anchor == 20
    held, _, _ = drive(fleet, grown, DivergenceCorrection(Script((SUPPRESS,) * 12)), 12)
    assert held[-1].anchor < 15


@pytest.mark.parametrize("tuner", TUNERS)
def test_nudge_shrinks_and_calm_reports_let_it_recover(tuner):
    clean, _, _ = drive(FLEET, ElChe(2, 10, tuner=tuner), DivergenceCorrection(Script()), 10)
    settled = clean[-1]
    assert settled.anchor == 20
    script = Script((NUDGE, SUPPRESS, NUDGE))
    cadences, correction, _ = drive(FLEET, settled, DivergenceCorrection(script), 40)
    anchors = [c.anchor for c in cadences]
    assert anchors[1:8] == [10, 10, 5, 5, 5, 5, 5]
    assert cadences[3].batch_counts == (10, 5)
    # Five calm reports, then a quarter more each: 6, 7, 8, 10, 12, 15, 18 and the tuner's own choice.
    assert anchors[8:16] == [6, 7, 8, 10, 12, 15, 18, 20]
    assert cadences[-1].batch_counts == settled.batch_counts
    assert correction.ceiling is None


def test_after_a_nudge_progress_comes_back_to_the_round_that_it_had_chosen():
    che, correction, drift, anchors = ElChe(2, 1, 0.015, tuner="progress"), DivergenceCorrection(), 0.001, []
    for k in range(120):
        counts = che.batch_counts
        after = che.report_timing([10.0 * counts[0], 20.0 * counts[1]], counts, 20.0, 8000.0)
        drift *= 1.3 ** max(counts) if 6 <= k < 10 else 1.0  # grows in four rounds
        correction, che, _ = correction.apply(che, after, drift, max(che.batch_counts))
        anchors.append(che.anchor)
    chosen, least = anchors[6], min(anchors[6:])
    assert (chosen, least, correction.ceiling) == (13, 1, None)
    assert anchors[-1] == 12  # it keeps a round that is this close
    back = anchors[len(anchors) - anchors[::-1].index(least) :]
    assert all(0 <= later - one <= max(1, one // 4) or later == chosen for one, later in itertools.pairwise(back))
    assert sorted(back) == back


def test_growth_is_that_of_the_steps_of_the_round():
    che = ElChe(2, 10)
    _, _, one = DivergenceCorrection().apply(che, che, 0.1, 10)
    correction = DivergenceCorrection(GrowthGuard(last=0.1))
    assert correction.apply(che, che, 0.2, 10)[0].guard.rate == pytest.approx(math.log(2) / 10)
    assert correction.apply(che, che, 0.2, 4)[0].guard.rate == pytest.approx(math.log(2) / 4)
    assert one is CALM


def test_seed_comes_back_to_its_start_without_overhead_to_drive_it():
    # Overhead stays between half the target and the target all the way: the seed alone would stay at 5 for ever.
    fleet = VirtualFleet([10.0, 20.0], sync_ms=15.0)
    che = ElChe(2, 10, overhead_target=0.2).report_timing([100, 200], [10, 10], 15)
    nudged = che.nudge_anchor_down(0.5)
    assert nudged.report_timing([100, 100], (10, 5), 15).anchor == 5
    cadences, correction, _ = drive(fleet, che, DivergenceCorrection(Script((NUDGE,))), 20)
    assert cadences[1].anchor == 5
    assert [c.anchor for c in cadences[5:12]] == [5, 6, 7, 8, 9, 10, 10]
    assert cadences[-1].batch_counts == (20, 10)
    assert correction.ceiling is None


@pytest.mark.parametrize("tuner", TUNERS)
def test_a_suppress_lowers_a_ceiling_and_never_raises_it(tuner):
    che = ElChe(2, 10, tuner=tuner)
    for ceiling, wanted in ((12, 10), (10, 10), (4, 4)):
        correction, held, _ = DivergenceCorrection(Script((SUPPRESS,)), ceiling=ceiling).apply(che, che, 0.1, 10)
        assert (correction.ceiling, held.anchor) == (wanted, wanted)


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize(("anchor", "ceiling"), [(9, None), (10, 10), (11, 10)])
def test_a_ceiling_goes_when_the_anchor_stays_below_it_by_itself(tuner, anchor, ceiling):
    """It was 8, and a quarter more is 10: an anchor of 10 may want more."""
    correction = DivergenceCorrection(Script(), ceiling=8, calm=4)
    after = ElChe(2, anchor, tuner=tuner)
    correction, che, _ = correction.apply(after.capped(8), after, 0.1, 10)
    assert correction.ceiling == ceiling
    assert che.anchor == min(anchor, 10)


@pytest.mark.parametrize("tuner", TUNERS)
def test_a_nudge_moves_counts_that_the_tuner_would_leave(tuner, monkeypatch):
    che = ElChe(2, 10, tuner=tuner, max_batch_diff=0).report_timing([100, 100], [10, 10], 0)
    _, che, _ = DivergenceCorrection(Script((NUDGE,))).apply(che, che, 1.0, 10)
    assert che.batch_counts == (5, 5)
    monkeypatch.setattr(divergence, "NUDGE_FACTOR", 0.95)
    fine = DivergenceCorrection(Script((NUDGE,)))
    _, che, _ = fine.apply(*[ElChe(2, 20, tuner=tuner).report_timing([200, 200], [20, 20], 0)] * 2, 1.0, 20)
    assert che.batch_counts == (19, 19)


@pytest.mark.parametrize("tuner", TUNERS)
def test_scripted_drift_through_the_growth_guard(tuner):
    def drift(k, counts):
        # Grows e-fold every 20 steps for ten rounds, then stays.
        return 1e-3 * 2.0 ** min(k, 10)

    cadences, correction, verdicts = drive(FLEET, ElChe(2, 10, tuner=tuner), DivergenceCorrection(), 80, drift)
    assert verdicts[3] is NUDGE
    assert min(c.anchor for c in cadences) <= 5
    assert verdicts[-20:] == [CALM] * 20
    assert cadences[-1].anchor == 20
    assert correction.ceiling is None


@pytest.mark.parametrize("tuner", TUNERS)
def test_drift_that_follows_the_round_length_settles(tuner):
    def drift(k, counts):
        # Replicas forget each other over 12 steps: longer rounds drift apart exponentially, shorter ones do not.
        return 0.01 * 1.2 ** max(0, max(counts) - 12) * 1.05 ** min(k, 30)

    cadences, _, verdicts = drive(FLEET, ElChe(2, 4, tuner=tuner), DivergenceCorrection(), 120, drift)
    assert NUDGE in verdicts
    assert min(c.anchor for c in cadences) >= 1
    # Once the drift stops growing the cadence of the clean run comes back.
    assert cadences[-1].anchor == 20


@pytest.mark.parametrize("tuner", TUNERS)
def test_calm_changes_nothing(tuner):
    # With a cheap merge steady goes below the anchor it began with, and stays there.
    for fleet in (FLEET, VirtualFleet([10.0, 20.0], sync_ms=1.0)):
        che = ElChe(2, 10, tuner=tuner)
        free = [che]
        for k in range(12):
            wall, sync = fleet.timings(free[-1].batch_counts, k)
            free.append(free[-1].report_timing(wall, free[-1].batch_counts, sync))
        cadences, correction, _ = drive(fleet, che, DivergenceCorrection(), 12)
        assert cadences == free
        assert correction.ceiling is None
