"""Callbacks: loggers, profiler and live plot."""

import dataclasses
import gzip
import json
import sys
from types import SimpleNamespace

import numpy as np
import optax
import pytest

import jaxche
from jaxche.reports import _callbacks
from jaxche.reports._callbacks import _notebook_display, scalars


@pytest.fixture
def fit(problem, devices):
    def run(*callbacks, **options):
        trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], **options)
        state = trainer.init(problem.params)
        return trainer.fit(state, problem.data, epochs=2, callbacks=callbacks, progress=False)[1]

    return run


@pytest.mark.slow
def test_scalars(fit):
    history = fit()
    found = scalars(history[-1])
    assert found["loss"] == pytest.approx(history[-1].loss)
    assert {"mae", "round/efficiency", "steps/rank1", "wait_ms/rank0"} <= set(found)
    assert not any(name.startswith(("scaling/", "validation/")) for name in found)
    history[-1].validation["loss"] = 0.25
    assert scalars(history[-1])["validation/loss"] == 0.25
    other = dataclasses.replace(history[-1], metrics={"loss": 9.0})
    assert scalars(other)["loss"] == history[-1].loss
    assert scalars(other)["metric/loss"] == 9.0
    assert "scaling/noise" in scalars(fit(scaling=jaxche.AdaScale())[-1])


def test_tensorboard(fit, tmp_path):
    history = fit(jaxche.reports.TensorBoardLogger(tmp_path))
    (path,) = tmp_path.glob("events.*")
    written = path.read_bytes()
    assert written.count(b"round/efficiency") == len(history)
    assert b"steps/rank1" in written


@pytest.mark.slow
def test_wandb(fit, tmp_path, until):
    import wandb  # a second, also in workers that run other files

    history = fit(jaxche.reports.WandbLogger(project="digits", mode="offline", dir=tmp_path))
    summary, step = dict(wandb.run.summary), wandb.run.step
    wandb.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # Its own process writes, and may still do so.
    assert until(lambda: path.read_bytes().count(b"round/efficiency") >= len(history), within_s=30)
    assert summary["loss"] == pytest.approx(history[-1].loss)
    assert (summary["round"], summary["epoch"]) == (history[-1].round, 1)
    assert step >= sum(info.examples for info in history)


@pytest.mark.parametrize(("logger", "package"), [("TensorBoardLogger", "tensorboardX"), ("WandbLogger", "wandb")])
def test_missing_package(logger, package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    arguments = {"folder": tmp_path} if package == "tensorboardX" else {}
    extra = {"tensorboardX": "tensorboard", "wandb": "wandb"}[package]
    with pytest.raises(ImportError, match=rf"pip install 'jaxche\[{extra}\]'"):
        getattr(jaxche.reports, logger)(**arguments)


def test_profile(fit, tmp_path):
    recorder = jaxche.reports.profile(tmp_path, rounds=range(2, 4))
    assert recorder.path is None
    fit(recorder, policy="sync", rows="equal")
    trace = json.loads(gzip.decompress(recorder.path.read_bytes()))
    assert trace["traceEvents"]


def test_profile_as_a_context(fit, tmp_path):
    with jaxche.reports.profile(tmp_path / "first", rounds=range(1, 99)) as recorder:
        fit(recorder, policy="sync", rows="equal")
    assert recorder.path is not None
    again = jaxche.reports.profile(tmp_path / "second", rounds=range(1, 2))  # JAX refuses two recordings at a time
    fit(again, policy="sync", rows="equal")
    assert again.path is not None


def test_steps_of_a_resumed_run(problem, devices, tmp_path):
    seen = []

    def train(epochs):
        trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], policy="sync", rows="equal")
        state = trainer.init(problem.params)
        callbacks = [lambda state, info: seen.append(state.examples) or None]
        return trainer.fit(state, problem.data, epochs, callbacks, progress=False, checkpoints=tmp_path)[1]

    train(1)
    history = train(2)
    assert seen == list(np.cumsum([info.examples for info in history]))


def test_a_finished_run_that_is_resumed_is_not_logged_again(problem, devices, tmp_path):
    class Recorder(jaxche.reports.Logger):
        def __init__(self):
            self.rounds = []

        def __call__(self, state, info):
            self.rounds.append(info.round)

    def train(epochs):
        trainer, recorder = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2]), Recorder()
        state, options = trainer.init(problem.params), {"progress": False, "checkpoints": tmp_path}
        _, history = trainer.fit(state, problem.data, epochs, [recorder], **options)
        return recorder.rounds, len(history)

    first, length = train(1)
    assert first == list(range(length))
    assert train(1) == ([], length)
    rounds, longer = train(2)
    assert rounds == list(range(length, longer))


@pytest.mark.parametrize("rounds", [range(2), [], [3, 5], 5])
def test_invalid_rounds(rounds, tmp_path):
    with pytest.raises(ValueError, match="from 1, one after another"):
        jaxche.reports.profile(tmp_path, rounds=rounds)


class Screen:
    """The display of a notebook."""

    def __init__(self):
        self.shown, self.updates = [], []

    def display(self, figure, display_id):
        self.shown.append(figure)
        return self

    def update(self, figure):
        self.updates.append(figure)


def test_live_plot_updates_one_figure(problem, devices, monkeypatch):
    screen = Screen()
    monkeypatch.setattr("jaxche.reports._callbacks._notebook_display", lambda: screen.display)
    monkeypatch.setattr(_callbacks, "_DRAWING", 1.0)
    live = jaxche.LivePlot(every_s=1e-9)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    _, history = trainer.fit(trainer.init(problem.params), problem.data, callbacks=[live], progress=False)
    assert len(screen.shown) == 1
    assert len(screen.updates) == len(history) - 1
    last = screen.updates[-1].axes[1].lines[0]
    assert len(last.get_xdata()) == len(history)


def test_a_live_plot_takes_a_tenth_of_the_time_at_most(round_info, monkeypatch):
    screen, clock = Screen(), [0.0]

    def draw(history):
        clock[0] += 0.5

    monkeypatch.setattr(_callbacks, "_notebook_display", lambda: screen.display)
    monkeypatch.setattr(_callbacks, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(jaxche.History, "plot", draw)
    live = jaxche.LivePlot(every_s=2.0)
    drawn = []
    for _ in range(100):
        before, clock[0] = clock[0], clock[0] + 0.1
        live(None, round_info())
        drawn += [before] if clock[0] - before > 0.3 else []
    assert drawn == pytest.approx([0.0, 5.1, 10.2], abs=0.15)


def test_live_plot_outside_a_notebook_draws_nothing_and_says_so_once(round_info, caplog, monkeypatch):
    screen = Screen()
    monkeypatch.setattr("IPython.display.display", screen.display)
    live = jaxche.LivePlot(every_s=1e-9)
    for _ in range(2):
        live(None, round_info())
    live.draw()
    assert not screen.shown
    [line] = caplog.messages
    assert "this is none; draw at the end: history.plot().savefig('history.png')" in line


def test_a_notebook_is_an_ipython_with_a_kernel(monkeypatch):
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace())
    assert _notebook_display() is None
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=None))
    assert callable(_notebook_display())


def test_live_plot_needs_no_ipython(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    jaxche.LivePlot().draw()


def test_invalid_interval():
    with pytest.raises(ValueError, match="every_s=0"):
        jaxche.LivePlot(every_s=0)
    with pytest.raises(ValueError, match="every_s='1 s' must be a number above 0"):
        jaxche.LivePlot(every_s="1 s")
    with pytest.raises(ValueError, match="every_s=True must be a number above 0"):
        jaxche.LivePlot(every_s=True)


def test_a_logger_without_a_call_says_what_to_write(round_info):
    class Mine(jaxche.reports.Logger):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine has no __call__; write def __call__\(self, state, info\)"):
        Mine()(None, round_info())
