import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxche


def test_partitions_run_in_the_order_of_the_plan():
    assert jaxche.order_partitions(list("abcd"), [["c", "d"], ["a", "b"]]) == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        ([["a", "b"], ["b", "c", "d"]], r"'b' is claimed twice, by partitions\[0\] and partitions\[1\]"),
        ([["a", "a", "b"], ["c", "d"]], r"'a' is claimed twice, by partitions\[0\];"),
        ([["a", "b"], ["d"]], "'c' is claimed by no partition"),
        ([["a", "c"], ["b"], ["d"]], r"partitions\[0\] is interleaved with partitions\[1\]: node 'b' runs between"),
        ([["a", "b"], [], ["c", "d"]], r"partitions\[1\] is empty"),
        ([["a", "b"], ["c", "d", "e"]], r"partitions\[1\] claims 'e', which is not in the plan"),
        ([], "partitions is empty"),
    ],
)
def test_refused(partitions, message):
    with pytest.raises(ValueError, match=message):
        jaxche.order_partitions(list("abcd"), partitions)


def test_a_plan_names_each_layer_once():
    with pytest.raises(ValueError, match="plan has node 'a' twice"):
        jaxche.order_partitions(["a", "b", "a"], [["a"], ["b"]])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers())
def test_any_stretches_in_any_order(lengths, seed):
    plan = list(range(sum(lengths)))
    stretches = [plan[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))]
    shuffler = random.Random(seed)
    mixed = [shuffler.sample(stretch, len(stretch)) for stretch in stretches]
    shuffler.shuffle(mixed)
    assert jaxche.order_partitions(plan, mixed) == stretches
