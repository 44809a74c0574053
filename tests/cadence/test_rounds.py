"""Rounds: the policies, and every batch of every epoch once, whatever the counts."""

import dataclasses
import hashlib
import json
import math
import struct
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxche.cadence
from jaxche.cadence import ApplyPolicy, RoundPlan, plan_round


@st.composite
def wanted(draw):
    size = draw(st.integers(1, 6))
    return draw(st.lists(st.lists(st.integers(1, 40), min_size=size, max_size=size), min_size=1, max_size=5).map(tuple))


def play(script, epoch_size, epochs, **how):
    """All plans of a run of so many epochs, the wanted counts taken from the script in turn."""
    plans, epoch, cursor = [], 0, 0
    while epoch < epochs:
        counts = script[len(plans) % len(script)]
        plan = plan_round(counts, round=len(plans), epoch=epoch, cursor=cursor, epoch_size=epoch_size, **how)
        assert plan.total >= 1
        plans.append(plan)
        epoch, cursor = plan.end
    return plans


@given(
    script=wanted(),
    epoch_size=st.integers(1, 120),
    epochs=st.integers(1, 3),
    crosses=st.booleans(),
    lead=st.none() | st.integers(0, 5),
)
def test_every_batch_exactly_once(script, epoch_size, epochs, crosses, lead):
    plans = play(script, epoch_size, epochs, max_batch_diff=lead, crosses_epochs=crosses, last_epoch=epochs)
    read = Counter(place for plan in plans for rank in range(len(plan.counts)) for place in plan.share(rank))
    assert read == {(epoch, index): 1 for epoch in range(epochs) for index in range(epoch_size)}
    # Rank 0's share of a round comes first: in order of round and rank the cursor never steps back.
    order = [place for plan in plans for rank in range(len(plan.counts)) for place in plan.share(rank)]
    assert order == sorted(order)
    for plan in plans:
        assert [len(plan.share(rank)) for rank in range(len(plan.counts))] == list(plan.counts)
        if not crosses:
            assert plan.start + plan.total <= epoch_size
        if lead is not None and min(plan.counts) > 0:
            assert max(plan.counts) <= min(plan.counts) + lead
        if min(plan.counts) == 0:
            # Fewer batches than ranks were left: one each.
            assert max(plan.counts) == 1


@given(counts=st.lists(st.integers(1, 40), min_size=2, max_size=6), cursor=st.integers(0, 99))
def test_crossing_without_an_end_keeps_the_counts(counts, cursor):
    plan = plan_round(counts, round=0, epoch=3, cursor=cursor, epoch_size=100, crosses_epochs=True)
    assert plan.counts == tuple(counts)
    assert plan.end == (3 + (cursor + sum(counts)) // 100, (cursor + sum(counts)) % 100)


def test_counts_of_an_epoch_in_rounds():
    plans = play(((46, 20),), 200, 1)
    assert [plan.counts for plan in plans] == [(46, 20), (46, 20), (46, 20), (1, 1)]
    assert plans[1].share(0)[0] == (0, 66)
    assert plans[1].share(1) == tuple((0, index) for index in range(112, 132))
    assert plans[-1].end == (1, 0)


def test_lockstep_gives_the_rest_one_a_rank():
    plans = play(((9, 4, 4),), 17, 1, max_batch_diff=0)
    assert [plan.counts for plan in plans] == [(4, 4, 4), (1, 1, 1), (1, 1, 0)]
    # Without lockstep the rest of an epoch goes to the fastest ranks.
    assert play(((1, 3, 2),), 8, 1)[-1].counts == (0, 1, 1)


def test_crossing_stops_at_the_last_epoch():
    plan = plan_round((30, 10), round=0, epoch=1, cursor=90, epoch_size=100, crosses_epochs=True, last_epoch=2)
    assert plan.total == 10
    assert plan.end == (2, 0)


plans = st.builds(
    RoundPlan,
    round=st.integers(0, 3),
    epoch=st.integers(0, 3),
    start=st.integers(0, 3),
    counts=st.lists(st.integers(0, 3), min_size=0, max_size=3).map(tuple),
    epoch_size=st.integers(4, 7),
)


@pytest.mark.parametrize("shares", [(), (3, 1)])
def test_ranks_and_rounds_have_different_numbers(shares):
    rounds = [(0, 0), (0, 5), (0, 10), (1, 0), (1, 5)]
    plans = [RoundPlan(i, *place, (3, 2), 15, shares, 5 * bool(shares)) for i, place in enumerate(rounds)]
    numbers = [plan.number(rank) for plan in plans for rank in range(2)]
    assert len(set(numbers)) == len(numbers)
    if not shares:  # steps count on from the first number of their rank
        assert numbers == [epoch * 15 + start + first for epoch, start in rounds for first in (0, 3)]


def test_steps_on_parts_of_batches_have_numbers_of_their_own():
    plans = [RoundPlan(i, 3 * i // 40, 3 * i % 40, (7, 2, 5), 40, (4, 1, 3), 3) for i in range(1000)]
    numbers = [plan.number(rank) + step for plan in plans for rank in range(3) for step in range(plan.counts[rank])]
    assert len(set(numbers)) == len(numbers)


def test_batches_of_each_rank_are_its_steps_or_its_part_of_those_that_are_joined():
    assert RoundPlan(0, 0, 0, (3, 1), 40).batches == (3.0, 1.0)
    assert RoundPlan(0, 0, 0, (1, 2), 40, (1, 3), 2).batches == (0.5, 1.5)


def test_a_cut_plan_has_steps_of_as_many_rows():
    plan = RoundPlan(0, 0, 0, (4, 1, 0), 100, (6, 2, 0), 8)
    assert plan.cut(9) == plan
    assert plan.cut(4) == RoundPlan(0, 0, 0, (2, 1, 0), 100, (6, 2, 0), 4)
    assert plan.cut(1).counts == (1, 1, 0)


@given(one=plans, other=plans)
def test_digests_tell_plans_apart(one, other):
    assert (one.digest() == other.digest()) == (one == other)
    assert dataclasses.replace(one).digest() == one.digest()


@given(plan=plans)
def test_digest_goes_through_float32_in_halves(plan):
    high, low = plan.digest_halves()
    assert 0 <= plan.digest() < 2**46
    assert high * 2**23 + low == plan.digest()
    assert (int(np.float32(high)), int(np.float32(low))) == (high, low)


def test_digest_is_the_same_on_every_machine():
    fields = struct.pack("<6q", 7, 1, 5, 99, 46, 20)
    assert int.from_bytes(hashlib.sha256(fields).digest()[:8], "big") >> 18 == 11244328334199
    assert RoundPlan(7, 1, 5, (46, 20), 99).digest() == 11244328334199


def test_plan_is_a_plain_value():
    plan = RoundPlan(7, 1, 5, (46, 20), 99)
    assert RoundPlan(**json.loads(json.dumps(dataclasses.asdict(plan)))) == plan
    assert RoundPlan(7, 1, 5, np.array([46, 20]), 99) == plan
    assert plan_round(np.array([46, 20]), round=7, epoch=1, cursor=5, epoch_size=99) == plan
    assert hash(plan) == hash(dataclasses.replace(plan))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epoch_size": 0}, "epoch_size=0: the data set is empty"),
        ({"epoch_size": -1}, "epoch_size=-1"),
        ({"epoch_size": 2.5}, "epoch_size=2.5"),
        ({"cursor": 10}, "start=10 is past the end"),
        ({"cursor": 11}, "start=11 is past the end"),
        ({"cursor": -1}, "start=-1"),
        ({"round": -1}, "round=-1"),
        ({"epoch": -1}, "epoch=-1"),
        ({"counts": (3, 0)}, "counts="),
        ({"counts": ()}, "counts="),
        ({"counts": (1.5, 2)}, r"counts=\(1.5, 2\) must be whole numbers"),
        ({"counts": (math.nan, 1)}, r"counts=\(nan, 1\) must be whole numbers"),
        ({"max_batch_diff": -1}, "max_batch_diff=-1"),
        ({"epoch": 2, "last_epoch": 2}, "last_epoch=2"),
        ({"epoch": 2, "last_epoch": 2, "crosses_epochs": True}, "last_epoch=2"),
    ],
)
def test_plan_round_refuses(change, said):
    arguments = {"counts": (3, 2), "round": 0, "epoch": 0, "cursor": 0, "epoch_size": 10} | change
    with pytest.raises(ValueError, match=said):
        plan_round(arguments.pop("counts"), **arguments)


def test_round_plan_refuses():
    with pytest.raises(ValueError, match=r"counts\[1\]=-2"):
        RoundPlan(0, 0, 0, (1, -2), 10)
    with pytest.raises(ValueError, match="rank=2"):
        RoundPlan(0, 0, 0, (1, 2), 10).share(2)
    with pytest.raises(ValueError, match="rank=-1"):
        RoundPlan(0, 0, 0, (1, 2), 10).share(-1)
    with pytest.raises(ValueError, match=r"counts=\(1.5, 2\) must be whole numbers"):
        RoundPlan(0, 0, 0, (1.5, 2), 10)
    with pytest.raises(ValueError, match=r"shares\[0\]=-1"):
        RoundPlan(0, 0, 0, (1, 1), 10, (-1, 1), 2)
    for shares in ((0, 0), (1,)):
        with pytest.raises(ValueError, match=r"shares=\(.*\) for counts=\(1, 1\): give each rank its part"):
            RoundPlan(0, 0, 0, (1, 1), 10, shares, 2)
    for joined in (0, -1, math.nan):
        with pytest.raises(ValueError, match=f"joined={joined}"):
            RoundPlan(0, 0, 0, (1, 1), 10, (1, 1), joined)


@pytest.mark.parametrize("policy", ApplyPolicy)
def test_policies_are_strings(policy):
    assert ApplyPolicy(policy.value) is policy
    assert policy == policy.value == str(policy) == f"{policy}"
    assert json.loads(json.dumps(policy)) == policy.value


def test_names():
    assert [policy.name for policy in ApplyPolicy] == ["SYNC", "CADENCE", "ASYNC", "AUTO"]
    assert [policy.value for policy in ApplyPolicy] == ["sync", "cadence", "async", "auto"]


@pytest.mark.parametrize("value", ["Cadence", "", None, 1])
def test_anything_else_is_refused_with_what_to_write(value):
    with pytest.raises(ValueError, match='"sync", "cadence", "async"') as refused:
        ApplyPolicy(value)
    assert repr(value) in str(refused.value)


def test_the_layer_needs_numpy_only():
    # The modules alone, without the front door, which may import every layer.
    code = (
        "import sys, types, pathlib\n"
        "front = types.ModuleType('jaxche'); front.__path__ = [sys.argv[1]]; sys.modules['jaxche'] = front\n"
        "import jaxche.cadence\n"
        "assert not {'jax', 'flax', 'optax', 'matplotlib'} & set(sys.modules)\n"
    )
    package = jaxche.cadence.__path__[0].rsplit("cadence", 1)[0]
    subprocess.run([sys.executable, "-c", code, package], check=True, timeout=60)
