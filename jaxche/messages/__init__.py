"""Messages: checks of arguments, values as text, tables, tracebacks that end in the user's line; imports no jax."""

from jaxche.messages._checks import finite_number as finite_number
from jaxche.messages._checks import one_of as one_of
from jaxche.messages._checks import positive as positive
from jaxche.messages._checks import whole_number as whole_number
from jaxche.messages._text import aligned as aligned
from jaxche.messages._text import brief as brief
from jaxche.messages._text import format_ranks as format_ranks
from jaxche.messages._text import html_table as html_table
from jaxche.messages._text import odd_ones as odd_ones
from jaxche.messages._text import per_rank as per_rank
from jaxche.messages._text import type_of as type_of
from jaxche.messages._tracebacks import causes as causes
from jaxche.messages._tracebacks import interruption as interruption
from jaxche.messages._tracebacks import short_traceback as short_traceback
from jaxche.messages._tracebacks import users_part as users_part
from jaxche.messages._tracebacks import without_library as without_library
