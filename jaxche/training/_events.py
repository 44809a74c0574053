"""Events of rounds for the launcher: a line of JSON for each local rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from jaxche.distributed import RESTART, Watchdog
from jaxche.reports import RoundInfo


def tell(watchdog: Watchdog, info: RoundInfo, ranks: Mapping[int, int], merged_bytes: int) -> None:
    """Write the events of a round.

    Args:
      watchdog: of this process.
      info: the round.
      ranks: for each rank of this process in the round, its rank at the start of the run.
      merged_bytes: what a replica puts into the merge.
    """
    watchdog.write_events([json.dumps(event(info, place, rank, merged_bytes)) for place, rank in ranks.items()])


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
