"""What a policy reached, from its record and the clock: also where the run was interrupted on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxche.cli._report import Result
from jaxche.training import History


def outcome(
    policy: str,
    history: History,
    rates: Sequence[float],
    seconds: Mapping[int, float],
    test: dict[str, float],
    curve: Sequence[dict[str, float]] = (),
) -> Result:
    """The numbers of a run: of all its rounds, from every start.

    Where the number of ranks changed on the way, only the rounds since then count: waiting and efficiency are against
    the rates of the ranks that are there at the end.

    Args:
      policy: its name.
      history: of the whole run.
      rates: free-running batches a second of each rank, measured at this start.
      seconds: training time of each round, by its number; a round without one counts with its own time.
      test: the held-out metrics at the end.
      curve: the same at the end of each epoch.

    Example:
      >>> outcome("cadence", History(), (50.0, 20.0), seconds={}, test={"accuracy": 0.1}).rounds
      0
    """
    counted = history.last_ranks
    return Result(
        policy=policy,
        test=test,
        curve=tuple(curve),
        seconds=sum(seconds.get(info.round, info.period_ms / 1e3) for info in counted),
        examples=sum(info.examples for info in counted),
        batches=sum(sum(info.counts) for info in counted),
        rates=tuple(rates),
        wait_ms=tuple(sum(waits) for waits in zip(*(info.wait_ms for info in counted), strict=True)),
        sync_ms=sum(info.sync_ms for info in counted),
        rounds=len(counted),
        merges=len(counted) if len(rates) > 1 else 0,
        memory=history.memory,
    )
