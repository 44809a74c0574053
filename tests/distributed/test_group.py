"""Failing together, seen from one process; tests/multiprocess does it with real ones."""

import json

import pytest

from jaxche.distributed import Group, RankError


def test_own_error_is_raised_as_it_is_with_its_place():
    with pytest.raises(OSError, match="disk") as caught:
        Group().raise_everywhere(OSError("disk"), 3, "round 7")
    assert "rank 3 in round 7" in caught.value.__notes__[0]


def test_no_error_passes():
    Group().raise_everywhere(None, 0, "round 0")


def test_an_error_within_a_context_is_raised_at_its_end():
    with pytest.raises(OSError, match="disk") as caught, Group().errors_everywhere(3, "round 7"):
        raise OSError("disk")
    assert "rank 3 in round 7" in caught.value.__notes__[0]


def test_an_error_elsewhere_ends_a_context(monkeypatch):
    report = {"rank": 1, "kind": "OSError", "message": "disk", "trace": ""}
    monkeypatch.setattr(Group, "all_gather", lambda self, own: [own, report])
    with pytest.raises(RankError, match="rank 1 failed in round 7"), Group().errors_everywhere(0, "round 7"):
        pass


def test_an_error_elsewhere_is_told_with_its_traceback(monkeypatch):
    report = {"rank": 1, "kind": "OSError", "message": "disk", "trace": "line 3"}
    monkeypatch.setattr(Group, "all_gather", lambda self, own: [own, report])
    with pytest.raises(RankError, match="rank 1 failed in round 2 with OSError: disk") as caught:
        Group().raise_everywhere(None, 0, "round 2")
    assert caught.value.rank == 1
    assert "line 3" in str(caught.value)


def test_a_report_stays_small_whatever_the_error_says(monkeypatch):
    sent = []
    monkeypatch.setattr(Group, "all_gather", lambda self, own: sent.append(own) or [own])
    with pytest.raises(OSError, match="é"):
        Group().raise_everywhere(OSError("é" * 9999), 123456, "round 7")
    assert len(json.dumps(sent[0])) < 20_000
