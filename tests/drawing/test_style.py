"""Colours and the choice of ranks in figures."""

import pytest

from jaxche.drawing import COLOURS, ranks_to_show, text_on


def contrast(one, other):
    """The contrast of two colours, from 1 to 21, by the relative luminance of WCAG 2."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colour", COLOURS)
def test_text_stands_out(colour):
    ink = text_on(colour)
    other = {"#000000": "#ffffff", "#ffffff": "#000000"}[ink]
    assert contrast(ink, colour) >= contrast(other, colour)


def test_ranks_shown_hold_the_fastest_and_the_slowest():
    ms = [float((7 * i) % 40) for i in range(40)]
    shown = ranks_to_show(ms)
    assert len(set(shown)) == 8
    assert (ms[shown[0]], ms[shown[-1]]) == (min(ms), max(ms))
    assert ranks_to_show([20.0, 50.0]) == [0, 1]
