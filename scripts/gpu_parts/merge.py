"""Merges of several sizes on the host and on the device, against bare all-reduces of the same bytes."""

from __future__ import annotations

from typing import Any

from gpu_parts.context import Context
from gpu_parts.processes import pair, program
from gpu_parts.table import Line

AGAINST = {
    "host": "copy to host, gloo all-reduce of one array between the processes, copy back",
    "device": "a jitted all-reduce of one array",
}


def run(context: Context) -> None:
    """A line for each backend and size, in MB of float32 parameters."""
    sizes = [1, 4] if context.cpu else [5, 100] if context.quick else [5, 100, 1400]
    turns = 3 if context.quick else 7
    words = ("--mb", ",".join(map(str, sizes)), "--turns", turns)
    _add(context, "host", pair(context, "shared", "merge_program", *words)[0])
    env = {"JAX_NUM_CPU_DEVICES": "2"} if context.cpu else {}
    found = program(context, "merge_program", *words, "--backend", "device", env=env)
    if found:
        _add(context, "device", found)
    else:
        goals: dict[str, Any] = {"goal": "<= 1.25", "against": AGAINST["device"]}
        context.add(Line("merge on the device", None, unit="ms", **goals, note="needs two cards"))
    context.add(Line("overlap of a merge with compute", None, note="not built: nothing overlaps a merge"))


def _add(context: Context, backend: str, rows: list[dict[str, float]]) -> None:
    for row in rows:
        name = f"merge on the {backend}, {row['mb']:g} MB"
        note = f"{row['turns']} turns; {row['mb'] / row['ours_ms']:.2f} GB/s of parameters"
        context.add(Line(name, row["ours_ms"], row["bare_ms"], "ms", "<= 1.25", AGAINST[backend], note))
