"""Merge rules against closed forms: f_i = (x - c_i)^2 / 2, learning rate 0.1."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxche.averaging import MERGE_RULES, merge_weights

COUNTS, CENTRES, START = (1, 3), (0.0, 1.0), 2.0


def one_round(x0, rule, p=None):
    """A round of local gradient descent and its merge, in plain floats."""
    weights, alpha = merge_weights(rule, COUNTS, p=p)
    deltas = []
    for n, c in zip(COUNTS, CENTRES, strict=True):
        x = x0
        for _ in range(n):
            x -= 0.1 * (x - c)
        deltas.append(x0 - x)
    return x0 - alpha * sum(w * d for w, d in zip(weights, deltas, strict=True))


@pytest.mark.parametrize(
    ("rule", "p", "after_one", "fixed_point"),
    [
        ("batch", None, 1.764500, 0.730458),
        ("steps", None, 1.746750, 0.890471),
        ("fednova", (0.5, 0.5), 1.709667, 0.474606),
        ("fednova", None, 1.705625, 0.730458),
    ],
)
def test_closed_forms(rule, p, after_one, fixed_point):
    assert one_round(START, rule, p) == pytest.approx(after_one, abs=1e-6)
    x = START
    for _ in range(500):
        x = one_round(x, rule, p)
    assert x == pytest.approx(fixed_point, abs=1e-6)


@pytest.mark.parametrize(("n", "efficiency"), [((1, 3), 0.893), ((10, 23), 0.911), ((4, 1, 1, 1), 0.770)])
def test_signal_to_noise_of_steps(n, efficiency):
    """With noise-limited progress the merged variance is sum w^2 n and the progress sum w n."""
    w = np.array(merge_weights("steps", n)[0])
    n = np.array(n)
    assert (w @ n) ** 2 / (w**2 @ n) / n.sum() == pytest.approx(efficiency, abs=1e-3)


@given(st.sampled_from(MERGE_RULES), st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any))
def test_weights_sum_to_one_and_idle_replicas_are_silent(rule, counts):
    weights, alpha = merge_weights(rule, counts)
    assert math.isclose(sum(weights), 1.0)
    assert alpha > 0
    assert all((w == 0) == (n == 0) for w, n in zip(weights, counts, strict=True))


@pytest.mark.parametrize("rule", MERGE_RULES)
def test_an_idle_replica_has_no_weight(rule):
    assert merge_weights(rule, [0, 3]) == ((0.0, 1.0), 1.0)


def test_batch_sizes_weigh_replicas():
    assert merge_weights("batch", [2, 2], batch_sizes=[8, 24]) == ((0.25, 0.75), 1.0)
    assert merge_weights("batch", [2, 0], batch_sizes=[8, 24]) == ((1.0, 0.0), 1.0)


def test_fednova_gives_the_objective_asked_for():
    """p need not be normalised, and only its proportions matter."""
    assert merge_weights("fednova", [1, 3], p=[2.0, 2.0]) == merge_weights("fednova", [1, 3], p=[0.5, 0.5])


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"rule": "mean", "counts": [1]}, "'mean'"),
        ({"rule": "steps", "counts": []}, "counts"),
        ({"rule": "steps", "counts": [0, 0]}, "counts"),
        ({"rule": "steps", "counts": [-1, 2]}, "counts"),
        ({"rule": "steps", "counts": 5}, r"counts=5 must be a list of numbers; write e.g. counts=\[10, 23\]"),
        ({"rule": "batch", "counts": [1, 2], "batch_sizes": 8}, "batch_sizes=8 must be a list of numbers"),
        ({"rule": "batch", "counts": [1, 2], "batch_sizes": [8]}, "batch_sizes has 1 entries for 2"),
        ({"rule": "fednova", "counts": [1, 2], "p": [0.5, math.nan]}, "p="),
        ({"rule": "batch", "counts": [1, 0], "batch_sizes": [0, 8]}, "weight 0"),
        ({"rule": "fednova", "counts": [1, 2], "p": [0, 0]}, "weight 0"),
        ({"rule": "steps", "counts": [1e308, 1e308]}, r"counts=\[1e\+308, 1e\+308\]: the numbers are too large"),
        ({"rule": "batch", "counts": [1, 1], "batch_sizes": [1e308, 1e308]}, "too large or too small"),
        ({"rule": "fednova", "counts": [1e308, 1e308]}, "too large or too small"),
        ({"rule": "fednova", "counts": [5e-324]}, "too large or too small"),
    ],
)
def test_bad_input_is_named(kwargs, named):
    with pytest.raises(ValueError, match=named):
        merge_weights(**kwargs)
