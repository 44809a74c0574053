"""The scripts: those that texts name exist and have these options, and refuse names that are none."""

import argparse
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
from chaos_parts import goodput

from jaxche.cli._main import make_parser

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += [*(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
PAGES += [path for path in SCRIPTS.rglob("*") if path.is_file() and path.suffix not in (".jsonl", ".pyc")]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf8") for path in sorted(PAGES)}

# The command of a script: in a code span, in a comment of HTML, or on a line of its own. Two spaces end it there.
SCRIPT = r"((?:scripts|examples)/[\w./]*\w)(?![\w*/.])"
COMMAND = re.compile(rf"(?:^[ #]*|`|<!-- \w+: )(?:[\w./]*python )?{SCRIPT}([^`#\n]*)", re.M)


def commands():
    """Every (script, arguments) that a text names."""
    found = set()
    for text in TEXTS.values():
        for script, rest in COMMAND.findall(text):
            words = re.split(r" {2,}| -->", rest.rstrip() if rest.startswith(" ") else "", maxsplit=1)[0]
            found.add((script, words.strip()))
    return sorted(found)


COMMANDS = commands()


class ParsedError(Exception):
    """The arguments of a script were parsed; nothing of it runs."""


@pytest.fixture
def parse(monkeypatch):
    """Parses the arguments of a script of Python as it does, and gives its parser; SystemExit if it refuses them."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser, *args):
        parse_args(parser, *args)
        raise ParsedError(parser)

    def parse(script, words):
        module = importlib.import_module("gpu_parts.__main__" if script == "scripts/gpu" else Path(script).stem)
        monkeypatch.setattr(sys, "argv", [script, *words])
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", stop)
            with pytest.raises(ParsedError) as parsed:
                module.main()
        return parsed.value.args[0]

    return parse


PARSERS = ["scripts/gpu"]
PARSERS += [f"scripts/{path.name}" for path in sorted(SCRIPTS.glob("*.py")) if "ArgumentParser(" in path.read_text()]


@pytest.mark.parametrize(("script", "words"), COMMANDS, ids=map(" ".join, COMMANDS))
def test_a_command_of_the_texts_has_its_script_and_its_options(script, words, parse):
    path, words = ROOT / script, shlex.split(words)
    assert path.exists()
    if script == "scripts/train":
        assert make_parser().parse_args(["train", *words])
    elif script in PARSERS:
        parse(script, words)
    else:  # in bash, of examples, or none
        code = re.sub(r'""".*?"""|^ *#[^\n]*', "", TEXTS.get(script, ""), flags=re.S | re.M)
        assert all(word in code for word in words if word.startswith("--"))


def test_the_search_finds_the_commands_of_all_scripts():
    """A search that finds nothing would pass everything."""
    assert len(COMMANDS) > 80
    mentioned = {script for script, _ in COMMANDS}
    assert {*PARSERS, "scripts/train", "scripts/test", "scripts/docs"} <= mentioned | {"scripts/notebooks.py"}
    assert ("scripts/slow_link.py", '--arms int4 "overlap int4"') in COMMANDS  # of a line of text
    assert ("scripts/gpu", "--only step,merge") in COMMANDS  # of a comment in bash
    assert ("scripts/house.py", "--write") in COMMANDS  # of a comment in HTML


def test_an_option_that_a_page_names_alone_is_one_of_some_command(parse):
    pages = [TEXTS[name] for name in TEXTS if name.endswith(".md")]
    spans = {span for page in pages for span in re.findall(r"`(--[^`\n]+)`", page)}
    named = {word for span in spans for word in span.split() if word.startswith("--")}
    (commands,) = (action.choices for action in make_parser()._actions if isinstance(action.choices, dict))
    parsers = [make_parser(), *commands.values(), *(parse(script, []) for script in PARSERS)]
    known = {option for parser in parsers for option in parser._option_string_actions}
    assert len(named) > 20
    assert named - known == {"--cpus-per-task", "--gres", "--no-kill"}  # of sbatch


@pytest.mark.parametrize(
    ("script", "words", "known"),
    [
        ("bench_ports", ["mnst"], "mnist"),
        ("bench_quality", ["--arms", "candence"], "cadence, default"),
        ("bench_peers", ["--only", "jaxche", "torchfit"], "torchft DiLoCo"),
    ],
)
def test_a_name_that_is_none_is_refused_with_those_that_are(script, words, known, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit):
        importlib.import_module(script).main()
    error = capsys.readouterr().err
    assert f" {words[-1]}" in error
    assert known in error


def test_an_unknown_arm_of_goodput_is_refused_with_the_known_ones(capsys):
    assert goodput.benchmark(1.0, ["elastc"], 15.0) == 2
    assert "--arms has elastc, which is none of undisturbed, elastic, restarts" in capsys.readouterr().out
