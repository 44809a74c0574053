"""XLA flags."""

import pytest

from jaxche.cluster import _xla_flags
from jaxche.cluster._xla_flags import MIXED_FLAGS, PROCESS_FLAGS, elastic_flags, with_flags


def test_user_flags_take_precedence():
    mine = "--xla_cpu_collective_timeout_seconds=9"
    flags = with_flags(f"--a=1 {mine}", PROCESS_FLAGS).split()
    assert flags[:2] == ["--a=1", mine]
    assert len(flags) == 1 + len(PROCESS_FLAGS)
    assert with_flags(" ".join(flags), PROCESS_FLAGS).split() == flags


def test_a_flag_file_is_unchanged():
    assert with_flags("/home/me/flags.txt", PROCESS_FLAGS) == "/home/me/flags.txt"


@pytest.mark.parametrize("name", [*PROCESS_FLAGS, *MIXED_FLAGS, "xla_cpu_multi_thread_eigen"])
def test_the_installed_jaxlib_supports_the_flag(name, monkeypatch):
    monkeypatch.setattr(_xla_flags, "_CHECKED_JAXLIB", (0, 0))
    assert with_flags("", {name: "1"}) == f"--{name}=1"


def test_flags_that_a_later_jaxlib_removed(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0.0")
    assert with_flags("", {"xla_flag_of_the_past": "1"}) == ""


@pytest.mark.parametrize(("heartbeat_s", "collective_s"), [(2, 3), (3.2, 4), (4, 4), (15, 10), (60, 10)])
def test_a_collective_of_an_elastic_run_waits_about_as_long_as_its_heartbeats(heartbeat_s, collective_s):
    assert elastic_flags(heartbeat_s) == {"xla_cpu_collective_timeout_seconds": str(collective_s)}
