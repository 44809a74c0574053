"""Numbers and tables as text of one width a letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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


def odd_ones(columns: Mapping[str, Sequence[str]], who: Sequence[int], most: int = 8) -> str:
    """A table of who differs from the most, of those columns in which somebody does.

    Args:
      columns: a value for each of ``who``, by their name.
      who: numbers of processes.
      most: rows at the most; how many more there are is said.

    Returns:
      The table, or "" where all are alike.

    Example:
      >>> print(odd_ones({"jax": ["0.10", "0.10", "0.9"], "seed": ["0", "0", "0"]}, who=[0, 1, 2]))
        process  jax
        most     0.10
        2        0.9
    """
    columns = {name: values for name, values in columns.items() if len(set(values)) > 1}
    if not columns:
        return ""
    # The first value wins a tie: the table then shows who differs from the first.
    usual = {name: max(dict.fromkeys(values), key=values.count) for name, values in columns.items()}
    differ = [i for i in range(len(who)) if any(columns[name][i] != usual[name] for name in columns)]
    rows = [["process", *columns], ["most", *usual.values()]]
    rows += [[str(who[i]), *(columns[name][i] for name in columns)] for i in differ[:most]]
    more = f"\n  and {len(differ) - most} more" if len(differ) > most else ""
    return aligned(rows, left=len(rows[0]), indent=2) + more
