"""The colours of all figures."""

from __future__ import annotations

# Palette of Okabe and Ito, distinct for colour-blind readers and in grey print. Lane i has colour i modulo 8.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
# Waiting is light and hatched, merging is dark.
WAIT, MERGE = "#E8E8E8", "#333333"


def text_on(colour: str) -> str:
    """Black or white, whichever has more contrast on a colour.

    With luminances :math:`L` from 0 to 1 the contrast of two colours is :math:`(L_1 + 0.05) / (L_2 + 0.05)`.

    Args:
      colour: ``"#rrggbb"``.

    Returns:
      ``"#000000"`` or ``"#ffffff"``.

    References:
      W3C, *Web content accessibility guidelines 2.2*, 2023: relative luminance, contrast ratio.

    Example:
      >>> text_on("#0072B2"), text_on("#F0E442")
      ('#ffffff', '#000000')
    """
    red, green, blue = (_linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def _linear(channel: float) -> float:
    """The linear light of an sRGB channel."""
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
