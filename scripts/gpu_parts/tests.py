"""The tests marked gpu, and the fast tests with the card as the default device."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from gpu_parts.context import Context
from gpu_parts.processes import ROOT
from gpu_parts.table import Line

# As scripts/test --fast.
FAST = "not slow and not gpu"
# Folders of tests that start processes, or have no use for a card.
OTHERS = ("multiprocess", "cli", "cluster", "drawing")


def run(context: Context) -> None:
    """The share of the tests that pass, of those that are not skipped."""
    missing = [name for name in ("pytest", "hypothesis", "chex") if not importlib.util.find_spec(name)]
    if missing:
        note = f"without {', '.join(missing)}; write: pip install 'jaxche[dev]'"
        context.add(Line("tests marked gpu", None, goal=">= 1", note=note))
        return
    if context.cpu:
        context.add(Line("tests marked gpu", None, goal=">= 1", note="they need a GPU"))
    else:
        _pytest(context, "tests marked gpu", ("-m", "gpu", "tests/training"))
    # A folder at a time, so that a run that is cut off keeps some.
    for folder in ["averaging"] if context.cpu else folders():
        if context.quick and not context.cpu:
            return
        _pytest(context, f"fast tests on the card: {folder}", ("-m", FAST, f"tests/{folder}"))


def folders() -> list[str]:
    """The folders of tests that compute."""
    found = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    return sorted(found - set(OTHERS))


def _pytest(context: Context, name: str, words: Sequence[str]) -> None:
    report = Path(context.folder) / "report.xml"
    report.unlink(missing_ok=True)
    # Several processes may use the card, so none may take most of its memory.
    env = os.environ | {"JAX_PLATFORMS": "cpu" if context.cpu else "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors", f"--junitxml={report}", *words]
    if importlib.util.find_spec("xdist") and not context.cpu:
        command += ["--numprocesses", str(min(8, os.cpu_count() or 1)), "--dist", "loadfile"]
    subprocess.run(command, env=env, cwd=ROOT, check=False)
    if not report.exists():
        context.add(Line(name, None, goal=">= 1", note="pytest ended without a report"))
        return
    passed, failed, skipped, first = counted(report.read_text(encoding="utf8"))
    note = f"{skipped} skipped" + (f"; failed: {', '.join(first[:8])}" if first else "")
    context.add(Line(name, passed, passed + failed, "tests", ">= 1", "all that are not skipped", note))


def counted(report: str) -> tuple[int, int, int, list[str]]:
    """Tests that passed, failed and were skipped, and the names of those that failed, from a JUnit report."""
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.fromstring(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}.{case.get('name')}".removeprefix("tests."))
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, len(failed), skipped, failed
