"""Two processes on one card, and a card beside its CPU cores, started by the README's commands."""

from __future__ import annotations

from typing import Any

from gpu_parts.context import Context
from gpu_parts.processes import pair
from gpu_parts.table import Line

# CPU devices are equal, so their steps are padded to these ms. The last pair is that of a CPU that adds 1 %.
PACES = {"shared": "20,20", "beside": "20,60", "auto": "4,400"}
WHERE = {"shared": "two on one card", "beside": "card and CPU"}
# policy="auto" must leave out a replica that adds less than this part to the speed of all.
LITTLE = 0.02


def run(context: Context) -> None:
    """Agreement, efficiency, a competing load, and the choice of ``policy="auto"``."""
    seconds = 2 if context.cpu or context.quick else 12
    if not context.quick:
        _choice(context, _start(context, "beside", "auto", "--seconds", seconds, "--policy", "auto")[0])
    for where in ("shared", "beside"):
        load = ("--load",) if where == "beside" else ()
        _cadence(context, where, _start(context, where, where, "--seconds", seconds, *load))


def _start(context: Context, where: str, pace: str, *words: object) -> list[Any]:
    return pair(context, where, "fleet_program", *words, launch=("--pace", PACES[pace]) if context.cpu else ())


def _cadence(context: Context, where: str, ranks: list[dict[str, Any]]) -> None:
    first, name = ranks[0], WHERE[where]
    same = sum(one == first["hashes"][leaf] for leaf, one in ranks[1]["hashes"].items())
    note = f"after {first['rounds']} rounds"
    context.add(
        Line(f"{name}: equal bit for bit", same, len(first["hashes"]), "arrays", ">= 1", "all parameter arrays", note)
    )
    counts = ":".join(map(str, first["counts"]))
    against = "the sum of the rates of both, running freely at the same time"
    note = f"rates {_rates(first['rates'])}; {counts} batches a round, {first['sync_ms']:.1f} ms to merge"
    context.add(
        Line(f"{name}: efficiency", first["batches_s"], sum(first["rates"]), "batches/s", ">= 0.95", against, note)
    )
    if "load" not in first:
        return
    load = first["load"]
    before, after = (one["counts"][0] / max(one["counts"][1], 1) for one in (first, load))
    wanted = load["rates"][0] / load["rates"][1]
    note = f"counts {before:.2f} : 1 without the load and {after:.2f} : 1 with it; rates {_rates(load['rates'])}"
    against = "the ratio of the rates of both under that load"
    context.add(Line(f"{name}: counts under a load", after, wanted, "to 1", "0.8 to 1.25", against, note))
    share = load["batches_s"]
    context.add(
        Line(
            f"{name}: efficiency under a load",
            share,
            sum(load["rates"]),
            "batches/s",
            "",
            "the rates under that load, measured before",
        )
    )


def _choice(context: Context, first: dict[str, Any]) -> None:
    adds = first["rates"][1] / sum(first["rates"])
    name, against = "card and CPU: auto leaves the CPU idle", f"replicas that add less than {LITTLE:.0%}"
    note = f"the CPU adds {adds:.2%}; auto says: {first['explained']}"
    # If the CPU adds more, the right choice depends on the cost of a merge, and nothing is checked.
    context.add(Line(name, float(first["idle"]), 1.0 if adds < LITTLE else None, "replicas", ">= 1", against, note))


def _rates(rates: list[float]) -> str:
    return " and ".join(f"{rate:.1f}" for rate in rates) + " batches/s"
