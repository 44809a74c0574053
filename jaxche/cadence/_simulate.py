"""A virtual fleet: run a cadence on devices of any speeds against a virtual clock."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from jaxche.cadence._elche import ElChe, short_row
from jaxche.cadence._round_plan import RoundPlan
from jaxche.drawing import COLOURS, figure_of, label_outside
from jaxche.messages import brief, finite_number, whole_number

# Batches in an epoch of a fleet, which has no data.
_ENDLESS = 2**48


@dataclass(frozen=True)
class Slowdown:
    """From round ``round`` on, a batch takes ``factor`` times as long on ``rank``.

    Attributes:
      rank: number of the rank.
      round: first slow round.
      factor: factor on the time of a batch; below 1 the rank becomes faster.

    Raises:
      ValueError: a rank or round that is not a whole number, or a factor that is not above 0.

    Example:
      >>> fleet = VirtualFleet([20.0, 50.0], slowdown=Slowdown(rank=0, round=10, factor=2.0))
      >>> fleet.speeds(9).tolist(), fleet.speeds(10).tolist()
      ([20.0, 50.0], [40.0, 50.0])
    """

    rank: int
    round: int
    factor: float

    def __post_init__(self) -> None:
        whole_number("rank", self.rank, 0, "Slowdown(rank=0, round=10, factor=2.0)")
        whole_number("round", self.round, 0, "Slowdown(rank=0, round=10, factor=2.0)")
        factor = finite_number("factor", self.factor, "factor=2.0")
        if factor <= 0:
            raise ValueError(f"factor={self.factor} must be above 0; write e.g. factor=2.0")
        object.__setattr__(self, "factor", factor)


def _numbers(name: str, row: Any) -> tuple[float, ...]:
    try:
        return tuple(map(float, row))
    except (TypeError, ValueError):
        line = f"one time for each rank; write e.g. {name}=[10.0, 23.0]"
        raise ValueError(f"{name}={row!r} must be a list of numbers, {line}") from None


@dataclass(frozen=True, repr=False)
class VirtualFleet:
    """Replicas of given speeds, with jitter, a merge cost, compilation times and a change of speed.

    wall_i = [n_i · f + b_i · (t_i - f)] · (1 + jitter · z),  sync = (C + 8 B / rate) · (1 + jitter · z)

    with ``n_i`` steps on the rows of ``b_i`` whole batches, ``f`` the part of a step that does not depend on its rows,
    ``B`` the bytes that a replica sends in a merge, and ``z`` standard normal, drawn for each rank and round.
    ``Trainer(fleet=)`` trains on the clock of such a fleet.

    Jitter is drawn for a whole round, not for a batch, so that long rounds do not average it out: clock changes and
    other jobs on a shared node also last longer than a batch.

    Args:
      ms_per_batch: ms of a batch on each rank, [R].
      jitter: relative standard deviation, 0 to 1.
      sync_ms: cost of a merge in ms, beside the time of its bytes.
      fixed_ms: ms of a step that do not depend on its rows; a step on half a batch takes half of the rest.
      slowdown: a rank that changes its speed during the run.
      first_report_ms: ms that compilation adds to the first round of each rank, [R]; None for none.
      first_sync_ms: ms that compilation adds to the first merge.
      group_sync_ms: ms of a merge within a group, for ``Trainer(groups=)``.
      link_mbit: Mbit a second that each replica can send, for ``Trainer(fleet=)``; None if bytes cost nothing.
      exchange_ms: with ``Trainer(overlap=)``, ms in which the replicas exchange the measurements of a round, beside its
        last steps. By default ``sync_ms`` with ``link_mbit``, a trip over the link, and 0 without.
      seed: seed of the jitter; the same seed gives the same run under every tuner.

    Raises:
      ValueError: a speed that is not above 0, a length other than R, or a number out of range.

    References:
      flodl 0.4.0 and the deterministic fleets of discrete-event simulation.

    Example:
      >>> run = VirtualFleet([10.0, 23.0], sync_ms=45.0).run(ElChe(2, 10, tuner="steady"), rounds=20)
      >>> run.counts[-1].tolist(), round(float(run.round_efficiency[-1]), 3)
      ([46, 20], 0.911)
    """

    ms_per_batch: Sequence[float]
    jitter: float = 0.0
    sync_ms: float = 5.0
    slowdown: Slowdown | None = None
    first_report_ms: Sequence[float] | None = None
    first_sync_ms: float = 0.0
    seed: int = 0
    fixed_ms: float = 0.0
    group_sync_ms: float = 0.0
    link_mbit: float | None = None
    exchange_ms: float | None = None

    def __post_init__(self) -> None:
        # Tuples of floats, so that fleets compare and hash.
        for name in ("ms_per_batch", "first_report_ms"):
            row = getattr(self, name)
            if row is not None or name == "ms_per_batch":
                object.__setattr__(self, name, _numbers(name, row))
        speeds = np.asarray(self.ms_per_batch)
        if not speeds.size or not (np.isfinite(speeds) & (speeds > 0)).all():
            raise ValueError(f"ms_per_batch={self.ms_per_batch} must be above 0 for each rank; write e.g. [10.0, 23.0]")
        if self.first_report_ms is not None and len(self.first_report_ms) != speeds.size:
            raise ValueError(
                f"first_report_ms has {len(self.first_report_ms)} entries for {speeds.size} ranks; write one per rank"
            )
        for ms in self.first_report_ms or ():
            finite_number("first_report_ms", ms, "first_report_ms=[900.0, 1500.0]", least=0.0)
        for name, least, line in (
            ("jitter", -math.inf, "jitter=0.05 for 5 %"),
            ("sync_ms", 0.0, "sync_ms=5.0"),
            ("fixed_ms", 0.0, "fixed_ms=2.0"),
            ("group_sync_ms", 0.0, "group_sync_ms=1.0"),
            ("first_sync_ms", 0.0, "first_sync_ms=500.0"),
            ("exchange_ms", 0.0, "exchange_ms=1.0"),
        ):
            if getattr(self, name) is None:
                continue
            object.__setattr__(self, name, finite_number(name, getattr(self, name), line, least=least))
        if not 0.0 <= self.jitter <= 1.0:
            raise ValueError(f"jitter={self.jitter} lies outside [0, 1]; write e.g. jitter=0.05 for 5 %")
        if self.fixed_ms > speeds.min():
            raise ValueError(
                f"fixed_ms={self.fixed_ms} is more than a batch takes, {speeds.min():g} ms on the fastest rank; it is "
                "a part of ms_per_batch"
            )
        if self.link_mbit is not None:
            rate = finite_number("link_mbit", self.link_mbit, "link_mbit=1000.0")
            if rate <= 0:
                raise ValueError(
                    f"link_mbit={self.link_mbit} must be above 0; write e.g. link_mbit=1000.0, or leave it out"
                )
            object.__setattr__(self, "link_mbit", rate)
        whole_number("seed", self.seed, 0, "seed=0")
        if self.slowdown is not None and not isinstance(self.slowdown, Slowdown):
            line = "slowdown=jaxche.cadence.Slowdown(rank=0, round=10, factor=2.0)"
            raise ValueError(f"slowdown={self.slowdown!r} is not a Slowdown; write {line}")
        if self.slowdown is not None and not 0 <= self.slowdown.rank < speeds.size:
            raise ValueError(f"slowdown.rank={self.slowdown.rank} is not one of {speeds.size} ranks")

    def __repr__(self) -> str:
        """One line, without arguments that have their defaults."""
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        rows = {name: short_row(row, "{:.4g}".format) for name, row in shown.items() if isinstance(row, tuple)}
        given = [f.name for f in fields(self) if shown[f.name] != f.default]
        return f"VirtualFleet({', '.join(f'{name}={rows.get(name, shown[name])}' for name in given)})"

    def speeds(self, round: int) -> np.ndarray:
        """True ms of a batch on each rank in a round, [R]."""
        ms = np.array(self.ms_per_batch)
        if self.slowdown is not None and round >= self.slowdown.round:
            ms[self.slowdown.rank] *= self.slowdown.factor
        return ms

    def merge_ms(self, sent_bytes: int = 0) -> float:
        """The time of a merge in which each replica sends so many bytes, without jitter."""
        return self.sync_ms + (8e-3 * sent_bytes / self.link_mbit if self.link_mbit else 0.0)

    @property
    def exchange_cost_ms(self) -> float:
        """The time in which the replicas exchange the measurements of a round with ``overlap=``."""
        if self.exchange_ms is not None:
            return self.exchange_ms
        return self.sync_ms if self.link_mbit else 0.0

    def timings(
        self, counts: Sequence[int], round: int, batches: Sequence[float] | None = None, sent_bytes: int = 0
    ) -> tuple[np.ndarray, float]:
        """Measurements of a round: (wall_ms [R], sync_ms).

        Args:
          counts: steps of each rank, [R].
          round: its number.
          batches: rows of each rank in whole batches, [R]; None for whole batches only.
          sent_bytes: that each replica sends in the merge.

        Raises:
          ValueError: ``counts`` or ``batches`` has another length than the fleet.
        """
        size = len(self.ms_per_batch)
        for name, row in (("counts", counts), ("batches", counts if batches is None else batches)):
            if np.shape(row) != (size,):
                raise ValueError(
                    f"{name}={brief(row)} for a fleet of {size} ranks; write one number for each, e.g. (10, 4) for two"
                )
        noise = np.random.default_rng((self.seed, round)).standard_normal(size + 1)
        # No batch takes less than a tenth of its time.
        stretch = np.maximum(1.0 + self.jitter * noise, 0.1)
        fixed = self.fixed_ms / np.array(self.ms_per_batch)
        rows = np.asarray(counts if batches is None else batches)
        wall = self.speeds(round) * (np.asarray(counts) * fixed + rows * (1 - fixed)) * stretch[:-1]
        if round == 0 and self.first_report_ms is not None:
            wall = wall + np.array(self.first_report_ms)
        sync_ms = self.merge_ms(sent_bytes) * stretch[-1] + (self.first_sync_ms if round == 0 else 0.0)
        return wall, float(sync_ms)

    def run(self, che: ElChe, rounds: int = 100) -> FleetRun:
        """Run the fleet under ``che`` for a number of rounds, planned under its lead limit.

        The tuner ``progress`` keeps its first anchor here: it follows how fast a model changes, and nothing is trained.
        With ``Trainer(fleet=)`` a model trains on this clock.

        Raises:
          ValueError: ``che`` is for another number of ranks, or ``rounds`` is below 1.
        """
        rounds = whole_number("rounds", rounds, 1, "run(che, rounds=100)")
        size = len(self.ms_per_batch)
        if che.world_size != size:
            raise ValueError(f"che.world_size={che.world_size} but the fleet has {size} ranks; write ElChe({size})")
        counts, wall = np.zeros((rounds, size), np.int64), np.zeros((rounds, size))
        anchor = np.zeros(rounds, np.int64)
        sync, rate, cost, plan_cost = np.zeros((4, rounds))
        slowest = np.zeros(rounds)
        for k in range(rounds):
            began = time.perf_counter()
            plan = RoundPlan(k, 0, 0, che.limited_counts, _ENDLESS)
            # Part of the cost: every host also hashes the plan and computes its batches; the last rank takes longest.
            plan.digest()
            plan.share(size - 1)
            plan_cost[k] = 1e3 * (time.perf_counter() - began)
            planned = plan.counts
            counts[k], anchor[k] = planned, che.anchor
            wall[k], sync[k] = self.timings(planned, k)
            rate[k], slowest[k] = np.sum(1.0 / self.speeds(k)), self.speeds(k).max()
            began = time.perf_counter()
            che = che.report_timing(wall[k], counts[k], sync[k])
            cost[k] = 1e3 * (time.perf_counter() - began)
        return FleetRun(che, counts, anchor, wall, sync, rate, slowest, cost, plan_cost)


@dataclass(frozen=True, eq=False, repr=False)
class FleetRun:
    """Record of a run of a virtual fleet: K rounds of R ranks.

    Args:
      che: the cadence after the last round.
      counts: batches, [K, R].
      anchor: anchor of each round, [K].
      wall_ms: compute time, [K, R].
      sync_ms: merge cost, [K].
      solo_rate: Σ 1 / t_i of the true speeds, batches a ms, [K].
      slowest_ms: t_slow of the true speeds, [K].
      controller_ms: real time that ``report_timing`` took on this machine, [K].
      plan_ms: real time that a host took to plan a round, hash the plan and compute a rank's batches, [K].

    Example:
      >>> run = VirtualFleet([20.0, 50.0], sync_ms=8.0).run(ElChe(2, 4, tuner="steady"), rounds=30)
      >>> run.counts.shape, round(run.efficiency, 2) > round(run.equal_batch_limit, 2)
      ((30, 2), True)
    """

    che: ElChe
    counts: np.ndarray
    anchor: np.ndarray
    wall_ms: np.ndarray
    sync_ms: np.ndarray
    solo_rate: np.ndarray
    slowest_ms: np.ndarray
    controller_ms: np.ndarray
    plan_ms: np.ndarray

    @property
    def round_ms(self) -> np.ndarray:
        """Length of each round in ms: the time of the slowest rank plus the merge, [K]."""
        return self.wall_ms.max(axis=1) + self.sync_ms

    @property
    def wait_ms(self) -> np.ndarray:
        """Time each rank waits for the slowest one before the merge, [K, R]."""
        return self.wall_ms.max(axis=1, keepdims=True) - self.wall_ms

    @property
    def round_efficiency(self) -> np.ndarray:
        """E = Σ n_i / [(max_i n_i t_i + C) Σ v_i] of each round, [K]."""
        return self.counts.sum(axis=1) / (self.round_ms * self.solo_rate)

    @property
    def efficiency(self) -> float:
        """Batches of the run divided by those that the ranks would do in that time without waiting or merging."""
        return float(self.counts.sum() / np.sum(self.round_ms * self.solo_rate))

    @property
    def equal_batch_efficiency(self) -> float:
        """Efficiency of equal counts with a merge after every batch: R / [(t_slow + C) Σ v_i]."""
        return self._equal(self.slowest_ms + self.sync_ms)

    @property
    def equal_batch_limit(self) -> float:
        """Efficiency of equal counts with free merges, their upper limit: R v_min / Σ v_i."""
        return self._equal(self.slowest_ms)

    def _equal(self, step_ms: np.ndarray) -> float:
        # Weighted by time, as is the efficiency of a run.
        return float(self.counts.shape[1] * np.sum(self.round_ms / step_ms) / np.sum(self.round_ms * self.solo_rate))

    def table(self) -> str:
        """A few lines of text: the first rounds, the last one, and the whole run."""
        rounds, size = self.counts.shape
        lines = ["round  anchor  efficiency  longest wait ms  counts"]
        for k in sorted({0, 1, 2, 3, rounds // 2, rounds - 1} & set(range(rounds))):
            shown = " ".join(map(str, self.counts[k, :8])) + (" …" if size > 8 else "")
            lines.append(
                f"{k:5d}  {self.anchor[k]:6d}  {self.round_efficiency[k]:10.3f}  {self.wait_ms[k].max():15.1f}  {shown}"
            )
        lines += [
            f"run of {rounds} rounds, {size} ranks: efficiency {self.efficiency:.3f}",
            f"equal counts, a merge after each step: {self.equal_batch_efficiency:.3f} "
            f"({self.equal_batch_limit:.3f} if merges were free)",
            f"controller: {np.median(self.controller_ms):.3f} ms a report, {np.median(self.plan_ms):.3f} ms a plan",
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.table()

    def plot(self) -> Any:
        """Counts and anchor, efficiency, and waiting over the rounds.

        Returns:
          A matplotlib figure; a notebook shows it when it is the last value of a cell.

        Raises:
          ImportError: without matplotlib; the message says what to install.
        """
        rounds, size = self.counts.shape
        x = np.arange(rounds)
        panels = [["counts"], ["efficiency"], ["wait"]]
        with figure_of(panels, heights=[2.2, 1.9, 1.9], points=rounds) as (figure, axes):
            for name, rows in (("counts", self.counts), ("wait", self.wait_ms)):
                if size <= len(COLOURS):
                    for rank in range(size):
                        axes[name].step(x, rows[:, rank], where="mid", color=COLOURS[rank], label=f"rank {rank}")
                else:
                    low, half, high = np.percentile(rows, (0, 50, 100), axis=1)
                    band = f"all {size:,} ranks"
                    axes[name].fill_between(x, low, high, step="mid", color=COLOURS[4], alpha=0.35, label=band)
                    axes[name].step(x, half, where="mid", color=COLOURS[0], label="median rank")
            axes["counts"].step(
                x, self.anchor, where="mid", color="black", linestyle=":", label="anchor: batches\nof the slowest"
            )
            axes["counts"].set(ylabel="batches a round", title="Cadence: batches of each rank between two merges")
            share = 100 * self.round_efficiency
            axes["efficiency"].step(x, share, where="mid", color=COLOURS[0], label="this run")
            limit = 100 * self.equal_batch_limit
            free = {"color": COLOURS[5], "linestyle": "--", "marker": "", "label": "equal batches,\nfree merge"}
            axes["efficiency"].axhline(limit, **free)
            title = f"Efficiency {self.efficiency:.1%} of the summed speeds; equal batches reach at most {limit:.1f}%"
            axes["efficiency"].set(ylabel="efficiency (%)", title=title)
            axes["efficiency"].set_ylim(0, 105)
            axes["wait"].set(ylabel="wait (ms)", xlabel="round", title="Waiting for the slowest before the merge")
            for panel in axes.values():
                panel.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
                panel.set_ylim(bottom=0)
                label_outside(panel)
        return figure
