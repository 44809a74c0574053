"""Time to quality over slow links on a virtual clock, against merges that cost nothing.

The text task on devices of 20 and 50 ms a batch, annealed to a deadline. A merge costs what the link takes for the
bytes of a model of some millions of parameters with Adam, and one round trip; the model that trains is small. *Time* is
the deadline over the one at which free merges (0.2 ms) have the same loss, on a line between runs of several deadlines.
Prints a Markdown table; lines of the results file are not run again.

    python scripts/bench_links.py
    python scripts/bench_links.py --seeds 0 1 --links 1000/20 --millions 50
    python scripts/bench_links.py --table          # from the results so far
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench_quality import Cell, Job, Results, configure, crossing, perform

from jaxche.averaging._wire import coded_bytes

FLEET, FREE_MS, RATE, GOAL = "20/50", 0.2, 8e-3, 1.1
DEADLINES = (10.0, 16.0, 22.0, 28.0, 34.0, 40.0)  # seconds, of free merges; the last one is that of all arms
# The wire of an arm, and the numbers that it sends for each parameter: with the two moments of Adam, or without.
ARMS = {"cadence, default": ("float32", 3), "cadence, int4": ("int4", 3), "cadence, overlap 0.5, int4": ("int4", 1)}
FREE = "cadence, default"


class Link(NamedTuple):
    """A link between two devices."""

    mbit: float
    trip_ms: float

    @classmethod
    def parse(cls, text: str) -> Link:
        rate, _, trip = text.partition("/")
        return cls(float(rate), float(trip))

    def merge_ms(self, arm: str, millions: float) -> float:
        """What a merge of two replicas takes: each sends its numbers once."""
        wire, numbers = ARMS[arm]
        return round(8e-3 * coded_bytes(round(numbers * millions * 1e6), wire) / self.mbit + self.trip_ms, 1)

    def __str__(self) -> str:
        return f"{self.mbit:g} Mbit/s, {self.trip_ms:g} ms"


def job(sync_ms: float, deadline_s: float, arm: str, seed: int) -> Job:
    return Job(Cell("text", FLEET, sync_ms, 0.0, deadline_s, "cosine"), arm, RATE, seed, "annealed")


def fits(merge_ms: float) -> bool:
    """Whether a merge of this length ends before the deadline."""
    return merge_ms < 1e3 * DEADLINES[-1]


def jobs(links: Sequence[Link], millions: Sequence[float], seeds: Sequence[int]) -> Iterator[Job]:
    """All runs; those of one trainer one after the other, so that it compiles once."""
    for seed in seeds:
        yield from (job(FREE_MS, deadline, FREE, seed) for deadline in DEADLINES[::-1])
        for link in links:
            for size in millions:
                for arm in ARMS:
                    if fits(link.merge_ms(arm, size)):
                        yield job(link.merge_ms(arm, size), DEADLINES[-1], arm, seed)


def time_ratio(results: Results, sync_ms: float, arm: str, seed: int) -> float | None:
    """How many times longer an arm takes to its loss than free merges; None if a run is missing."""
    row = results.rows.get(job(sync_ms, DEADLINES[-1], arm, seed).key)
    free = [(1e3 * deadline, results.rows.get(job(FREE_MS, deadline, FREE, seed).key)) for deadline in DEADLINES]
    if row is None or any(one is None for _, one in free):
        return None
    return DEADLINES[-1] / crossing([(ms, one["loss"]) for ms, one in free if one], row["loss"])


def table(results: Results, links: Sequence[Link], millions: Sequence[float], seeds: Sequence[int]) -> str:
    lines = [
        "| link | parameters | arm | merge, ms | rounds | loss at 40 s | time, against free merges | goal of 1.1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for link in links:
        for size in millions:
            for arm in ARMS:
                cost = link.merge_ms(arm, size)
                rows = [results.rows.get(job(cost, DEADLINES[-1], arm, seed).key) for seed in seeds]
                found = [row for row in rows if row]
                ratios = [ratio for seed in seeds if (ratio := time_ratio(results, cost, arm, seed)) is not None]
                losses = ", ".join(f"{row['loss']:.3f}" for row in found)
                ends = "not run | –" if fits(cost) else "no merge fits | missed"
                if ratios:
                    shown = ", ".join("above 4" if ratio >= 4 else f"{ratio:.2f}" for ratio in ratios)
                    ends = f"{shown} | {'met' if statistics.mean(ratios) <= GOAL else 'missed'}"
                count = found[0]["rounds"] if found else "–"
                lines.append(
                    f"| {link} | {size:g} M | {name(arm)} | {cost:,.0f} | {count} | {losses or '–'} | {ends} |"
                )
    return "\n".join(lines)


def name(arm: str) -> str:
    wire, numbers = ARMS[arm]
    return f"`{wire}`" + (", `overlap=0.5`" if numbers == 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", type=Link.parse, default=[Link(1000, 20), Link(100, 100)])
    parser.add_argument("--millions", nargs="+", type=float, default=[2, 20, 50], help="of parameters")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("links.jsonl"))
    parser.add_argument("--cache", type=Path, default=Path("runs/quality"), help="compiled programs")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    results = Results(args.results)
    if not args.table:
        configure(args.cache, 2)
        for one in jobs(args.links, args.millions, args.seeds):
            if one.key not in results.rows:
                row = perform(one, results.batches(one.cell, one.arm), args.cache)
                results.add(row)
                print(
                    f"{one.arm}, {one.cell.sync_ms:g} ms, {one.cell.deadline_s:g} s, seed {one.seed}: "
                    f"loss {row['loss']:.4f}, {row['rounds']} rounds, {row['seconds']} s",
                    flush=True,
                )
    print(table(results, args.links, args.millions, args.seeds))


if __name__ == "__main__":
    main()
