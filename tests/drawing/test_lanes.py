"""Lanes: what is drawn, in proportion, and readable by any parser of XML."""

from xml.etree import ElementTree

import pytest

from jaxche.drawing import COLOURS, WAIT, Bar, Lane, lanes, ranks_to_show, text_on

SVG = "{http://www.w3.org/2000/svg}"


def draw(*rows):
    return ElementTree.fromstring(lanes([Lane(label, bars) for label, bars in rows], unit="ms"))


def contrast(one, other):
    """Of two colours, from 1 to 21, by the relative luminance of WCAG 2."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def test_bars_are_in_proportion():
    root = draw(
        ("rank 0", [Bar(0, 30, COLOURS[0], "30 steps"), Bar(30, 10, WAIT, "waits")]),
        ("rank 1", [Bar(0, 40, COLOURS[1])]),
    )
    bars = [rect for rect in root.iter(f"{SVG}rect") if rect.get("height") == "22"]
    work, wait, other = (float(bar.get("width")) for bar in bars)
    assert work == pytest.approx(3 * wait, rel=1e-3)
    assert other == pytest.approx(work + wait, rel=1e-3)
    assert bars[1].get("fill").startswith("url(")  # hatched: not by colour alone


def test_what_is_written_is_escaped():
    text = lanes([Lane("a<b", [Bar(0, 1, COLOURS[0], "x & y")])], unit="<ms> & s", caption="<c>")
    ElementTree.fromstring(text)
    assert "&lt;ms&gt; &amp; s" in text
    assert "a&lt;b" in text
    assert "x &amp; y" in text


def test_ticks_are_few_and_round():
    for end in (0.0, 3e-4, 0.9, 7, 60, 99, 1234, 5e6):
        root = draw(("rank 0", [Bar(0, end, COLOURS[0])]))
        ticks = [text.text for text in root.iter(f"{SVG}text") if text.get("font-size") == "11"]
        assert 2 <= len(ticks) <= 7, end
        assert ticks[0] == "0"


def test_an_empty_picture_is_one():
    assert draw().tag == f"{SVG}svg"


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
