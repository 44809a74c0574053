"""The picture holds what it promises."""

import math
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from jaxche.training import History, RoundInfo


def history(world, rounds=6, **more):
    counts = tuple(range(world + 3, 3, -1))
    values = {
        "epoch": 0,
        "cursor": 0,
        "counts": counts,
        "planned": counts,
        "weights": (1 / world,) * world,
        "wall_ms": tuple(100.0 - i for i in range(world)),
        "sync_ms": 5.0,
        "metrics": {},
        "drift": 0.01,
        "drift_dir": 0.3,
        "losses": (1.0,) * world,
        "examples": 32,
        "anchor": min(counts),
        "verdict": "calm",
    } | more
    return History(RoundInfo(round=r, loss=1 / (r + 1), **values) for r in range(rounds))


def panels(figure):
    return {axes.get_label(): axes for axes in figure.axes}


@pytest.mark.parametrize("world", [2, 40])
def test_every_panel_has_a_title_and_units(world, tmp_path):
    figure = history(world).plot()
    assert isinstance(figure, Figure)
    assert not plt.get_fignums()  # nothing left open
    drawn = panels(figure)
    assert list(drawn) == ["rounds", "counts", "efficiency", "drift", "examples", "seconds"]
    for axes in drawn.values():
        assert axes.get_xlabel()
        assert axes.get_title(loc="left")
    assert [text.get_text() for text in drawn["counts"].get_legend().get_texts()][-1] == "anchor"
    assert len(drawn["rounds"].get_yticklabels()) == min(world, 8)
    assert ("8 of 40 ranks" in drawn["rounds"].get_title(loc="left")) == (world == 40)
    figure.savefig(tmp_path / "history.png")


def test_rounds_lie_on_the_clock():
    axes = panels(history(2, rounds=3).plot())["rounds"]
    bars = [bar for bar in axes.patches if bar.get_width() > 0 and hasattr(bar, "get_y")]
    work = sorted((bar.get_x(), bar.get_width()) for bar in bars if math.isclose(bar.get_width(), 0.1))
    # Three rounds of 105 ms: the slowest works 100 of them.
    np.testing.assert_allclose([x for x, _ in work], [0.0, 0.105, 0.21], atol=1e-9)
    waits = [bar for bar in bars if math.isclose(bar.get_width(), 0.001, abs_tol=1e-9)]
    assert len(waits) == 3
    assert all(bar.get_hatch() for bar in waits)


def test_one_replica_has_a_loss_and_nothing_to_wait_for():
    assert list(panels(history(1).plot())) == ["examples", "seconds"]


def test_the_loss_is_drawn_on_both_axes():
    drawn = panels(history(2).plot())
    assert drawn["examples"].lines[0].get_xdata()[-1] == 6 * 32
    assert drawn["seconds"].lines[0].get_xdata()[-1] == pytest.approx(6 * 0.105)
    assert drawn["seconds"].lines[0].get_ydata()[-1] == pytest.approx(1 / 6)


def test_noise_and_memory_have_panels_where_they_are_known():
    scaled = history(2, noise=500.0, gain=1.5, lr_factor=1.2, progress=3.0)
    scaled.memory = ({"rank": 0, "parameters": 2**20, "in all": 3 * 2**20},)
    figure = scaled.plot()
    drawn = panels(figure)
    assert list(drawn)[-3:] == ["noise", "gain", "memory"]
    cells = drawn["memory"].tables[0].get_celld()
    assert cells[2, 0].get_text().get_text() == "in all"
    assert cells[2, 1].get_text().get_text() == "3.00"


def test_averaged_gradients_do_not_drift():
    axes = panels(history(2, drift=0.0, drift_dir=0.0).plot())["drift"]
    assert "gradients are averaged" in axes.texts[0].get_text()


def test_a_slice_of_a_history_is_one():
    part = history(2)[2:4]
    assert isinstance(part, History)
    assert "Rounds 2 to 3" in panels(part.plot())["rounds"].get_title(loc="left")


def test_a_round_draws_itself():
    picture = history(2)[0]._repr_html_()
    ElementTree.fromstring(picture)
    assert "round 0, epoch 0: loss 1" in picture
    assert "waits 1.0 ms" in picture
    assert "8 of 40 ranks" in history(40)[0]._repr_html_()


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="train first"):
        History().plot()
