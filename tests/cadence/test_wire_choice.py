"""The choice of wire="auto", from measured merges."""

import dataclasses

import pytest

import jaxche
from jaxche.cadence import WireChoice, choose_wire, is_long_merge, merge_share


@pytest.fixture
def measured():
    def cadence(sync_ms, reports=3, tuner="steady"):
        che = jaxche.ElChe(2, 4, 0.5, tuner=tuner)
        for _ in range(reports):
            che = che.report_timing([80.0, 200.0], [4, 4], sync_ms)
        return che

    return cadence


def test_the_share_of_merges_follows_from_their_median_and_the_length_of_a_round(measured):
    assert merge_share(measured(50.0, reports=2)) == 0.0
    che = measured(50.0)
    steps_ms = max(20 * che.batch_counts[0], 50 * che.batch_counts[1])
    assert merge_share(che) == pytest.approx(50 / (50 + steps_ms))
    assert merge_share(che.report_timing([80.0, 200.0], [4, 4], 5000.0)) == pytest.approx(50 / (50 + steps_ms), rel=0.5)
    assert merge_share(jaxche.ElChe(2, 4)) == 0.0
    assert merge_share(measured(399.0, reports=1)) == 0.0
    assert merge_share(measured(400.0, reports=1)) > 0.0  # each more of them would take as long


def test_a_merge_is_long_from_twenty_steps_of_the_fastest_replica_on(measured):
    assert not is_long_merge(measured(399.0))
    assert is_long_merge(measured(400.0))


@pytest.mark.parametrize(("coded_ms", "wire"), [(69.0, "int4"), (71.0, "float32"), (200.0, "float32")])
def test_codes_are_taken_where_a_merge_is_clearly_faster(measured, coded_ms, wire):
    choice = choose_wire(measured(100.0), coded_ms)
    assert choice.wire == wire
    assert choice.reason.endswith(f"one in int4 takes {coded_ms:.3g} ms: wire={wire!r}")
    assert choice.reason.startswith("merges in float32 of 100 ms took ")
    assert WireChoice(**dataclasses.asdict(choice)) == choice
