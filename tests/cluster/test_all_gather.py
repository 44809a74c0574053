"""The all-gather of texts."""

import pytest

from jaxche.cluster import share


def test_timeout(service):
    client = service("hosts", {0: "n0"})
    assert share("hosts", 1, 2, "n1", 7.5, client) == ["n0", "n1"]
    assert client.waits == [7500, 7500]


def test_missing_processes_are_named(service):
    silent = service("hosts", {0: "n0"}, RuntimeError("DEADLINE_EXCEEDED"))
    with pytest.raises(TimeoutError, match=r"process 2 joined, but sent nothing for .hosts. within 0 s"):
        share("hosts", 1, 3, "n1", 0.1, silent)


def test_a_process_outside_of_a_run_has_its_own_text():
    assert share("hosts", 0, 1, "node1", timeout_s=60) == ["node1"]


def test_names_are_separate(service):
    assert share("hosts", 0, 1, "n0", 1.0, service("hosts/of", {0: "other"})) == ["n0"]
