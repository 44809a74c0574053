"""The plot of a run."""

import math
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from jaxche.reports import History


@pytest.fixture
def history(round_info):
    """Makes the history of replicas each a step and a millisecond ahead of the next."""

    def make(world, rounds=6, **more):
        counts, wall_ms = tuple(range(world + 3, 3, -1)), tuple(100.0 - i for i in range(world))
        fields = {"wall_ms": wall_ms, "sync_ms": 5.0, "examples": 32} | more
        return History(round_info(counts, round=r, loss=1 / (r + 1), **fields) for r in range(rounds))

    return make


def panels(figure):
    return {axes.get_label(): axes for axes in figure.axes}


@pytest.mark.parametrize("world", [2, 40])
def test_every_panel_has_a_title_and_units(world, tmp_path, history):
    figure = history(world).plot()
    assert isinstance(figure, Figure)
    assert not plt.get_fignums()  # nothing left open
    drawn = panels(figure)
    assert list(drawn) == ["rounds", "counts", "efficiency", "drift", "examples", "seconds", "metrics"]
    for axes in drawn.values():
        assert axes.get_xlabel()
        assert axes.get_title(loc="left")
    assert [text.get_text() for text in drawn["counts"].get_legend().get_texts()][-1] == "anchor: steps\nof the slowest"
    assert len(drawn["rounds"].get_yticklabels()) == min(world, 8)
    assert ("8 of 40 ranks" in drawn["rounds"].get_title(loc="left")) == (world == 40)
    figure.savefig(tmp_path / "history.png")


def test_timeline_of_rounds(history):
    axes = panels(history(2, rounds=3).plot())["rounds"]
    bars = [bar for bar in axes.patches if bar.get_width() > 0 and hasattr(bar, "get_y")]
    work = sorted((bar.get_x(), bar.get_width()) for bar in bars if math.isclose(bar.get_width(), 0.1))
    # Three rounds of 105 ms: the slowest works 100 of them.
    np.testing.assert_allclose([x for x, _ in work], [0.0, 0.105, 0.21], atol=1e-9)
    waits = [bar for bar in bars if math.isclose(bar.get_width(), 0.001, abs_tol=1e-9)]
    assert len(waits) == 3
    assert all(bar.get_hatch() for bar in waits)


def test_number_of_drawn_rounds(history):
    history_of_12 = history(2, rounds=12)
    assert panels(history_of_12.plot())["rounds"].get_title(loc="left").startswith("Rounds 4 to 11: ")
    assert "12 rounds, 1.3 s, efficiency" in history_of_12._repr_html_()
    assert "; the last 8:" in history_of_12._repr_html_()


def test_ticks_of_examples(history):
    axes = panels(history(2, rounds=50, examples=12345).plot())["examples"]
    low, high = axes.get_xlim()
    assert 3 <= len([tick for tick in axes.get_xticks() if low <= tick <= high]) <= 6


def legend(axes):
    return [text.get_text().replace("\n", " ") for text in axes.get_legend().get_texts()]


def test_drift_says_what_is_bad(history):
    calm, held = (panels(history(2, verdict=verdict).plot())["drift"] for verdict in ("calm", "nudge"))
    both = ["to the merged step, squared (bad: above 1)", "to the parameters (bad: if it grows)"]
    assert legend(calm) == both
    assert legend(held) == [*both, "grew: rounds held short"]
    direction, drift = calm.lines
    assert (direction.get_ydata()[0], drift.get_ydata()[0]) == (0.2, 0.01)
    np.testing.assert_array_equal(held.lines[-1].get_ydata(), 0.01)


@pytest.mark.parametrize("direction", [0.2, 40.0])
def test_the_bad_part_of_the_drift_is_shaded(direction, history):
    axes = panels(history(2, drift_dir=direction).plot())["drift"]
    [shade] = axes.patches
    assert shade.get_y() == 1.0
    assert shade.get_y() + shade.get_height() == pytest.approx(axes.get_ylim()[1])
    assert axes.get_ylim()[1] > max(1.0, direction)


def test_panels_of_one_replica(history):
    assert list(panels(history(1, metrics={}).plot())) == ["examples", "seconds"]


def test_metrics_have_a_line_each_by_name(history):
    axes = panels(history(2, metrics={"accuracy": 0.5, "late": math.nan}).plot())["metrics"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["accuracy", "late"]
    assert axes.lines[0].get_xdata()[-1] == 6 * 32
    many = panels(history(2, metrics={f"m{i}": 1.0 for i in range(20)}).plot())["metrics"]
    assert f"{len(many.lines)} of 20" in many.get_title(loc="left")


def test_metrics_that_only_some_rounds_have(history):
    first, second = history(2, metrics={}), history(2, metrics={"cost in $ per $": 0.5})
    axes = panels((first + second).plot())["metrics"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [r"cost in \$ per \$"]
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [math.nan] * 6 + [0.5] * 6)


def test_a_loss_of_nan_does_not_end_the_smooth_curve(history, round_info):
    broken = round_info((4, 5), round=6, loss=math.nan, wall_ms=(100.0, 99.0))
    loss = panels(History([*history(2), broken, *history(2, rounds=60)]).plot())["examples"].lines[1].get_ydata()
    assert np.isfinite(loss).all()
    assert loss[-1] == pytest.approx((1 / 60 + 1 / 59) / 2)


def test_the_loss_of_a_run_that_diverges_leaves_width_to_the_panels(history, round_info):
    """Matplotlib warns if labels leave none."""
    figure = History([*history(2), round_info((4, 5), round=6, loss=1e30, wall_ms=(100.0, 99.0))]).plot()
    figure.draw_without_rendering()
    assert max(len(label.get_text()) for label in panels(figure)["examples"].get_yticklabels()) < 10


def test_loss_panels(history):
    drawn = panels(history(2).plot())
    assert drawn["examples"].lines[0].get_xdata()[-1] == 6 * 32
    assert drawn["seconds"].lines[0].get_xdata()[-1] == pytest.approx(6 * 0.105)
    assert drawn["seconds"].lines[0].get_ydata()[-1] == pytest.approx(1 / 6)


def test_noise_and_memory_panels(history):
    scaled = history(2, noise=500.0, gain=1.5, lr_factor=1.2, progress=3.0)
    scaled.memory = ({"rank": 0, "parameters": 2**20, "in all": 3 * 2**20},)
    figure = scaled.plot()
    drawn = panels(figure)
    assert list(drawn)[-3:] == ["noise", "gain", "memory"]
    cells = drawn["memory"].tables[0].get_celld()
    assert cells[2, 0].get_text().get_text() == "in all"
    assert cells[2, 1].get_text().get_text() == "3.00"


def test_numbers_of_memory_fit_their_columns(history):
    run = history(2)
    run.memory = tuple({"rank": rank, "parameters": 80 * 2**30, "in all": 900 * 2**30} for rank in range(2))
    figure = run.plot()
    figure.draw_without_rendering()
    cells = panels(figure)["memory"].tables[0].get_celld()
    assert [cells[row, 2].get_text().get_text() for row in (1, 2)] == ["81,920", "921,600"]
    boxes = [cells[2, column].get_text().get_window_extent() for column in (1, 2)]
    assert boxes[0].x1 < boxes[1].x0


def test_one_round_is_a_point(history):
    for rounds, marker in ((1, "o"), (2, "None")):
        drawn = panels(history(2, rounds=rounds).plot())
        for name in ("counts", "efficiency", "drift", "examples", "seconds", "metrics"):
            assert {line.get_marker() for line in drawn[name].lines} == {marker}
    ticks = [label.get_text() for label in panels(history(2, rounds=1).plot())["counts"].get_xticklabels()]
    assert all("." not in tick for tick in ticks)


def test_an_idle_rank_is_none_that_waits(round_info):
    for counts, wait in (((5, 0), "0.0%"), ((5, 1), "25.0%")):
        run = History([round_info(counts, wall_ms=(100.0, 50.0 * counts[1]), sync_ms=0.0)])
        assert f"wait {wait}, merge 0.0%" in panels(run.plot())["efficiency"].get_title(loc="left")


def test_names_of_metrics_leave_width_to_the_panels(history):
    long, hidden = "validation/top_5_accuracy_of_the_moving_average_of_the_model", "_loss_of_the_teacher"
    figure, short = history(2, metrics={long: 0.5, hidden: 0.5}).plot(), history(2).plot()
    shown = [text.get_text() for text in panels(figure)["metrics"].get_legend().get_texts()]
    assert "".join(shown[0].split()) == long
    assert shown[1].strip() == hidden
    widths = []
    for one in (figure, short):
        one.draw_without_rendering()
        widths.append(panels(one)["examples"].get_position().width)
    assert widths[0] > 0.9 * widths[1]


def test_no_drift_has_a_reason(history):
    axes = panels(history(2, drift=0.0, drift_dir=0.0).plot())["drift"]
    assert axes.texts[0].get_text() == "none: gradients are averaged, or one rank takes all steps"


def test_plot_of_rounds_with_the_final_ranks(history):
    drawn = panels(History([*history(3)[:2], *history(2)[2:]]).plot())
    assert "Rounds 2 to 5" in drawn["rounds"].get_title(loc="left")
    assert drawn["counts"].get_lines()[0].get_xdata().tolist() == [2, 3, 4, 5]


def test_html_of_rounds_with_the_final_ranks(history):
    html = History([*history(3)[:4], *history(2)[4:]])._repr_html_()
    assert "rank 1" in html
    assert "rank 2" not in html
    assert "; the last 2:" in html


def test_slice(history):
    part = history(2)[2:4]
    assert isinstance(part, History)
    assert "Rounds 2 to 3" in panels(part.plot())["rounds"].get_title(loc="left")


def test_html_of_a_round(history):
    picture = history(2)[0]._repr_html_()
    ElementTree.fromstring(picture)
    assert "round 0, epoch 0: loss 1" in picture
    assert "waits 1.0 ms" in picture
    assert "8 of 40 ranks" in history(40)[0]._repr_html_()


def test_empty_history():
    with pytest.raises(ValueError, match="train first"):
        History().plot()


def test_validation_losses_are_beside_those_of_training(history):
    rounds = history(2)
    assert panels(rounds.plot())["examples"].get_legend() is None
    for number, loss in ((1, 0.9), (5, 0.4)):
        rounds[number].validation["loss"] = loss
    for name, x in (("examples", [64, 192]), ("seconds", [0.21, 0.63])):
        axes = panels(rounds.plot())[name]
        (line,) = (line for line in axes.get_lines() if line.get_label() == "validation")
        np.testing.assert_allclose(line.get_xdata(), x)
        np.testing.assert_allclose(line.get_ydata(), [0.9, 0.4])
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training", "validation"]
    rounds[3].validation["loss"] = 500.0
    assert panels(rounds.plot())["seconds"].get_yscale() == "log"
