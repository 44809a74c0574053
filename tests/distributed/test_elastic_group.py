"""The processes that process 0 waits for at exit; liveness and the clock are played here."""

from types import SimpleNamespace

import pytest

from jaxche.distributed import _elastic_group as module

BEGINNING = {0: 10, 1: 11, 2: 12}


@pytest.fixture
def leave(monkeypatch):
    """Leaves as a process of a run; gives how many seconds it took. ``looks`` are the processes alive, in time."""

    def leaving(process, looks, members=None):
        seconds, seen = [0.0], iter(looks)
        monkeypatch.setattr(module.time, "monotonic", lambda: seconds[0])
        monkeypatch.setattr(module.time, "sleep", lambda s: seconds.__setitem__(0, seconds[0] + s))
        now = [next(seen)]

        class Liveness:
            def __init__(self, state, watchdog):
                self.stopped = False

            def lost(self, expected):
                gone = [other for other, incarnation in expected.items() if now[0].get(other) != incarnation]
                now[0] = next(seen, now[0])
                return gone

            def alive(self):
                return now[0]

            def stop(self):
                self.stopped = True

        monkeypatch.setattr(module, "Liveness", Liveness)
        group = module.ElasticGroup(SimpleNamespace(process_id=process, num_processes=3, client=object()))
        group._incarnations = members
        group.leave()
        assert group._liveness.stopped
        return seconds[0]

    return leaving


def test_process_0_stays_while_others_live_but_not_for_ever(leave):
    looks = [BEGINNING] * 50 + [{0: 10, 2: 12}] * 50 + [{0: 10}]
    assert leave(0, looks) == pytest.approx(100 * module._POLL_S)
    assert module._EXIT_TIMEOUT_S <= leave(0, [BEGINNING]) < module._EXIT_TIMEOUT_S + 1


def test_it_does_not_wait_for_a_standby_process(leave):
    assert leave(0, [BEGINNING | {1: 99}, {0: 10, 1: 99}], members=BEGINNING) == pytest.approx(module._POLL_S)


def test_the_others_leave_at_once(leave):
    assert leave(1, [BEGINNING]) == 0
