"""The file of events: what is told, and a disk that takes no more."""

import json
import os
import sys

import pytest

from jaxche.cluster import launch
from jaxche.cluster._events import event_log

FULL = "/dev/full"


def test_events_are_appended_as_they_happen(tmp_path):
    path = tmp_path / "events"
    for number in (1, 2):
        with event_log(path) as log:
            log.write("start", rank=number)
            last = json.loads(path.read_text().splitlines()[-1])
            assert (last["event"], last["rank"]) == ("start", number)
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.skipif(not os.path.exists(FULL), reason=f"needs {FULL}")
def test_a_full_disk_is_told_once_and_ends_nothing(capsys):
    command = [sys.executable, "-c", "pass"]
    assert launch(command, 2, env={"JAX_PLATFORMS": "cpu"}, events=FULL) == 0
    err = capsys.readouterr().err
    assert err.count("events='/dev/full': No space left on device; the run goes on without it") == 1
