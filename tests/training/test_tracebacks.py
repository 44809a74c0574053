"""Tracebacks end in the user's line; unexpected errors keep every frame."""

import traceback
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxche
from jaxche.messages import short_traceback

OWN = str(Path(jaxche.__file__).parent)


def frames(error):
    return [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]


def names(error):
    found = frames(error)
    assert not [file for file, _ in found if file.startswith(OWN)]
    return [name for file, name in found if file == __file__][1:]  # without that of pytest.raises


def caught(problem, loss=None, data=None, call="fit"):
    trainer = jaxche.Trainer(loss or problem.loss, optax.sgd(0.1))
    with pytest.raises(Exception) as found:
        getattr(trainer, call)(trainer.init(problem.params), problem.data if data is None else data)
    return found.value


@pytest.mark.parametrize("call", ["fit", "round"])
def test_an_argument_ends_in_the_line_of_the_call(problem, call):
    assert names(caught(problem, data=[], call=call)) == []


@pytest.mark.parametrize("call", ["fit", "evaluate", "init", "replace", "params", "opt_state", "with_ema"])
def test_other_arguments_end_in_the_line_of_the_call(problem, call):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1))
    for arguments, error in ({"epoch": 3}, TypeError), ({}, TypeError), ({"state": 3}, (TypeError, ValueError)):
        with pytest.raises(error) as found:
            getattr(trainer, call)(**arguments)
        assert names(found.value) == []


def test_a_callback_without_the_info_ends_in_the_line_of_the_call(problem):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1))
    with pytest.raises(
        ValueError, match=r"callbacks\[0\] takes \(state\), and is called with the state and the Ro"
    ) as error:
        trainer.fit(trainer.init(problem.params), problem.data, callbacks=[lambda state: None])
    assert names(error.value) == []


def test_a_trainer_ends_in_its_own_line():
    with pytest.raises(ValueError, match="tx=") as error:
        jaxche.Trainer(lambda p, b: 0.0, "adam")
    assert names(error.value) == []
    with pytest.raises(ValueError, match="batch_size") as error:
        jaxche.Batches(np.ones(3), 0)
    assert names(error.value) == []
    assert frames(error.value)[-1][0] == __file__  # not the initializer of the dataclass, which has no file
    with pytest.raises(ValueError, match="tx=") as error:
        jaxche.sharded_step(lambda p, b: 0.0, "adam", jaxche.NoShard())
    assert names(error.value) == []


def test_what_a_loss_returns_ends_in_the_line_of_the_call(problem):
    assert names(caught(problem, lambda p, b: None)) == []


def test_an_error_in_a_loss_keeps_its_frames(problem):
    def inner(params):
        return params["missing"]

    def loss(params, batch):
        return inner(params)

    error = caught(problem, loss)
    assert isinstance(error, KeyError)
    assert names(error) == ["loss", "inner"]


def test_a_known_mistake_in_a_loss_ends_in_its_line(problem):
    def loss(params, batch):
        return jnp.sum(params["w"]) * float(jnp.sum(params["w"]))

    error = caught(problem, loss)
    assert isinstance(error, ValueError)
    assert frames(error)[-1] == (__file__, "loss")
    net = nn.BatchNorm(use_running_average=False, axis_name="batch")

    def norm(apply, batch):
        return apply(batch["x"]).mean()

    trainer = jaxche.Trainer(jaxche.linen_loss(net, norm), optax.sgd(0.1))
    state = trainer.init(
        {"scale": jnp.ones(5), "bias": jnp.zeros(5)}, {"batch_stats": {"mean": jnp.zeros(5), "var": jnp.ones(5)}}
    )
    with pytest.raises(ValueError, match="axis 'batch'") as found:
        trainer.fit(state, problem.data)
    assert frames(found.value)[-1] == (__file__, "norm")


def test_an_error_in_the_data_keeps_its_frames(problem):
    class Data(list):
        def __getitem__(self, i):
            if i == 5:
                raise OSError("disk")
            return super().__getitem__(i)

    error = caught(problem, data=Data(problem.data[i] for i in range(12)))
    assert isinstance(error, OSError)
    assert names(error) == ["__getitem__"]


def test_an_unexpected_error_keeps_all(problem, monkeypatch):
    monkeypatch.setattr("jaxche.training._start_checks.epoch_size", None)
    error = caught(problem, call="round")
    assert isinstance(error, TypeError)
    assert any(file.startswith(OWN) for file, _ in frames(error))


def test_an_interrupt_ends_in_the_line_of_the_call_or_in_that_of_the_user_which_it_stopped(problem, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1))
    state = trainer.init(problem.params)
    with pytest.raises(KeyboardInterrupt) as found:
        trainer.evaluate(state, problem.data, interrupt)
    assert names(found.value) == ["interrupt"]
    monkeypatch.setattr(trainer, "_planned", interrupt)
    with pytest.raises(KeyboardInterrupt) as found:
        trainer.round(state, problem.data)
    assert not [file for file, _ in frames(found.value) if file.startswith(OWN)]


def test_the_variable_keeps_all(problem, monkeypatch):
    monkeypatch.setenv("JAXCHE_TRACEBACK", "full")
    assert any(file.startswith(OWN) for file, _ in frames(caught(problem, data=[])))


def test_causes_are_shortened_too():
    @short_traceback
    def call():
        try:
            jaxche.Trainer(lambda p, b: 0.0, "adam")
        except ValueError as error:
            raise RuntimeError("user") from error

    with pytest.raises(RuntimeError) as found:
        call()
    assert names(found.value.__cause__) == []


def test_an_error_may_be_its_own_cause():
    @short_traceback
    def call():
        try:
            jaxche.Trainer(lambda p, b: 0.0, "adam")
        except ValueError as error:
            raise error from error

    with pytest.raises(ValueError, match="adam") as found:
        call()
    assert names(found.value) == ["call", "call"]  # raised twice
