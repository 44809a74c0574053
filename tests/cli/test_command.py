"""Colours are for terminals."""

import io

import pytest

from jaxche.cli import main
from jaxche.cli._command import paint


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


def test_errors_have_one_form(capsys):
    assert main(["simulate", "--ms", "20"]) == 2
    assert capsys.readouterr().err.startswith("jaxche simulate: error: a simulation needs two or more ranks")


@pytest.mark.parametrize("command", ["train", "report", "launch", "doctor", "simulate", "plan", "completion"])
def test_every_command_has_examples_and_tells_its_exit_codes(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: jaxche {command} ")
    assert "examples:\n" in shown
    assert "exit codes:\n  0 " in shown
