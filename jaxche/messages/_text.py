"""Numbers as text, and tables as aligned text or HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_LISTED = 12
# Names that begin with a vowel as it is spoken, and not with that of "unit" or of "one".
_VOWEL = re.compile(r"(?!eu|one|uni|use|uti)[aeiou]", re.IGNORECASE)


def format_ranks(ranks: Sequence[int]) -> str:
    """The first twelve of many numbers as text."""
    shown = ", ".join(map(str, ranks[:_LISTED]))
    return shown + (f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else "")


def brief(value: Any, most: int = 80) -> str:
    """The value as text on one line of at most ``most`` characters, for messages; of an array dtype and shape."""
    is_number = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    # The classes of arrays and of numbers, such as np.float32, have these attributes too.
    has_shape = not issubclass(type(value), type) and hasattr(value, "shape") and hasattr(value, "dtype")
    if has_shape and not is_number:
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    if type(value) in (list, tuple):
        left, right = "[]" if isinstance(value, list) else "()"
        text = left + ", ".join(map(brief, value[:most])) + right
    elif type(value) is dict:
        text = "{" + ", ".join(f"{name!r}: {brief(value[name])}" for name in list(value)[:most]) + "}"
    elif hasattr(value, "__qualname__") and not isinstance(value, type):
        text = f"<{type(value).__name__} {value.__qualname__.replace('<locals>.', '')}>"
    else:
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
        if "\n" in text:  # the repr of a model has a page
            text = f"{type(value).__name__}(...)"
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def type_of(value: Any) -> str:
    """The name of the type of a value with its article, "an int" or "a dict"; or "None"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if _VOWEL.match(name) else 'a'} {name}"


def aligned(rows: Sequence[Sequence[str]], left: int = 0, indent: int = 0, gap: int = 2) -> str:
    """A table as lines with aligned columns, the first ``left`` of them to the left; the first row has the titles."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        return (" " * indent + (" " * gap).join(cells)).rstrip()

    return "\n".join(map(line, rows))


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table as a ``<table>`` element; titles, cells and caption are escaped."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    body = "".join(line("td", row) for row in rows)
    return f"<table>{above}<thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"


def per_rank(values: Sequence[float], form: str = "{:.0f}", most: int = 8) -> str:
    """The values of all ranks as text, e.g. ``"10:4"``; of more than ``most`` ranks their range, e.g. ``"0..63"``."""
    if len(values) <= most:
        return ":".join(map(form.format, values))
    return f"{form.format(min(values))}..{form.format(max(values))}"


class OddOnes(NamedTuple):
    """The processes that differ from the majority, the values of the majority, and a table."""

    processes: tuple[int, ...]
    majority: dict[str, str]
    table: str


def odd_ones(
    columns: Mapping[str, Sequence[str]],
    processes: Sequence[int],
    beside: Mapping[str, Sequence[str]] | None = None,
    most: int = 8,
) -> OddOnes:
    """The ``processes`` that differ from the majority in a column; the table also has the columns ``beside``."""
    columns, beside = {name: values for name, values in columns.items() if len(set(values)) > 1}, beside or {}
    if not columns:
        return OddOnes((), {}, "")
    # In a tie the first value counts as the majority.
    majority = {name: max(dict.fromkeys(values), key=values.count) for name, values in columns.items()}
    differ = [i for i in range(len(processes)) if any(columns[name][i] != majority[name] for name in columns)]
    shown = [*beside.values(), *columns.values()]
    rows = [["process", *beside, *columns], ["most", *[""] * len(beside), *majority.values()]]
    rows += [[str(processes[i]), *(values[i] for values in shown)] for i in differ[:most]]
    more = f"\n  and {len(differ) - most} more" if len(differ) > most else ""
    table = aligned(rows, left=len(rows[0]), indent=2) + more
    return OddOnes(tuple(processes[i] for i in differ), majority, table)
