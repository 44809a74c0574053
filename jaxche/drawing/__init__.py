"""Colours and style of figures, and lanes of bars as SVG; imports no jax."""

from jaxche.drawing._lanes import Bar as Bar
from jaxche.drawing._lanes import Lane as Lane
from jaxche.drawing._lanes import lanes as lanes
from jaxche.drawing._lanes import svg as svg
from jaxche.drawing._style import COLOURS, figure_of, label_outside, logarithmic
from jaxche.drawing._style import MERGE as MERGE
from jaxche.drawing._style import WAIT as WAIT
from jaxche.drawing._style import ranks_to_show as ranks_to_show
from jaxche.drawing._style import text_on as text_on

# For users, on a page of the reference; what is imported "as" itself is for the other packages.
__all__ = ["COLOURS", "figure_of", "label_outside", "logarithmic"]
