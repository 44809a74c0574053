"""The plot of a run: cadence, time, loss and memory."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxche.cadence import Verdict
from jaxche.drawing import COLOURS, MERGE, WAIT, figure_of, label_outside, logarithmic, ranks_to_show, text_on
from jaxche.reports._round_info import RoundInfo, efficiency_of, is_scaled

# More rounds make the bars too narrow for their labels.
ROUNDS_DRAWN = 8
# Above this drift against the merged step, the steps of the replicas cancel more than they agree.
_APART = 1.0
# Characters in a line of a legend.
_LABEL = 24


def draw(rounds: Sequence[RoundInfo], memory: Sequence[dict[str, int]]) -> Any:
    """A figure of these rounds, without panels that have no data."""
    if not rounds:
        raise ValueError("the history has no rounds; train first: state, history = trainer.fit(state, data)")
    rounds = list(rounds)  # read once
    run = _Run(rounds, memory)
    world = len(rounds[0].counts)
    rows: list[tuple[list[str], float]] = []
    if world > 1:
        rows = [(["rounds"], 0.9 + 0.28 * min(world, 8)), (["counts"], 2.0), (["efficiency"], 1.5), (["drift"], 1.7)]
    rows.append((["examples", "seconds"], 2.0))
    if run.metrics:
        rows.append((["metrics"], 1.9))
    if is_scaled(rounds):
        rows.append((["noise", "gain"], 1.9))
    if memory:
        rows.append((["memory"], 0.5 + 0.22 * (1 + len(_memory_names(run)))))
    names, heights = [names for names, _ in rows], [height for _, height in rows]
    with figure_of(names, heights, points=len(rounds)) as (figure, axes):
        for name, panel in axes.items():
            _PANELS[name](panel, run)
    return figure


class _Run:
    """The rounds, and the arrays that several panels use."""

    def __init__(self, infos: Sequence[RoundInfo], memory: Sequence[dict[str, int]]):
        self.infos, self.memory = infos, memory
        self.rounds = self.of("round")
        self.counts = self.of("counts")
        self.seconds = np.cumsum(self.of("period_ms")) / 1e3
        self.examples = np.cumsum(self.of("examples"))
        self.metrics = list(dict.fromkeys(name for info in infos for name in info.metrics))
        steps = np.maximum(self.counts.sum(axis=0), 1)
        self.ranks = ranks_to_show((self.of("wall_ms").sum(axis=0) / steps).tolist())

    def of(self, name: str) -> np.ndarray:
        """A number of each round, or of each rank in each round."""
        return np.array([getattr(info, name) for info in self.infos])


def _rounds(axes: Any, run: _Run) -> None:
    """A timeline of the last rounds."""
    shown = run.infos[-ROUNDS_DRAWN:]
    ends = run.seconds[-len(shown) :] * 1e3
    width = ends[-1] - (ends[0] - shown[0].period_ms)
    for info, end in zip(shown, ends, strict=True):
        start, slowest = end - info.period_ms, max(info.wall_ms)
        for lane, rank in enumerate(run.ranks):
            colour, wall = COLOURS[lane % len(COLOURS)], info.wall_ms[rank]
            axes.barh(lane, wall / 1e3, left=start / 1e3, height=0.72, color=colour)
            if wall / width > 0.028:
                x = (start + wall / 2) / 1e3
                axes.text(x, lane, info.counts[rank], ha="center", va="center", color=text_on(colour), fontsize=8)
            left = (start + wall) / 1e3
            axes.barh(lane, (slowest - wall) / 1e3, left=left, height=0.72, color=WAIT, hatch="////", edgecolor="0.55")
        axes.axvspan((start + slowest) / 1e3, end / 1e3, color=MERGE, lw=0)
    axes.barh(0, 0, color=WAIT, hatch="////", edgecolor="0.55", label="wait")
    axes.barh(0, 0, color=MERGE, label="merge")
    axes.set_yticks(range(len(run.ranks)), [f"rank {rank}" for rank in run.ranks])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim((ends[0] - shown[0].period_ms) / 1e3, ends[-1] / 1e3)
    part = f"Rounds {shown[0].round} to {shown[-1].round}" if len(shown) > 1 else f"Round {shown[0].round}"
    some = "" if len(run.ranks) == run.counts.shape[1] else f", {len(run.ranks)} of {run.counts.shape[1]} ranks"
    axes.set(xlabel="training time (s)", title=f"{part}: steps of each rank, then one merge{some}")
    label_outside(axes)


def _over_rounds(axes: Any, **labels: str) -> None:
    axes.set(xlabel="round", **labels)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _counts(axes: Any, run: _Run) -> None:
    for lane, rank in enumerate(run.ranks):
        colour = COLOURS[lane % len(COLOURS)]
        axes.step(run.rounds, run.counts[:, rank], where="mid", color=colour, lw=1.6, label=f"rank {rank}")
    anchor = "anchor: steps\nof the slowest"
    axes.step(run.rounds, run.of("anchor"), where="mid", color="black", lw=1.2, ls=":", label=anchor)
    _over_rounds(axes, ylabel="local steps", title="Cadence: steps of each rank between two merges")
    axes.yaxis.get_major_locator().set_params(integer=True, nbins=5)
    axes.set_ylim(bottom=0)
    label_outside(axes)


def _efficiency(axes: Any, run: _Run) -> None:
    percent = 100 * run.of("efficiency")
    axes.plot(run.rounds, percent, color=COLOURS[0], lw=1, alpha=0.35)
    axes.plot(run.rounds, _smooth(percent), color=COLOURS[0], lw=1.8)
    # Idle ranks do not wait, and the summed speeds do not include them either.
    wait = sum(np.mean(np.array(info.wait_ms)[np.array(info.counts) > 0]) for info in run.infos) / 1e3 / run.seconds[-1]
    merge = run.of("sync_ms").sum() / 1e3 / run.seconds[-1]
    _over_rounds(axes, ylabel="efficiency (%)")
    axes.set_title(
        f"Efficiency {efficiency_of(run.infos):.1%} of the summed speeds: wait {wait:.1%}, merge {merge:.1%}"
    )
    axes.set_ylim(0, 105)


def _drift(axes: Any, run: _Run) -> None:
    _over_rounds(axes, ylabel="relative distance", title="Drift: distance of the replicas before a merge")
    drift, direction = run.of("drift"), run.of("drift_dir")
    if not np.nanmax([*drift, 0.0]) > 0:
        reason = "none: gradients are averaged, or one rank takes all steps"
        axes.text(0.5, 0.5, reason, ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    lines = (
        (direction, "to the merged step,\nsquared (bad: above 1)", COLOURS[4], "--"),
        (drift, "to the parameters\n(bad: if it grows)", COLOURS[5], "-"),
    )
    for values, label, colour, style in lines:
        positive = np.where(values > 0, values, np.nan)
        axes.plot(run.rounds, positive, color=colour, ls=style, lw=1.4, label=label)
    held = [i for i, info in enumerate(run.infos) if info.verdict != Verdict.CALM]
    if held:
        axes.plot(run.rounds[held], drift[held], "v", color="black", ms=4, label="grew: rounds\nheld short")
    logarithmic(axes.yaxis)
    low, high = axes.get_ylim()
    high = max(high, 1.5 * _APART)
    axes.set_ylim(low, high)
    axes.axhspan(_APART, high, color=COLOURS[5], alpha=0.12, lw=0)
    label_outside(axes)


def _loss_per_examples(axes: Any, run: _Run) -> None:
    _loss(axes, run.examples, run)
    axes.set(xlabel="examples trained on", title="Loss: mean over a round's examples")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=5)


def _loss_per_second(axes: Any, run: _Run) -> None:
    _loss(axes, run.seconds, run)
    rate = run.examples[-1] / run.seconds[-1]
    axes.set(xlabel="training time (s)", title=f"The same on the clock: {rate:,.0f} examples a second")


def _loss(axes: Any, x: np.ndarray, run: _Run) -> None:
    loss = run.of("loss")
    axes.plot(x, loss, color=COLOURS[0], lw=1, alpha=0.35)
    axes.plot(x, _smooth(loss), color=COLOURS[0], lw=1.8, label="training")
    validation = np.array([info.validation.get("loss", np.nan) for info in run.infos])
    evaluated = np.isfinite(validation)
    if evaluated.any():
        axes.plot(x[evaluated], validation[evaluated], "o-", color=COLOURS[1], lw=1.4, ms=4, label="validation")
        axes.legend()
    loss = np.concatenate([loss, validation[evaluated]])
    finite = loss[np.isfinite(loss)]
    # A linear axis does not show the end of a larger range.
    if finite.size and finite.min() > 0 and finite.max() / finite.min() > 100:
        logarithmic(axes.yaxis)
    elif finite.size and finite.min() > 0:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("loss")


def _metrics(axes: Any, run: _Run) -> None:
    shown = run.metrics[: len(COLOURS)]
    for name, colour in zip(shown, COLOURS, strict=False):
        values = np.array([info.metrics.get(name, np.nan) for info in run.infos])
        axes.plot(run.examples, values, color=colour, lw=1.6, label=_label(name))
    some = f", {len(shown)} of {len(run.metrics)}" if len(shown) < len(run.metrics) else ""
    axes.set(xlabel="examples trained on", title=f"Metrics: means over a round{some}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    label_outside(axes)


def _label(name: str) -> str:
    """The name of a metric in a legend: a long one on several lines, or the panels would have no width."""
    # matplotlib leaves out labels that begin with _, and reads formulas between dollars.
    return textwrap.fill(f" {name}" if name.startswith("_") else name, _LABEL).replace("$", r"\$")


def _noise(axes: Any, run: _Run) -> None:
    noise = run.of("noise")
    noise = np.where(np.isfinite(noise) & (noise > 0), noise, np.nan)
    axes.plot(run.rounds, noise, color=COLOURS[2], lw=1.8, label="critical batch: noise equals signal")
    axes.plot(run.rounds, run.of("effective_batch"), color="black", lw=1, ls=":", label="effective batch of a step")
    _over_rounds(axes, ylabel="examples", title="Gradient noise scale")
    if np.isfinite(noise).any():
        logarithmic(axes.yaxis)
        axes.margins(y=0.45)
    axes.legend()


def _gain(axes: Any, run: _Run) -> None:
    axes.plot(run.rounds, run.of("gain"), color=COLOURS[2], lw=1.8, label="progress of a step (gain)")
    axes.plot(run.rounds, run.of("lr_factor"), color=COLOURS[5], lw=1.4, ls="--", label="learning rate")
    _over_rounds(axes, ylabel="times the base batch's", title="What a step is worth")
    axes.set_ylim(bottom=0)
    axes.legend()


def _memory(axes: Any, run: _Run) -> None:
    axes.axis("off")
    shown = [run.memory[i] for i in ranks_to_show([row["in all"] for row in run.memory])]
    ranks = [f"rank {row['rank']}" for row in shown]
    lines = [[name, *(_mebibytes(row[name]) for row in shown)] for name in _memory_names(run)]
    axes.set_title("Memory of a device in a round (MiB)")
    table = axes.table(
        [["", *ranks], *lines],
        loc="upper left",
        edges="horizontal",
        colWidths=[0.2] + [0.1] * len(ranks),
        cellLoc="right",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(8.5)
    for (row, column), cell in table.get_celld().items():
        cell.set_edgecolor("0.85")
        cell.get_text().set_ha("left" if column == 0 else "right")
        if row in (0, len(lines)):
            cell.get_text().set_fontweight("bold")


def _mebibytes(size: int) -> str:
    """Bytes as MiB in at most seven characters up to 900 GiB, which fit into a column."""
    mib = size / 2**20
    return f"{mib:,.0f}" if mib >= 1000 else f"{mib:.2f}"


def _memory_names(run: _Run) -> list[str]:
    return [name for name in run.memory[0] if name != "rank"]


def _smooth(values: np.ndarray) -> np.ndarray:
    """A trailing mean over a thirtieth of the run, of the values that are finite; nan where none is."""
    window = max(1, len(values) // 30)
    finite = np.isfinite(values)
    sums, counts = (np.cumsum([0, *column]) for column in (np.where(finite, values, 0.0), finite))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    found = counts[ends] - counts[begins]
    return np.where(found > 0, sums[ends] - sums[begins], np.nan) / np.maximum(found, 1)


_PANELS = {
    "rounds": _rounds,
    "counts": _counts,
    "efficiency": _efficiency,
    "drift": _drift,
    "examples": _loss_per_examples,
    "seconds": _loss_per_second,
    "metrics": _metrics,
    "noise": _noise,
    "gain": _gain,
    "memory": _memory,
}
