"""Failing together, seen from one process; tests/multiprocess does it with real ones."""

import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import pytest

from jaxche.distributed import Group, PeerLostError, RankError, _group


def groups(store, size):
    """The groups of all processes of a run."""
    return [Group(SimpleNamespace(process_id=i, num_processes=size, client=store)) for i in range(size)]


def test_all_processes_gather_all_values_in_their_order(store):
    size = 12

    def gather(group):
        return [group.all_gather([call, group.process_index]) for call in range(20)]

    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(gather, groups(store, size)):
            assert found == [[[call, i] for i in range(size)] for call in range(20)]
    assert len(store.key_value_dir_get("")) == size  # the last call


def test_the_last_process_reads_all_values_at_once(store):
    """One read for each would be N² of N processes."""
    for i in range(99):
        store.key_value_set(f"jaxche/all_gather/0/0/{i}", json.dumps(i))
    assert Group(SimpleNamespace(process_id=99, num_processes=100, client=store)).all_gather(99) == list(range(100))
    assert store.reads == 2


@pytest.mark.parametrize(
    ("calls", "errors"),
    [
        (
            [
                lambda one: one.raise_everywhere(None, 0, "the start of fit"),
                lambda one: one.raise_everywhere(None, 1, "x"),
            ],
            [
                (RankError, "process 0 is in the start of fit, and process 1 in x: all"),
                (RankError, "process 1 is in x"),
            ],
        ),
        (
            [lambda one: one.all_gather(3), lambda one: one.raise_everywhere(None, 1, "x")],
            [(RankError, "is in another call, and process 1 in x: all"), (RankError, "and process 0 in another call")],
        ),
        (
            [lambda one: one.raise_everywhere(OSError("disk"), 0, "y"), lambda one: one.raise_everywhere(None, 1, "x")],
            [(OSError, "disk"), (RankError, "process 1 is in x, and process 0 in y: all")],
        ),
    ],
)
def test_processes_in_different_calls_say_in_which_and_own_errors_come_first(calls, errors, store):
    """What each sends would mean something else to the others."""
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(call, one) for call, one in zip(calls, groups(store, 2), strict=True)]
    for future, (kind, message) in zip(found, errors, strict=True):
        with pytest.raises(kind, match=message):
            future.result()


def test_own_error_is_raised_as_it_is_with_its_place():
    with pytest.raises(OSError, match="disk") as caught, Group().errors_everywhere(3, "round 7"):
        raise OSError("disk")
    assert "rank 3 in round 7" in caught.value.__notes__[0]


def test_an_error_elsewhere_is_told_with_its_traceback(monkeypatch):
    report = {"rank": 1, "kind": "OSError", "message": "disk", "trace": "line 3"}
    monkeypatch.setattr(Group, "all_gather", lambda self, own, place="": [own, report])
    message = "rank 1 failed in round 2 with OSError: disk"
    with pytest.raises(RankError, match=message) as caught, Group().errors_everywhere(0, "round 2"):
        pass
    assert caught.value.rank == 1
    assert "line 3" in str(caught.value)


def test_an_error_goes_to_another_process():
    error = RankError("rank 3 failed", rank=3)
    error.add_note("in round 7")
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(copied), str(copied), copied.rank, copied.__notes__) == (
            RankError,
            "rank 3 failed",
            3,
            ["in round 7"],
        )


def test_a_report_stays_small_whatever_the_error_says(monkeypatch):
    sent = []
    monkeypatch.setattr(Group, "all_gather", lambda self, own, place="": sent.append(own) or [own])
    with pytest.raises(OSError, match="é"):
        Group().raise_everywhere(OSError("é" * 9999), 123456, "round 7")
    assert len(json.dumps(sent[0])) < 20_000


@pytest.fixture
def pair(monkeypatch, store):
    monkeypatch.setattr(_group, "_POLL_MS", 20)
    monkeypatch.setattr(_group, "_TIMEOUT_MS", 20_000)  # a wait that no test should see the end of
    return groups(store, 2)


def test_a_process_that_has_left_is_not_waited_for(pair):
    zero, one = pair
    one.leave()
    with pytest.raises(RankError, match=r"process 1 has ended its script.*same calls of fit, evaluate") as caught:
        zero.barrier()
    assert caught.value.rank == 1


def test_what_a_process_sent_before_it_left_is_read(pair, monkeypatch):
    zero, one = pair

    one.leave()
    left = one.client.key_value_dir_get("jaxche/left/")

    def late(*_):  # set between the wait for it and the check
        one.client.key_value_set("key", "value", allow_overwrite=True)
        return left

    monkeypatch.setattr(one.client, "key_value_dir_get", late)
    assert zero.receive("key", 1) == "value"


def test_a_process_in_a_merge_that_this_one_has_not_begun_is_not_waited_for(pair):
    zero, one = pair
    with zero.collective(), one.collective():  # a merge of both
        pass
    with one.collective(), pytest.raises(RankError, match="process 1 is in the merge of a round") as caught:
        zero.barrier()
    assert caught.value.rank == 1


def test_a_process_in_the_merge_of_this_one_is_waited_for(pair):
    """As the thread of a replica waits for a flag while another thread merges."""
    zero, one = pair
    with ThreadPoolExecutor(1) as pool, zero.collective(), one.collective():
        found = pool.submit(zero.receive, "key", 1)
        while not one.client.key_value_dir_get("jaxche/merging/1"):
            pass
        reads = one.client.reads
        while one.client.reads < reads + 9 and not found.done():  # until it has read that
            pass
        one.client.key_value_set("key", "value")
        assert found.result() == "value"


def test_a_long_wait_is_logged_once(pair, monkeypatch, caplog):
    zero, one = pair
    monkeypatch.setattr(_group, "_LOG_S", 0.0)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(zero.all_gather, 0)
        while one.client.reads < 2:  # until it has checked
            pass
        one.all_gather(1)
        assert found.result() == [0, 1]
    (record,) = caplog.records
    assert "has waited 0 s for process 1, which may compile" in record.getMessage()


def test_a_value_that_is_handed_on_leaves_no_key(store):
    size = 3

    def relay(group):
        return [group.relay([2, 0], lambda value: [*(value or []), group.process_index]) for _ in range(5)]

    with ThreadPoolExecutor(size) as pool:
        assert list(pool.map(relay, groups(store, size))) == [[[2, 0]] * 5] * size
    assert len(store.key_value_dir_get("")) == size  # the last all-gather


def test_another_error_of_the_store_than_a_timeout_is_raised():
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"), _group.suppress_timeout():
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: the coordinator is gone")


def test_a_wait_for_a_process_has_an_end(pair, monkeypatch):
    monkeypatch.setattr(_group, "_TIMEOUT_MS", 0)
    with pytest.raises(TimeoutError, match="process 1 did not set key within 0 s"):
        pair[0].receive("key", 1)


@pytest.mark.parametrize("all_end", [True, False])
def test_whether_the_others_end_too(pair, all_end):
    def wait_at_barrier(name, timeout_ms):
        if not all_end:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    pair[0].client.wait_at_barrier = wait_at_barrier
    assert pair[0].ends_together() == all_end


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (ValueError("an argument"), False),
        (ValueError("Gloo all-reduce failed"), True),
        (jax.errors.JaxRuntimeError("INTERNAL"), True),
    ],
)
def test_which_errors_of_a_program_are_those_of_a_lost_process(pair, error, is_lost):
    with pytest.raises(PeerLostError if is_lost else type(error), match=str(error)), pair[0].collective():
        raise error
    with pytest.raises(type(error)), Group(SimpleNamespace(num_processes=1)).collective():
        raise error
