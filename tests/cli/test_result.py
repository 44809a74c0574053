"""Lines and tables of results."""

import pytest

from jaxche.cli._progress import round_header, round_line
from jaxche.cli._result import Result, table


def result(policy="cadence", seconds=10.0, ranks=2, **more):
    values = {
        "policy": policy,
        "test": {"accuracy": 0.971},
        "seconds": seconds,
        "examples": 22400,
        "batches": 630,
        "rates": (50.0, 20.0)[:ranks] if ranks <= 2 else (10.0,) * ranks,
        "wait_ms": (100.0, 500.0)[:ranks] if ranks <= 2 else tuple(range(ranks)),
        "sync_ms": 200.0,
        "rounds": 50,
        "merges": 50 if ranks > 1 else 0,
    }
    return Result(**(values | more))


@pytest.fixture
def info(round_info):
    """Makes a late and long round, of numbers as wide as they come."""

    def make(world, steps=10):
        wall_ms = tuple(1000.0 + rank for rank in range(world))
        return round_info((steps,) * world, round=123456, epoch=99, wall_ms=wall_ms, sync_ms=12345.6, loss=0.5)

    return make


def test_derived_numbers():
    r = result()
    assert r.examples_per_second == 2240
    assert r.efficiency == pytest.approx(0.9)
    assert r.wait_share == pytest.approx((0.01, 0.05))
    assert r.sync_share == pytest.approx(0.02)
    assert r.to_dict()["efficiency"] == r.efficiency
    assert Result.from_dict(r.to_dict()) == r
    assert (
        Result.from_dict({name: x for name, x in r.to_dict().items() if name != "memory"}) == r
    )  # of an older version


def test_one_policy():
    text = table([result()], "accuracy")
    rows = {line[:22].strip(): line[22:].strip() for line in text.splitlines()}
    assert rows["test accuracy"] == "97.1 %"
    assert rows["efficiency"] == "90.0 %"
    assert rows["their sum"] == "70.0"
    assert rows["wait of each rank"] == "1.0:5.0 %"


def test_policies_side_by_side_with_ratios_to_the_first():
    results = [result("sync", 20.0), result("cadence", 10.0), result("async", 8.0)]
    text = table(results, "accuracy")
    lines = text.splitlines()
    assert lines[0].split() == ["sync", "cadence", "async", "cadence", "/", "sync", "async", "/", "sync"]
    assert next(line for line in lines if line.startswith("training time")).split()[-4:] == ["x", "0.50", "x", "0.40"]
    assert all(len(line) <= 100 for line in lines)


def test_one_replica_has_no_wait():
    text = table([result(ranks=1)], "accuracy")
    assert "wait" not in text
    assert "their sum" not in text


@pytest.mark.parametrize("world", [1, 2, 4, 64])
def test_width_of_lines(world, info):
    assert len(round_line(info(world, steps=200))) <= 100
    assert len(round_header(world)) == len(round_line(info(world)))
    assert all(len(line) <= 100 for line in table([result(ranks=world)], "accuracy").splitlines())


def test_many_ranks_are_shown_as_a_range(info):
    assert " 10:10:10:10 " in round_line(info(4))
    assert " 10..10 " in round_line(info(5))
