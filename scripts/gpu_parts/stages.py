"""A pipeline of two stages on one card against the whole model, and stages of two processes through a folder."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_parts.context import Context
from gpu_parts.processes import program
from gpu_parts.table import Line

_WHOLE = "the whole model, its gradients accumulated over the same micro-batches by a scan"


def run(context: Context) -> None:
    """Time of both kinds of stages, and whether their losses agree."""
    turns = 3 if context.quick else 9
    found = program(context, "stages_program", "pipeline", "--turns", turns, "--losses", turns)
    note = f"{found['micro_batches']} micro-batches of {found['rows']} rows, {turns} turns"
    context.add(Line("pipeline, 2 stages on one card", found["ms"], found["whole_ms"], "ms", "<= 1.1", _WHOLE, note))
    name = "pipeline: loss"
    context.add(Line(name, found["loss"], found["whole_loss"], "", "0.999 to 1.001", "the loss of the whole model"))
    missing = [package for package in ("obstore", "xxhash") if not importlib.util.find_spec(package)]
    if missing:
        note = f"without {' and '.join(missing)}; write: pip install 'jaxche[store]'"
        context.add(Line("DataStore: equal losses", None, goal=">= 1", note=note))
        return
    ranks = _through_a_folder(context, turns)
    pairs = list(zip(ranks[1]["losses"], found["losses"], strict=True))
    same = sum(abs(a - b) <= 1e-3 * abs(b) for a, b in pairs)
    against = "steps; the losses of the same stages in one process, to a thousandth"
    context.add(Line("DataStore: equal losses", same, len(pairs), "steps", ">= 1", against, "each stage a process"))
    sent = f"{ranks[0]['mb']:.1f} MB of activations and gradients a step, on files of this machine"
    against = "a step of these stages in one process"
    context.add(Line("DataStore: a step", ranks[1]["ms"], found["ms"], "ms", "", against, sent))


def _through_a_folder(context: Context, turns: int) -> list[dict[str, Any]]:
    """The results of two processes, a stage each, that share only a folder; both are on the first card."""
    with tempfile.TemporaryDirectory(dir=context.folder) as folder:
        # Two processes on one card: neither may take most of its memory.
        env = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
        env["XLA_CLIENT_MEM_FRACTION"] = ".35"
        running = []
        for stage in range(2):
            words = ["store", "--turns", turns, "--stage", stage, "--store", f"{folder}/store", "--out", folder]
            words += ["--cpu"] if context.cpu else []
            command = [sys.executable, "-m", "gpu_parts.stages_program", *map(str, words)]
            running.append(subprocess.Popen(command, env=env))
        codes = [process.wait() for process in running]
        if any(codes):
            raise RuntimeError(f"the stages ended with {codes}")
        return [json.loads((Path(folder) / f"{stage}.json").read_text(encoding="utf8")) for stage in range(2)]
