"""Layer 0, drawing: colours, lanes of bars as SVG, text tables, and the style of figures; imports no jax."""

from jaxche.drawing._colours import COLOURS, MERGE, WAIT, text_on
from jaxche.drawing._figure import figure_of, label_outside, logarithmic, ranks_to_show
from jaxche.drawing._lanes import Bar, Lane, lanes
from jaxche.drawing._text import aligned, html_table, odd_ones, per_rank

__all__ = [
    "COLOURS",
    "MERGE",
    "WAIT",
    "Bar",
    "Lane",
    "aligned",
    "figure_of",
    "html_table",
    "label_outside",
    "lanes",
    "logarithmic",
    "odd_ones",
    "per_rank",
    "ranks_to_show",
    "text_on",
]
