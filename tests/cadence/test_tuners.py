"""The progress tuner: rounds as long as merges and movement make best, whatever a single report says."""

import math
from dataclasses import replace

import numpy as np
import pytest

import jaxche
from jaxche.cadence import TUNERS
from jaxche.cadence._shared_steps import (
    best_shared_ms,
    best_shared_steps,
    effective_ranks,
    more_steps,
    shared_steps,
    shared_worth,
)
from jaxche.cadence._tuner import Tuner
from jaxche.cadence._tuner_progress import (
    USUAL,
    MergeCost,
    best_round_ms,
    exposed_exchange_ms,
    exposed_ms,
    half_life_ms,
    progress_anchor,
    sent_after,
)

SPEEDS = {"two": (20.0, 50.0), "four": (20.0, 20.0, 40.0, 80.0)}


def run(ms, sync_ms, travel_ms, rounds=30, poison=None, che=None, jitter=0.0):
    """The cadence after some rounds; ``poison`` maps a round to changes of its report."""
    noise, che, seen = np.random.default_rng(0), che or jaxche.ElChe(len(ms), 1, tuner="progress"), []
    for number in range(rounds):
        counts = np.array(che.batch_counts)
        report = {
            "wall_ms": counts * ms * np.maximum(1 + jitter * noise.standard_normal(len(ms)), 0.1),
            "actual_batches": counts,
            "sync_ms": sync_ms * max(1 + jitter * noise.standard_normal(), 0.1),
            "travel_ms": travel_ms * max(1 + jitter * noise.standard_normal(), 0.1),
        } | (poison or {}).get(number, {})
        che = che.report_timing(**report)
        seen.append(che.round_ms)
    return che, seen


def added_ms(cost, lengths):
    """What a merge adds to rounds of these lengths."""
    added = np.maximum(0, cost.ms - cost.overlap * lengths)
    added += np.maximum(0, cost.exchange_ms - (1 - cost.overlap) * lengths)
    assert added[::5_000] == pytest.approx([cost.added_ms(length) for length in lengths[::5_000]])
    return added


def shared_ms(che, rows, joined):
    """The length of a round of a great many steps that share batches."""
    return 1e-6 * shared_steps(che, rows, joined, 1e-6, math.inf)


@pytest.mark.parametrize("ms", SPEEDS.values(), ids=SPEEDS)
@pytest.mark.parametrize("sync_ms", [1.0, 11.0, 100.0])
@pytest.mark.parametrize("travel_ms", [2e3, 2e4])
def test_rounds_are_where_merges_and_local_steps_cost_alike(ms, sync_ms, travel_ms):
    che, _ = run(ms, sync_ms, travel_ms)
    tau = half_life_ms(travel_ms, min(ms))
    best = max(math.sqrt(sync_ms * tau), min(ms))
    assert best / 1.25 <= che.round_ms <= best * 1.25
    # In whole batches no other anchor of such rounds makes more progress, but for the flat top.
    value = {}
    for anchor in range(1, max(1, math.ceil(2 * che.round_ms / max(ms))) + 1):
        counts = np.round(anchor * max(ms) / np.array(ms))
        wall = float((counts * ms).max())
        value[anchor] = counts.sum() / (wall + sync_ms) / (1 + wall / tau)
    assert value[che.anchor] >= 0.97 * max(value.values())


def test_local_steps_are_worth_as_much_as_in_tau_of_25_batches_however_fast_replicas_move():
    """At the start of a run at a high learning rate they move as far as their parameters are long in a few steps."""
    assert half_life_ms(10.0, 20.0) == 500.0
    # They move faster where they share batches, and take more steps.
    assert half_life_ms(10.0, 20.0, 4.0) == 125.0
    assert half_life_ms(1000.0, 16.0) == pytest.approx(450.0)
    che, _ = run((20.0, 20.0), 5.0, 10.0)
    assert che.round_ms == pytest.approx(math.sqrt(5.0 * 500.0), rel=0.25)
    for rows, joined, more in (((8, 8), 1, 2.0), ((16, 16), 2, 1.0)):
        best = best_shared_ms(MergeCost(5.0), 500.0 / more, 2)
        assert shared_ms(che, rows, joined) == pytest.approx(best)


def test_faster_movement_makes_rounds_shorter_and_slower_movement_longer():
    early, _ = run(SPEEDS["two"], 11.0, 3e3)
    late, _ = run(SPEEDS["two"], 11.0, 3e4, che=early)
    assert late.round_ms > 2.5 * early.round_ms
    again, _ = run(SPEEDS["two"], 11.0, 3e3, che=late)
    assert again.round_ms == pytest.approx(early.round_ms, rel=0.3)


def test_without_movement_the_anchor_stays():
    """Averaged gradients and a first report tell none."""
    che, _ = run(SPEEDS["two"], 11.0, 0.0)
    assert (che.anchor, che.round_ms, che.batch_counts) == (1, 0.0, (3, 1))


@pytest.mark.parametrize("tuner", sorted(TUNERS))
def test_a_report_without_times_of_steps_changes_neither_anchor_nor_counts(tuner):
    che = jaxche.ElChe(2, 3, tuner=tuner)
    after = che.report_timing([0.0, 0.0], [3, 3], 11.0, 5e3)
    assert (after.anchor, after.batch_counts, after.is_calibrated) == (che.anchor, che.batch_counts, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"travel_ms": 1e9},
        {"travel_ms": 1e-3},
        {"sync_ms": 1e5},
        {"wall_ms": [60.0, 90000.0]},
    ],
    ids=["still", "leaping", "merge", "rank"],
)
@pytest.mark.parametrize("at", [0, 1, 15])
def test_one_absurd_report_is_forgotten(wrong, at):
    usual, _ = run(SPEEDS["two"], 11.0, 5e3)
    che, seen = run(SPEEDS["two"], 11.0, 5e3, poison={at: wrong})
    assert che.round_ms == pytest.approx(usual.round_ms, rel=0.3)
    assert max(seen) <= 8 * usual.round_ms


def test_jitter_leaves_the_round_length_alone():
    _, seen = run(SPEEDS["four"], 11.0, 5e3, rounds=100, jitter=0.05)
    assert len(set(seen[10:])) <= 3


def test_a_first_report_does_not_lengthen_a_round():
    _, seen = run(SPEEDS["two"], 1000.0, 1e5, rounds=3)
    assert seen[0] <= 50.0
    assert seen[1] > seen[0]


def test_a_saved_cadence_goes_on_the_same():
    che, _ = run(SPEEDS["four"], 11.0, 5e3, rounds=7)
    again = jaxche.ElChe.from_dict(che.to_dict())
    assert again == che
    assert run(SPEEDS["four"], 11.0, 5e3, che=again)[0] == run(SPEEDS["four"], 11.0, 5e3, che=che)[0]


def test_the_anchor_counts_the_waiting_of_whole_batches():
    """With a cheap merge one slow batch would do, but 2.5 : 1 then runs as 3 : 1."""
    assert progress_anchor(np.array([20.0, 50.0]), MergeCost(0.2), 1e5, 200.0, 200, None) == 2


def test_a_travel_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="travel_ms=nan"):
        jaxche.ElChe(2, 1, tuner="progress").report_timing([20.0, 50.0], [1, 1], 5.0, travel_ms=math.nan)


def test_with_overlap_a_round_has_the_length_of_most_progress_but_only_hides_the_merge():
    # 1 / progress at every length, the slow way.
    lengths = np.geomspace(10.0, 20_000.0, 200_000)
    for tau, cost in (
        (3000.0, MergeCost(400.0, 0.5)),
        (3000.0, MergeCost(1500.0, 0.5)),
        (3000.0, MergeCost(1000.0, 0.25)),
        (800.0, MergeCost(50.0)),
        # Rounds that hide the merge, or a part of it, with an exchange that takes less time, as long or longer.
        (3000.0, MergeCost(400.0, 0.5, 20.0)),
        (3000.0, MergeCost(20.0, 0.5, 8.0)),
        (900.0, MergeCost(1500.0, 0.5, 40.0)),
        (900.0, MergeCost(1500.0, 0.5, 1500.0)),
        (900.0, MergeCost(1500.0, 0.25, 1000.0)),
        (100.0, MergeCost(20.0, 0.25, 900.0)),
    ):
        time = (lengths + added_ms(cost, lengths)) * (1 + lengths / tau) / lengths
        assert best_round_ms(cost, tau) == pytest.approx(lengths[time.argmin()], rel=1e-3)
    # Whole batches too: 4 and 10 of 50 and 20 ms, half of which hide 100 ms.
    speeds = np.array([50.0, 20.0])
    assert progress_anchor(speeds, MergeCost(100.0, 0.5), 3000.0, 200.0, 200, None) == 4
    # A single batch of each device hides nothing; two hide a merge and an exchange, which may ask for more.
    assert progress_anchor(np.array([50.0, 50.0]), MergeCost(10.0, 0.5), 3000.0, 50.0, 200, None) == 2
    assert progress_anchor(np.array([50.0, 50.0]), MergeCost(10.0, 0.5, 30.0), 3000.0, 50.0, 200, None) == 2
    assert progress_anchor(np.array([50.0, 50.0]), MergeCost(10.0, 0.5, 70.0), 3000.0, 150.0, 200, None) == 3


def test_measurements_are_sent_before_the_steps_that_hide_their_exchange():
    # Steps of 20 and 50 ms: two and one of them take 1.25 times as long as an exchange of 30 ms, or longer.
    assert sent_after((200.0, 200.0), (10, 4), (5, 2), 30.0) == (8, 3)
    # Not before the merge of the last round comes in, nor before the first step.
    assert sent_after((200.0, 200.0), (10, 4), (5, 2), 300.0) == (5, 2)
    assert sent_after((20.0, 50.0, 0.0), (1, 1, 0), (0, 0, 0), 30.0) == (1, 1, 0)
    assert sent_after((40.0, 0.0), (2, 3), (0, 0), 1e9) == (1, 3)  # of a speed that is not known
    assert sent_after((200.0,), (10,), (5,), 0.0) == (10,)


def test_an_exchange_adds_what_the_last_steps_do_not_hide():
    # It begins when the last replica has sent, after 160 and 150 ms.
    assert exposed_exchange_ms((200.0, 200.0), (10, 4), (8, 3), 40.0) == 0.0
    assert exposed_exchange_ms((200.0, 200.0), (10, 4), (8, 3), 45.0) == pytest.approx(5.0)
    assert exposed_exchange_ms((200.0, 150.0), (10, 3), (8, 3), 45.0) == pytest.approx(5.0)
    assert exposed_exchange_ms((200.0, 0.0), (10, 0), (10, 0), 45.0) == 45.0


def test_a_merge_adds_what_is_not_hidden():
    # Both have done half of their round after 100 ms.
    assert exposed_ms((200.0, 200.0), (10, 4), (5, 2), 100.0) == 0.0
    assert exposed_ms((200.0, 200.0), (10, 4), (5, 2), 130.0) == pytest.approx(30.0)
    # One that waits is not the last to end.
    assert exposed_ms((200.0, 100.0), (10, 2), (8, 1), 140.0) == 0.0
    # A replica without steps waits for the merge all the same.
    assert exposed_ms((200.0, 0.0), (10, 0), (5, 0), 230.0) == pytest.approx(130.0)


@pytest.mark.parametrize("sync_ms", [0.2, 11.0, 300.0])
@pytest.mark.parametrize("tau", [100.0, 900.0, 20_000.0])
@pytest.mark.parametrize("replicas", [1.7, 6.8])
def test_steps_that_share_batches_take_rounds_of_most_progress(sync_ms, tau, replicas):
    best = best_shared_ms(MergeCost(sync_ms), tau, replicas)
    lengths = best * np.geomspace(0.001, 5.0, 60_001)
    progress = lengths / (lengths + sync_ms) * shared_worth(lengths, tau, replicas)
    assert best == pytest.approx(lengths[np.argmax(progress)], rel=1e-3)
    for cost in (MergeCost(sync_ms, 0.4), MergeCost(sync_ms, 0.4, 0.2 * sync_ms), MergeCost(sync_ms, 0.4, sync_ms)):
        lengths = best_shared_ms(cost, tau, replicas) * np.geomspace(0.01, 5.0, 60_001)
        progress = lengths / (lengths + added_ms(cost, lengths)) * shared_worth(lengths, tau, replicas)
        assert best_shared_ms(cost, tau, replicas) == pytest.approx(lengths[np.argmax(progress)], rel=1e-3)


def test_a_merge_that_costs_nothing_ends_every_step_that_shares_batches():
    assert best_shared_ms(MergeCost(0.0), 900.0, 3.0) == 0


def test_replicas_of_unequal_speed_count_as_fewer():
    assert effective_ranks((5, 5, 5)) == pytest.approx(3)
    assert effective_ranks((18, 18, 8, 4)) == pytest.approx(48**2 / 728)
    assert effective_ranks((7, 0)) == 1


def test_more_replicas_share_batches_in_shorter_rounds():
    che, _ = run((20.0, 20.0), 11.0, 2000.0)
    two, four = (shared_ms(che, rows, 1) for rows in ((8, 8), (4, 4, 4, 4)))
    assert two == pytest.approx(best_shared_ms(MergeCost(11.0), half_life_ms(2000.0, 20.0), 2))
    assert 0.75 * two < four < 0.82 * two  # about as the number to the power of -1/3
    # While rounds grow, those that share batches grow with them.
    assert shared_ms(replace(che, round_ms=20.0), (8, 8), 1) == pytest.approx(40.0)
    assert shared_steps(jaxche.ElChe(2, 1, tuner="progress"), (8, 8), 1, 14.3, math.inf) == 1
    grouped = replace(che, half_life=4.0)
    assert two < shared_ms(grouped, (8, 8), 1) == pytest.approx(min(2 * che.round_ms, two * 4 ** (2 / 3)), rel=0.1)


@pytest.mark.parametrize(
    ("sync_ms", "overlap", "exchange_ms", "steps"),
    [
        # Of two steps one runs beside a merge, of one step none.
        (5.0, 0.5, 0.0, 2),
        (14.0, 0.5, 0.0, 2),
        (20.0, 0.5, 0.0, 4),
        (0.2, 0.5, 0.0, 1),
        (5.0, 0.3, 0.0, 4),
        # The second step hides an exchange too, and a longer one asks for more.
        (5.0, 0.5, 8.0, 2),
        (5.0, 0.5, 20.0, 3),
        (0.2, 0.5, 20.0, 3),
        (5.0, 0.0, 0.0, 3),
        (0.2, 0.0, 0.0, 1),
    ],
)
def test_merges_run_beside_whole_steps_that_share_batches(sync_ms, overlap, exchange_ms, steps):
    che, rows, step_ms = run((20.0, 50.0), sync_ms, 1000.0)[0], (11, 5), 14.3
    che = replace(che, overlap=overlap, round_ms=1e3, exchange_samples=(exchange_ms,) * 3)
    assert shared_steps(che, rows, 1, step_ms, math.inf) == steps
    if overlap:
        tau = half_life_ms(1000.0, 20.0, more_steps(rows, 1))

        def lost(n):
            beside = math.floor(overlap * n)
            last = max(0, min(math.ceil(1.25 * exchange_ms / step_ms), n - max(1, beside)))
            exposed = max(0.0, sync_ms - beside * step_ms) + max(0.0, exchange_ms - last * step_ms)
            worth = shared_worth(n * step_ms, tau, 16**2 / 146) / (1 + overlap * n * step_ms / tau)
            return (n * step_ms + exposed) / (n * step_ms) / worth

        assert steps == min(range(1, 40), key=lost)
    elif steps > 2:
        assert shared_steps(che, rows, 1, step_ms, 2 * step_ms) == 2


@pytest.mark.parametrize(("sync_ms", "overlap"), [(250.0, 0.5), (250.0, 0.0), (0.2, 0.5)])
def test_the_first_round_that_shares_batches_follows_the_merges_of_exact_sync(sync_ms, overlap):
    che = jaxche.ElChe(2, 1, tuner="progress", overlap=overlap, ms_per_batch=(20.0, 50.0), sync_samples=(sync_ms,) * 3)
    best = best_shared_steps(MergeCost(sync_ms, overlap), USUAL * 20.0, effective_ranks((11, 5)), 14.3)
    assert shared_steps(che, (11, 5), 1, 14.3, math.inf) == best
    assert (best > 10) == (sync_ms > 1)
    # Tried again after exact sync: in rounds as long as the last ones were.
    assert shared_steps(replace(che, round_ms=143.0), (11, 5), 1, 14.3, math.inf) == 10


@pytest.mark.parametrize("sync_ms", [0.2, 30.0, 300.0])
@pytest.mark.parametrize("exchange_ms", [0.0, 7.0, 150.0])
def test_what_a_merge_adds_is_known_for_many_numbers_of_steps_at_once(sync_ms, exchange_ms):
    cost, numbers = MergeCost(sync_ms, 0.4, exchange_ms), np.arange(1, 50)
    one_by_one = [cost.added_to([14.3 * n], [n]) for n in numbers.tolist()]
    np.testing.assert_allclose(cost.added_to_steps(numbers, 14.3), one_by_one, atol=1e-9)


def test_the_steady_tuner_with_overlap_counts_what_is_not_hidden():
    che = jaxche.ElChe(2, 2, 0.05, tuner="steady", overlap=0.5)
    for _ in range(4):
        che = che.report_timing([50.0 * che.batch_counts[0], 20.0 * che.batch_counts[1]], che.batch_counts, 100.0)
    assert che.batch_counts == (4, 10)

    # The second half of a round hides an exchange: one of 20 ms in full, one of 150 ms but for 5 % of the round.
    assert MergeCost(100.0, 0.5, 20.0).least_round_ms(0.05) == pytest.approx(100 / 0.55)
    for cost in (MergeCost(100.0, 0.5, 150.0), MergeCost(100.0, 0.25, 50.0), MergeCost(100.0, 0.5, 100.0)):
        least = cost.least_round_ms(0.05)
        assert cost.added_ms(least) == pytest.approx(0.05 * least)
    for _ in range(4):
        wall_ms = [50.0 * che.batch_counts[0], 20.0 * che.batch_counts[1]]
        che = che.report_timing(wall_ms, che.batch_counts, 100.0, exchange_ms=20.0)
    assert che.batch_counts == (4, 10)
    with pytest.raises(ValueError, match=r"exchange_ms=-1.* write e.g. exchange_ms=1.0"):
        che.report_timing([50.0, 20.0], [1, 1], 100.0, exchange_ms=-1.0)


@pytest.mark.parametrize("tuner", ["steady", "progress", "seed"])
def test_a_limit_that_binds_is_told(tuner):
    che = jaxche.ElChe(2, 1, 0.05, max_anchor=10, tuner=tuner)
    assert che.limit == ""
    for _ in range(6):
        wall = [50.0 * che.batch_counts[0], 20.0 * che.batch_counts[1]]
        che = che.report_timing(
            wall, che.batch_counts, 2000.0, **({"travel_ms": 9000.0} if tuner == "progress" else {})
        )
    assert che.anchor == 10
    wanted = {"steady": "40 s, max_anchor=800", "progress": "2.85 s, max_anchor=57", "seed": ""}[tuner]
    assert che.limit == (wanted and f"max_anchor=10 limits rounds to 0.5 s; merges of 2 s ask for {wanted}")
    assert che.with_max_anchor(800).limit == ""


def test_a_new_tuner_is_a_line_in_the_table(monkeypatch):
    def longer(che, report):
        return {"anchor": che.anchor + len(report.batches)}

    monkeypatch.setitem(TUNERS, "fixed", Tuner(longer, nudged=lambda che, anchor: np.array([7, 7])))
    che = jaxche.ElChe(2, 4, tuner="fixed").report_timing([20.0, 50.0], [1, 1], 1.0)
    assert (che.anchor, che.batch_counts) == (6, (4, 4))
    assert replace(che, ms_per_batch=(20.0, 50.0)).nudge_anchor_down(0.5).batch_counts == (7, 7)
    with pytest.raises(ValueError, match="'progress', 'fixed'"):
        jaxche.ElChe(2, tuner="unknown")
