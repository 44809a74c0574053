"""The choice of policy="auto": exact sync where a merge is cheap, local steps where it is not, no useless device."""

import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

import jaxche
from jaxche.cadence import ApplyPolicy, Choice, RowShares, active_counts, better_than_cadence, choose
from jaxche.cadence._choice import Kind
from jaxche.cadence._options import LocalCosts, alone_batches, options, whole_options
from jaxche.cadence._shared_steps import effective_ranks, more_steps, shared_worth
from jaxche.cadence._tuner_progress import MergeCost

BATCH = 16


def measured(ms, sync_ms, travel_ms=0.0, fixed=0.0):
    """Shares and a cadence that have seen these devices."""
    shares, che = RowShares(), jaxche.ElChe(len(ms), 1, tuner="progress")
    for rows in (BATCH, BATCH, BATCH, BATCH // 2):
        wall = [fixed + (t - fixed) * rows / BATCH for t in ms]
        shares = shares.report([1] * len(ms), [rows] * len(ms), wall)
    for _ in range(3):
        che = che.report_timing(ms, [1] * len(ms), sync_ms, travel_ms)
    return shares, che


def chosen(ms, sync_ms, travel_ms=0.0, now=None, round=10, fixed=0.0):
    return choose(now or Choice(), *measured(ms, sync_ms, travel_ms, fixed), BATCH, round)


def ways(shares, sync_ms, tau_ms):
    """All ways to use devices of 20 and 50 ms, where ``tau_ms`` was measured in steps that share a batch."""
    costs = LocalCosts(MergeCost(sync_ms), tau_ms * more_steps(1 / np.array([20, 50]), 1))
    return options(shares, shares.cuts(BATCH), BATCH, sync_ms, [costs], shared=1)


@pytest.mark.parametrize("ms", [(20, 50), (20, 20, 40, 80), (20,) * 8])
def test_a_cheap_merge_is_for_exact_sync_and_a_dear_one_for_local_steps(ms):
    assert chosen(ms, 0.2).policy is ApplyPolicy.SYNC
    assert chosen(ms, 40.0, travel_ms=2e4).policy is ApplyPolicy.CADENCE


def test_small_updates_where_small_steps_are_short():
    updates = chosen((20, 20, 40, 80), 0.2)
    assert (updates.policy, updates.joined) == (ApplyPolicy.SYNC, 1)
    updates = chosen((20, 20, 40, 80), 2.5, travel_ms=100.0, fixed=1.0)  # replicas move too fast for local steps
    assert (updates.policy, updates.joined) == (ApplyPolicy.SYNC, 2)
    # Most of a step does not depend on its rows.
    assert chosen((20, 20, 40, 80), 0.2, fixed=15.0).joined == 3
    assert chosen((20,) * 8, 0.2, fixed=15.0).joined == 8


def test_local_steps_share_batches_where_rounds_are_short():
    short = chosen((20, 20, 40, 80), 11.0, travel_ms=2e3)
    assert (short.policy, short.joined) == (ApplyPolicy.CADENCE, 1)
    assert short.reason.startswith("local steps that share batches in rounds of ")
    # A part of a step does not depend on its rows, so steps are on two batches, or replicas take whole ones.
    assert chosen((20,) * 4, 40.0, travel_ms=1e4, fixed=3.0).joined == 2
    whole = chosen((20, 20, 40, 80), 40.0, travel_ms=1e4, fixed=15.0)
    assert (whole.policy, whole.joined, whole.active) == (ApplyPolicy.CADENCE, 0, ())
    assert whole.reason.startswith("local steps in rounds of ")


def test_steps_that_share_batches_are_not_chosen_where_the_fastest_alone_makes_more_progress():
    """Then all on whole batches are an option, too."""
    now = Choice(ApplyPolicy.CADENCE, 1)
    assert chosen((20,) * 4, 40.0, 1e3, now, round=20).joined == 1
    whole = chosen((20,) * 4, 200.0, 1e3, now, round=20)
    assert (whole.policy, whole.joined, whole.active) == (ApplyPolicy.CADENCE, 0, ())
    assert "1.59 times the progress of the fastest alone" in whole.reason


def test_a_change_to_whole_batches_is_tried_for_some_rounds():
    now, arguments = Choice(ApplyPolicy.CADENCE, 1, since=3), ((20, 20, 40, 80), 40.0, 1e4)
    changed = chosen(*arguments, now=now, round=20, fixed=15.0)
    assert (changed.joined, changed.since) == (0, 20)
    kept = chosen(*arguments, now=now, round=20)
    assert (kept.joined, kept.since) == (1, 3)


def test_tuners_that_choose_no_length_of_a_round_take_whole_batches():
    shares, che = measured((20, 20, 40, 80), 40.0, 1e4)
    assert choose(Choice(), shares, che, BATCH, 10).joined == 1
    whole = choose(Choice(), shares, replace(che, tuner="steady"), BATCH, 10)
    assert (whole.policy, whole.joined, whole.active) == (ApplyPolicy.CADENCE, 0, ())


def test_how_fast_replicas_move_is_measured_in_the_present_kind_of_steps():
    """Those that share batches take more steps, and each kind has its own τ."""
    assert more_steps(np.ones(4), 1) == pytest.approx(4)
    assert more_steps(np.ones(4), 2) == pytest.approx(2)
    # A batch is on the fast one with probability 5/7: 3.5 steps of both in the time of 1 and 0.4.
    assert more_steps(np.array([1.0, 0.4]), 1) == pytest.approx(1.4 / math.sqrt((1 + 0.4**3) / 1.4))
    shares, che = measured((20,) * 4, 30.0, 1500.0)
    alone = Choice(ApplyPolicy.CADENCE, 0, (True, False, False, False))
    found = [choose(now, shares, che, BATCH, 10) for now in (Choice(ApplyPolicy.CADENCE, 1), alone)]
    told = [float(re.search(r"([\d.]+) times the progress", choice.reason)[1]) for choice in found]
    assert told[0] > 1.5 * told[1]


def test_rows_of_different_shapes_are_not_shared():
    shares, che = measured((20, 20, 40, 80), 11.0, 2e3)
    for now in (Choice(), Choice(ApplyPolicy.CADENCE, 1)):
        assert choose(now, replace(shares, shapes_differ=True), che, BATCH, 10).joined == 0


def test_the_batches_of_exact_sync_are_not_those_of_local_steps():
    """After updates on two batches, as after none, local steps share one."""
    shares, che = measured((20, 20, 40, 80), 11.0, 2e3)
    assert choose(Choice(joined=2), shares.split(2, BATCH), che, BATCH, 10).joined == 1


def test_small_steps_that_turn_out_to_take_as_long_are_given_up():
    che, shares, choice, rows = jaxche.ElChe(4, 1, tuner="progress"), RowShares(), Choice(), [BATCH] * 4
    seen = []
    for round in range(12):
        wall = [15.0 + 5.0 * r / BATCH for r in rows]
        shares, che = shares.report([1] * 4, rows, wall), che.report_timing(wall, [1] * 4, 0.2)
        choice = choose(choice, shares, che, BATCH, round)
        if choice.joined:
            shares = shares.split(choice.joined, BATCH)
            rows = shares.rows or rows
            seen.append(choice.joined)
    assert seen[0] == 1
    assert seen[-1] == 4


def test_rows_are_shared_in_multiples_of_a_unit():
    shares, _ = measured((20,) * 32, 0.2)
    # A batch of 16 rows in units of 4 keeps four devices busy, and 28 idle.
    cheap = 0.2, [LocalCosts(MergeCost(0.2), 1e3)]
    assert options(shares, shares.cuts(BATCH, 4), BATCH, *cheap)[0].round_ms == pytest.approx(5.0)
    assert options(shares, shares.cuts(BATCH), BATCH, *cheap)[0].round_ms == pytest.approx(1.25)


def test_a_device_alone_merges_for_one_per_cent_of_the_time_and_soon_enough_to_choose_again():
    assert alone_batches(MergeCost(100.0), 20.0) == 500
    assert alone_batches(MergeCost(7.0), 20.0) == 35
    assert alone_batches(MergeCost(0.2), 20.0) == 20
    # Beside steps: as many as hide the merge and the exchange.
    assert alone_batches(MergeCost(1000.0, 0.5), 20.0) == 99
    assert alone_batches(MergeCost(1000.0, 0.25, 3600.0), 20.0) == 237
    assert alone_batches(MergeCost(0.0, 0.5), 20.0) == 20


def test_a_device_alone_where_merges_cost_more_than_the_others_add():
    choice = chosen((20, 50), 500.0, travel_ms=5e3)
    assert choice.active == (True, False)
    assert "rank 0 alone" in choice.reason
    assert "ranks [1] would add nothing" in choice.reason
    _, che = measured((20, 50), 500.0)
    counts = active_counts(che, choice, 10_000)
    assert counts[1] == 0
    assert counts[0] * 20 >= 100 * 500.0 * 0.99  # 1 % of the time in merges
    assert active_counts(che, choice, 7) == (7, 0)
    # No rest that is shorter, beside which its merge would not fit.
    assert active_counts(che, choice, 2 * counts[0]) == counts
    assert active_counts(che, choice, 2 * counts[0] - 1) == (2 * counts[0] - 1, 0)


def test_an_idle_device_is_tried_on_one_batch():
    choice = chosen((20, 50), 500.0, travel_ms=5e3)
    _, che = measured((20, 50), 500.0)
    alone = active_counts(che, choice, 10_000)
    assert active_counts(che, choice, 10_000, due=(False, True)) == (alone[0], 1)
    assert active_counts(che, choice, 10_000, due=(False, False)) == alone
    assert sum(active_counts(che, choice, 7, due=(False, True))) == 7


def test_a_useless_device_is_left_out():
    choice = chosen((20, 20, 4000), 0.2, fixed=15.0, now=Choice(ApplyPolicy.CADENCE))
    assert choice.policy is ApplyPolicy.CADENCE or not choice.active


@pytest.mark.parametrize(
    ("sync_ms", "tau_ms", "better"), [(2.0, 1500.0, ApplyPolicy.CADENCE), (1.0, 800.0, ApplyPolicy.SYNC)]
)
def test_a_little_more_progress_is_no_reason_to_change(sync_ms, tau_ms, better):
    shares, che = measured((20, 50), sync_ms, tau_ms / 0.45)
    found = ways(shares, sync_ms, tau_ms)
    found = {one.policy: one.progress for one in found if one.joined == 1}
    assert max(found.values()) < 1.08 * min(found.values())  # or this test needs other speeds
    assert max(found, key=found.get) is better
    for policy in (ApplyPolicy.SYNC, ApplyPolicy.CADENCE):
        assert choose(Choice(policy, 1), shares, che, BATCH, 10).policy is policy


def test_another_choice_waits_until_it_would_have_saved_its_compilation():
    shares, che = measured((20, 50), 40.0, 2e3 / 0.45)
    shares = shares.report([1, 1], [BATCH, BATCH], [20.0, 50.0], compile_ms=600.0)
    best = choose(Choice(), shares, che, BATCH, 10)
    assert (best.policy, best.joined, best.since_ms) == (ApplyPolicy.CADENCE, 1, 0.0)
    assert best.compiled == (("cadence", 1),)

    now = Choice(ApplyPolicy.SYNC, 1, since_ms=5e3, compiled=(("sync", 1),))
    progress = {one.policy: one.progress for one in ways(shares, 40.0, 2e3) if one.joined == 1}
    gain = 1 - progress[now.policy] / progress[best.policy]
    enough_ms = 5e3 + 600.0 / gain
    kept = choose(now, shares, che, BATCH, 10, clock_ms=enough_ms - 1.0)
    assert (kept.policy, kept.since_ms, kept.compiled) == (now.policy, now.since_ms, now.compiled)
    changed = choose(now, shares, che, BATCH, 10, clock_ms=enough_ms + 1.0)
    assert (changed.policy, changed.since_ms) == (best.policy, enough_ms + 1.0)
    assert changed.compiled == (("sync", 1), ("cadence", 1))
    for compiled in ((), changed.compiled):
        assert choose(replace(now, compiled=compiled), shares, che, BATCH, 10).policy is best.policy


def test_replicas_are_left_out_of_local_steps_for_little_progress():
    now, shares, che = Choice(ApplyPolicy.CADENCE, 1), *measured((20, 50), 66.0, 2500.0 / 0.45)
    found = ways(shares, 66.0, 2500.0)
    found = {one.active: one.progress for one in found if one.policy is now.policy}
    assert 1 < found[True, False] / found[()] < 1.08  # or this test needs other speeds
    assert choose(now, shares, che, BATCH, 10).active == (True, False)
    assert choose(Choice(now.policy, active=(True, False)), shares, che, BATCH, 10).active == (True, False)


def test_local_steps_are_given_a_few_rounds():
    now = Choice(ApplyPolicy.CADENCE, since=8)
    assert chosen((20,) * 8, 0.2, travel_ms=100.0, now=now, round=10) == now
    assert chosen((20,) * 8, 0.2, travel_ms=100.0, now=now, round=12).policy is ApplyPolicy.SYNC


def test_long_merges_are_tried_in_fewer_rounds():
    """Each costs as much as many batches. One round of a replica alone has many."""
    for sync_ms, rounds in ((19 * 20.0, 4), (20 * 20.0, 2)):
        now = Choice(ApplyPolicy.CADENCE, since=8)
        arguments = {"ms": (20, 50), "sync_ms": sync_ms, "travel_ms": 5e3, "now": now}
        assert chosen(**arguments, round=8 + rounds - 1) == now
        alone = chosen(**arguments, round=8 + rounds)
        assert alone.active == (True, False)
    cheap = arguments | {"now": alone, "sync_ms": 5.0}
    assert chosen(**cheap, round=alone.since + 1).active == ()


@pytest.mark.parametrize(("given_up", "patience"), [(0, 32), (1, 32), (2, 64), (4, 256), (9, 512)])
def test_local_steps_are_tried_again_after_longer_and_longer_times(given_up, patience):
    now = Choice(ApplyPolicy.SYNC, 16, since=10, given_up=given_up)
    arguments = {"ms": (20,) * 16, "sync_ms": 12.0, "travel_ms": 10.0, "fixed": 6.0}
    assert chosen(**arguments, now=now, round=11).policy is ApplyPolicy.SYNC
    assert chosen(**arguments, now=now, round=10 + patience - 16).policy is ApplyPolicy.SYNC
    again = chosen(**arguments, now=now, round=10 + patience)
    assert (again.policy, again.given_up) == (ApplyPolicy.CADENCE, given_up)
    back = chosen(**arguments, now=again, round=20 + patience)
    assert (back.policy, back.given_up) == (ApplyPolicy.SYNC, given_up + 1)


def test_exact_sync_is_looked_at_again_every_16_updates():
    now = Choice(ApplyPolicy.SYNC, 4, since=10)
    made = [round for round in range(11, 60) if chosen((20,) * 4, 30.0, travel_ms=2e4, now=now, round=round) != now]
    assert made == [*range(11, 27), 42, 58]


def test_merges_of_each_kind_have_their_own_time():
    """Exact sync sends gradients, local steps parameters and moments, or codes of them; beside steps no moments."""
    now = Choice(ApplyPolicy.CADENCE, 1, since=10, before_ms=4.0)
    assert now.merges_ms([40.0, 40.0, 4.0]) == (4.0, 4.0, 4.0)  # not all of these are merges of local steps
    assert now.compared([12.0, 12.0, 4.0], 13) == now
    known = now.compared([12.0, 12.0, 12.0], 14)
    assert known.before_ms == 0
    assert known.merges_ms([12.0, 12.0, 12.0]) == (4.0, 12.0, 12.0)  # beside steps not measured: the most alike
    assert known.merges_ms([24.0, 24.0, 24.0]) == (8.0, 24.0, 24.0)  # the link has become slower
    coded = known.with_local_ms([12.0, 12.0, 12.0], 2.0)
    assert coded.merges_ms([2.0, 2.0, 2.0]) == (4.0, 2.0, 2.0)
    back = replace(coded, policy=ApplyPolicy.SYNC, since=20, before_ms=2.0, before=Kind.WAITING)
    assert back.merges_ms([2.0, 2.0, 2.0]) == (4.0, 2.0, 2.0)
    assert back.compared([5.0, 5.0, 5.0], 24).merges_ms([5.0, 5.0, 5.0]) == (5.0, 2.0, 2.0)
    beside = replace(known, overlap=0.5, since=30, before_ms=12.0, before=Kind.WAITING)
    assert beside.merges_ms([12.0, 6.0, 6.0]) == (4.0, 12.0, 12.0)
    measured = beside.compared([6.0, 6.0, 6.0], 34)
    assert measured.merges_ms([6.0, 6.0, 6.0]) == (4.0, 12.0, 6.0)
    assert measured.with_local_ms([6.0, 6.0, 6.0], 1.0).merges_ms([1.0, 1.0, 1.0]) == (4.0, 2.0, 1.0)
    unknown = Choice(ApplyPolicy.CADENCE, 1).with_local_ms([10.0], 2.0)
    assert unknown.merges_ms([2.0]) == (10.0, 2.0, 2.0)
    # Before its merges are measured, those of exact sync stand for them, and a merge in codes is one of them.
    early = replace(unknown, overlap=0.5, before_ms=30.0, before=Kind.SYNC).with_local_ms([7.0], 1.0)
    assert (early.before_ms, early.merges_ms([1.0])) == (0.0, pytest.approx((30.0, 1.0, 1.0)))
    assert Choice.from_dict(json.loads(json.dumps(back.to_dict()))) == back


def test_local_steps_whose_merges_take_longer_than_those_of_exact_sync_are_given_up():
    arguments = {"ms": (20, 20, 40, 80), "travel_ms": 5e2, "round": 14}
    now = Choice(ApplyPolicy.CADENCE, 1, since=10)
    assert chosen(sync_ms=6.0, now=replace(now, before_ms=6.0), **arguments).policy is ApplyPolicy.CADENCE
    dear = chosen(sync_ms=6.0, now=replace(now, before_ms=1.0), **arguments)
    assert (dear.policy, dear.before_ms, dear.before) == (ApplyPolicy.SYNC, 6.0, Kind.WAITING)
    assert dear.merges_ms([6.0, 6.0, 6.0]) == (1.0, 6.0, 6.0)
    assert "and 1 ms to merge" in dear.reason


def test_merges_beside_steps_cost_what_is_not_hidden():
    shares, che = measured((20, 20, 40, 80), 30.0, 3e3)
    costs = LocalCosts(MergeCost(30.0), 1e3)
    assert costs.rate(30.0) == pytest.approx(1 / 2)
    overlapped = costs._replace(merge=MergeCost(30.0, 0.5))
    assert overlapped.rate(30.0) == pytest.approx(30 / 45)
    assert overlapped.rate(60.0) == 1.0
    assert overlapped._replace(merge=MergeCost(30.0, 0.5, 15.0)).rate(60.0) == 1.0
    assert overlapped._replace(merge=MergeCost(30.0, 0.5, 45.0)).rate(60.0) == pytest.approx(60 / 75)
    assert costs.worth(60.0, 1e3) == 1
    assert overlapped.worth(60.0, 1e3) == pytest.approx(0.96 / (1 + 0.5 * 60 / 1e3))
    (waiting,), (beside,) = (
        [one for one in options(shares, shares.cuts(BATCH), BATCH, 30.0, [each]) if all(one.active) and not one.joined]
        for each in (costs, overlapped)
    )
    # Two steps of the slowest replica: about √(30 · 1000) ms, and with one of them beside it a merge is hidden.
    assert (waiting.round_ms, beside.round_ms) == (160.0, 160.0)
    assert beside.progress / waiting.progress == pytest.approx((160 + 30) / 160 * 0.96 / (1 + 0.5 * 160 / 1e3))
    # So it is for steps that share a batch, with their own τ.
    speed, rows = 1 / np.array([20, 20, 40, 80]), shares.cuts(BATCH)[1].rows
    tau = 1e3 / more_steps(speed, 1)
    (shared,) = (
        one
        for one in options(shares, shares.cuts(BATCH), BATCH, 30.0, [overlapped], shared=1)
        if one.joined and one.policy is ApplyPolicy.CADENCE
    )
    wall = shares.cuts(BATCH)[1].ms
    number = shared.round_ms / wall
    assert number == pytest.approx(round(number))
    assert round(number) // 2 * wall >= 30 > (round(number) - 2) // 2 * wall  # whole steps that hide the merge
    worth = shared_worth(shared.round_ms, tau, effective_ranks(rows)) * overlapped.worth(shared.round_ms, tau)
    assert shared.progress == pytest.approx(20.0 / shares.cuts(BATCH)[1].ms * worth)
    now = Choice(ApplyPolicy.CADENCE, 1)
    told = [choose(now, shares, che, BATCH, 10, overlaps=(part,)).reason for part in (0.0, 0.5)]
    assert told[0] != told[1]


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_the_fastest_devices_are_options_one_after_the_other(overlap):
    ms, costs = np.array([80.0, 20.0, 40.0, 20.0]), LocalCosts(MergeCost(30.0, overlap), 1e3)
    found = whole_options(ms, costs)
    assert [one.active for one in found] == [
        (False, True, False, False),
        (False, True, False, True),
        (False, True, True, True),
        (),
    ]
    alone, *several = found
    assert alone.round_ms == alone_batches(costs.merge, 20.0) * 20.0
    assert alone.progress == pytest.approx(costs.rate(alone.round_ms))
    # Whole steps of the slowest of them: as long as hides a merge, or about √(30 · 1000) ms.
    lengths = (80.0, 80.0, 160.0) if overlap else (180.0, 160.0, 160.0)
    for one, speeds, length in zip(several, [(50, 50), (50, 50, 25), (50, 50, 25, 12.5)], lengths, strict=True):
        assert one.round_ms == pytest.approx(length)
        rate = sum(speeds) * costs.rate(length)
        worth = effective_ranks(speeds) ** -0.25 / (1 + length / 1e3) * costs.worth(length, 1e3)
        assert one.progress == pytest.approx(rate / 50 * worth)
        assert one.rate == pytest.approx(rate / 137.5)


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_a_round_of_whole_batches_is_as_long_as_the_slowest_replica_needs(overlap):
    """Of one step of that replica none runs beside a merge."""
    costs = LocalCosts(MergeCost(6.0, overlap), 500.0)
    *_, both = whole_options(np.array([30.0, 90.0]), costs)
    assert both.round_ms == 90.0
    progress = effective_ranks([3, 1]) ** -0.25 * 4 / 3 * 90 / 96 / (1 + 90 / 500) * costs.worth(90.0, 500.0)
    assert both.progress == pytest.approx(progress)
    che = jaxche.ElChe(3, tuner="progress").report_timing([30.0, 90.0, 300.0], [1, 1, 1], 6.0, 100.0)
    assert che.round_ms < 90
    assert active_counts(che, Choice(ApplyPolicy.CADENCE, 0, (True, True, False)), 100) == (3, 1, 0)


BOTH = {"overlaps": (0.0, 0.5)}


def test_merges_run_beside_steps_where_that_promises_more():
    shares, che = measured((20, 20, 40, 80), 30.0, 3e3)
    found = choose(Choice(), shares, che, BATCH, 10, **BOTH)
    assert (found.policy, found.overlap, found.kind) == (ApplyPolicy.CADENCE, 0.5, Kind.BESIDE)
    assert (found.before_ms, found.before) == (30.0, Kind.SYNC)
    assert "30 ms to merge beside the first 50% of the next round" in found.reason
    assert re.search(r"\(sync [\d.]+, cadence [\d.]+, cadence with overlap=0.5 [\d.]+\)", found.reason)
    assert repr(found) == "Choice(policy 'cadence' since round 10, 1 batches a step, overlap 0.5)"
    waiting = choose(Choice(), shares, che, BATCH, 10)
    assert (waiting.policy, waiting.overlap) == (ApplyPolicy.CADENCE, 0.0)
    # It is kept, and a cheap merge is waited for.
    assert choose(found, shares, che, BATCH, 20, **BOTH).since == 10
    assert choose(Choice(), *measured((20, 20, 40, 80), 0.2, 3e3), BATCH, 10, **BOTH).policy is ApplyPolicy.SYNC
    # Another way has to be clearly better, also if it is that of the merges.
    near = measured((20, 50), 5.0, 2e3)
    for overlap in BOTH["overlaps"]:
        now = Choice(ApplyPolicy.CADENCE, 1, overlap=overlap, since=10, merge_scales=(1.0, 1.0, 1.0))
        kept = choose(now, *near, BATCH, 20, **BOTH)
        assert (kept.overlap, kept.since) == (overlap, 10)
    # Where it may not any more, it waits.
    after = choose(found, shares, che, BATCH, 20)
    assert (after.overlap, after.since, after.before) == (0.0, 20, Kind.BESIDE)


def test_merges_are_waited_for_where_replicas_drift_far_apart_beside_them():
    fleet = measured((20, 20, 40, 80), 30.0, 3e3)
    beside = choose(Choice(), *fleet, BATCH, 10, **BOTH)
    # Drifts before there are merges beside steps, and some of merges that report none, say nothing.
    assert Choice().drifted(0.5, 3) == Choice()
    now = beside.drifted(math.nan, 11)
    for round in range(13, 28):
        assert now.overlap == 0.5
        now = choose(now, *fleet, BATCH, round, **BOTH, drift=0.3)
    # It takes 16 drifts, half of which and one more are large.
    half = replace(now, drifts=(0.09,) * 8 + (0.3,) * 7)
    assert choose(half, *fleet, BATCH, 28, **BOTH, drift=0.3).overlap == 0.5
    apart = choose(now, *fleet, BATCH, 28, **BOTH, drift=0.3)
    assert (apart.overlap, apart.kind, apart.apart_at, apart.drifts) == (0.0, Kind.WAITING, 28, ())
    assert apart.reason.endswith("; beside merges the replicas drifted by more than 10%, so they wait for these")
    # After 512 rounds they try again. An overlap that is given stays.
    assert choose(apart, *fleet, BATCH, 28 + 511, **BOTH, drift=0.0).overlap == 0.0
    again = choose(apart, *fleet, BATCH, 28 + 512, **BOTH, drift=0.0)
    assert (again.overlap, again.drifts) == (0.5, ())
    assert "drifted" not in again.reason
    assert choose(now, *fleet, BATCH, 28, overlaps=(0.5,), drift=0.3).overlap == 0.5


def test_an_exchange_that_was_not_measured_takes_half_of_a_merge():
    _, che = measured((20, 50), 30.0, 3e3)
    now = Choice()
    waiting, beside = now.local_costs(che, (0.0, 0.5))
    assert (waiting, beside) == (MergeCost(30.0), MergeCost(30.0, 0.5, 15.0))
    # Merges beside steps that are measured have reported it, if it takes any time.
    for one in (replace(now, policy=ApplyPolicy.CADENCE, overlap=0.5), replace(now, merge_scales=(1.0, 0.0, 2.0))):
        assert one.local_costs(che, (0.5,))[0].exchange_ms == 0
    known = replace(che, exchange_samples=(3.0, 4.0, 5.0))
    assert now.local_costs(known, (0.5,)) == [MergeCost(30.0, 0.5, 4.0)]


@pytest.mark.parametrize("world", [2, 16, 17, 64])
def test_many_replicas_compare_some_numbers_of_joined_batches(world):
    shares, _ = measured((20,) * world, 1.0)
    numbers = list(shares.cuts(BATCH))
    assert numbers[: min(world, 16)] == list(range(1, min(world, 16) + 1))
    assert numbers[-1] == world
    assert all(b <= 1.13 * a for a, b in itertools.pairwise(numbers[15:]))
    assert len(numbers) <= 30


def test_nothing_is_chosen_before_it_is_measured():
    che = jaxche.ElChe(2, 1, tuner="progress")
    assert choose(Choice(), RowShares(), che, BATCH, 1) == Choice()


def test_a_saved_choice_is_equal():
    choice = chosen((20, 50), 500.0, travel_ms=5e3)
    choice = replace(choice, drifts=(0.25, 0.125), apart_at=7)
    assert Choice.from_dict(json.loads(json.dumps(choice.to_dict()))) == choice


def test_repr_leaves_the_reason_out():
    assert repr(Choice()) == "Choice(policy 'sync' since round 0)"
    assert repr(Choice(joined=3, since=4)) == "Choice(policy 'sync' since round 4, 3 batches an update)"
    local = Choice(ApplyPolicy.CADENCE, 0, (True, False, True), "a reason", 9)
    assert repr(local) == "Choice(policy 'cadence' since round 9, 2 of 3 replicas)"
    assert repr(Choice(ApplyPolicy.CADENCE, 2)) == "Choice(policy 'cadence' since round 0, 2 batches a step)"


@pytest.mark.parametrize(
    ("ms", "sync_ms", "line"),
    [
        ((20, 20, 40, 80), 0.2, "exact sync of a batch in 7.5 ms"),
        ((20, 20, 20, 20), 1.0, "local steps that share batches in rounds of 20 ms"),
        ((20, 50), 100.0, "rank 0 alone"),
        ((20, 20, 40, 80), 20.0, ""),
    ],
)
def test_a_cadence_of_whole_batches_is_compared_with_what_auto_would_choose(ms, sync_ms, line):
    shares, che = measured(ms, sync_ms, 3e3)
    text = better_than_cadence(che, BATCH)
    assert text.endswith(line)
    assert bool(text) == bool(line)
    if line:
        # As much as "auto" itself expects, relative to local steps on whole batches by all replicas.
        progress = float(
            re.search(r"([\d.]+) times", choose(Choice(ApplyPolicy.CADENCE), shares, che, BATCH, 10).reason)[1]
        )
        costs = LocalCosts(MergeCost(sync_ms), 0.45 * 3e3)
        whole = [one for one in options(shares, shares.cuts(BATCH), BATCH, sync_ms, [costs]) if not one.active]
        same = max(one.progress for one in whole if one.policy is ApplyPolicy.CADENCE)
        assert float(re.search(r"expects ([\d.]+) times", text)[1]) == pytest.approx(progress / same, abs=0.02)


def test_a_cadence_is_compared_once_merges_and_movement_are_measured():
    _, che = measured((20, 20, 40, 80), 0.2, 3e3)
    assert better_than_cadence(che, BATCH)
    for missing in ({"sync_samples": ()}, {"travel_samples": ()}, {"ms_per_batch": (20.0, 20.0, 40.0, 0.0)}):
        assert better_than_cadence(replace(che, **missing), BATCH) == ""
    # The other tuners follow an overhead target.
    assert better_than_cadence(replace(che, tuner="steady"), BATCH) == ""


def test_a_cadence_is_compared_with_cuts_of_whole_units():
    _, che = measured((20, 20, 40, 80), 0.2, 3e3)
    # A replica of 8 devices takes a multiple of 8 rows, so exact sync cuts a batch into fewer parts.
    singles, islands = (better_than_cadence(che, BATCH, unit) for unit in (1, BATCH // 2))
    assert "exact sync of a batch" in singles
    assert "exact sync of a batch" not in islands


def test_a_device_alone_is_no_option_where_all_make_more_progress_with_other_merges():
    shares, _ = measured((20, 50), 184.0)

    def alone(tau_ms):
        costs = [LocalCosts(MergeCost(184.0), tau_ms), LocalCosts(MergeCost(184.0, 0.5, 100.0), tau_ms)]
        found = options(shares, shares.cuts(BATCH), BATCH, 184.0, costs, shared=1)
        return [one.overlap for one in found if one.active]

    # Both replicas make 0.99 of its progress beside merges at first, then 1.03, and 0.83 where they wait.
    assert alone(3e3) == [0.0, 0.5]
    assert alone(4e3) == []
