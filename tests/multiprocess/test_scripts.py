"""The scripts that show what a run withstands, in short."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(script, *words):
    command = [sys.executable, str(ROOT / "scripts" / script), *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=560, check=False)


@pytest.mark.slow
def test_the_anchor_grows_until_a_slow_link_costs_little():
    done = run("slow_link.py", "--steps", "1000")
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.search(r"efficiency ([\d.]+) % before and ([\d.]+) %", _spaced(done.stdout)).groups())
    assert before < 60 < 85 < after


@pytest.mark.slow
def test_runs_come_through_a_fault_of_each_kind():
    done = run("chaos.py", "--faults", "6", "--undisturbed", "8", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 runs came through" in done.stdout


def _spaced(text):
    return text.replace("%", " %")
