"""Rounds handed on: what is written, how often, and where the packages are missing."""

import gzip
import json
import sys
import time

import numpy as np
import optax
import pytest

import jaxche
from jaxche.reports._callbacks import scalars


@pytest.fixture
def fit(problem, devices):
    def run(*callbacks, **options):
        trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], **options)
        state = trainer.init(problem.params)
        return trainer.fit(state, problem.data, epochs=2, callbacks=callbacks, progress=False)[1]

    return run


def test_a_round_as_numbers(fit):
    history = fit()
    found = scalars(history[-1])
    assert found["loss"] == pytest.approx(history[-1].loss)
    assert {"mae", "round/efficiency", "steps/rank1", "wait_ms/rank0"} <= set(found)
    assert not any(name.startswith("scaling/") for name in found)
    assert "scaling/noise" in scalars(fit(scaling=jaxche.AdaScale())[-1])


def test_tensorboard_reads_what_was_written(fit, tmp_path):
    loader = pytest.importorskip("tensorboardX.event_file_writer")
    assert loader
    history = fit(jaxche.reports.TensorBoardLogger(tmp_path))
    (path,) = tmp_path.glob("events.*")
    written = path.read_bytes()
    assert written.count(b"round/efficiency") == len(history)
    assert b"steps/rank1" in written


def test_wandb_keeps_what_was_logged(fit, tmp_path):
    wandb = pytest.importorskip("wandb")
    history = fit(jaxche.reports.WandbLogger(project="digits", mode="offline", dir=tmp_path))
    summary, step = dict(wandb.run.summary), wandb.run.step
    wandb.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30  # its own process writes, and may still do so
    while path.read_bytes().count(b"round/efficiency") < len(history) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.read_bytes().count(b"round/efficiency") >= len(history)
    assert summary["loss"] == pytest.approx(history[-1].loss)
    assert (summary["round"], summary["epoch"]) == (history[-1].round, 1)
    assert step >= sum(info.examples for info in history)


@pytest.mark.parametrize(("logger", "package"), [("TensorBoardLogger", "tensorboardX"), ("WandbLogger", "wandb")])
def test_a_missing_package_is_named_with_its_extra(logger, package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    arguments = {"folder": tmp_path} if package == "tensorboardX" else {}
    extra = {"tensorboardX": "tensorboard", "wandb": "wandb"}[package]
    with pytest.raises(ImportError, match=rf"pip install 'jaxche\[{extra}\]'"):
        getattr(jaxche.reports, logger)(**arguments)


def test_rounds_are_profiled(fit, tmp_path):
    recorder = jaxche.reports.profile(tmp_path, rounds=range(2, 4))
    assert recorder.path is None
    fit(recorder, policy="sync")
    trace = json.loads(gzip.decompress(recorder.path.read_bytes()))
    assert trace["traceEvents"]


def test_a_recording_ends_with_its_block(fit, tmp_path):
    with jaxche.reports.profile(tmp_path / "first", rounds=range(1, 99)) as recorder:
        fit(recorder, policy="sync")
    assert recorder.path is not None
    again = jaxche.reports.profile(tmp_path / "second", rounds=range(1, 2))  # JAX refuses two recordings at a time
    fit(again, policy="sync")
    assert again.path is not None


def test_steps_go_on_where_a_resumed_run_goes_on(problem, devices, tmp_path):
    seen = []

    def train(epochs):
        trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], policy="sync")
        state = trainer.init(problem.params)
        callbacks = [lambda state, info: seen.append(state.examples) or None]
        return trainer.fit(state, problem.data, epochs, callbacks, progress=False, checkpoints=tmp_path)[1]

    train(1)
    history = train(2)
    assert seen == list(np.cumsum([info.examples for info in history]))


@pytest.mark.parametrize("rounds", [range(2), [], [3, 5]])
def test_rounds_that_cannot_be_profiled_are_refused(rounds, tmp_path):
    with pytest.raises(ValueError, match="from 1, one after another"):
        jaxche.reports.profile(tmp_path, rounds=rounds)
