"""What a fit tells those who watch over it must not end it."""

import os

import pytest

from jaxche.training import EVENTS, HEARTBEAT, _watched
from jaxche.training._watched import beat, tell


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(_watched, "_warned", set())


def test_a_heartbeat_that_cannot_be_given_is_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(HEARTBEAT, str(tmp_path / "gone" / "0"))
    beat()
    beat()
    told = capsys.readouterr().err
    assert told == f"{HEARTBEAT}={tmp_path}/gone/0: No such file or directory; the run goes on without it\n"
    (tmp_path / "gone").mkdir()
    beat()
    assert (tmp_path / "gone" / "0").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_file_of_events_is_told_once(monkeypatch, capsys):
    monkeypatch.setenv(EVENTS, "/dev/full")
    monkeypatch.setattr(_watched, "event", lambda info, rank, merged_bytes: {"rank": rank})
    for _ in range(2):
        tell(None, [0, 1], 8)
    assert capsys.readouterr().err == f"{EVENTS}=/dev/full: No space left on device; the run goes on without it\n"
