"""What a fit tells those who watch over it must not end it."""

import os
import subprocess
import sys

import optax
import pytest

import jaxche
from jaxche.training import EVENTS, HANG_TIMEOUT, HEARTBEAT, _watched
from jaxche.training._watched import beat, beat_again, tell


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


def test_who_waits_gives_no_heartbeat_before_its_first_round(tmp_path, monkeypatch):
    monkeypatch.setenv(HEARTBEAT, str(tmp_path / "0"))
    monkeypatch.setattr(_watched, "_moved", False)
    beat_again()
    assert not (tmp_path / "0").exists()
    beat()
    (tmp_path / "0").unlink()
    beat_again()
    assert (tmp_path / "0").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_file_of_events_is_told_once(monkeypatch, capsys):
    monkeypatch.setenv(EVENTS, "/dev/full")
    monkeypatch.setattr(_watched, "event", lambda info, place, rank, merged_bytes: {"rank": rank})
    for _ in range(2):
        tell(None, {0: 0, 1: 2}, 8)
    assert capsys.readouterr().err == f"{EVENTS}=/dev/full: No space left on device; the run goes on without it\n"


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_time_for_a_round_that_makes_no_sense_is_refused_before_the_round(text, monkeypatch, problem, devices):
    monkeypatch.setenv(HANG_TIMEOUT, text)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    with pytest.raises(ValueError, match=f"{HANG_TIMEOUT}='{text}' must be positive seconds; write {HANG_TIMEOUT}=600"):
        trainer.round(trainer.init(problem.params), problem.data)


ENDS = """
import contextlib, time
from jaxche.training._watched import in_time

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


HANGS = """
import os, threading
import jax.numpy as jnp, numpy as np, optax
import jaxche

class Data(list):
    def __getitem__(self, i):
        return super().__getitem__(i) if i < 5 else waits_for_ever()

def waits_for_ever():
    threading.Event().wait()

data = Data([np.ones(4, np.float32)] * 8)
trainer = jaxche.Trainer(lambda w, batch: jnp.mean((w - batch) ** 2), optax.sgd(0.1))
state, info = trainer.round(trainer.init(jnp.zeros(4)), data, counts=(2,))
print("round", info.round, flush=True)
os.environ["JAXCHE_HANG_TIMEOUT"] = "1.5"  # the first one has compiled
state, info = trainer.round(state, data, counts=(2,))
print("round", info.round, flush=True)
trainer.round(state, data, counts=(2,))
"""


def test_a_round_that_hangs_ends_the_process_and_says_where():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "round 0\nround 1\n")
    assert "Timeout (0:00:01.500000)!" in done.stderr
    assert "in waits_for_ever" in done.stderr
