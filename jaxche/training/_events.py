"""Events of rounds: a line of JSON for each local rank, for whatever watches over this process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from jaxche.distributed import EVENTS, RESTART, unless_full
from jaxche.reports import RoundInfo


def tell(info: RoundInfo, ranks: Mapping[int, int], merged_bytes: int) -> None:
    """Append a line of JSON for each local rank to the file of events; where it is full the run goes on without.

    Args:
      info: the round.
      ranks: of this process: what number the run started with, by that in the round.
      merged_bytes: what a replica puts into the merge.
    """
    if EVENTS not in os.environ:
        return
    lines = [json.dumps(event(info, place, rank, merged_bytes)) + "\n" for place, rank in ranks.items()]
    # One write of whole lines in append mode: processes of one machine do not mix theirs.
    path = os.environ[EVENTS]
    with unless_full(f"{EVENTS}={path}"), open(path, "a", encoding="utf8") as file:
        file.write("".join(lines))


def event(info: RoundInfo, place: int, rank: int, merged_bytes: int) -> dict[str, Any]:
    """One round of one rank, and where it was among those that took part."""
    return {
        "time": round(time.time(), 3),
        "event": "round",
        "rank": rank,
        "round": info.round,
        "epoch": info.epoch,
        "steps": info.counts[place],
        "compute_ms": round(info.wall_ms[place], 3),
        "wait_ms": round(info.wait_ms[place], 3),
        "merge_ms": round(info.sync_ms, 3),
        "merged_bytes": merged_bytes,
        "restart": int(os.environ.get(RESTART, 0)),
    }
