"""Numbers as text, and tables as aligned text or HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple


def aligned(rows: Sequence[Sequence[str]], left: int = 0, indent: int = 0) -> str:
    """A table as lines with aligned columns.

    Args:
      rows: cells as text, equally many in each row; the first row has the titles.
      left: number of left-aligned columns, the first ones; the others are right-aligned.
      indent: spaces before each line.

    Returns:
      Lines without trailing spaces, and without a newline at the end.

    Example:
      >>> print(aligned([["rank", "host", "steps"], ["0", "n1", "12"], ["1", "n2", "7"]], left=2))
      rank  host  steps
      0     n1       12
      1     n2        7
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        return (" " * indent + "  ".join(cells)).rstrip()

    return "\n".join(map(line, rows))


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table as HTML.

    Args:
      head: titles of the columns.
      rows: cells as text, equally many in each row.
      caption: a line above.

    Returns:
      A ``<table>`` element; titles, cells and caption are escaped.

    Example:
      >>> html_table(["a<b"], [["1 & 2"]])
      '<table><thead><tr><th>a&lt;b</th></tr></thead><tbody><tr><td>1 &amp; 2</td></tr></tbody></table>'
    """

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    body = "".join(line("td", row) for row in rows)
    return f"<table>{above}<thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"


def per_rank(values: Sequence[float], form: str = "{:.0f}", most: int = 8) -> str:
    """The values of all ranks as text, or their range.

    Args:
      values: one a rank.
      form: format of a value.
      most: with more ranks than this, the range.

    Returns:
      The text.

    Example:
      >>> per_rank([10, 4]), per_rank(range(64)), per_rank([50.0, 20.5, 1.0], "{:.1f}", most=2)
      ('10:4', '0..63', '1.0..50.0')
    """
    if len(values) <= most:
        return ":".join(map(form.format, values))
    return f"{form.format(min(values))}..{form.format(max(values))}"


class OddOnes(NamedTuple):
    """The processes that differ from the majority, the majority's values, and a table."""

    who: tuple[int, ...]
    usual: dict[str, str]
    table: str


def odd_ones(
    columns: Mapping[str, Sequence[str]],
    who: Sequence[int],
    beside: Mapping[str, Sequence[str]] | None = None,
    most: int = 8,
) -> OddOnes:
    """Finds the processes that differ from the majority in some column.

    Args:
      columns: name of each column, and its value for each of ``who``.
      who: numbers of the processes.
      beside: columns that are shown and not compared.
      most: maximum number of rows; the table says how many more there are.

    Returns:
      The numbers of the processes that differ, the most frequent value of each column with differences, and the table;
      without differences an empty tuple, an empty dict and "".

    Example:
      >>> odd = odd_ones({"jax": ["0.10", "0.10", "0.9"], "seed": ["0", "0", "0"]}, who=[0, 1, 2])
      >>> odd.who, odd.usual
      ((2,), {'jax': '0.10'})
      >>> print(odd.table)
        process  jax
        most     0.10
        2        0.9
    """
    columns, beside = {name: values for name, values in columns.items() if len(set(values)) > 1}, beside or {}
    if not columns:
        return OddOnes((), {}, "")
    # In a tie the first value counts as the majority.
    usual = {name: max(dict.fromkeys(values), key=values.count) for name, values in columns.items()}
    differ = [i for i in range(len(who)) if any(columns[name][i] != usual[name] for name in columns)]
    shown = [*beside.values(), *columns.values()]
    rows = [["process", *beside, *columns], ["most", *[""] * len(beside), *usual.values()]]
    rows += [[str(who[i]), *(values[i] for values in shown)] for i in differ[:most]]
    more = f"\n  and {len(differ) - most} more" if len(differ) > most else ""
    return OddOnes(tuple(who[i] for i in differ), usual, aligned(rows, left=len(rows[0]), indent=2) + more)
