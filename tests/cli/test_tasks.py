"""Data and models of the tasks."""

import jax
import numpy as np
import optax
import pytest

import jaxche
from jaxche.cli._settings import TASKS
from jaxche.cli._tasks import load, split


@pytest.fixture(scope="module", params=["digits", "mnist", "text"])
def task(request):
    return load(request.param, batch_size=16)


def test_a_task_has_batches_and_held_out_arrays_of_the_same_shapes(task):
    assert task.name in TASKS
    assert task.epochs >= 1
    for batch, held in zip(jax.tree.leaves(task.data[0]), jax.tree.leaves(task.test.arrays), strict=True):
        assert len(batch) == 16
        assert batch.shape[1:] == held.shape[1:]
        assert batch.dtype == held.dtype


def test_the_same_seed_gives_the_same_start(task):
    a, b, c = (jax.tree.leaves(task.init(seed)[0]) for seed in (0, 0, 1))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(a, c, strict=True))


@pytest.mark.slow
def test_a_few_steps_lower_the_loss(task):
    trainer = jaxche.Trainer(task.loss_fn, task.tx, replicas=jax.devices()[:1])
    state = trainer.init(*task.init(0))
    before = task.evaluate(trainer.params(state))
    assert task.metric in before
    state, info = trainer.round(state, task.data, counts=[30])
    after = task.evaluate(trainer.params(state))
    assert np.isfinite(info.loss)
    assert after["loss"] < 0.9 * before["loss"]


def test_mnist_is_4000_and_1000_with_every_class():
    task = load("mnist")
    assert len(task.data) == 125
    assert np.bincount(task.test.arrays["y"]).tolist() == [100] * 10
    assert task.test.arrays["x"].min() == 0.0
    assert task.test.arrays["x"].max() == 1.0


def test_the_text_is_long_enough_and_windows_share_one_character():
    task = load("text")
    assert len(task.data.arrays) + len(task.test.arrays) > 9000
    assert np.array_equal(task.data.arrays[:-1, -1], task.data.arrays[1:, 0])


@pytest.mark.parametrize("test", [1, 7, 250, 999])
def test_a_split_is_disjoint_stratified_and_always_the_same(test):
    labels = np.random.default_rng(3).integers(0, 10, 1000)
    train, held = split(labels, test)
    assert sorted([*train, *held]) == list(range(1000))
    assert len(held) == test
    share = np.bincount(labels[held], minlength=10) - test * np.bincount(labels, minlength=10) / 1000
    assert np.abs(share).max() <= 1
    assert np.array_equal(held, split(labels, test)[1])


def test_batch_size_and_learning_rate():
    task = load("digits", batch_size=10, learning_rate=0.5)
    assert len(task.data[0]["x"]) == 10
    params = {"w": np.ones(2, np.float32)}
    updates, _ = task.tx.update(params, task.tx.init(params), params)
    np.testing.assert_allclose(optax.apply_updates(params, updates)["w"], 0.5, atol=1e-5)
