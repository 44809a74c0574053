"""Heartbeats of ranks."""

import pytest

from jaxche.cluster import _heartbeat as module
from jaxche.cluster._heartbeat import Heartbeats


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_timeout_since_start_or_last_heartbeat(tmp_path, clock):
    paths = [tmp_path / "0", tmp_path / "1"]
    beats = Heartbeats(paths, timeout_s=10.0)
    clock[0] += 9
    assert beats.hang_report() is None
    paths[1].touch()
    assert beats.hang_report() is None
    clock[0] += 9
    assert beats.hang_report() is None
    paths[1].unlink()  # a file written again is a beat too
    paths[1].touch()
    paths[0].touch()
    assert beats.hang_report() is None
    clock[0] += 5
    paths[0].unlink()
    paths[0].touch()
    assert beats.hang_report() is None
    clock[0] += 10
    assert beats.hang_report() == "rank 0 10 s ago, rank 1 15 s ago"


def test_no_heartbeat_is_a_hang(tmp_path, clock):
    beats = Heartbeats([tmp_path / "0"], timeout_s=10.0)
    clock[0] += 10
    assert beats.hang_report() == "rank 0 never"


def test_timeout_of_one_rank(tmp_path, clock):
    paths = [tmp_path / name for name in "012"]
    beats = Heartbeats(paths, timeout_s=1e9, rank_timeout_s=10.0)
    for _ in range(3):  # the last never speaks: it may still compile
        for path in paths[:2]:
            path.unlink(missing_ok=True)
            path.touch()
        assert beats.hung() == []
        clock[0] += 5
    clock[0] += 50
    assert beats.hung() == []  # all are silent
    paths[1].unlink()
    paths[1].touch()
    assert beats.hung() == [0]
    assert beats.hung(run_over=True) == [0]
    clock[0] += 11
    assert beats.hung(run_over=True) == [0, 1]
    beats.forget(0)  # another starts in its place
    clock[0] += 50
    paths[1].unlink()
    paths[1].touch()
    assert beats.hung() == []
