"""How fast replicas are when nobody waits for anybody: the bound of any cadence."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import Any

from jaxche.distributed import Group
from jaxche.training._place import spans_processes
from jaxche.training._programs import Local
from jaxche.training._replica import Replica


def free_rates(
    group: Group,
    replicas: Sequence[Replica],
    locals_: Sequence[Local],
    batches: Sequence[Any],
    seconds: float,
    pool: Executor,
) -> dict[int, float]:
    """Batches per second of each rank of all processes, all running at once.

    Args:
      group: the processes of the run.
      replicas: of this process, compiled and warm.
      locals_: where each starts; they are not changed.
      batches: to take in turn.
      seconds: how long to run.
      pool: with a thread a replica.
    """
    # The processes of one island must stop after the same step, so these count steps instead of seconds.
    spanning = {
        replica.rank: (replica, local)
        for replica, local in zip(replicas, locals_, strict=True)
        if spans_processes(replica.place)
    }
    times = {rank: replica.run(local, batches, 0).wall_ms / len(batches) for rank, (replica, local) in spanning.items()}
    together = group.all_gather(times)  # and all start together
    agreed = {
        rank: math.ceil(seconds * 1e3 / max(part[str(rank)] for part in together if str(rank) in part))
        for rank in spanning
    }

    def run_one(replica: Replica, local: Local) -> float:
        until = time.perf_counter() + seconds
        feed: Iterable[Any] = itertools.cycle(batches)
        if replica.rank in agreed:
            feed = itertools.islice(feed, agreed[replica.rank])
        else:
            feed = itertools.takewhile(lambda _: time.perf_counter() < until, feed)
        outcome = replica.run(local, feed, 0)
        if outcome.error:
            raise outcome.error
        return outcome.steps / outcome.wall_ms * 1e3

    rates = {replica.rank: rate for replica, rate in zip(replicas, pool.map(run_one, replicas, locals_), strict=True)}
    return {int(rank): rate for part in group.all_gather(rates) for rank, rate in part.items()}
