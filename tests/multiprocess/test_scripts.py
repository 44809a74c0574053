"""The scripts that show what a run withstands, in short."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(script, *words):
    command = [sys.executable, str(ROOT / "scripts" / script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)


@pytest.mark.slow
def test_the_anchor_grows_until_a_slow_link_costs_little():
    done = run("slow_link.py", "--steps", "1000")
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    target = float(re.search(r"target (\d+)%", done.stdout)[1])
    rounds = re.findall(r"^ *\d+ +(\d+) +[\d:]+ +[\d.]+ +[\d.]+ +([\d.]+)% +[\d.]+%$", done.stdout, re.M)
    anchors, shares = [int(anchor) for anchor, _ in rounds], [float(share) for _, share in rounds]
    last = float(re.search(r"merging takes ([\d.]+)% of the last rounds", done.stdout)[1])
    assert anchors[0] < anchors[-2]
    assert last <= 1.2 * target < shares[0]


@pytest.mark.slow
def test_runs_come_through_a_fault_of_each_kind():
    done = run("chaos.py", "--faults", "6", "--undisturbed", "8", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 runs came through" in done.stdout
