"""The picture of a strategy: the devices of a mesh, with the slices that each of them keeps, as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping

from jaxche.drawing import COLOURS, WAIT, svg, text_on

# Sizes in pixels, and at most eight devices in a row and eight rows.
_CELL, _ROW, _GAP, _LEFT, _MOST = 76, 15, 10, 10, 8


def devices_svg(strategy: str, cut: Mapping[str, bool], axes: Mapping[str, int], names: list[str]) -> str:
    """The slices on each device of a mesh as SVG, a row for each copy; ``cut`` trees are cut along the last axis."""
    caption = f"{strategy} on {' x '.join(f'{name} {size}' for name, size in axes.items())}"
    across = list(axes.values())[-1]
    down = math.prod(axes.values()) // across
    columns, rows = min(across, _MOST), min(down, _MOST)
    height = 22 + 3 * _ROW + _GAP
    width = max(_LEFT + columns * (_CELL + _GAP) + 130, 7 * len(caption) + 10)
    bottom = 28 + rows * height
    below = _ROW if down > rows else 0
    parts = [f'<text x="0" y="14" font-weight="bold">{html.escape(caption)}</text><g font-size="11">']
    for i in range(rows):
        y = 28 + i * height
        for j in range(columns):
            label = html.escape(names[i * across + j])
            x = _LEFT + j * (_CELL + _GAP)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL}" height="{height - _GAP}" rx="4" fill="none" stroke="#888"/>'
                f'<text x="{x + _CELL / 2}" y="{y + 13}" text-anchor="middle">{label}</text>'
            )
            bars = enumerate(cut.items())
            parts += [_bar(name, sliced, x + 4, y + 19 + k * _ROW, j, across) for k, (name, sliced) in bars]
        x = _LEFT + columns * (_CELL + _GAP)
        more = f"and {across - columns} more" if across > columns else ""
        parts.append(f'<text x="{x}" y="{y + 30}">{more}</text>')
        if len(axes) > 1:
            parts.append(f'<text x="{x}" y="{y + 46}">copy {i} of {down}</text>')
    if below:
        left = f"{down - rows} more {'copy' if down == rows + 1 else 'copies'}"
        parts.append(f'<text x="{_LEFT}" y="{bottom + 8}">and {left}</text>')
    return svg(width, bottom + below - 2, [*parts, "</g>"])


def _bar(name: str, sliced: bool, x: float, y: float, device: int, devices: int) -> str:
    """One bar of a device: coloured whole, or only its slice."""
    width = _CELL - 8
    start, part = (width * device / devices, width / devices) if sliced else (0.0, width)
    # Whole copies all have the same colour.
    colour = COLOURS[device % len(COLOURS)] if sliced else COLOURS[0]
    ink = "#000000" if sliced else text_on(colour)
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{_ROW - 3}" fill="{WAIT}"/>'
        f'<rect x="{x + start:.1f}" y="{y}" width="{part:.1f}" height="{_ROW - 3}" fill="{colour}"/>'
        f'<text x="{x + width / 2}" y="{y + 10}" text-anchor="middle" font-size="10" fill="{ink}">{name}</text>'
    )
