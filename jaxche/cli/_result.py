"""The results of a run: the numbers of each policy, and the table that compares policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import jaxche
from jaxche.messages import aligned, per_rank

# With more ranks than this, show the range of their values.
MAX_RANKS = 4
# The rows with ratios to the first policy, and the attributes of their numbers.
_COMPARED = {"training time": "seconds", "examples a second": "examples_per_second", "efficiency": "efficiency"}


@dataclass(frozen=True)
class Result:
    """The result of one policy."""

    policy: str
    # Metrics on the test set at the end.
    test: dict[str, float]
    # Duration of the rounds: without compilation, evaluation and checkpoints.
    seconds: float
    examples: int
    batches: int
    # Batches a second of each rank without merges, measured while all ranks run.
    rates: tuple[float, ...]
    # Total wait of each rank for the slowest, and total cost of merges without these waits.
    wait_ms: tuple[float, ...]
    sync_ms: float
    rounds: int
    # 0 with one replica.
    merges: int
    # Bytes that a device of each replica needs for a round.
    memory: tuple[dict[str, int], ...] = ()

    @property
    def examples_per_second(self) -> float:
        return self.examples / self.seconds

    @property
    def efficiency(self) -> float:
        """Batches a second of wall time over the sum of ``rates``."""
        return self.batches / self.seconds / sum(self.rates)

    @property
    def wait_share(self) -> tuple[float, ...]:
        return tuple(ms / self.seconds / 1e3 for ms in self.wait_ms)

    @property
    def sync_share(self) -> float:
        return self.sync_ms / self.seconds / 1e3

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived numbers."""
        derived = ("examples_per_second", "efficiency", "wait_share", "sync_share")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Result:
        """The inverse of :meth:`to_dict`."""
        return cls(**{field.name: saved[field.name] for field in fields(cls) if field.name in saved})


def result_from_history(policy: str, history: jaxche.History, rates: Sequence[float]) -> Result:
    """The result of a run over all its starts: of its last rounds, with as many ranks as there are ``rates``."""
    counted = history.last_ranks
    return Result(
        policy=policy,
        test=counted[-1].validation,
        seconds=counted.seconds,
        examples=sum(info.examples for info in counted),
        batches=sum(info.batches for info in counted),
        rates=tuple(rates),
        wait_ms=tuple(sum(waits) for waits in zip(*(info.wait_ms for info in counted), strict=True)),
        sync_ms=sum(info.sync_ms for info in counted),
        rounds=len(counted),
        merges=len(counted) if len(rates) > 1 else 0,
        memory=history.memory,
    )


def metric_title(metric: str) -> str:
    """The metric and its unit as a row title."""
    return "test accuracy" if metric == "accuracy" else f"test {metric} (nats a character)"


def metric_text(metric: str, value: float) -> str:
    """The value of a metric as text."""
    return percent(value) if metric == "accuracy" else f"{value:.3f}"


def result_rows(results: Sequence[Result], metric: str) -> list[list[str]]:
    """Table rows with a column for each policy and its ratio to the first; a header if there are several."""
    first = results[0]
    rows = [
        [metric_title(metric), *(metric_text(metric, r.test[metric]) for r in results)],
        ["training time", *(f"{r.seconds:.1f} s" for r in results)],
        ["examples a second", *(f"{r.examples_per_second:,.0f}" for r in results)],
        ["free-running batches/s", *(per_rank(r.rates, "{:.1f}", MAX_RANKS) for r in results)],
        ["efficiency", *(percent(r.efficiency) for r in results)],
    ]
    if len(first.rates) > 1:
        rows.insert(-1, ["  their sum", *(f"{sum(r.rates):.1f}" for r in results)])
        shares = [per_rank([100 * share for share in r.wait_share], "{:.1f}", MAX_RANKS) + " %" for r in results]
        rows += [
            ["wait of each rank", *shares],
            ["sync share", *(percent(r.sync_share) for r in results)],
        ]
    rows += [
        ["rounds", *(str(r.rounds) for r in results)],
        ["merges", *(str(r.merges) for r in results)],
    ]
    if len(results) > 1:
        for row in rows:
            name = _COMPARED.get(row[0])
            row += [f"x {getattr(r, name) / getattr(first, name):.2f}" if name else "" for r in results[1:]]
        rows.insert(0, ["", *(r.policy for r in results), *(f"{r.policy} / {first.policy}" for r in results[1:])])
    return rows


def table(results: Sequence[Result], metric: str) -> str:
    """The :func:`result_rows` as text."""
    return aligned(result_rows(results, metric), left=1)


def percent(share: float) -> str:
    """A share of 1 as text."""
    return f"{100 * share:.1f} %"
