"""Time to quality over slow links on a virtual clock, against merges that cost nothing.

The text task on devices of 20 and 50 ms a batch, annealed to a deadline. A merge costs what the link takes for its
bytes, and one round trip, as if the small model that trains had some millions of parameters: its link has a lower rate.
With overlap the exchange of measurements takes one more round trip, beside the last steps of a round.
*Time* is the deadline over the one at which free merges (0.2 ms) have the same loss, on a line between runs of several
deadlines. Prints a Markdown table; lines of the results file are not run again.

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

FLEET, FREE_MS, RATE, GOAL = "20/50", 0.2, 8e-3, 1.1
DEADLINES = (10.0, 16.0, 22.0, 28.0, 34.0, 40.0)  # seconds, of free merges; the last one is that of all arms
ARMS = {
    "cadence, default": "`float32`",
    "cadence, int4": "`int4`",
    "cadence, overlap 0.5, int4": "`int4`, `overlap=0.5`",
    "auto": '`"auto"`',
    "auto, wire auto": '`"auto"`, `wire="auto"`',
    "auto, int4": '`"auto"`, `int4`',
    "auto, overlap 0.5, int4": '`"auto"`, `int4`, `overlap=0.5`',
}
FREE, ALONE = "cadence, default", "fast device alone"
SMALL = 0.10976  # millions of parameters of the model that trains


class Link(NamedTuple):
    """A link between two devices."""

    mbit: float
    trip_ms: float

    @classmethod
    def parse(cls, text: str) -> Link:
        rate, _, trip = text.partition("/")
        return cls(float(rate), float(trip))

    def cell(self, millions: float) -> Cell:
        """The cell in which the bytes of the small model take as long as those of so many millions of parameters."""
        return Cell("text", FLEET, self.trip_ms, 0.0, DEADLINES[-1], "cosine", round(self.mbit * SMALL / millions, 6))

    def __str__(self) -> str:
        return f"{self.mbit:g} Mbit/s, {self.trip_ms:g} ms"


def annealed(cell: Cell, arm: str, seed: int) -> Job:
    return Job(cell, arm, RATE, seed, "annealed")


def free(deadline_s: float, seed: int) -> Job:
    return annealed(Cell("text", FLEET, FREE_MS, 0.0, deadline_s, "cosine"), FREE, seed)


def alone(seed: int) -> Job:
    return annealed(Cell("text", FLEET, 0.0, 0.0, DEADLINES[-1], "cosine"), ALONE, seed)


def jobs(links: Sequence[Link], millions: Sequence[float], seeds: Sequence[int]) -> Iterator[Job]:
    """All runs; those of one trainer one after the other, so that it compiles once."""
    for seed in seeds:
        yield from (free(deadline, seed) for deadline in DEADLINES[::-1])
        yield alone(seed)
        yield from (annealed(link.cell(size), arm, seed) for link in links for size in millions for arm in ARMS)


def time_ratio(results: Results, job: Job) -> float | None:
    """How many times longer a run takes to its loss than free merges; 0 if these end above it, None without a run."""
    row = results.rows.get(job.key)
    rows = [(1e3 * deadline, results.rows.get(free(deadline, job.seed).key)) for deadline in DEADLINES]
    if row is None or any(one is None for _, one in rows):
        return None
    return DEADLINES[-1] / crossing([(ms, one["loss"]) for ms, one in rows if one], row["loss"])


def line(results: Results, head: Sequence[str], runs: Sequence[Job]) -> str:
    """A line of the table: runs of several seeds."""
    found = [row for run in runs if (row := results.rows.get(run.key))]
    ratios = [ratio for run in runs if (ratio := time_ratio(results, run)) is not None]
    cells = ["–", "–", "–", "not run", "–"]
    if found:
        losses = ", ".join(f"{row['loss']:.3f}" for row in found)
        merges = found[0]["sync_ms"] and found[0]["rounds"]
        merged = [f"{found[0]['merge_ms']:,.0f}", merges] if merges else ["–", "–"]
        cells = [*merged, losses if found[0]["rounds"] else "no merge fits", "–", "missed"]
    if ratios:
        cells[3] = ", ".join("above 4" if one >= 4 else f"{one:.2f}" if one else "below 1" for one in ratios)
        cells[4] = "met" if statistics.mean(ratios) <= GOAL else "missed"
    return f"| {' | '.join(map(str, (*head, *cells)))} |"


def table(results: Results, links: Sequence[Link], millions: Sequence[float], seeds: Sequence[int]) -> str:
    lines = [
        "| link | parameters | arm | merge, ms | rounds | loss at 40 s | time, against free merges | goal of 1.1 |",
        "|---|---|---|---|---|---|---|---|",
        line(results, ("none", "any", "fast device alone"), [alone(seed) for seed in seeds]),
    ]
    for link in links:
        for size in millions:
            for arm, name in ARMS.items():
                runs = [annealed(link.cell(size), arm, seed) for seed in seeds]
                lines.append(line(results, (str(link), f"{size:g} M", name), runs))
    return "\n".join(lines)


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
                    f"{one.arm}, {one.cell}, seed {one.seed}: loss {row['loss']:.4f}, {row['rounds']} rounds, "
                    f"{row['seconds']} s",
                    flush=True,
                )
    print(table(results, args.links, args.millions, args.seeds))


if __name__ == "__main__":
    main()
