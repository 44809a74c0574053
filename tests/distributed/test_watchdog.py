"""Heartbeats and the hang timeout."""

import os
import subprocess
import sys

import pytest

from jaxche.distributed import HANG_TIMEOUT, HEARTBEAT, _watchdog
from jaxche.distributed._watchdog import beat, beat_again


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(_watchdog, "_warned", set())


def test_a_heartbeat_that_cannot_be_given_is_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(HEARTBEAT, str(tmp_path / "gone" / "0"))
    beat()
    beat()
    told = capsys.readouterr().err
    assert told == f"{HEARTBEAT}={tmp_path}/gone/0: No such file or directory; the run goes on without it\n"
    (tmp_path / "gone").mkdir()
    beat()
    assert (tmp_path / "gone" / "0").exists()


def test_who_waits_gives_no_heartbeat_before_its_first_round(tmp_path, monkeypatch):
    monkeypatch.setenv(HEARTBEAT, str(tmp_path / "0"))
    monkeypatch.setattr(_watchdog, "_moved", False)
    beat_again()
    assert not (tmp_path / "0").exists()
    beat()
    (tmp_path / "0").unlink()
    beat_again()
    assert (tmp_path / "0").exists()


ENDS = """
import contextlib, time
from jaxche.distributed._watchdog import in_time

for _ in range(3):
    with contextlib.suppress(KeyError), in_time():
        raise KeyError
    with in_time():
        pass
time.sleep(3)
print("lives")
"""


def test_what_ends_in_time_is_let_go_also_by_an_error():
    env = os.environ | {HANG_TIMEOUT: "2"}
    done = subprocess.run([sys.executable, "-c", ENDS], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "lives\n"
