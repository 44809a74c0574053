"""Layer 0, drawing: colours, lanes of bars and the look of figures. Knows nothing of what it draws; imports no jax."""

from jaxche.drawing._colours import COLOURS, MERGE, WAIT, text_on
from jaxche.drawing._figure import figure_of, label_outside, logarithmic, ranks_to_show
from jaxche.drawing._lanes import Bar, Lane, lanes

__all__ = [
    "COLOURS",
    "MERGE",
    "WAIT",
    "Bar",
    "Lane",
    "figure_of",
    "label_outside",
    "lanes",
    "logarithmic",
    "ranks_to_show",
    "text_on",
]
