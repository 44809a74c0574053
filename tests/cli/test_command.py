"""Colours, errors, exits and help of commands."""

import errno
import io
import os
import re
import shlex
import subprocess
import sys

import pytest

from jaxche.cli import main
from jaxche.cli._command import exit_code, paint
from jaxche.cli._main import make_parser


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_only_terminals_get_colours(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert paint("bad", "bad", Terminal()) == "\033[1;31mbad\033[0m"
    assert paint("bad", "bad", io.StringIO()) == "bad"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("bad", "bad", Terminal()) == "bad"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert paint("bad", "bad", Terminal()) == "bad"


def test_error_format(capsys):
    assert main(["simulate", "--ms", "20"]) == 2
    assert capsys.readouterr().err.startswith("jaxche simulate: error: a simulation needs two or more ranks")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("words", "name"), [([], "jaxche"), (["--version"], "jaxche"), (["simulate"], "jaxche simulate")]
)
def test_an_output_that_cannot_be_written_is_one_line(words, name):
    with open("/dev/full", "w") as out:
        command = [sys.executable, "-m", "jaxche", *words]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"{name}: error: [Errno 28] No space left on device\n")


def test_an_exit_at_once_needs_no_reader():
    words = [sys.executable, "-c", "import jaxche.cli._command as c; print('result'); c.exit_at_once(3)"]
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONUNBUFFERED": ""}  # else print() fails
    with os.fdopen(writer) as out:
        done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])  # it fails at the end of the command, or in print()
def test_an_output_without_a_reader_is_no_error(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "jaxche", "simulate", "--rounds", "2"]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(writer) as out:
        done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("words", "code"), [("--rounds 2", 0), ("--ms 20", 2)])
def test_closed_standard_streams_leave_the_exit_code(words, code):
    command = f"exec {shlex.quote(sys.executable)} -m jaxche simulate {words} <&- >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", command], check=False).returncode == code


@pytest.mark.parametrize(
    ("error", "code"),
    [(OSError(errno.EAGAIN, "no process"), 1), (FileNotFoundError(errno.ENOENT, "no file"), 2), (ValueError("bad"), 2)],
)
def test_a_system_that_is_busy_is_no_invalid_argument(capsys, error, code):
    def fail():
        raise error

    assert exit_code("launch", fail) == code
    assert "jaxche launch: error: " in capsys.readouterr().err


def test_ctrl_c_is_an_exit_code(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxche.cli._simulate._fleet", interrupted)
    assert main(["simulate"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "command", ["train", "report", "launch", "coordinator", "doctor", "simulate", "plan", "completion"]
)
def test_help_has_examples_that_parse_and_exit_codes(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: jaxche {command} ")
    lines = shown.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
    examples = [re.split(r" {2,}|;|\)| > ", line.strip())[0] for line in lines if "jaxche " in line]
    assert examples
    for example in examples:
        assert make_parser().parse_args(shlex.split(example.partition("jaxche ")[2])), example
    assert "exit codes:\n  0 " in shown
