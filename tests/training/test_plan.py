"""Plans follow from the state alone: what is owed first, the epoch's end kept, time bounded."""

from dataclasses import replace

import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxche
from jaxche.cadence import ApplyPolicy, Choice, DivergenceCorrection, ElChe, RowShares, limit_lead
from jaxche.training._plan import End, GivenRound, PlanRules, given_plan, next_plan, time_limit_ms
from jaxche.training._state import TrainerState

CHE = ElChe.from_dict(ElChe(world_size=2, anchor=4).to_dict() | {"batch_counts": (10, 4), "ms_per_batch": (20.0, 50.0)})


def state(che=CHE, **more):
    return TrainerState((), che, DivergenceCorrection(), **more)


def rules(policy=ApplyPolicy.CADENCE, world_size=2):
    return PlanRules(policy, world_size, joined=world_size)


@pytest.mark.parametrize(
    ("policy", "counts"),
    [(ApplyPolicy.SYNC, (1, 1)), (ApplyPolicy.CADENCE, (10, 4)), (ApplyPolicy.ASYNC, (10, 4))],
)
def test_the_policy_sets_the_counts(policy, counts):
    plan = next_plan(state(), 100, rules(policy))
    assert plan.counts == counts
    assert (plan.round, plan.epoch, plan.start) == (0, 0, 0)


def test_a_rank_whose_state_is_on_its_way_takes_no_local_steps():
    given, three = ElChe(3, 4), rules(world_size=3)._replace(newcomers=(1,))
    assert next_plan(state(given), 100, three).counts == (4, 0, 4)
    assert next_plan(state(given), 3, three).counts == (2, 0, 1)
    assert next_plan(state(given), 100, three._replace(policy=ApplyPolicy.SYNC)).counts == (1, 1, 1)


def test_a_single_replica_runs_in_long_rounds_to_the_end_of_the_epoch():
    assert next_plan(state(che=None, cursor=90), 100, rules(world_size=1)).counts == (10,)
    assert next_plan(state(che=None), 100, rules(world_size=1)).counts == (50,)


@pytest.mark.parametrize(
    ("steps", "clock_ms", "count"),
    [
        (50, 50 * 45.0, 50),  # slow steps
        (50, 50 * 2.0, 50),  # short ones: a round is at most as long as all before it
        (100, 100 * 2.0, 100),
        (400, 400 * 2.0, 400),
        (2000, 2000 * 2.0, 1000),  # and lasts two seconds
    ],
)
def test_the_rounds_of_a_single_replica_grow_to_two_seconds_of_short_steps(steps, clock_ms, count):
    given = state(che=None, steps=steps, clock_ms=clock_ms)
    assert next_plan(given, 10_000, rules(world_size=1)).counts == (count,)
    assert next_plan(given, 10_000, rules(world_size=1)._replace(solo_steps=7)).counts == (7,)


def test_the_rounds_of_a_single_replica_end_where_something_is_due():
    seen, now = [], state(che=None)
    while now.steps < 60:
        plan = next_plan(now, 24, rules(world_size=1), End(stops=(10, 25)))
        now = replace(now, steps=now.steps + plan.total, cursor=(now.cursor + plan.total) % 24)
        seen.append(now.steps)
    assert {10, 20, 24, 25, 30, 40, 48, 50, 60} <= set(seen)
    assert next_plan(state(), 100, rules(), End(stops=(1,))).total == next_plan(state(), 100, rules()).total


@pytest.mark.parametrize("policy", list(ApplyPolicy))
def test_what_is_owed_comes_first_and_alone(policy):
    plan = next_plan(state(cursor=60, pending_batches=((0, 30, 36), (0, 50, 51))), 100, rules(policy))
    assert (plan.epoch, plan.start, sum(plan.counts)) == (0, 30, 6)


def test_a_lead_is_limited_in_what_is_owed_too():
    che = ElChe.from_dict(CHE.to_dict() | {"max_batch_diff": 2})
    first, second = next_plan(state(che, pending_batches=((0, 30, 90),)), 100, rules()).counts
    assert abs(first - second) <= 2


def test_given_counts_are_cut_where_the_epoch_ends_except_by_async():
    def counts(policy, **place):
        return given_plan(state(**place), 100, rules(policy), GivenRound((10, 4))).counts

    assert sum(counts(ApplyPolicy.CADENCE, cursor=95)) == 5
    assert counts(ApplyPolicy.ASYNC, cursor=95) == (10, 4)
    assert sum(counts(ApplyPolicy.ASYNC, pending_batches=((0, 30, 33),))) == 3
    idle = given_plan(state(cursor=95), 100, rules(ApplyPolicy.CADENCE), GivenRound((0, 10)))
    assert idle.counts == (0, 5)


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (0, 0)])
def test_counts_of_another_world_are_refused(counts):
    with pytest.raises(ValueError, match="for 2 replicas; give each its number of steps"):
        given_plan(state(), 100, rules(), GivenRound(counts))


def test_a_round_may_take_twice_what_was_planned_and_never_less_than_a_hiccup():
    assert time_limit_ms(CHE, next_plan(state(), 100, rules())) == pytest.approx(400)
    assert time_limit_ms(CHE, given_plan(state(), 100, rules(), GivenRound((1, 1)))) == pytest.approx(50 + 200)


def test_there_is_no_limit_before_speeds_are_known():
    che = ElChe(world_size=2, anchor=4)
    half = ElChe.from_dict(CHE.to_dict() | {"ms_per_batch": (20.0, 0.0)})
    assert time_limit_ms(half, next_plan(state(half), 100, rules())) is None
    assert time_limit_ms(che, next_plan(state(che), 100, rules())) is None
    assert time_limit_ms(None, next_plan(state(None), 100, rules(world_size=1))) is None


def planned(counts, size, policy=ApplyPolicy.CADENCE, lead=None, most=None, shares=None):
    """The plans of an epoch, or of what is left of a run, by ranks that keep these counts."""
    che = ElChe.from_dict(
        ElChe(len(counts), 1, max_batch_diff=lead).to_dict()
        | {"batch_counts": counts, "ms_per_batch": (1.0,) * len(counts)}
    )
    plans, done = [], 0
    while done < min(size, most or size):
        now = state(che, cursor=done, row_shares=shares or RowShares())
        left = None if most is None else most - done
        plans.append(next_plan(now, size, rules(policy, len(counts)), End(steps=left, epochs=1)))
        done += plans[-1].total
    assert done == min(size, most or size)
    return plans


@given(
    counts=st.lists(st.sampled_from([1, 1, 2, 3, 10, 40]), min_size=2, max_size=6).map(tuple),
    size=st.integers(6, 300),
    lead=st.sampled_from([None, 1, 2, 5]),
    most=st.one_of(st.none(), st.integers(6, 300)),
    policy=st.sampled_from([ApplyPolicy.CADENCE, ApplyPolicy.ASYNC, ApplyPolicy.SYNC]),
)
def test_no_round_at_the_end_leaves_ranks_idle(counts, size, lead, most, policy):
    whole = len(counts) if policy is ApplyPolicy.SYNC else sum(limit_lead(counts, lead))
    plans = planned(counts, size, policy, lead, most)
    for plan in plans:
        busy = [n for n in plan.counts if n]
        if policy is ApplyPolicy.SYNC:
            assert 2 * len(busy) >= len(counts)
        else:
            assert len(busy) == len(counts)
            assert max(busy) - min(busy) <= (max(counts) if lead is None else lead)
        if len(plans) > 1:
            assert plan.total >= min(whole / 4, (whole + 1) // 2)
    # At most one more merge than whole rounds need, and none is longer than a whole one and a batch for each rank.
    assert len(plans) <= -(-sum(plan.total for plan in plans) // whole) + 1
    assert max(plan.total for plan in plans) < whole + len(counts)


def test_what_would_be_left_is_split_or_joined():
    def totals(counts, size, **more):
        return [plan.total for plan in planned(counts, size, **more)]

    assert totals((10, 4), 30) == [14, 8, 8]
    assert totals((10, 4), 32) == [14, 14, 4]  # 4 is more than a quarter
    assert [plan.counts for plan in planned((1, 1), 5)] == [(1, 1), (2, 1)]
    assert [plan.counts for plan in planned((1, 1), 5, policy=ApplyPolicy.SYNC)] == [(1, 1), (1, 1), (1, 0)]
    assert [plan.counts for plan in planned((1,) * 4, 5, policy=ApplyPolicy.SYNC)] == [(1, 1, 1, 0), (1, 1, 0, 0)]
    assert [plan.counts for plan in planned((2, 2), 5, lead=0)] == [(2, 2), (1, 0)]  # in lockstep
    assert [plan.counts for plan in planned((4, 4), 9, lead=1)] == [(3, 2), (2, 2)]
    # A lead that is cut off goes to the others.
    assert [plan.counts for plan in planned((10, 40, 5, 3), 24, lead=1)] == [(4, 4, 4, 3), (3, 2, 2, 2)]


def test_a_single_replica_ends_with_rounds_of_equal_length():
    plans = [next_plan(state(che=None, cursor=cursor), 101, rules(world_size=1)).counts for cursor in (0, 50, 76)]
    assert plans == [(50,), (26,), (25,)]


@pytest.mark.parametrize("policy", [ApplyPolicy.SYNC, ApplyPolicy.CADENCE])
def test_rows_by_speed_end_with_rounds_of_equal_length(policy):
    shares = RowShares((60, 20), (2, 1), 8)
    plans = planned((1, 1), 25, policy, shares=shares)
    assert [(plan.joined, plan.counts) for plan in plans] == [(8, (2, 1)), (8, (2, 1)), (5, (1, 1)), (4, (1, 1))]
    assert [plan.joined for plan in planned((1, 1), 25, policy, most=10, shares=shares)] == [8, 2]


def test_async_merges_steps_that_share_batches_sooner_once_its_anchor_is_lowered():
    che = ElChe(2, 8, tuner="progress")
    for _ in range(4):
        che = che.report_timing([20.0 * n for n in che.batch_counts], che.batch_counts, 20.0, travel_ms=8e3)
    shares = RowShares()
    for _ in range(3):
        shares = shares.report((1, 1), (16, 16), (20.0, 20.0)).split(1, 16)
    before, lowered = (state(one, row_shares=shares) for one in (che, che.nudge_anchor_down(0.5)))

    def steps(state, policy):
        return next_plan(state, 999, rules(policy)).counts[0]

    assert steps(lowered, ApplyPolicy.ASYNC) < 0.8 * steps(before, ApplyPolicy.ASYNC)
    # Without a limit by the anchor the length is chosen from the cost of a merge, and grows by twice at most.
    longest = round(2 * lowered.che.round_ms / max(shares.times()))
    assert steps(lowered, ApplyPolicy.CADENCE) == min(steps(before, ApplyPolicy.CADENCE), longest)


@pytest.mark.parametrize("policy", list(ApplyPolicy))
@pytest.mark.parametrize("most", [1, 2, 13])
def test_a_plan_has_no_more_batches_than_the_run(policy, most):
    plan = next_plan(state(), 100, rules(policy), End(steps=most, epochs=9))
    assert plan.total == min(most, 2 if policy is ApplyPolicy.SYNC else 14)
    owed = state(pending_batches=((0, 30, 36),), cursor=60)
    assert next_plan(owed, 100, rules(policy), End(steps=most)).total == min(most, 6)
    shares = RowShares((60, 20), (2, 1), 8)
    assert next_plan(state(row_shares=shares), 100, rules(policy), End(steps=most)).total == min(most, 8)


def test_async_ends_at_the_last_epoch_or_step_and_not_before():
    crossing = next_plan(state(cursor=98), 100, rules(ApplyPolicy.ASYNC), End(epochs=2))
    assert crossing.end == (1, 12)
    assert next_plan(state(epoch=1, cursor=85), 100, rules(ApplyPolicy.ASYNC), End(epochs=2)).counts == (6, 2)
    assert next_plan(state(cursor=98), 100, rules(ApplyPolicy.ASYNC), End(steps=5, epochs=2)).total == 5
    assert next_plan(state(cursor=98), 100, rules(ApplyPolicy.ASYNC)).total == 14


def test_idle_ranks_stay_idle_at_the_end():
    choice = Choice(ApplyPolicy.CADENCE, active=(True, False, True), since=0)
    che = ElChe.from_dict(
        ElChe(3, 4).to_dict()
        | {"batch_counts": (10, 4, 4), "ms_per_batch": (20.0, 500.0, 50.0), "sync_samples": (1.0, 1.0)}
    )
    sizes = (1000, 3, 1)
    plans = [next_plan(state(che, choice=choice), size, rules(world_size=3)).counts for size in sizes]
    assert plans == [(2, 0, 1), (2, 0, 1), (1, 0, 0)]


@pytest.mark.parametrize(
    ("options", "steps"), [({}, None), ({"scaling": jaxche.AdaScale()}, 50), ({"outputs": lambda *_: None}, 50)]
)
def test_rounds_that_average_the_noise_scale_or_keep_outputs_do_not_grow(problem, devices, options, steps):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1], **options)
    assert trainer._rules.solo_steps == steps
