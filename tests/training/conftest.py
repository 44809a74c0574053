"""A small regression problem that every test of the trainer can solve, and a record of what was read."""

import jax
import optax
import pytest

import jaxche
from jaxche.training import _plan


class Recorder:
    """Passes batches through and notes which were read."""

    def __init__(self, data):
        self._data, self.reads = data, []

    def __len__(self):
        return len(self._data)

    def __getitem__(self, i):
        return self.epoch(0)[i]

    def epoch(self, e):
        return _Epoch(self, e)


class _Epoch:
    def __init__(self, recorder, e):
        self._recorder, self._epoch = recorder, e

    def __getitem__(self, i):
        self._recorder.reads.append((self._epoch, i))
        return self._recorder._data.epoch(self._epoch)[i]


@pytest.fixture
def recorder():
    return Recorder


@pytest.fixture(scope="session")
def train_rounds():
    """Trains rounds of the given counts: the trainer, the state after the last, and what was told of each."""

    def train(loss, params, data, replicas, rounds, tx=None, **knobs):
        trainer = jaxche.Trainer(loss, tx or optax.adam(0.05), replicas=replicas, **knobs)
        state, infos = trainer.init(params), []
        for counts in rounds:
            state, info = trainer.round(state, data, counts=counts)
            infos.append(info)
        return trainer, state, infos

    return train


@pytest.fixture
def trained_alike(close):
    """Two results of ``train_rounds`` are of the same training, on replicas of whatever kind."""

    def check(one, other):
        (a, after_a, infos_a), (b, after_b, infos_b) = one, other
        # Stages keep a list of trees where the whole model has what it was given.
        close(*(jax.tree.leaves(trainer.params(state)) for trainer, state in ((a, after_a), (b, after_b))), rtol=2e-5)
        for u, v in zip(infos_a, infos_b, strict=True):
            assert u.loss == pytest.approx(v.loss, rel=1e-5)
            assert u.losses == pytest.approx(v.losses, rel=1e-5, nan_ok=True)
            assert u.metrics == pytest.approx(v.metrics, rel=1e-5)
            assert u.drift == pytest.approx(v.drift, rel=1e-3, abs=1e-7)
            assert u.drift_dir == pytest.approx(v.drift_dir, rel=1e-3, abs=1e-6)
            assert (u.counts, u.examples, u.epoch, u.weights) == (v.counts, v.examples, v.epoch, v.weights)

    return check


@pytest.fixture
def patient(monkeypatch):
    """A stall of this machine cuts no round short."""
    monkeypatch.setattr(_plan, "_MIN_EXTRA_MS", 60_000.0)


@pytest.fixture
def lockstep(patient):
    """Makes the cadence of replicas that take two steps a round each: no timing decides."""

    def make(world=2):
        return jaxche.ElChe(world_size=world, anchor=2, max_anchor=2, max_batch_diff=0)

    return make
