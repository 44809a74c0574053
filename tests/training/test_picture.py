"""The picture holds what it promises."""

import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from jaxche.training import History, RoundInfo


def history(world, rounds=6):
    counts = tuple(range(world + 3, 3, -1))
    return History(
        RoundInfo(
            round=r,
            epoch=0,
            cursor=0,
            counts=counts,
            planned=counts,
            weights=(1 / world,) * world,
            wall_ms=tuple(100.0 - i for i in range(world)),
            sync_ms=5.0,
            loss=1 / (r + 1),
            metrics={},
            drift=0.0,
            drift_dir=0.0,
            losses=(1.0,) * world,
            examples=32,
            anchor=min(counts),
            verdict="calm",
        )
        for r in range(rounds)
    )


@pytest.mark.parametrize("world", [1, 2, 40])
def test_three_panels_with_units_and_ranks(world, tmp_path):
    figure = history(world).plot()
    assert isinstance(figure, Figure)
    assert not plt.get_fignums()  # nothing left open
    cadence, clock, loss = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes] == ["round", "ms per round (mean)", "training time (s)"]
    labels = [text.get_text() for text in cadence.get_legend().get_texts()]
    assert labels[:1] == ["rank 0"]
    assert ("anchor" in labels) == (world > 1)
    assert [t.get_text() for t in clock.get_yticklabels()] == [f"rank {r}" for r in range(min(world, 8))]
    assert loss.lines[0].get_ydata()[-1] == pytest.approx(1 / 6)
    figure.savefig(tmp_path / "history.png")


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="train first"):
        History().plot()
