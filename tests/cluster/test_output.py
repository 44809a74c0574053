"""Lines come out whole, with their rank, however the bytes arrive."""

import io
import os

import pytest

from jaxche.cluster._output import LinePrinter, OutputReader


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb", b"c\n"], ["a", "bc"]),
        ([b"no end"], ["no end"]),
        ([b"a\r", b"\nb\n"], ["a", "b"]),
        ([b"a\n\nb\n"], ["a", "", "b"]),
        ([b"[Gloo] Rank 0 is connected to 1 peer ranks.\nb\n"], ["b"]),
        ([b"\r 10%", b"\r 20%\n"], [" 10%", " 20%"]),
        (["é".encode()[:1], "é".encode()[1:] + b"\xff\n"], ["é�"]),
    ],
)
def test_lines(chunks, lines):
    out = io.StringIO()
    read, write = os.pipe()
    reader = OutputReader(os.fdopen(read, "rb"), 3, LinePrinter(prefix=True), out, keep=2)
    for chunk in chunks:
        os.write(write, chunk)
    os.close(write)
    reader.join(timeout=5)
    assert out.getvalue() == "".join(f"[3] {line}\n" for line in lines)
    assert list(reader.last) == lines[-2:]


def test_a_narrow_or_closed_terminal_does_not_stop_the_reader():
    printer = LinePrinter(prefix=False)
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    printer.print(narrow, 0, "█")
    assert narrow.buffer.getvalue() == b"\\u2588\n"
    closed = io.StringIO()
    closed.close()
    printer.print(closed, 0, "dropped")
