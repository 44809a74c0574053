import numpy as np
import pytest

from jaxche.messages import finite_number, one_of, whole_number


@pytest.mark.parametrize("value", [3, np.int8(3), np.array(3)], ids=["int", "scalar", "array"])
def test_whole_numbers_of_numpy_are_whole(value):
    number = whole_number("n", value, 1, "n=4", most=3)
    assert number == 3
    assert type(number) is int


@pytest.mark.parametrize("value", [True, np.True_, 2.0, "3", None, [1]], ids=repr)
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(ValueError, match=r"n=.* must be a whole number; write e\.g\. n=4"):
        whole_number("n", value, 1, "n=4")


@pytest.mark.parametrize(("value", "limit"), [(0, "at least 1"), (9, "at most 8")])
def test_a_whole_number_has_limits(value, limit):
    with pytest.raises(ValueError, match=rf"n={value} must be {limit}; write e\.g\. n=4"):
        whole_number("n", value, 1, "n=4", most=8)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, "a", None, [1.0, 2.0]], ids=repr)
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match=r"ms=.* must be a finite number of at least 0; write e\.g\. ms=20\.0"):
        finite_number("ms", value, "ms=20.0", least=0)


def test_a_finite_number_is_a_float():
    assert finite_number("ms", np.float32(0.5), "ms=20.0", least=0.5) == 0.5


@pytest.mark.parametrize(
    ("value", "shown"),
    [("mean", "'mean'"), (np.zeros(2), r"float64\[2\]"), (len, "<builtin_function_or_method len>"), (["steps"], ".*")],
    ids=["text", "array", "function", "list"],
)
def test_an_unknown_name_is_shown_beside_the_known_ones(value, shown):
    with pytest.raises(ValueError, match=f"^merge={shown} is unknown; write one of 'steps', 'batch'$"):
        one_of("merge", value, {"steps": 1, "batch": 2})


def test_a_known_name_is_taken():
    one_of("merge", "steps", ("steps", "batch"))
