"""Numbers as text, and tables as text of one width a letter or as HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple


def aligned(rows: Sequence[Sequence[str]], left: int = 0, indent: int = 0) -> str:
    """Rows of cells as lines with columns of one width each.

    Args:
      rows: cells as text, the titles first; as many in each.
      left: how many of the first columns are flush left, as words are; the others are flush right, as numbers are.
      indent: blanks before each line.

    Returns:
      Lines without a newline at the end, and without blanks at theirs.

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
    """Rows of cells as an HTML table.

    Args:
      head: titles of the columns.
      rows: cells as text; as many in each.
      caption: a line above.

    Returns:
      A ``<table>`` element; titles, cells and caption are text in it, never markup.

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
    """Values of all ranks, or of the smallest and the largest.

    Args:
      values: one a rank.
      form: of each.
      most: with more ranks than this their range is shown.

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
    """Who differs from the most, in what, and a table of it."""

    who: tuple[int, ...]
    usual: dict[str, str]
    table: str


def odd_ones(
    columns: Mapping[str, Sequence[str]],
    who: Sequence[int],
    beside: Mapping[str, Sequence[str]] | None = None,
    most: int = 8,
) -> OddOnes:
    """Who differs from the most, by those columns in which somebody does.

    Args:
      columns: a value for each of ``who``, by their name.
      who: numbers of processes.
      beside: columns that are shown and not compared.
      most: rows at the most; how many more there are is said.

    Returns:
      The numbers of those that differ, what most have in each column in which somebody differs, and the table; where
      all are alike nobody, nothing and "".

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
    # The first value wins a tie: the table then shows who differs from the first.
    usual = {name: max(dict.fromkeys(values), key=values.count) for name, values in columns.items()}
    differ = [i for i in range(len(who)) if any(columns[name][i] != usual[name] for name in columns)]
    shown = [*beside.values(), *columns.values()]
    rows = [["process", *beside, *columns], ["most", *[""] * len(beside), *usual.values()]]
    rows += [[str(who[i]), *(values[i] for values in shown)] for i in differ[:most]]
    more = f"\n  and {len(differ) - most} more" if len(differ) > most else ""
    return OddOnes(tuple(who[i] for i in differ), usual, aligned(rows, left=len(rows[0]), indent=2) + more)
