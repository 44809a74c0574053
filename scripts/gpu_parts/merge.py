"""Merges of several sizes on the host and on the device against bare all-reduces, and merges beside steps."""

from __future__ import annotations

from typing import Any

from gpu_parts.context import Context
from gpu_parts.processes import pair, program
from gpu_parts.table import Line
from jaxche.cluster import count_gpus

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
    launch = ("--pace", "20,20") if context.cpu else ()  # merges then have the cores for themselves
    overlap_turns = 2 if context.quick else 5
    _overlap(context, pair(context, "shared", "overlap_program", "--turns", overlap_turns, launch=launch)[0])
    if context.cpu or count_gpus() > 1:
        env = {"JAX_NUM_CPU_DEVICES": "2"} if context.cpu else {}
        _add(context, "device", program(context, "merge_program", *words, "--backend", "device", env=env))
    else:
        goals: dict[str, Any] = {"goal": "<= 1.25", "against": AGAINST["device"]}
        context.add(Line("merge on the device", None, unit="ms", **goals, note="needs two cards"))


def _overlap(context: Context, found: dict[str, Any]) -> None:
    merge, hidden = found["merge_ms"], found["hidden_ms"]
    note = f"{found['mb']:.1f} MB, {found['steps']} steps a round; {found['waiting']:.1f} batches/s if rounds wait for "
    note += f"merges of {merge:.1f} ms"
    against = "the sum of the rates of both, running freely at the same time"
    rate, free = found["overlap"], found["free"]
    context.add(Line("overlap=0.5: efficiency", rate, free, "batches/s", ">= 0.95", against, note))
    against = "the same rounds, which wait for each merge"
    context.add(Line("overlap=0.5: against waiting", rate, found["waiting"], "batches/s", ">= 1", against))
    against = "what that merge took"
    context.add(Line("overlap=0.5: hidden of a merge", hidden, hidden + found["exposed_ms"], "ms", "", against))


def _add(context: Context, backend: str, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        name = f"merge on the {backend}, {row['mb']:g} MB"
        if row["ours_ms"] is None:
            context.add(Line(name, None, goal="<= 1.25", note="the memory of this card is too small for it"))
            continue
        note = f"{row['turns']} turns; {row['mb'] / row['ours_ms']:.2f} GB/s of parameters"
        context.add(Line(name, row["ours_ms"], row["bare_ms"], "ms", "<= 1.25", AGAINST[backend], note))
