"""The live picture: drawn when it is time, in one place."""

import pytest

import jaxche


class Screen:
    """Stands for the notebook: what is shown, and what replaces it."""

    def __init__(self):
        self.shown, self.updates = [], []

    def display(self, figure, display_id):
        self.shown.append(figure)
        return self

    def update(self, figure):
        self.updates.append(figure)


def test_it_is_drawn_once_and_then_updated(problem, devices, monkeypatch):
    import optax

    screen = Screen()
    monkeypatch.setattr("IPython.display.display", screen.display)
    live = jaxche.LivePlot(every_s=1e-9)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    _, history = trainer.fit(trainer.init(problem.params), problem.data, callbacks=[live], progress=False)
    assert len(screen.shown) == 1
    assert len(screen.updates) == len(history) - 1
    last = screen.updates[-1].axes[1].lines[0]
    assert len(last.get_xdata()) == len(history)


def test_a_bad_interval_is_refused():
    with pytest.raises(ValueError, match="every_s=0"):
        jaxche.LivePlot(every_s=0)
