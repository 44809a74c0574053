"""The size and style of matplotlib figures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

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


@contextlib.contextmanager
def figure_of(rows: Sequence[Sequence[str]], heights: Sequence[float]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A figure of notebook width with the style of jaxche inside the context.

    Args:
      rows: names of the panels in each row; a row of one panel is as wide as the figure.
      heights: of the rows in inches.

    Returns:
      A context with the matplotlib figure and its axes by name. The figure is closed, so pyplot does not show it.

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
    with plt.rc_context(_STYLE):
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
    """Makes an axis logarithmic with plain numbers: 0.1, 0.2, 0.5, 1; over many decades 0.1, 1, 10.

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
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def label_outside(axes: Any) -> None:
    """Places the legend to the right of the axes.

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


def ranks_to_show(ms_per_step: Sequence[float], most: int = 8) -> list[int]:
    """A subset of ranks to plot, evenly spaced from the fastest to the slowest.

    Args:
      ms_per_step: of each rank.
      most: maximum number of ranks.

    Returns:
      Their numbers; all ranks in order if there are at most ``most``.

    Example:
      >>> ranks_to_show([20.0, 50.0]), ranks_to_show([5, 1, 4, 2, 3], most=3)
      ([0, 1], [1, 4, 0])
    """
    if len(ms_per_step) <= most:
        return list(range(len(ms_per_step)))
    order = np.argsort(ms_per_step, kind="stable")
    return order[np.linspace(0, len(order) - 1, most).round().astype(int)].tolist()
