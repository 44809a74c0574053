"""A small regression problem that every test of the trainer can solve, and a record of what was read."""

from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxche


class Problem:
    """Least squares with a nonlinearity, so that local SGD and joined batches really differ."""

    def __init__(self, examples=96, batch_size=8):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(examples, 5)).astype(np.float32)
        y = np.tanh(x @ rng.normal(size=(5, 2))).astype(np.float32)
        self.data = jaxche.Batches({"x": x, "y": y}, batch_size, seed=3)
        self.params = {
            "w": rng.normal(size=(5, 2)).astype(np.float32) * 0.3,
            "b": np.zeros(2, np.float32),
        }

    @staticmethod
    def loss(params, batch):
        error = jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]
        return jnp.mean(error**2), {"mae": jnp.mean(jnp.abs(error))}

    def joined(self, epoch, indices):
        """Several batches as one."""
        batches = [self.data.epoch(epoch)[i] for i in indices]
        return jax.tree.map(lambda *x: np.concatenate(x), *batches)


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
def problem():
    return Problem()


@pytest.fixture
def make_problem():
    return Problem


@pytest.fixture
def recorder():
    return Recorder


@pytest.fixture
def close():
    """Compare two trees, tightly unless told otherwise."""

    def check(a, b, rtol=1e-5, atol=1e-6):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)

    return check


@pytest.fixture
def same():
    """Two trees are equal bit for bit."""

    def check(a, b):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))

    return check


@pytest.fixture
def told():
    """What rounds say, to be compared: a nan equals a nan."""

    def texts(history):
        return [str(asdict(info)) for info in history]

    return texts
