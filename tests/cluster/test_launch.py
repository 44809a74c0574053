"""The ranks of the next start after a failure."""

import errno
import signal
import subprocess
import threading
from types import SimpleNamespace

import pytest

from jaxche.cluster import _launch, _worker_group, launch
from jaxche.cluster._launch import next_placements
from jaxche.cluster._placement import Placement

ZERO, ONE, TWO = (Placement(core=core, pace_ms=pace) for core, pace in ((0, 20.0), (0, 20.0), (1, 50.0)))


def test_removal_after_two_failures_in_a_row():
    placements = [ZERO, ONE, TWO]
    placements, blamed = next_placements(placements, 1, None, survivors=True)
    assert len(placements) == 3
    # Another one fails: the count begins again.
    placements, blamed = next_placements(placements, 0, blamed, survivors=True)
    assert len(placements) == 3
    assert blamed == 0
    placements, blamed = next_placements(placements, 0, blamed, survivors=True)
    # Equal placements on one core are different placements: the other stays.
    assert [placement is other for placement, other in zip(placements, (ONE, TWO), strict=True)] == [True, True]
    assert blamed is None


def test_no_removal_of_the_last_process_or_without_survivors():
    assert next_placements([ONE], 0, 0, survivors=True)[0] == [ONE]
    assert next_placements([ZERO, ONE], 0, 0, survivors=False)[0] == [ZERO, ONE]


def test_a_hang_removes_no_rank():
    assert next_placements([ZERO, TWO], None, 1, survivors=True) == ([ZERO, TWO], None)


def test_the_time_without_a_heartbeat_reaches_the_ranks(monkeypatch):
    given = []
    monkeypatch.setattr(
        "jaxche.cluster._launch._supervise", lambda context, placements, base, *more: given.append(base)
    )
    launch(["true"], 2, env={"JAX_PLATFORMS": "cpu"}, elastic=True, heartbeat_timeout_s=5)
    assert (given[0]["JAXCHE_HEARTBEAT_TIMEOUT"], given[0]["JAXCHE_ELASTIC"]) == ("5", "1")


def test_a_launch_from_a_thread_leaves_signals_alone():
    found = []

    def work():
        before = signal.getsignal(signal.SIGTERM)
        with _launch._signals() as received:
            found.append((received.empty(), signal.getsignal(signal.SIGTERM) == before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(True, True)]


def test_a_system_without_memory_for_a_process_is_no_wrong_command(monkeypatch):
    def fails(*args, **options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    failing = SimpleNamespace(Popen=fails, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    monkeypatch.setattr(_worker_group, "subprocess", failing)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        launch(["true"], 1, env={"JAX_PLATFORMS": "cpu"})
