"""Tables as text: columns stay columns, whatever is in them."""

from xml.etree import ElementTree

import numpy as np
import pytest

from jaxche.messages import aligned, brief, format_ranks, html_table, odd_ones, per_rank, type_of


def test_of_many_ranks_the_first_twelve_are_listed():
    assert format_ranks([3, 5]) == "3, 5"
    assert format_ranks(range(14)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more"


ROWS = [["rank", "", "ms"], ["0", "now", "1.5"], ["12", "", "1000.25"]]


@pytest.mark.parametrize("left", [0, 1, 3])
@pytest.mark.parametrize("indent", [0, 2])
def test_columns_have_one_width(left, indent):
    lines = aligned(ROWS, left, indent).splitlines()
    ends = indent + 4, indent + 4 + 2 + 3, indent + 4 + 2 + 3 + 2 + 7
    assert len(lines) == 3
    for line, row in zip(lines, ROWS, strict=True):
        assert not line[:indent].strip()
        assert line == line.rstrip()
        for i, (end, width, cell) in enumerate(zip(ends, (4, 3, 7), row, strict=True)):
            found = line.ljust(ends[-1])[end - width : end]
            assert found == (cell.ljust(width) if i < left else cell.rjust(width))


def test_rows_of_different_lengths_are_a_mistake():
    with pytest.raises(ValueError, match="zip"):
        aligned([["a", "b"], ["c"]])


def test_what_is_in_a_table_of_html_is_text():
    root = ElementTree.fromstring(html_table(["<script>x</script>", "a & b"], [["</td>", "&lt;"]], caption="<c>"))
    assert [element.text for element in root.iter() if element.text] == [
        "<c>",
        "<script>x</script>",
        "a & b",
        "</td>",
        "&lt;",
    ]


def test_many_ranks_are_a_range():
    assert per_rank([1, 2, 3]) == "1:2:3"
    assert per_rank([3, 9, 4, 1, 5], most=4) == "1..9"
    assert per_rank([3.25, 9, 4, 1, 5], "{:g}", most=5) == "3.25:9:4:1:5"


def test_who_differs_is_named_beside_what_most_have():
    columns = {"jax": list("aaba"), "flax": list("cccc"), "seed": list("0001")}
    odd = odd_ones(columns, processes=[0, 2, 5, 7], beside={"host": ["n0", "n2", "n5", "n7"]})
    assert (odd.processes, odd.majority) == ((5, 7), {"jax": "a", "seed": "0"})
    rows = [line.split() for line in odd.table.splitlines()]
    assert rows == [
        ["process", "host", "jax", "seed"],
        ["most", "a", "0"],
        ["5", "n5", "b", "0"],
        ["7", "n7", "a", "1"],
    ]


def test_the_first_wins_a_tie_and_many_are_counted():
    odd = odd_ones({"seed": ["1"] * 10 + ["0"] * 10}, range(20), most=3)
    assert (odd.processes, odd.majority) == (tuple(range(10, 20)), {"seed": "1"})
    assert odd.table.splitlines()[-2:] == ["  12       0", "  and 7 more"]


def test_nobody_differs():
    assert odd_ones({"seed": ["1", "1"]}, [0, 1], {"host": ["a", "b"]}) == ((), {}, "")


def test_a_type_has_its_article():
    assert [type_of(value) for value in (1, {}, iter([]), None)] == ["an int", "a dict", "a list_iterator", "None"]


@pytest.mark.parametrize(
    "name", ["an Adam", "an IterableDataset", "an UnpackedBatches", "a UserDict", "a UnitSet", "a OneHot", "a Batches"]
)
def test_an_article_follows_the_sound_of_the_name(name):
    assert type_of(type(name.split()[1], (), {})()) == name


def test_arrays_are_brief_and_numbers_of_numpy_are_shown():
    assert brief(np.zeros((2, 3), np.float32)) == "float32[2, 3]"
    assert brief([np.float64(1.5), np.zeros(1)]) == "[np.float64(1.5), float64[1]]"
    assert brief((np.float32, np.ndarray)) == "(<class 'numpy.float32'>, <class 'numpy.ndarray'>)"
