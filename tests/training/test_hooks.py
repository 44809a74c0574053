"""Rounds that hang, and callbacks that end a run."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.distributed import HANG_TIMEOUT
from jaxche.training import _hooks
from jaxche.training._plan import End


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


def test_a_round_that_hangs_ends_the_process_and_says_where(run_forked):
    done = run_forked("-c", HANGS)
    assert (done.returncode, done.stdout) == (1, "round 0\nround 1\n")
    assert "Timeout (0:00:01.500000)!" in done.stderr
    assert "in waits_for_ever" in done.stderr


@pytest.mark.parametrize("answer", [True, np.bool_(True), jnp.bool_(True)])
def test_a_callback_that_ends_training_is_named(problem, devices, caplog, answer):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    callbacks = [lambda state, info: None, lambda state, info: info.round == 2 and answer]
    _, history = trainer.fit(trainer.init(problem.params), problem.data, 9, callbacks, progress=False)
    assert len(history) == 3
    assert caplog.text.count("callbacks[1] returned true after round 2, and training ends") == 1


def test_a_callback_that_has_ended_training_is_not_named_again_in_the_last_round(round_info, caplog):
    """With several processes training ends with the round after it."""
    hook = _hooks.CallbackHook([lambda state, info: True], every=None, is_leader=True)
    run = SimpleNamespace(state=None, is_done=False)
    for info in (round_info(round=2), round_info(round=3, stop=1)):
        assert hook.on_round(run, info)
    assert [record.getMessage() for record in caplog.records] == [
        "callbacks[0] returned true after round 2, and training ends"
    ]


@pytest.mark.parametrize("answer", [0.25, {"loss": 0.25}, "no", 1, [0]])
def test_a_callback_whose_result_may_not_be_meant_to_end_training_is_refused(problem, devices, answer):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(ValueError, match=r"callbacks\[0\] returned .*, which is neither True nor False; .*return True"):
        trainer.fit(trainer.init(problem.params), problem.data, 1, [lambda state, info: answer], progress=False)


@pytest.mark.parametrize("answer", [0, "", {}, False, np.bool_(False)])
def test_a_callback_without_a_result_goes_on(problem, devices, answer, caplog):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state, _ = trainer.fit(trainer.init(problem.params), problem.data, 1, [lambda state, info: answer], progress=False)
    assert state.epoch == 1
    assert "training ends" not in caplog.text


@pytest.mark.parametrize("elastic", [False, True])
def test_an_evaluation_that_loses_a_process_ends_a_run_that_cannot_shrink(problem, devices, monkeypatch, elastic):
    def fails(*args):
        raise jaxche.PeerLostError("did one of them die?")

    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    state, history = trainer.fit(trainer.init(problem.params), problem.data, max_steps=2, progress=False)
    hook = _hooks.EvaluationHook(trainer, problem.data, None, None, None)
    run = _hooks.Run(state, problem.data, len(problem.data), End(), history)
    monkeypatch.setattr(_hooks, "evaluate", fails)
    monkeypatch.setattr(trainer._group, "elastic", elastic, raising=False)
    if not elastic:
        with pytest.raises(jaxche.PeerLostError, match="did one of them die"):
            hook.on_end(run)
    else:
        hook.on_end(run)
    assert history[-1].validation == {}
