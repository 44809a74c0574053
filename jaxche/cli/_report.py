"""What a run prints: a line a round, a table at the end. Text from numbers, nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from jaxche.drawing import aligned, per_rank
from jaxche.training import RoundInfo

# With more ranks than this their range is shown.
_RANKS = 4


@dataclass(frozen=True)
class Result:
    """What one policy reached.

    Args:
      policy: its name.
      test: the held-out metrics at the end.
      curve: the same at the end of each epoch since the last start, with ``epoch`` and ``seconds``.
      seconds: training time, without evaluation and compilation.
      examples: trained on.
      batches: trained on.
      rates: batches a second of each rank, nobody waiting for anybody, all at work; measured in this run.
      wait_ms: what each rank waited for the slowest, in all.
      sync_ms: what merges cost beyond waiting, in all.
      rounds: how many.
      merges: how many (none with one replica).
      memory: bytes a device needs for a round, of each replica.
    """

    policy: str
    test: dict[str, float]
    curve: tuple[dict[str, float], ...]
    seconds: float
    examples: int
    batches: int
    rates: tuple[float, ...]
    wait_ms: tuple[float, ...]
    sync_ms: float
    rounds: int
    merges: int
    memory: tuple[dict[str, int], ...] = ()

    @property
    def examples_per_second(self) -> float:
        return self.examples / self.seconds

    @property
    def efficiency(self) -> float:
        """Batches a second by the wall clock over the sum of the free-running rates."""
        return self.batches / self.seconds / sum(self.rates)

    @property
    def wait_share(self) -> tuple[float, ...]:
        return tuple(ms / self.seconds / 1e3 for ms in self.wait_ms)

    @property
    def sync_share(self) -> float:
        return self.sync_ms / self.seconds / 1e3

    def to_dict(self) -> dict[str, Any]:
        """Everything, the derived numbers too."""
        derived = ("examples_per_second", "efficiency", "wait_share", "sync_share")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Result:
        """What :meth:`to_dict` made; derived numbers are derived again."""
        return cls(**{field.name: saved[field.name] for field in fields(cls)})


def metric_title(metric: str) -> str:
    """The metric with its unit, as tables name it."""
    return "test accuracy" if metric == "accuracy" else f"test {metric} (nats a character)"


def metric_text(metric: str, value: float) -> str:
    """The metric as tables print it.

    Example:
      >>> metric_text("accuracy", 0.975), metric_text("loss", 2.31)
      ('97.5 %', '2.310')
    """
    return _percent(value) if metric == "accuracy" else f"{value:.3f}"


def round_header(world_size: int) -> str:
    """The titles over the lines of ``round_line``."""
    merged = f"  {'wait ms':>15}  {'sync ms':>7}  {'efficiency':>10}" if world_size > 1 else ""
    return f"{'round':>6}  {'epoch':>5}  {'batches':>15}  {'loss':>7}{merged}"


def round_line(info: RoundInfo) -> str:
    """One round."""
    line = f"{info.round:6d}  {info.epoch + 1:5d}  {per_rank(info.counts, most=_RANKS):>15}  {info.loss:7.4f}"
    if len(info.counts) == 1:
        return line
    return f"{line}  {per_rank(info.wait_ms, most=_RANKS):>15}  {info.sync_ms:7.1f}  {_percent(info.efficiency):>10}"


def result_rows(results: Sequence[Result], metric: str) -> list[list[str]]:
    """The numbers of each policy side by side, and how they compare with the first.

    Args:
      results: one a policy.
      metric: the entry of ``Result.test`` to show.

    Returns:
      Cells; of several policies the first row has their names.
    """
    first, many = results[0], len(results) > 1
    rows = [
        [metric_title(metric), *(metric_text(metric, r.test[metric]) for r in results)],
        ["training time", *(f"{r.seconds:.1f} s" for r in results)],
        ["examples a second", *(f"{r.examples_per_second:,.0f}" for r in results)],
        ["free-running batches/s", *(per_rank(r.rates, "{:.1f}", _RANKS) for r in results)],
        ["efficiency", *(_percent(r.efficiency) for r in results)],
    ]
    if len(first.rates) > 1:
        rows.insert(-1, ["  their sum", *(f"{sum(r.rates):.1f}" for r in results)])
        shares = [per_rank([100 * share for share in r.wait_share], "{:.1f}", _RANKS) + " %" for r in results]
        rows += [
            ["wait of each rank", *shares],
            ["sync share", *(_percent(r.sync_share) for r in results)],
        ]
    rows += [
        ["rounds", *(str(r.rounds) for r in results)],
        ["merges", *(str(r.merges) for r in results)],
    ]
    if many:
        against = [_against(first, r) for r in results[1:]]
        head = ["", *(r.policy for r in results), *(f"{r.policy} / {first.policy}" for r in results[1:])]
        for row in rows:
            row += [ratios.get(row[0], "") for ratios in against]
        rows.insert(0, head)
    return rows


def table(results: Sequence[Result], metric: str) -> str:
    """The :func:`result_rows` as lines."""
    return aligned(result_rows(results, metric), left=1)


def _against(first: Result, other: Result) -> dict[str, str]:
    pairs = {
        "training time": (other.seconds, first.seconds),
        "examples a second": (other.examples_per_second, first.examples_per_second),
        "efficiency": (other.efficiency, first.efficiency),
    }
    return {name: f"x {a / b:.2f}" for name, (a, b) in pairs.items()}


def step_text(step_ms: Sequence[float]) -> str:
    """What a step takes, in words.

    Example:
      >>> step_text([3.04, 3.2])
      'the step itself takes 3.1 ms'
    """
    return f"the step itself takes {statistics.mean(step_ms):.1f} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
