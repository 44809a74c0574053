"""Rates of replicas that run free."""

import sys

import optax
import pytest

import jaxche
from jaxche.replicas import Replica


@pytest.fixture
def trainer(problem, devices):
    return jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:3])


def test_rates_leave_the_state_alone_and_cover_every_replica(trainer, problem, same):
    state = trainer.init(problem.params)
    rates = trainer.measure_rates(state, problem.data, seconds=0.1)
    assert len(rates) == 3
    assert min(rates) > 0
    same(trainer.params(state), problem.params)
    assert state.round == 0


def test_data_that_cannot_be_read_is_an_error(trainer, problem):
    state = trainer.init(problem.params)
    trainer.round(state, problem.data)
    with pytest.raises(OSError, match="on fire"):
        trainer.measure_rates(state, Torn(problem.data), seconds=0.1)


def test_a_replica_over_processes_that_cannot_run_is_an_error_of_its_own(trainer, problem, monkeypatch):
    state = trainer.init(problem.params)
    trainer.round(state, problem.data)
    run, module = Replica.run, sys.modules[Replica.__module__]
    monkeypatch.setattr(module, "spans_processes", lambda placement: True)
    monkeypatch.setattr(
        Replica, "run", lambda self, *args: run(self, *args)._replace(wall_ms=0.0, error=OSError("no memory"))
    )
    with pytest.raises(OSError, match="no memory"):
        trainer.measure_rates(state, problem.data, seconds=0.1)


def test_a_replica_that_fails_is_an_error_in_all_processes(trainer, problem, monkeypatch):
    state = trainer.init(problem.params)
    trainer.round(state, problem.data)
    run = Replica.run
    monkeypatch.setattr(Replica, "run", lambda self, *args: run(self, *args)._replace(error=OSError("no memory")))
    with pytest.raises(OSError, match="no memory") as raised:
        trainer.measure_rates(state, problem.data, seconds=0.1)
    assert raised.value.__notes__[0].startswith("raised on rank 0 in the measurement of rates;")


class Torn:
    """Its third batch cannot be read."""

    def __init__(self, data):
        self._data = data

    def __len__(self):
        return len(self._data)

    def __getitem__(self, i):
        if i == 2:
            raise OSError("disk on fire")
        return self._data[i]
