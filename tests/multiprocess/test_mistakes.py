"""Mistakes in a run of two processes: each of them ends, with the same error as alone."""

import json
import sys
from pathlib import Path

import pytest

from jaxche.cluster import launch

PROGRAM = Path(__file__).with_name("mistakes.py")
pytestmark = pytest.mark.usefixtures("forked")


@pytest.mark.slow
def test_every_mistake_is_an_error_in_both_processes(load, tmp_path):
    mistakes = load("mistakes")
    assert launch([sys.executable, str(PROGRAM), str(tmp_path)], 2, env={"PYTHONWARNINGS": "error"}) == 0
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for name, _, named, write in mistakes.MISTAKES:
        for rank, seen in enumerate((zero, one)):
            kind, message = seen["found"][name]
            assert kind in ("ValueError", "TypeError", "NonFiniteLossError", "RankError"), (name, rank, kind, message)
            assert named in message, (name, rank)
            assert write in message, (name, rank)
    for name, write in {"loss": "return loss", "data": "one batch", "batch": "", "callbacks": "(state, info)"}.items():
        (here, told), (there, own) = zero["alone"][name], one["alone"][name]
        assert there != "none", name
        assert here in ("RankError", "ValueError"), (name, here)
        assert write in told, (name, told)
        assert write in own
