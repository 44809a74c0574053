"""Colours, and the size and style of matplotlib figures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# Palette of Okabe and Ito, distinct for colour-blind readers and in grey print. Lane i has colour i modulo 8.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
# Waiting is light and hatched, merges are dark.
WAIT, MERGE = "#E8E8E8", "#333333"

_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.6,
    "hatch.linewidth": 0.6,
}
_WIDTH, _DPI = 8.6, 110
_DECADES = 60.0
_RANKS = 8


@contextlib.contextmanager
def figure_of(
    rows: Sequence[Sequence[str]], heights: Sequence[float], points: int = 2
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A context with a matplotlib figure of notebook width in the style of jaxche.

    Args:
      rows: names of the panels in each row; a row of one panel is as wide as the figure.
      heights: of the rows in inches.
      points: of each line; a line of one point has no length, so it gets a marker.

    Returns:
      A context with the figure and its axes by name. The figure is closed, so that pyplot does not show it.

    Raises:
      ImportError: matplotlib is missing; the message says what to install.

    Example:
      >>> with figure_of([["counts"], ["drift", "loss"]], heights=[2.0, 2.0]) as (figure, axes):
      ...     _ = axes["counts"].plot([1, 2, 3])
      >>> sorted(axes)
      ['counts', 'drift', 'loss']
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError("drawing needs matplotlib; write: pip install 'jaxche[plot]'") from error
    columns = int(np.lcm.reduce([len(row) for row in rows]))
    mosaic: Any = [[name for name in row for _ in range(columns // len(row))] for row in rows]
    with plt.rc_context(_STYLE | {"lines.marker": "o" if points == 1 else "None"}):
        figure, axes = plt.subplot_mosaic(
            mosaic,
            figsize=(_WIDTH, sum(heights)),
            height_ratios=list(heights),
            layout="constrained",
            dpi=_DPI,
        )
        # A notebook shows an open figure twice: as the value of the cell, and through pyplot.
        plt.close(figure)
        yield figure, axes


def logarithmic(axis: Any) -> None:
    """Make an axis logarithmic with decimal labels: 0.1, 0.2, 0.5, 1; over many decades 0.1, 1, 10.

    Call it after plotting.

    Args:
      axis: ``axes.yaxis`` or ``axes.xaxis`` of matplotlib.

    Example:
      >>> with figure_of([["one"]], heights=[2.0]) as (_, axes):
      ...     logarithmic(axes["one"].yaxis)
      >>> axes["one"].get_yscale()
      'log'
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    low, high = axis.get_data_interval()
    wide = 0 < low < high < np.inf and high / low > _DECADES
    axis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if 1e3 <= value < 1e7 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def label_outside(axes: Any) -> None:
    """Place the legend to the right of the axes.

    Args:
      axes: matplotlib axes with labelled artists.

    Example:
      >>> with figure_of([["one"]], heights=[2.0]) as (_, axes):
      ...     _ = axes["one"].plot([0, 1], label="a line")
      ...     label_outside(axes["one"])
      >>> [text.get_text() for text in axes["one"].get_legend().get_texts()]
      ['a line']
    """
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), frameon=False, fontsize=8.5, borderaxespad=0.2)


def ranks_to_show(ms_per_step: Sequence[float]) -> list[int]:
    """At most 8 ranks to plot, evenly spaced from the fastest to the slowest; all in order if they fit."""
    if len(ms_per_step) <= _RANKS:
        return list(range(len(ms_per_step)))
    order = np.argsort(ms_per_step, kind="stable")
    return order[np.linspace(0, len(order) - 1, _RANKS).round().astype(int)].tolist()


def text_on(colour: str) -> str:
    """Black or white, whichever has more contrast on a colour ``"#rrggbb"`` (WCAG 2.2, contrast ratio)."""
    red, green, blue = (_linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def _linear(channel: float) -> float:
    """The linear light of an sRGB channel."""
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
