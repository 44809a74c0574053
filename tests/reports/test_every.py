"""Frequencies: what is due after a round, and what is refused."""

import pytest

from jaxche.reports import Every, Reached, as_every


def reached(steps=0, examples=0, epochs=0, seconds=0.0):
    return Reached(steps, examples, epochs, seconds)


@pytest.mark.parametrize("name", Reached._fields)
def test_it_is_due_at_the_first_merge_at_or_after_a_multiple(name):
    every, due, before = Every(**{name: 10}), [], reached()
    for total in (4, 9, 10, 19, 20, 21, 45, 49, 50):
        after = reached(**{name: total})
        if every.is_due(before, after):
            due.append(total)
        before = after
    assert due == [10, 20, 45, 50]  # 30 and 40 together


def test_seconds_may_be_fractions_and_other_totals_do_not_count():
    every = Every(seconds=0.5)
    assert every.is_due(reached(seconds=0.4), reached(seconds=0.6))
    assert not every.is_due(reached(seconds=0.6), reached(steps=99, examples=99, epochs=99, seconds=0.9))


def test_a_whole_number_means_steps():
    assert as_every("log_every", 5) == Every(steps=5)
    assert as_every("log_every", None) is None
    assert as_every("log_every", Every(epochs=1)) == Every(epochs=1)
    assert str(Every(epochs=2)) == "epochs=2"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"Every\(nothing\): give exactly one number, e.g. jaxche.Every\(steps=1000\)"),
        ({"steps": 5, "epochs": 1}, r"Every\(steps=5, epochs=1\): give exactly one"),
        ({"steps": 0}, r"steps=0 must be a whole number above 0; write jaxche.Every\(steps=10\)"),
        ({"examples": 1.5}, r"examples=1.5 must be a whole number above 0"),
        ({"epochs": True}, r"epochs=True must be a whole number"),
        ({"seconds": -1.0}, r"seconds=-1.0 must be a number above 0; write jaxche.Every\(seconds=10\)"),
        ({"seconds": float("nan")}, "seconds=nan must be a number"),
        ({"steps": "5"}, "steps='5' must be a whole number"),
        ({"steps": [5]}, r"steps=\[5\] must be a whole number"),
    ],
)
def test_other_numbers_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Every(**given)


@pytest.mark.parametrize("value", [0, -3, 2.5, "epoch", True])
def test_other_arguments_are_refused_with_the_line_to_write(value):
    with pytest.raises(ValueError, match=r"eval_every=.*; write eval_every=1000 for steps, or eval_every=jaxche.Every"):
        as_every("eval_every", value)
