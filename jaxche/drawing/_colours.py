"""One set of colours for every picture."""

from __future__ import annotations

# Okabe and Ito's palette: told apart by colour-blind readers and in grey print. Rank r has colour r.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
# What is no work: waiting is light and hatched, merging is dark.
WAIT, MERGE = "#E8E8E8", "#333333"


def text_on(colour: str) -> str:
    """Black or white, whichever is read more easily on a colour.

    Args:
      colour: ``"#rrggbb"``.

    Returns:
      ``"#000000"`` or ``"#ffffff"``.

    Example:
      >>> text_on("#0072B2"), text_on("#F0E442")
      ('#ffffff', '#000000')
    """
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"
