"""Output lines of ranks, and the event log."""

import io
import json
import os
import sys

import pytest

from jaxche.cluster import launch
from jaxche.cluster._output import EventLog, LinePrinter, OutputReader

FULL = "/dev/full"


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb", b"c\n"], ["a", "bc"]),
        ([b"a\n" * 21, b"b\n"], [*"a" * 21, "b"]),
        ([b"no end"], ["no end"]),
        ([b"a\r", b"\nb\n"], ["a", "b"]),
        ([b"a\n\nb\n"], ["a", "", "b"]),
        ([b"a\n\rb\r\rc\r\n"], ["a", "b", "c"]),
        ([b"[Gloo] Rank 0 is connected to 1 peer ranks.\nb\n"], ["b"]),
        ([b"\r 10%", b"\r 20%\n"], [" 10%", " 20%"]),
        (["é".encode()[:1], "é".encode()[1:] + b"\xff\n"], ["é�"]),
    ],
)
def test_lines(chunks, lines):
    out = io.StringIO()
    read, write = os.pipe()
    reader = OutputReader(os.fdopen(read, "rb"), 3, LinePrinter(prefix=True), out)
    for chunk in chunks:
        os.write(write, chunk)
    os.close(write)
    reader.join(timeout=5)
    assert out.getvalue() == "".join(f"[3] {line}\n" for line in lines)
    assert list(reader.last) == lines[-20:]


def test_a_narrow_or_closed_terminal_does_not_stop_the_reader():
    printer = LinePrinter(prefix=False)
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    printer.print(narrow, 0, "█")
    assert narrow.buffer.getvalue() == b"\\u2588\n"
    closed = io.StringIO()
    closed.close()
    printer.print(closed, 0, "dropped")


def test_events_are_appended(tmp_path):
    path = tmp_path / "events"
    for number in (1, 2):
        EventLog(path).write("start", rank=number)
        last = json.loads(path.read_text().splitlines()[-1])
        assert (last["event"], last["rank"]) == ("start", number)
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.skipif(not os.path.exists(FULL), reason=f"needs {FULL}")
def test_a_full_disk_is_reported_once(capsys):
    command = [sys.executable, "-c", "pass"]
    assert launch(command, 2, env={"JAX_PLATFORMS": "cpu"}, events=FULL) == 0
    err = capsys.readouterr().err
    assert err.count("events='/dev/full': No space left on device; the run continues without it") == 1
