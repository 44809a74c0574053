"""The cost of measuring the noise scale: rounds with a scaling rule against rounds without, in every mode."""

from __future__ import annotations

from gpu_parts.context import Context
from gpu_parts.processes import pair, program
from gpu_parts.table import Line


def run(context: Context) -> None:
    """A line for each mode and rule; with several replicas rank 0 works, and the other, on the CPU, does nothing."""
    turns = 2 if context.quick else 4
    makes = 1 if context.quick else 3
    words = ("--turns", turns, "--makes", makes)
    found = program(context, "noise_program", *words)
    if not (context.quick and context.cpu):
        found += pair(context, "beside", "noise_program", *words)[0]
    for row in found:
        note = f"{row['model']}, {row['steps']} steps a round; the ratio is the median over {turns} turns, {makes} made"
        name = f"{row['rule']}, {row['mode']}"
        ours = row["plain_ms"] * row["ratio"]
        context.add(Line(name, ours, row["plain_ms"], "ms", "<= 1.03", "the same rounds without a rule", note))
