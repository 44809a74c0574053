"""Who is waited for at the end of an elastic run, with the look at who lives played here."""

import pytest

from jaxche.distributed import _group as module
from jaxche.distributed import _liveness as lives
from jaxche.distributed import farewell

BEGINNING = {0: 10, 1: 11, 2: 12}


@pytest.fixture
def leave(monkeypatch):
    """Leaves as a process of a run; gives how many seconds it took. ``looks`` are the lives seen, one after another."""

    def leaving(process, looks, members=None):
        seconds, seen = [0.0], iter(looks)
        monkeypatch.setattr(module.time, "monotonic", lambda: seconds[0])
        monkeypatch.setattr(module.time, "sleep", lambda s: seconds.__setitem__(0, seconds[0] + s))
        monkeypatch.setattr(module, "_members", members)
        now = [next(seen)]

        def lost(expected):
            gone = [other for other, life in expected.items() if now[0].get(other) != life]
            now[0] = next(seen, now[0])
            return gone

        monkeypatch.setattr(module, "lost", lost)
        monkeypatch.setattr(module, "lives", lambda: now[0])
        for name, value in {"process_id": process, "num_processes": 3, "client": object()}.items():
            monkeypatch.setattr(module._jax_distributed.global_state, name, value)
        farewell()
        return seconds[0]

    return leaving


def test_process_0_stays_while_others_live_but_not_for_ever(leave):
    looks = [BEGINNING] * 50 + [{0: 10, 2: 12}] * 50 + [{0: 10}]
    assert leave(0, looks) == pytest.approx(100 * module._LOOK_S)
    assert module._FAREWELL_S <= leave(0, [BEGINNING]) < module._FAREWELL_S + 1


def test_it_does_not_wait_for_who_took_a_place_too_late(leave):
    assert leave(0, [BEGINNING | {1: 99}, {0: 10, 1: 99}], members=BEGINNING) == pytest.approx(module._LOOK_S)


def test_the_others_leave_at_once(leave):
    assert leave(1, [BEGINNING]) == 0


def test_one_that_begins_to_live_between_two_looks_does_not_end_the_watch():
    told = {lives._LIVES: {"0": "1"}, lives._BEATS: {"0": "7"}}

    class Store:
        def key_value_dir_get(self, place):
            seen = [(place + process, text) for process, text in told[place].items()]
            told[lives._LIVES]["1"], told[lives._BEATS]["1"] = "1", "1"  # right after
            return seen

    watch = object.__new__(lives._Watch)
    watch._client, watch._heard, watch._looked = Store(), {}, 0.0
    watch._look()
    watch._look()
    assert {process: heard[:2] for process, heard in watch._heard.items()} == {0: (1, "7"), 1: (1, "1")}
