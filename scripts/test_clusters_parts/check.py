"""Proves that a run of `scripts/test_clusters` did what it had to do, and prints it in one line.

python scripts/test_clusters_parts/check.py trained FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Seconds for a coordinator to end after its run.
_END_S = 20


def trained(folder: Path) -> str:
    """The digits with paces of 20 and 50 ms: the slow rank took fewer steps, and the model learnt."""
    [result] = json.loads((folder / "result.json").read_text())["results"].values()
    rounds = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    counts = [sum(steps) for steps in zip(*(info["counts"] for info in rounds if "counts" in info), strict=True)]
    accuracy = result["test"]["accuracy"]
    assert len(counts) == 2, counts
    assert counts[1] > 0, "the slow rank did nothing"
    assert counts[0] > 1.5 * counts[1], f"the fast rank did not range ahead: {counts}"
    assert sum(counts) == 6 * 45, f"not every batch of every epoch was used once: {counts}"
    assert accuracy > 0.9, accuracy
    return f"steps {counts} at 20 and 50 ms, {len(rounds)} rounds, accuracy {100 * accuracy:.1f} %"


def elastic(folder: Path) -> str:
    """Process 0 of three was killed after four rounds: the others trained on, and the coordinator has ended."""
    rounds = _rounds(folder, processes=[1, 2], epochs=3)
    worlds = [len(counts) for *_, counts, _ in rounds]
    assert worlds == [3] * 4 + [2] * (len(rounds) - 4), worlds
    assert len(rounds) > 5, worlds
    deadline = time.monotonic() + _END_S
    while (left := list(_coordinators(folder))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"coordinators left: {left}"
    return f"process 0 was killed, and the other two trained to the end: {len(rounds)} rounds, every batch once"


def replaced(folder: Path) -> str:
    """Process 0 of two was killed after four rounds and started again: one rank trained alone, then two."""
    rounds = _rounds(folder, processes=[0, 1], epochs=12)
    worlds = [len(counts) for *_, counts, _ in rounds]
    assert (worlds[3:5], worlds[-1]) == ([2, 1], 2), worlds
    alone = worlds.count(1)
    return f"process 0 was killed, and started again alone: {len(rounds)} rounds, {alone} without it, every batch once"


def _rounds(folder: Path, processes: list[int], epochs: int) -> list[Any]:
    """The rounds of tests/multiprocess/resumed.py, equal in these processes, which used every batch once."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))}
    first, *others = results.values()
    assert list(results) == [str(process) for process in processes], list(results)
    assert all(other == first for other in others), results
    used = [(epoch, cursor + i) for _, epoch, cursor, counts, _ in first["rounds"] for i in range(sum(counts))]
    assert used == [(epoch, i) for epoch in range(epochs) for i in range(12)], used
    return first["rounds"]


def _coordinators(folder: Path) -> Iterator[str]:
    """The coordinators whose environment names the folder."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if b"jaxche.distributed._coordinator" in words and str(folder).encode() in variables:
            yield path.name


CHECKS = {"trained": trained, "elastic": elastic, "replaced": replaced}

if __name__ == "__main__":
    run = Path(sys.argv[2])
    print(f"{run.name}: {CHECKS[sys.argv[1]](run)}")
