"""What the README shows works: its Python runs, top to bottom, its commands exist, and its loops change little."""

import difflib
import os
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxche.cli import main
from jaxche.cli._main import make_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


def commands():
    """Every `jaxche ...` that the README shows, in a block or in a line."""
    found = [line.split("#")[0] for block in blocks("bash") for line in block.splitlines()]
    found += re.findall(r"`([^`\n]*jaxche [^`\n]*)`", README)
    found = [line[line.index("jaxche ") :] for line in found if re.search(r"(^|\s|\()jaxche [a-z]", line)]
    return sorted({re.sub(r"[)\"]+$", "", line.split(" >")[0].strip()) for line in found})


def test_the_python_blocks_run(capsys):
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    # The linen loop, before and after.
    before, after = (float(x) for x in re.findall(r"epoch 2: loss ([\d.]+)", capsys.readouterr().out))
    assert after < 1
    assert before < 1
    # The nnx model was trained in place and goes on working.
    assert names["model"](names["x"]).shape == (256, 1)
    assert int(names["optimizer"].step[...]) > 3 * 16  # its own loop's, and more by the trainer
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(names["loss"].params))
    assert names["history"][-1].examples > 0  # of the Grain pipeline


def test_a_train_state_loop_changes_in_five_lines():
    before = next(block for block in blocks("python") if "TrainState.create" in block)
    before = before[before.index("for epoch") :].splitlines()
    after = next(block for block in blocks("python") if "state.replace" in block).splitlines()
    after = [line for line in after if line.strip() and not line.startswith(("import jaxche", "history "))]
    added = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert len(added) <= 5, added


def test_before_and_after_fit_on_a_page():
    """Thirty lines: what an nnx loop becomes, and what a linen one does."""
    for sign in ("state.replace", "loss.update"):
        block = next(block for block in blocks("python") if sign in block)
        assert len(block.splitlines()) <= 30


@pytest.mark.parametrize("command", commands())
def test_the_commands_it_names_are_understood(command, monkeypatch, capsys):
    words = shlex.split(command.replace("<name>", "mine"))
    assert make_parser().parse_args(words[1:])
    if "--emit" in words:
        monkeypatch.setattr("sys.argv", words)
        assert main(words[1:]) == 0
        assert capsys.readouterr().out.strip()


def test_it_names_many_commands():
    assert len(commands()) > 12


def test_the_scripts_it_names_can_be_run():
    scripts = set(re.findall(r"scripts/\w+(?:\.py)?", README))
    assert {"scripts/train", "scripts/test", "scripts/bench_cadence.py"} <= scripts
    for script in scripts:
        assert (ROOT / script).exists(), script
        assert script.endswith(".py") or os.access(ROOT / script, os.X_OK), script


def test_the_files_it_shows_are_there():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
