"""What the README shows works: its Python runs, top to bottom, and its commands exist."""

import os
import re
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


def test_the_python_blocks_run():
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    trained = jax.tree.leaves(names["params"])
    assert all(np.isfinite(x).all() for x in trained)
    assert names["history"][-1].loss < names["history"][0].loss
    assert names["model"](names["x"]).shape == (256, 1)


def test_the_scripts_it_names_can_be_run():
    scripts = set(re.findall(r"scripts/\w+(?:\.py)?", README))
    assert {"scripts/train", "scripts/test", "scripts/bench_cadence.py"} <= scripts
    for script in scripts:
        assert (ROOT / script).exists(), script
        assert script.endswith(".py") or os.access(ROOT / script, os.X_OK), script


def test_the_files_it_shows_are_there():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
