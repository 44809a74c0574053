"""Streams over real processes: each reads its own, or all read the same; each batch once, also after a restart."""

import json
import sys
from pathlib import Path

import pytest

from jaxche.cluster import launch

PROGRAM = Path(__file__).with_name("streams.py")
pytestmark = pytest.mark.usefixtures("forked")
SHARDS, EQUAL = (11, 5), 13


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    code = launch([sys.executable, str(PROGRAM), str(folder)], 2, env={"PYTHONWARNINGS": "error"})
    assert code == 0
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(2)]


def own_ids(process, epochs=2):
    return [100_000 * process + 1000 * epoch + i for epoch in range(epochs) for i in range(SHARDS[process])]


def equal_ids(epochs=2):
    return [700_000 + 1000 * epoch + i for epoch in range(epochs) for i in range(EQUAL)]


def alike(one):
    return {name: value for name, value in one.items() if name != "found"}


def test_each_process_trains_on_its_own_stream_in_order(results):
    for process, result in enumerate(results):
        assert result["own"]["found"] == own_ids(process)
        assert result["own"]["place"] == [2, 0, None]
        assert result["sync"] == own_ids(process, epochs=1)
    assert alike(results[0]["own"]) == alike(results[1]["own"])
    counts = [counts for epoch, _, _, counts, _ in results[0]["own"]["rounds"] if epoch == 0]
    assert counts == [[2, 2], [2, 2], [2, 1], [2, 0], [2, 0], [1, 0]]
    planned = [planned for epoch, _, planned, _, _ in results[0]["own"]["rounds"] if epoch == 0]
    assert planned == [[2, 2], [2, 2], [2, 2], [2, 0], [2, 0], [2, 0]]


def test_the_batches_of_the_processes_may_have_unlike_sizes(results):
    one, other = results
    assert alike(one["unlike"]) == alike(other["unlike"])
    assert one["unlike later"] == other["unlike later"]
    assert one["unlike later"][0] >= 24  # at the first merge after them
    for process, result in enumerate(results):
        found = result["unlike"]["found"]
        assert found == own_ids(process)[: len(found)]


def test_equal_streams_are_divided(results):
    assert sorted(results[0]["equal"]["found"] + results[1]["equal"]["found"]) == equal_ids()
    assert alike(results[0]["equal"]) == alike(results[1]["equal"])
    assert {len(result["equal"]["found"]) for result in results} == {EQUAL + 1, EQUAL - 1}


def test_the_processes_of_one_replica_read_the_same_stream(results):
    for result in results:
        assert result["island"] == equal_ids()
        assert "the processes of one replica need the same ones; write" in result["own island"][1]


@pytest.mark.parametrize(("name", "place"), [("own", [8, 5]), ("own, before", [4, 4]), ("equal", [8])])
def test_a_run_goes_on_bit_for_bit(results, name, place):
    for process, result in enumerate(results):
        first, second = result[f"resumed {name}"]
        assert first["place"][2][0] == place
        assert alike(second) == alike(result[name.split(",")[0]])
        ids = equal_ids() if name == "equal" else own_ids(process)
        found = first["found"] + second["found"]
        if name == "equal":
            assert found == result["equal"]["found"]
        else:
            assert found == ids
    assert f"{place[0]} batches of the stream were read again and skipped" in "\n".join(results[0]["said"])


def test_iterators_with_a_state_are_restored_on_each_process(results):
    for process, result in enumerate(results):
        first, second, log, said = result["restored"]
        taken = first["place"][2][0]
        assert taken == [8, 5]
        assert first["place"][2][1] == [False, True]
        assert first["found"] + second["found"] == own_ids(process, epochs=1)
        assert log == [0, *range(taken[process], SHARDS[process])]
        assert not any("skipped" in text for text in said)
    assert alike(results[0]["restored"][1]) == alike(results[1]["restored"][1])


def test_what_processes_cannot_train_on_is_an_error_on_all(results):
    one, other = (result["refused"] for result in results)
    for name, named in {
        "iterator": "in a run of 2 processes; set shards=",
        "auto": "policy='auto' deals out rows by speed",
        "lengths": "in epoch 0 they ended after {0: 5, 1: 6} batches",
        "batches": "begin with different batches, and shards=False means that all read the same",
        "empty": "no batches in epoch 0; give each process at least one",
        "unequal": "processes differ",
    }.items():
        assert named in one[name][1], name
        assert named in other[name][1], name
    assert one["empty"][0] == "RankError"
    assert other["empty"][0] == "ValueError"


def test_equal_batches_under_shards_are_warned_of(results):
    told = [[text for text in result["warned"] if "read the same first batch" in text] for result in results]
    assert list(map(len, told)) == [1, 0]
