"""The picture of a run: the cadence, where the time went, what was learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxche.training._history import History

# Okabe and Ito's palette: told apart by colour-blind readers and in grey print.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
_RANKS_SHOWN = 8


def draw(history: History) -> Any:
    """Draw a history: counts per round, compute and wait per rank, loss over time; the gain where there is one."""
    if not history:
        raise ValueError("the history has no rounds; train first: state, history = trainer.fit(state, data)")
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'jaxche[plot]'") from error

    panels = 4 if history.scaled else 3
    figure, axes_ = plt.subplots(panels, 1, figsize=(9, 8 * panels / 3), layout="constrained")
    cadence, clock, loss = axes_[:3]
    # Closed, a notebook shows it once, as the value of the cell, and not again by pyplot.
    plt.close(figure)
    rounds = np.array([info.round for info in history])
    counts = np.array([info.counts for info in history])
    wall = np.array([info.wall_ms for info in history])
    world = counts.shape[1]
    shown = range(min(world, _RANKS_SHOWN))

    for rank in shown:
        cadence.step(rounds, counts[:, rank], where="mid", color=COLOURS[rank], label=f"rank {rank}", linewidth=1.8)
    if world > 1:
        cadence.step(
            rounds, [info.anchor for info in history], where="mid", color="0.35", linestyle=":", label="anchor"
        )
    cadence.set(xlabel="round", ylabel="local steps", title="Cadence: steps each rank takes between two merges")
    cadence.set_ylim(bottom=0)
    cadence.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)

    compute = wall.mean(axis=0)[: len(shown)]
    wait = np.array([info.wait_ms for info in history]).mean(axis=0)[: len(shown)]
    sync = np.full(len(shown), np.mean([info.sync_ms for info in history]))
    labels = [f"rank {rank}" for rank in shown]
    clock.barh(labels, compute, color=[COLOURS[r] for r in shown])
    clock.barh(labels, wait, left=compute, color="0.85", hatch="//", edgecolor="0.5", label="wait for the slowest")
    clock.barh(labels, sync, left=compute + wait, color="0.25", label="merge")
    clock.invert_yaxis()
    clock.set(xlabel="ms per round (mean)", title=f"Where the time goes (efficiency {history.efficiency:.1%})")
    clock.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)

    seconds = np.cumsum([info.period_ms for info in history]) / 1e3
    loss.plot(seconds, [info.loss for info in history], color=COLOURS[0], linewidth=1.8)
    loss.set(xlabel="training time (s)", ylabel="loss", title="Loss: mean over the examples of a round")
    if history.scaled:
        _draw_scaling(axes_[3], rounds, history)
    for axes in axes_:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if axes is clock else "y", color="0.9")
        axes.set_axisbelow(True)
    return figure


def _draw_scaling(axes: Any, rounds: np.ndarray, history: History) -> None:
    axes.plot(rounds, [info.gain for info in history], color=COLOURS[2], linewidth=1.8, label="gain")
    factors = [info.lr_factor for info in history]
    axes.plot(rounds, factors, color=COLOURS[5], linewidth=1.8, linestyle="--", label="learning rate")
    noise = history[-1].noise
    known = f" (critical batch size at the end: {noise:,.0f} examples)" if np.isfinite(noise) else ""
    axes.set(xlabel="round", ylabel="times that of the base batch", title=f"What a step is worth{known}")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
