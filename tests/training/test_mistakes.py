"""Every mistake ends in an error that names the argument, shows its value briefly and gives the line to write."""

import importlib.util
from pathlib import Path

import pytest

import jaxche

_PATH = Path(__file__).parent.parent / "multiprocess" / "mistakes.py"
_SPEC = importlib.util.spec_from_file_location("mistakes", _PATH)
mistakes = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(mistakes)

MOST = 600  # characters


@pytest.mark.slow
@pytest.mark.parametrize(("do", "named", "write"), [pytest.param(*row, id=name) for name, *row in mistakes.MISTAKES])
def test_a_mistake_is_told_what_to_write(do, named, write):
    with pytest.raises((ValueError, TypeError, jaxche.NonFiniteLossError)) as caught:
        do()
    message = str(caught.value)
    assert named in message
    assert write in message
    assert len(message) <= MOST
    assert " at 0x" not in message
    assert not any(word in message for word in ("preparation", "standby", "quorum", "treedef", "pytree"))


def test_there_are_as_many_as_newcomers_made():
    names = [row[0] for row in mistakes.MISTAKES]
    assert len(set(names)) == len(names) >= 59


@pytest.mark.slow
@pytest.mark.parametrize("do", mistakes.WORKS.values(), ids=mistakes.WORKS)
def test_what_newcomers_may_do_works(do):
    state, _ = do()
    assert state.epoch == 1
