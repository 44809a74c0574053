"""Colours and style of figures, lanes of bars as SVG, text and tracebacks; imports no jax."""

from jaxche.drawing._lanes import Bar as Bar
from jaxche.drawing._lanes import Lane as Lane
from jaxche.drawing._lanes import lanes as lanes
from jaxche.drawing._style import COLOURS, figure_of, label_outside, logarithmic
from jaxche.drawing._style import MERGE as MERGE
from jaxche.drawing._style import WAIT as WAIT
from jaxche.drawing._style import ranks_to_show as ranks_to_show
from jaxche.drawing._style import text_on as text_on
from jaxche.drawing._text import aligned as aligned
from jaxche.drawing._text import brief as brief
from jaxche.drawing._text import format_ranks as format_ranks
from jaxche.drawing._text import html_table as html_table
from jaxche.drawing._text import odd_ones as odd_ones
from jaxche.drawing._text import per_rank as per_rank
from jaxche.drawing._tracebacks import TRACEBACK as TRACEBACK
from jaxche.drawing._tracebacks import short_traceback as short_traceback
from jaxche.drawing._tracebacks import users_part as users_part
from jaxche.drawing._tracebacks import without_library as without_library

# For users, on a page of the reference; what is imported "as" itself is for the other packages.
__all__ = ["COLOURS", "figure_of", "label_outside", "logarithmic"]
