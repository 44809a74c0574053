"""Lanes of bars on a common axis as SVG text, without matplotlib."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxche.drawing._style import WAIT, text_on

_WIDTH, _LANE, _GAP, _AXIS, _CHAR = 640, 22, 5, 34, 6.6
_TICKS = 6


class Bar(NamedTuple):
    """A bar in a lane: start and length in the unit of the axis, fill colour (``WAIT`` is hatched), and label."""

    start: float
    length: float
    colour: str
    text: str = ""


class Lane(NamedTuple):
    """A row of bars with a label on its left."""

    label: str
    bars: Sequence[Bar]


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    """An ``<svg>`` element of these parts. Its text has the colour of the page, so that dark pages show it too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
    style = 'style="max-width:100%" font-family="sans-serif" font-size="12" fill="currentColor"'
    return f"{head} {style}>{''.join(parts)}</svg>"


def lanes(rows: Sequence[Lane], unit: str, caption: str) -> str:
    """Lanes of bars on one axis as an ``<svg>`` element, under a caption."""
    left = 12 + _CHAR * max((len(row.label) for row in rows), default=0)
    end = max((bar.start + bar.length for row in rows for bar in row.bars), default=0.0) or 1.0
    scale = (_WIDTH - left - 14) / end
    top = 24
    bottom = top + len(rows) * (_LANE + _GAP)
    parts = [
        f'<text x="0" y="14" font-weight="bold">{html.escape(caption)}</text>',
        '<defs><pattern id="jaxche-wait" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{WAIT}"/>'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="#888" stroke-width="2"/></pattern></defs>',
    ]
    for tick in _ticks(end):
        x = left + tick * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#8888" stroke-width="0.7"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 13}" text-anchor="middle" font-size="11">{tick:g}</text>')
    parts.append(
        f'<text x="{left + end * scale / 2:.1f}" y="{bottom + 29}" text-anchor="middle">{html.escape(unit)}</text>'
    )
    for number, row in enumerate(rows):
        y = top + number * (_LANE + _GAP)
        middle = y + _LANE / 2 + 4
        parts.append(f'<text x="{left - 7:.1f}" y="{middle}" text-anchor="end">{html.escape(row.label)}</text>')
        parts += [_bar(bar, left + bar.start * scale, bar.length * scale, y, middle) for bar in row.bars]
    return svg(_WIDTH, bottom + _AXIS, parts)


def _bar(bar: Bar, x: float, length: float, y: float, middle: float) -> str:
    if length <= 0:
        return ""
    text = html.escape(bar.text)
    fill = "url(#jaxche-wait)" if bar.colour == WAIT else bar.colour
    # A white edge separates neighbours of one colour.
    edge = 'stroke="#fff" stroke-width="0.8"' if length > 3 else ""
    shown = f'<rect x="{x:.1f}" y="{y}" width="{length:.2f}" height="{_LANE}" fill="{fill}" {edge}>'
    shown += f"<title>{text}</title></rect>"
    if text and len(bar.text) * _CHAR + 4 < length:
        shown += (
            f'<text x="{x + length / 2:.1f}" y="{middle}" text-anchor="middle" font-size="11" '
            f'fill="{text_on(bar.colour)}" pointer-events="none">{text}</text>'
        )
    return shown


def _ticks(end: float) -> list[float]:
    """Round numbers from 0 to ``end``."""
    step = 10 ** math.floor(math.log10(end))
    step = next((step * f for f in (0.1, 0.2, 0.5, 1, 2) if end / (step * f) <= _TICKS), step * 5)
    return [round(i * step, 10) for i in range(math.floor(end / step + 1e-9) + 1)]
