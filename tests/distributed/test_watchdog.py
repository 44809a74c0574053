"""Heartbeats and the hang timeout."""

import contextlib
import faulthandler
import os
import signal
import threading

import pytest

from jaxche.distributed import EVENTS, HANG_TIMEOUT, HEARTBEAT, delayed_interrupt, hang_timeout, on_sigterm
from jaxche.distributed._watchdog import Watchdog


def test_a_heartbeat_that_cannot_be_given_is_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(HEARTBEAT, str(tmp_path / "gone" / "0"))
    watchdog = Watchdog()
    watchdog.heartbeat()
    watchdog.heartbeat()
    told = capsys.readouterr().err
    assert told == f"{HEARTBEAT}={tmp_path}/gone/0: No such file or directory; the run continues without it\n"
    (tmp_path / "gone").mkdir()
    watchdog.heartbeat()
    assert (tmp_path / "gone" / "0").exists()


def test_who_waits_gives_no_heartbeat_before_its_first_round(tmp_path, monkeypatch):
    monkeypatch.setenv(HEARTBEAT, str(tmp_path / "0"))
    watchdog = Watchdog()
    watchdog.heartbeat_while_waiting()
    assert not (tmp_path / "0").exists()
    watchdog.heartbeat()
    (tmp_path / "0").unlink()
    watchdog.heartbeat_while_waiting()
    assert (tmp_path / "0").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_file_of_events_is_reported_once(monkeypatch, capsys):
    monkeypatch.setenv(EVENTS, "/dev/full")
    watchdog = Watchdog()
    for _ in range(2):
        watchdog.write_events(["{}"])
    assert capsys.readouterr().err == f"{EVENTS}=/dev/full: No space left on device; the run continues without it\n"


def test_what_ends_in_time_is_let_go_also_by_an_error(monkeypatch):
    """tests/multiprocess has one that does not, and is ended."""
    calls = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: calls.append(seconds))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("cancel"))
    monkeypatch.setenv(HANG_TIMEOUT, "2")
    with contextlib.suppress(KeyError), hang_timeout():
        raise KeyError
    with hang_timeout():
        calls.append("a round")
    assert calls == [2.0, "cancel", 2.0, "a round", "cancel"]


def test_an_interrupt_waits_for_the_end_of_its_context_but_not_a_second_one():
    before, reached = signal.getsignal(signal.SIGINT), []

    def interrupted(times):
        with delayed_interrupt():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
                reached.append(times)

    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            interrupted(times)
        assert signal.getsignal(signal.SIGINT) == before
    assert reached == [1, 2]
    interrupted(0)


def test_a_thread_gets_no_signals():
    called = []

    def work():
        before = signal.getsignal(signal.SIGTERM)
        with on_sigterm(lambda: called.append("action")):
            called.append(signal.getsignal(signal.SIGTERM) == before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert called == [True]
