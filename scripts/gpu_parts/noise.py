"""The cost of measuring the noise scale: rounds with a scaling rule against rounds without, in every mode."""

from __future__ import annotations

from typing import Any

from gpu_parts.context import Context
from gpu_parts.processes import pair, program
from gpu_parts.table import Line


def run(context: Context) -> None:
    """A line for each mode and rule; with several replicas rank 0 works, and the other, on the CPU, does nothing."""
    short = context.quick or context.cpu
    turns, makes = (2, 1) if short else (4, 3)
    # Each rule has programs of its own to compile.
    words = ("--turns", turns, "--makes", makes, "--rules", "AdaScale" if context.quick else "AdaScale,AdamScale")
    _add(context, program(context, "noise_program", *words), turns, makes)
    if not context.quick:
        _add(context, pair(context, "beside", "noise_program", *words)[0], turns, makes)


def _add(context: Context, rows: list[dict[str, Any]], turns: int, makes: int) -> None:
    for row in rows:
        note = f"{row['model']}, {row['steps']} steps a round; the ratio is the median over {turns} turns, {makes} made"
        name, ours = f"{row['rule']}, {row['mode']}", row["plain_ms"] * row["ratio"]
        context.add(Line(name, ours, row["plain_ms"], "ms", "<= 1.03", "the same rounds without a rule", note))
