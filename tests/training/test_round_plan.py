"""Plans follow from the state alone: what is owed first, the epoch's end kept, time bounded."""

import pytest

from jaxche.cadence import ApplyPolicy, DivergenceCorrection, ElChe
from jaxche.training._round import next_plan, plan_of_counts, time_limit_ms
from jaxche.training._state import TrainerState

CHE = ElChe.from_dict(ElChe(world_size=2, anchor=4).to_dict() | {"batch_counts": (10, 4), "ms_per_batch": (20.0, 50.0)})


def state(che=CHE, **more):
    return TrainerState((), che, DivergenceCorrection(), **more)


@pytest.mark.parametrize(
    ("policy", "counts"),
    [(ApplyPolicy.SYNC, (1, 1)), (ApplyPolicy.CADENCE, (10, 4)), (ApplyPolicy.ASYNC, (10, 4))],
)
def test_the_policy_sets_the_counts(policy, counts):
    plan = next_plan(state(), 100, policy, 2)
    assert plan.counts == counts
    assert (plan.round, plan.epoch, plan.start) == (0, 0, 0)


def test_a_single_replica_runs_in_long_rounds_to_the_end_of_the_epoch():
    assert next_plan(state(che=None, cursor=90), 100, ApplyPolicy.CADENCE, 1).counts == (10,)
    assert next_plan(state(che=None), 100, ApplyPolicy.CADENCE, 1).counts == (50,)


@pytest.mark.parametrize("policy", list(ApplyPolicy))
def test_what_is_owed_comes_first_and_alone(policy):
    plan = next_plan(state(cursor=60, pending_batches=((0, 30, 36), (0, 50, 51))), 100, policy, 2)
    assert (plan.epoch, plan.start, sum(plan.counts)) == (0, 30, 6)


def test_a_lead_is_limited_in_what_is_owed_too():
    che = ElChe.from_dict(CHE.to_dict() | {"max_batch_diff": 2})
    first, second = next_plan(state(che, pending_batches=((0, 30, 90),)), 100, ApplyPolicy.CADENCE, 2).counts
    assert abs(first - second) <= 2


def test_given_counts_are_cut_where_the_epoch_ends_except_by_async():
    assert sum(plan_of_counts(state(cursor=95), 100, ApplyPolicy.CADENCE, 2, (10, 4)).counts) == 5
    assert plan_of_counts(state(cursor=95), 100, ApplyPolicy.ASYNC, 2, (10, 4)).counts == (10, 4)
    assert sum(plan_of_counts(state(pending_batches=((0, 30, 33),)), 100, ApplyPolicy.ASYNC, 2, (10, 4)).counts) == 3


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (0, 0)])
def test_counts_of_another_world_are_refused(counts):
    with pytest.raises(ValueError, match="for 2 replicas; give each its number of steps"):
        plan_of_counts(state(), 100, ApplyPolicy.CADENCE, 2, counts)


def test_a_round_may_take_twice_what_was_planned_and_never_less_than_a_hiccup():
    assert time_limit_ms(CHE, next_plan(state(), 100, ApplyPolicy.CADENCE, 2)) == pytest.approx(400)
    assert time_limit_ms(CHE, plan_of_counts(state(), 100, ApplyPolicy.CADENCE, 2, (1, 1))) == pytest.approx(50 + 200)


def test_there_is_no_limit_before_speeds_are_known():
    che = ElChe(world_size=2, anchor=4)
    half = ElChe.from_dict(CHE.to_dict() | {"ms_per_batch": (20.0, 0.0)})
    assert time_limit_ms(half, next_plan(state(half), 100, ApplyPolicy.CADENCE, 2)) is None
    assert time_limit_ms(che, next_plan(state(che), 100, ApplyPolicy.CADENCE, 2)) is None
    assert time_limit_ms(None, next_plan(state(None), 100, ApplyPolicy.CADENCE, 1)) is None
