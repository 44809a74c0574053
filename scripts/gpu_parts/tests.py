"""The tests marked gpu, and the fast tests with the card as the default device."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from gpu_parts.context import Context
from gpu_parts.processes import ROOT, STANDIN
from gpu_parts.table import Line

# As scripts/test --fast.
FAST = "not slow and not gpu"
# Folders of tests that start processes, or have no use for a card.
OTHERS = ("multiprocess", "cli", "cluster", "drawing", "messages")


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
    env = os.environ | {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if context.cpu:
        env["JAX_PLATFORMS"] = "standin,cpu"
        env["PYTHONPATH"] = os.pathsep.join([env.get("PYTHONPATH", ""), str(STANDIN)])
    # pytest-benchmark, where it is installed, warns under xdist, and warnings are errors.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "--continue-on-collection-errors"]
    command += [f"--junitxml={report}", *words]
    if importlib.util.find_spec("xdist") and not context.cpu:
        command += ["--numprocesses", str(min(8, os.cpu_count() or 1)), "--dist", "loadfile"]
    subprocess.run(command, env=env, cwd=ROOT, check=False)
    if not report.exists():
        context.add(Line(name, None, goal=">= 1", note="pytest ended without a report"))
        return
    passed, failed, skipped, missing = counted(report.read_text(encoding="utf8"))
    note = f"{skipped} skipped" + (f"; failed: {', '.join(failed[:8])}" if failed else "")
    note += f"; files that were not run, without {', '.join(missing)}" if missing else ""
    context.add(Line(name, passed, passed + len(failed), "tests", ">= 1", "all that are not skipped", note))


def counted(report: str) -> tuple[int, list[str], int, list[str]]:
    """Tests that passed, failed (by name) and were skipped, and packages that files lack, from a JUnit report."""
    passed, skipped, failed, missing = 0, 0, [], set()
    for case in ElementTree.fromstring(report).iter("testcase"):
        kinds = {child.tag for child in case}
        lacks = re.search(r"No module named '(\w+)", "".join(case.itertext()))
        if "error" in kinds and lacks and lacks[1] != "jaxche":
            missing.add(lacks[1])
        elif kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}.{case.get('name')}".removeprefix("tests."))
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped, sorted(missing)
