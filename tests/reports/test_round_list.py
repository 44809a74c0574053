"""A list of rounds that keeps all but the newest as bytes, against a plain list."""

import copy
import math
import operator
import pickle
import tracemalloc
from dataclasses import dataclass, replace

import pytest

import jaxche.reports._round_list as round_list
from jaxche.reports import History, RoundInfo
from jaxche.reports._round_list import packed, unpacked


@pytest.fixture
def rounds(round_info, monkeypatch):
    """Ten rounds, of which a list keeps the last three as they are."""
    monkeypatch.setattr(round_list, "UNPACKED", 3)
    return [
        round_info(round=r, loss=1.0 / (1 + r), noise=math.nan, losses=(math.nan, -0.0), metrics={"accuracy": r / 10})
        for r in range(10)
    ]


def stored(history):
    """Whether each item of a list is bytes."""
    return [isinstance(item, bytes) for item in list.__iter__(history)]


def test_old_rounds_are_stored_as_bytes(rounds):
    history = History()
    for number, info in enumerate(rounds):
        history.append(info)
        assert history[-1] is info
        assert stored(history) == [place < number - 2 for place in range(number + 1)]
    again = pickle.loads(pickle.dumps(history))
    copies = [copy.copy(history), copy.deepcopy(history), history.copy(), again]
    for other in (History(rounds), History(history), history[:5] + rounds[5:], *copies):
        assert stored(other) == stored(history)


def test_all_reads_give_the_rounds_of_a_plain_list(rounds, told):
    history = History(rounds, [{"rank": 0}])
    assert len(history) == 10
    assert [type(info) for info in history] == [RoundInfo] * 10
    for read in (
        list,
        lambda h: [*reversed(h)],
        lambda h: [h[i] for i in range(-10, 10)],
        lambda h: list(h[2:9:3]),
        lambda h: list(h[::-1]),
        lambda h: list(h + h[:2]),
        lambda h: list(h[:2] + list(h)),
        lambda h: list(h) + h[1:3],
        lambda h: h * 2,
        lambda h: 2 * h,
        lambda h: sorted(h, key=lambda info: info.loss),
        lambda h: [copy.copy(h)[0], copy.deepcopy(h)[0], pickle.loads(pickle.dumps(h))[0]],
        lambda h: [h.copy().pop(0), h.copy().pop()],
    ):
        found, expected = read(history), read(rounds)
        assert type(found) is list
        assert told(found) == told(expected)
        assert found == expected
    first, *rest = history
    assert (first, rest) == (rounds[0], rounds[1:])
    assert history[2:5].memory == history.copy().memory == history.memory
    for one, other in zip(history, rounds, strict=True):
        assert list(vars(one)) == list(vars(other))
        assert list(map(type, vars(one).values())) == list(map(type, vars(other).values()))
        assert replace(one, loss=7.0) == replace(other, loss=7.0)


def test_comparisons_and_searches_are_those_of_the_rounds(rounds):
    history, other = History(rounds), replace(rounds[1], loss=-1.0)
    assert history == rounds
    assert rounds == history
    assert history == History(rounds)
    assert history == [*map(copy.deepcopy, rounds)]
    for unequal in (rounds[:9], [rounds[0], other, *rounds[2:]], History([rounds[0], other, *rounds[2:]]), History()):
        assert history != unequal
        assert unequal != history
    assert rounds[1] in history
    assert other not in history
    assert (history.index(copy.deepcopy(rounds[1])), history.count(rounds[1]), history.count(other)) == (1, 1, 0)
    for both in ((history, (1,)), ((1,), history)):
        with pytest.raises(TypeError):
            operator.add(*both)


def test_changes_are_those_of_a_plain_list(rounds):
    history, plain = History(rounds), list(rounds)
    for change in (
        lambda h: h.__setitem__(1, rounds[8]),
        lambda h: h.__setitem__(slice(2, 4), rounds[:3]),
        lambda h: h.insert(0, rounds[3]),
        lambda h: h.__delitem__(4),
        lambda h: h.remove(copy.deepcopy(rounds[5])),
        lambda h: h.extend(h),
        lambda h: h.__iadd__(rounds[:2]),
        lambda h: h.__imul__(2),
        lambda h: h.sort(key=lambda info: info.loss, reverse=True),
        lambda h: h.reverse(),
        lambda h: h.__delitem__(slice(None, None, 2)),
        lambda h: h.extend(iter(rounds)),
        lambda h: h.clear(),
    ):
        change(history)
        change(plain)
        assert history == plain
        assert list(history) == plain
    history += History(rounds)
    assert type(history) is History
    assert stored(history) == [True] * 7 + [False] * 3


def test_numbers_tables_and_files_are_those_of_plain_rounds(rounds, monkeypatch):
    history = History(rounds)
    monkeypatch.setattr(round_list, "UNPACKED", 100)
    plain = History(rounds)
    assert not any(stored(plain))
    assert repr(history) == repr(plain)
    assert history._repr_html_() == plain._repr_html_()
    assert history.to_json() == plain.to_json()
    assert repr(history.rows()) == repr(plain.rows())
    assert (history.seconds, history.efficiency) == (plain.seconds, plain.efficiency)
    assert history.last_ranks == plain.last_ranks
    for one, other in zip(history.plot().axes, plain.plot().axes, strict=True):
        assert [repr(line.get_xydata()) for line in one.lines] == [repr(line.get_xydata()) for line in other.lines]


def test_rounds_with_other_values_are_kept_as_they_are(round_info):
    @dataclass(frozen=True, repr=False, eq=False)
    class Named(RoundInfo):
        name: str = "mine"

    extended = round_info()
    vars(extended)["note"] = "mine"
    for info in (Named(**vars(round_info())), extended, round_info(metrics={"f": lambda: 0}), "a round"):
        assert packed(info) is info
        assert unpacked(info) is info


def test_a_long_history_takes_few_bytes(round_info, monkeypatch):
    """More than 2.5 KB a round as objects."""
    monkeypatch.setattr(round_list, "UNPACKED", 10)
    tracemalloc.start()
    try:
        history = History()
        for r in range(2000):
            history.append(round_info(round=r, clock_ms=0.5 * r, wall_ms=(0.25 * r, 0.125 * r)))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken / len(history) < 600
