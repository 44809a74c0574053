"""Lanes: what is drawn, in proportion, and readable by any parser of XML."""

from xml.etree import ElementTree

import pytest

from jaxche.drawing import COLOURS, WAIT, Bar, Lane, lanes

SVG = "{http://www.w3.org/2000/svg}"


def draw(*rows):
    return ElementTree.fromstring(lanes([Lane(label, bars) for label, bars in rows], unit="ms", caption="<c>"))


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
