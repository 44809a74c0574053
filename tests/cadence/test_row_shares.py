"""Row shares: all ranks end a round at the same time, whatever part of a step does not depend on its rows."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxche.cadence import RoundPlan, RowShares
from jaxche.cadence._rank_times import RankTimes
from jaxche.cadence._row_shares import fill

BATCH = 16


def run(ms_per_batch, fixed, total, rounds=12, jitter=0.0, shares=None, seed=0, compile_ms=0.0, **limits):
    """The shares after some rounds on devices of these speeds, from whole batches."""
    noise, shares = np.random.default_rng(seed), shares or RowShares()
    world = len(ms_per_batch)
    seen, compiled = [], {()}
    for _ in range(rounds):
        cost, _ = 0.0 if shares.rows in compiled else compile_ms, compiled.add(shares.rows)
        rows, steps = shares.rows or (BATCH,) * world, shares.steps or (1,) * world
        wall = [
            (n * fixed + (ms - fixed) * r / BATCH) * max(1 + jitter * noise.standard_normal(), 0.1)
            for ms, n, r in zip(ms_per_batch, steps, rows, strict=True)
        ]
        shares = shares.report(steps, rows, wall, cost).split(total // BATCH, BATCH, **limits)
        seen.append(shares.rows)
    return shares, seen


def slowest(ms_per_batch, fixed, rows):
    return max(fixed + (ms - fixed) * r / BATCH for ms, r in zip(ms_per_batch, rows, strict=True) if r)


@pytest.mark.parametrize(
    ("ms", "fixed", "total", "wanted"),
    [
        ((20, 20, 40, 80), 0.0, 48, (18, 17, 9, 4)),
        ((20, 50), 0.0, 32, (23, 9)),
        ((20, 50), 8.0, 32, (25, 7)),
        ((20, 20, 60), 0.0, 48, (20, 21, 7)),
    ],
)
def test_rows_fill_the_same_time(ms, fixed, total, wanted):
    shares, seen = run(ms, fixed, total)
    assert seen[-1] == seen[6]  # settled
    best = min(slowest(ms, fixed, rows) for rows in [wanted, shares.rows])
    assert slowest(ms, fixed, shares.rows) <= 1.05 * best
    assert sum(shares.rows) == total
    assert np.allclose(shares.times(), [fixed + (t - fixed) * r / BATCH for t, r in zip(ms, shares.rows, strict=True)])


@given(
    st.lists(st.tuples(st.floats(0, 30), st.floats(0.01, 5)), min_size=1, max_size=4),
    st.integers(1, 40),
)
def test_fill_ends_as_early_as_any_split(lines, total):
    fixed, slope = map(np.array, zip(*lines, strict=True))
    rows = fill(total, fixed, slope)
    assert rows.sum() == total
    assert rows.min() >= 0
    end = max(f + s * r for f, s, r in zip(fixed, slope, rows, strict=True) if r)

    def earlier(total, i):
        """Whether the ranks from i on can do as many rows well before ``end``."""
        return total <= sum(max(0, int((0.999 * end - f) / s)) for f, s in lines[i:])

    assert not earlier(total, 0)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 300),
    st.sampled_from([1, 2, 8]),
)
def test_each_unit_goes_to_the_rank_that_ends_first_with_it(lines, total, unit):
    fixed, slope = np.array(lines, float).T
    twin = np.zeros(len(lines), int)
    while (left := total - twin.sum()) > 0:
        twin[np.argmin(fixed + slope * (twin + unit))] += min(unit, left)
    assert fill(total, fixed, slope, unit).tolist() == twin.tolist()


@given(st.integers(1, 300), st.integers(1, 64))
def test_shares_are_multiples_of_the_unit_but_for_one(total, unit):
    rows = fill(total, np.zeros(3), np.array([1.0, 2.0, 5.0]), unit)
    assert rows.sum() == total
    assert sum(r % unit != 0 for r in rows) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_equal_devices_with_jitter_keep_whole_batches(seed):
    assert run((20, 20), 5.0, 32, rounds=60, jitter=0.04, seed=seed)[0].rows == ()


@pytest.mark.parametrize("seed", range(5))
def test_jitter_rarely_moves_the_shares(seed):
    _, seen = run((20, 50), 5.0, 32, rounds=100, jitter=0.03, seed=seed)
    assert len(set(seen)) <= 5  # each is compiled for


@pytest.mark.parametrize("seed", range(5))
def test_of_varying_times_compilation_takes_at_most_what_it_saves(seed):
    ms, options = (20, 20, 40, 80), {"rounds": 300, "jitter": 0.3, "seed": seed}
    free, costly = (set(run(ms, 5.0, 256, **options, compile_ms=cost)[1]) for cost in (0.0, 6000.0))
    assert len(free) > 30
    # A round of some 120 ms loses at most half against the best shares; 6 s of compilation are 100 such rounds.
    assert 1 < len(costly) <= 2 + 300 / 100


def test_new_shares_are_taken_once_so_much_time_is_lost_as_their_compilation_takes():
    shares, _ = run((20, 50), 0.0, 48, compile_ms=200.0)
    assert shares.rows == (35, 13)
    assert shares.compile_ms == 200
    _, seen = run((20, 90), 0.0, 48, rounds=30, shares=shares)
    changed = seen.index((40, 8))
    assert set(seen[:changed]) == {(35, 13)}
    # A round takes 90 * 13 / 16 ms instead of 50. The change of speed shows in the middle of the last times, later.
    needed = 200 / (90 * 13 / 16 - 50)
    assert needed <= changed + 1 <= needed + 3


def test_the_first_change_waits_for_nothing():
    """The compilation of a last batch of an epoch is no reason against it."""
    shares = RowShares()
    for _ in range(3):
        shares = shares.report([1, 1], [16, 16], [20.0, 50.0], compile_ms=1e6).split(2, BATCH)
    assert shares.rows == (23, 9)


def test_shares_that_were_used_before_are_taken_at_once():
    shares, _ = run((20, 50), 0.0, 32, compile_ms=1e6)
    _, seen = run((50, 50), 0.0, 32, shares=shares)
    assert seen[-1] == (16, 16)  # whole batches, whose program is compiled
    assert len(set(seen)) == 2
    kept, _ = run((50, 20), 0.0, 32, shares=shares)  # would be (9, 23): compilation costs too much
    assert kept.rows == (16, 16)
    assert kept.lost_ms > 0


def test_shares_used_before_need_memory_and_a_joined_batch_of_their_size():
    shares, _ = run((20, 50), 0.0, 32, compile_ms=1e6)
    tight, _ = run((50, 50), 0.0, 32, shares=shares, max_rows=[23, 12])
    assert (tight.rows, tight.steps) == ((23, 9), (1, 1))
    longer = shares.split(4, BATCH)  # no shares of its length are in use: compiled at once
    assert sum(longer.rows) == 4 * BATCH
    assert longer.split(2, BATCH).rows == (23, 9)


def test_a_rank_that_was_slow_for_a_while_is_tried_again():
    shares, _ = run((20, 50), 5.0, 32)
    slow, _ = run((20, 400), 5.0, 32, shares=shares)
    assert slow.rows == (32, 0)
    # Its longest step took 400 ms, and a round without it takes 35: it is tried after 20 s.
    _, still = run((20, 400), 5.0, 32, rounds=2500, shares=slow)
    tries = [i for i, rows in enumerate(still) if rows != (32, 0)]
    # Its 8 rows took half as long in the first try as the 16 of its longest step; then each wait is twice as long.
    assert tries == pytest.approx([50 * 400 / 35 * n for n in (1, 2, 4)], rel=0.1)
    _, seen = run((20, 50), 5.0, 32, rounds=700, shares=slow)
    back = seen.index(shares.rows)
    assert back == pytest.approx(50 * 400 / 35, rel=0.1)
    assert set(seen[back:]) == {shares.rows}


def test_a_rank_that_was_slow_from_the_start_is_tried_with_the_equal_parts_of_the_start():
    shares, _ = run((20, 1500), 5.0, 48)
    assert shares.rows == (48, 0)
    later, seen = run((20, 50), 5.0, 48, rounds=1700, shares=shares)
    assert list(dict.fromkeys(seen))[:2] == [(48, 0), (24, 24)]
    assert later.used[-1] == ((24, 24), (2, 2), 3)
    assert min(later.rows) > 8


def test_fewer_rows_than_ranks_measure_all_of_them():
    """Fast ranks that had no row at the start get one, and so does one that was slow for a while."""
    ms, shares, seen = [80.0, 40.0, 80.0, 20.0, 20.0], RowShares((1, 1, 0, 0, 0), (1, 1, 0, 0, 0), 1), []
    for round in range(1200):
        speeds = [4.0, *ms[1:]] if round > 300 else ms
        wall = [n * one / 2 for one, n in zip(speeds, shares.rows, strict=True)]
        shares = shares.report(shares.steps, shares.rows, wall).split(1, 2)
        seen.append(shares.rows)
    assert seen[12] == seen[30] == (0, 0, 0, 1, 1)
    assert seen[-1] == (2, 0, 0, 0, 0)
    assert all(sum(rows) == 2 for rows in seen)


def test_the_time_of_a_whole_batch_follows_from_that_of_a_step_on_some_rows():
    """A part of a step does not depend on its rows, once steps of two sizes are measured."""
    steps, rows, batches = (2, 2, 0), (8, 24, 0), (0.5, 1.5, 0.0)
    wall = [2 * (10 + 1.0 * 4), 2 * (10 + 0.5 * 12), 0.0]
    assert RowShares().whole_ms(steps, rows, batches, wall) == pytest.approx([14 * 4, 16 * 4 / 3, 0])
    shares = RowShares()
    for size in (BATCH, BATCH, BATCH, 4):
        shares = shares.report([1] * 3, [size] * 3, [10 + slope * size for slope in (1.0, 0.5, 0.5)])
    assert shares.whole_ms(steps, rows, batches, wall) == pytest.approx([26, 18, 0])
    twice = [2 * one for one in wall]  # it has become slower
    assert shares.whole_ms(steps, rows, batches, twice) == pytest.approx([52, 36, 0])


def test_little_time_is_not_worth_a_compilation():
    assert run((0.2, 0.5), 0.0, 32)[0].rows == ()


def test_one_absurd_report_changes_nothing():
    shares, _ = run((20, 50), 5.0, 32)
    poisoned = shares.report(shares.steps, shares.rows, [26.0, 9000.0]).split(2, BATCH)
    assert poisoned.rows == shares.rows


def test_a_change_of_speed_is_followed_at_all_sizes():
    shares, _ = run((20, 50), 8.0, 32)
    shares, _ = run((60, 50), 24.0, 32, rounds=3, shares=shares)  # the fast one three times slower
    assert dataclasses.replace(shares, rows=(BATCH, BATCH), steps=(1, 1)).times()[0] == pytest.approx(60, rel=0.1)
    shares, _ = run((60, 50), 24.0, 32, shares=shares)
    fixed, _ = shares.fit()
    assert slowest((60, 50), 24.0, shares.rows) <= 1.3 * slowest((60, 50), 24.0, (14, 18))
    assert fixed[0] > 8


def test_a_rank_whose_fixed_time_is_too_long_gets_no_rows():
    rows = fill(16, np.array([2.0, 2.0, 100.0]), np.array([1.0, 1.0, 1.0]))
    assert rows.tolist() == [8, 8, 0]


def test_a_share_above_the_limit_takes_several_steps():
    shares, _ = run((20, 80), 2.0, 64, max_rows=[20, 100])
    assert shares.steps[0] == -(-shares.rows[0] // 20) > 1
    assert shares.steps[1] == 1


@pytest.mark.parametrize(
    ("ms", "fixed", "wanted"),
    [
        ((20, 20, 40, 80), 0.0, 1),
        ((20, 50), 0.0, 1),  # 11 and 5 rows take 15.6 ms, and half of 23 and 9 rows 14.4
        ((20, 20, 20, 20), 1.5, 1),  # a step takes 6.1 ms on one batch, 10.8 on two
        ((20, 20, 20, 20), 3.0, 2),  # 7.3 and 11.5
        ((20, 20, 40, 80), 10.0, 2),
        (
            (20, 20, 40, 80),
            16.0,
            0,
        ),  # 1.7 times as long a batch with two as with four, where the fast ones have 52 rows
        ((20, 20), 0.0, 1),
        ((20, 20), 19.0, 2),  # whole batches, too
    ],
)
def test_local_steps_share_few_batches_where_that_takes_little_longer(ms, fixed, wanted):
    shares, _ = run(ms, fixed, BATCH * len(ms))
    for _ in range(3):  # without two sizes of a step nothing is known of its fixed part
        sizes = [8] * len(ms)
        wall = [fixed + (one - fixed) * 8 / BATCH for one in ms]
        shares = shares.report([1] * len(ms), sizes, wall)
    assert shares.without().best_joined(BATCH) == wanted
    assert dataclasses.replace(shares, shapes_differ=True).best_joined(BATCH) == 0


@given(
    st.lists(st.tuples(st.floats(5, 60), st.floats(0, 0.9)), min_size=2, max_size=4),
    st.integers(4, 64),
)
def test_the_best_number_of_batches_is_that_of_a_slow_twin(devices, batch):
    lines = [(ms * part, ms * (1 - part) / batch) for ms, part in devices]
    ranks = tuple(RankTimes(((1.0, (f + s,) * 3), (9.0, (f + 9 * s,) * 3))) for f, s in lines)
    ms, fits = {}, []
    for n in range(1, len(devices) + 1):
        rows = fill(n * batch, *np.array([rank.line for rank in ranks]).T)
        ms[n] = max(f + s * r for (f, s), r in zip((rank.line for rank in ranks), rows, strict=True) if r)
        fits += [n] if max(rows) <= batch else []
    fits = [n for n in fits if ms[n] / n <= 1.5 * min(ms[m] / m for m in ms)]
    best = max(fits, key=lambda n: n**0.75 / ms[n], default=0)
    assert RowShares(ranks=ranks).best_joined(batch) == best
    for n in ms:  # it stays while no other makes 5 % more progress
        kept = RowShares((1,), (1,), n, ranks).best_joined(batch)
        assert kept == (n if n in fits and 1.05 * n**0.75 / ms[n] > best**0.75 / ms[best] else best)


@given(
    st.dictionaries(st.integers(1, 64), st.integers(1, 3), min_size=2, max_size=8), st.floats(0, 5), st.floats(0.3, 9)
)
def test_a_line_without_noise_is_exact(numbers, fixed, slope):
    rank = RankTimes(tuple((float(rows), (fixed + slope * rows,) * number) for rows, number in numbers.items()))
    np.testing.assert_allclose(rank.line, (fixed, slope), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fixed", [0.0, 6.0])
def test_a_line_through_noisy_times_is_near_them_all(fixed):
    """Through the newest of them a step of few rows took three times as long as it does, and others 20 % off."""
    rng, errors = np.random.default_rng(0), []
    for _ in range(200):
        rank = RankTimes()
        for rows in (32, 32, 32, 52, 44, 48, 48, 46):
            rank = rank.report(1, rows, (fixed + 0.6 * rows) * (1 + 0.2 * rng.standard_normal()), 1.0)
        found, slope = rank.line
        errors.append([(found + slope * rows) / (fixed + 0.6 * rows) - 1 for rows in (8, 48)])
    few, many = np.sqrt(np.mean(np.square(errors), axis=0))
    assert few < 0.9
    assert many < 0.14


@pytest.mark.parametrize("factor", [0.6, 0.8, 1.2, 1.4])
def test_a_small_change_of_speed_is_followed_in_two_reports(factor):
    rank = RankTimes()
    for rows in (32, 32, 32, 48, 16, 24):
        rank = rank.report(1, rows, 0.5 * rows, 1.0)
    for rows in (40, 40):
        rank = rank.report(1, rows, factor * 0.5 * rows, 1.0)
    for rows in (32, 40, 48):
        fixed, slope = rank.line
        assert fixed + slope * rows == pytest.approx(factor * 0.5 * rows, rel=0.08)


def test_one_outlier_does_not_hide_the_slope():
    rank = RankTimes()
    for rows in (32, 32, 32, 16, 16, 16, 8, 8, 8):
        rank = rank.report(1, rows, 4 + 0.5 * rows if rank.samples else 300.0, 1.0)
    np.testing.assert_allclose(rank.line, (4, 0.5), rtol=1e-6)


def test_a_saved_value_is_equal():
    shares, _ = run((20, 50), 8.0, 32)
    assert RowShares.from_dict(json.loads(json.dumps(dataclasses.asdict(shares)))) == shares


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any),
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_pieces_cover_every_row_once(shares, sizes, steps):
    """Whatever the sizes of the batches, which no rank knows of those it does not read."""
    counts = tuple(steps if share else 0 for share in shares)
    plan = RoundPlan(0, 2, 3, counts, 3 + len(sizes), tuple(shares), len(sizes))
    seen = {}
    for rank in range(len(shares)):
        for step in plan.steps(rank):
            for piece in step:
                epoch, index = piece.key
                assert epoch == 2
                seen.setdefault(index, []).extend(range(sizes[index - 3])[piece.rows(sizes[index - 3])])
        assert set(plan.share(rank)) == {piece.key for step in plan.steps(rank) for piece in step}
    assert {index: sorted(rows) for index, rows in seen.items()} == {i + 3: list(range(n)) for i, n in enumerate(sizes)}
    assert plan.end == (3, 0)
    assert sum(plan.batches) == pytest.approx(len(sizes))


def test_plans_that_cut_otherwise_have_another_digest():
    plans = [
        RoundPlan(0, 0, 0, (1, 1), 9, shares, joined)
        for shares, joined in (((), 0), ((1, 1), 2), ((1, 2), 2), ((1, 1), 3))
    ]
    assert len({plan.digest() for plan in plans}) == 4


def test_repr_is_one_line():
    shares = RowShares()
    assert repr(shares) == "RowShares(whole batches)"
    for _ in range(3):
        shares = shares.report([1, 1], [16, 16], [20.0, 50.0]).split(joined=2, batch_rows=16)
    assert repr(shares) == "RowShares(23:9 rows of 2 batches, in 1:1 steps)"
