"""Rounds that hang."""

import subprocess
import sys

import optax
import pytest

import jaxche
from jaxche.distributed import HANG_TIMEOUT


@pytest.mark.parametrize("text", ["soon", "0", "1e12", "-1", "nan", "inf"])
def test_a_time_for_a_round_that_makes_no_sense_is_refused_before_the_round(text, monkeypatch, problem, devices):
    monkeypatch.setenv(HANG_TIMEOUT, text)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    with pytest.raises(ValueError, match=f"{HANG_TIMEOUT}='{text}' must be above 0 and below 1e.09 seconds; write"):
        trainer.round(trainer.init(problem.params), problem.data)


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
