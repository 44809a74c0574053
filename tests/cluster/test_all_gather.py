"""The all-gather of JSON values."""

import pytest

from jaxche.cluster import all_gather


def test_timeout(service):
    state = service(1, 2, "hosts", {0: '"n0"'})
    assert all_gather("hosts", "n1", 7.5) == ["n0", "n1"]
    assert state.waits == [7500, 7500]


def test_missing_processes_are_named(service):
    service(1, 3, "hosts", {0: '"n0"'}, RuntimeError("DEADLINE_EXCEEDED"))
    with pytest.raises(TimeoutError, match=r"process 2 joined, but sent nothing for .hosts. within 0 s"):
        all_gather("hosts", "n1", 0.1)


def test_names_are_separate(service):
    service(0, 1, "hosts/of", {0: '"other"'})
    assert all_gather("hosts", "n0", 1.0) == ["n0"]
