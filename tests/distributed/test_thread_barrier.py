"""Threads of several processes wait for each other, over a store that is a dict, until one of them gives up."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from jaxche.distributed import Group, PeerLostError
from jaxche.distributed._thread_barrier import ThreadBarrier


@pytest.fixture
def barriers(store):
    """The barriers of three processes."""
    states = [SimpleNamespace(process_id=i, num_processes=3, client=store) for i in range(3)]
    return [Group(state).thread_barrier("save") for state in states]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_nobody_goes_on_before_all_are_there_and_keys_are_used_again(barriers, pool, store):
    for _ in range(2):
        early = [pool.submit(one.wait, key, 60_000) for one in barriers[:2] for key in ("write", "commit")]
        assert not any(future.done() for future in early)
        barriers[2].wait("commit", 60_000)
        barriers[2].wait("write", 60_000)
        assert [future.result() for future in early] == [None] * 4
    for one in barriers:
        one.close()
    assert not store.key_value_dir_get("jaxche/")


def test_one_that_gives_up_ends_the_waits_of_all_and_those_to_come(barriers, pool, store):
    early = pool.submit(barriers[0].wait, "write", 60_000)
    barriers[1].abort()
    with pytest.raises(threading.BrokenBarrierError, match="aborted before all processes reached write"):
        early.result()
    for one in barriers:
        with pytest.raises(threading.BrokenBarrierError):
            one.wait("commit", 60_000)
    for one in barriers:
        one.close()
    assert not store.key_value_dir_get("jaxche/")


def test_the_end_of_the_time_and_a_death_are_told(barriers, store):
    with pytest.raises(TimeoutError):
        barriers[0].wait("write", 60)

    def receive(key, process, timeout_ms):
        raise PeerLostError(f"process {process} died")

    with pytest.raises(PeerLostError, match="process 1 died"):
        ThreadBarrier(store, "jaxche/save/0", 0, [1], receive).wait("commit", 60_000)
