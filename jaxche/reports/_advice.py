"""Advice on the batch size: goodput is throughput times statistical efficiency."""

from __future__ import annotations

import collections
import html
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxche.averaging import MERGE_RULES, merge_weights
from jaxche.cadence import ElChe
from jaxche.messages import aligned, finite_number, html_table, one_of, per_rank, positive, whole_number
from jaxche.reports._round_info import RoundInfo
from jaxche.scaling import effective_replicas

# Speeds are those of this many last rounds.
_RECENT = 50
# A shorter round drifts less, so it may lose this share of the goodput. The model is less accurate than that.
_CLOSE = 0.01


@dataclass(frozen=True, repr=False)
class Choice:
    """The counts of a round and their estimated goodput.

    Attributes:
      counts: batches of each replica between two merges; 0 for an excluded replica, and parts of a batch if a run with
        ``rows="speed"`` is the current choice.
      batch: effective batch size of an update: the examples of the round with averaged gradients, else one local
        batch times the effective replicas of the merge.
      ms: duration of the round.
      examples_per_second: throughput.
      efficiency: statistical efficiency, the progress per example relative to the base batch.
      goodput: throughput times efficiency.

    Example:
      >>> choice = Choice((4, 2), batch=192, ms=45.0, examples_per_second=4267.0, efficiency=0.86, goodput=3670.0)
      >>> choice.counts
      (4, 2)
    """

    counts: tuple[float, ...]
    batch: float
    ms: float
    examples_per_second: float
    efficiency: float
    goodput: float

    def __repr__(self) -> str:
        return (
            f"Choice({_by_rank(self.counts)} steps in {self.ms:.4g} ms, batch {self.batch:.4g}: "
            f"{self.examples_per_second:.4g} examples a second, efficiency {self.efficiency:.4g}, "
            f"goodput {self.goodput:.4g})"
        )


@dataclass(frozen=True, repr=False)
class Advice:
    """The result of :func:`~jaxche.reports.advise`; its ``repr`` is a table.

    Attributes:
      average: ``"gradients"`` or ``"parameters"``.
      noise: critical batch size in examples.
      base_batch_size: batch size for which the learning rate was tuned.
      now: the current counts.
      best: the shortest round with a goodput within 1 % of the largest.
      choices: all candidates, by replicas and counts.

    Example:
      >>> from jaxche.reports import advise
      >>> advice = advise(noise=960, base_batch_size=32, batch_size=32, ms_per_batch=[10.0, 20.0], sync_ms=5.0,
      ...                 average="gradients", now=(1, 1), max_anchor=8)
      >>> advice.best.counts, round(advice.speedup, 2)
      ((4, 2), 1.48)
    """

    average: str
    noise: float
    base_batch_size: float
    now: Choice
    best: Choice
    choices: tuple[Choice, ...]

    @property
    def speedup(self) -> float:
        """Goodput of the best choice relative to the current one."""
        return self.best.goodput / self.now.goodput

    @property
    def line(self) -> str:
        """The arguments of the trainer for the best choice; empty if the current counts are the best."""
        if self.best.counts == self.now.counts:
            return ""
        ranks = _ranks(self.best)
        if len(ranks) == 1:
            return f"replicas=[devices[{ranks[0]}]]"
        part = "" if len(ranks) == len(self.best.counts) else f"replicas=[devices[r] for r in {ranks}], "
        if self.average == "gradients" and max(self.best.counts) == 1:
            return part + 'policy="sync"'
        anchor = min(n for n in self.best.counts if n)
        che = f"che=jaxche.ElChe(world_size={len(ranks)}, anchor={anchor}, max_anchor={anchor})"
        return f'{part}policy="cadence", average="{self.average}", {che}'

    @property
    def summary(self) -> str:
        """The advice in one sentence."""
        text = f"gradient noise scale {_short(self.noise)} examples: "
        if len(self.best.counts) == 1:
            return f"{text}no multiple of the batch of {_short(self.now.batch)} is better at the same examples a second"
        ranks = _ranks(self.best)
        text += f"{_by_rank(self.best.counts)} steps between merges " if len(ranks) > 1 else f"rank {ranks[0]} alone "
        if not self.line:
            return text + "(as now) reach a target as soon as any"
        return text + f"should reach a target {self.speedup:.2f} times as soon as {_by_rank(self.now.counts)}"

    def rows(self) -> list[dict[str, Any]]:
        """A selection of the choices as flat dicts.

        The counts of all replicas, doubled from row to row, the best choice for each smaller number of replicas, the
        current choice and the best one.
        """
        whole = max(len(_ranks(choice)) for choice in self.choices)
        shown, least = [], 0
        for choice in self.choices:
            if len(_ranks(choice)) == whole and min(n for n in choice.counts if n) >= least:
                least = 2 * min(n for n in choice.counts if n)
                shown.append(choice)
        for used in sorted({len(_ranks(choice)) for choice in self.choices} - {whole}):
            shown.append(max((c for c in self.choices if len(_ranks(c)) == used), key=lambda c: c.goodput))
        order = {choice.counts: choice for choice in (*shown, self.now, self.best)}
        ordered = sorted(order.values(), key=lambda c: (-len(_ranks(c)), sum(c.counts)))
        notes = {self.now.counts: "now"}
        notes[self.best.counts] = ", ".join(filter(None, [notes.get(self.best.counts), "soonest"]))
        return [asdict(choice) | {"note": notes.get(choice.counts, "")} for choice in ordered]

    def table(self) -> str:
        """The summary, the rows, the arguments for the trainer and the limits of the estimate as text."""
        return "\n".join([self.summary, aligned(self._cells()), *self._remarks()])

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        head, *body = self._cells()
        remarks = "".join(f"<p>{html.escape(remark)}</p>" for remark in self._remarks())
        return html_table(head, body, self.summary) + remarks

    def _remarks(self) -> list[str]:
        write = [f"write: {self.line}"] if self.line else []
        if self.average == "parameters" and len(self.best.counts) > 1:
            write.append("not in these numbers: what longer rounds lose by drift")
        return write

    def _cells(self) -> list[list[str]]:
        cells = [["steps", "batch", "ms a round", "examples/s", "efficiency", "goodput/s", ""]]
        for row in self.rows():
            numbers = (f"{row['examples_per_second']:,.0f}", f"{row['efficiency']:.1%}", f"{row['goodput']:,.0f}")
            cells.append([_by_rank(row["counts"]), _short(row["batch"]), f"{row['ms']:.1f}", *numbers, row["note"]])
        return cells


def _by_rank(counts: Sequence[float]) -> str:
    return per_rank(counts, "{:g}")


def _ranks(choice: Choice) -> list[int]:
    """The replicas that a choice uses."""
    return [rank for rank, n in enumerate(choice.counts) if n]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def advise(
    *,
    noise: float,
    base_batch_size: float,
    batch_size: float,
    ms_per_batch: Sequence[float],
    sync_ms: float,
    average: str,
    merge: str = "steps",
    now: Sequence[float] = (),
    max_anchor: int = 200,
    max_batches: int | None = None,
) -> Advice:
    r"""Find the counts with the largest goodput at the current noise and speeds.

    .. math:: \mathrm{goodput} = \frac{u b'}{\max_i n_i t_i + C} \cdot E, \qquad
              E(b') = \frac{\mathrm{gain}(b' / b_0)}{b' / b_0} = \frac{B + b_0}{B + b'}

    with the noise scale :math:`B = \operatorname{tr}\Sigma / \|G\|^2` in examples, the base batch :math:`b_0` and
    :math:`u` updates of the effective batch :math:`b'` in a round.

    With averaged gradients :math:`u = 1` and :math:`b' = \sum n_i b`. A longer round merges less often, but its larger
    batch is less efficient, so one length is optimal. With averaged parameters :math:`u = \alpha \sum w_i n_i` and
    :math:`b' = m_{eff} b`. This batch hardly depends on the length of the round, so the goodput grows with the length,
    by less and less. The model does not include the loss from drift, so the result is the shortest round within 1 % of
    the best.

    The candidates are the counts that :class:`~jaxche.ElChe` sets for these speeds, for all replicas and for the
    fastest ones alone, with the same merge cost. A single replica has no merge cost, and updates of one batch.

    The advice is for the current state of training: noise usually grows during training, and the best batch with it.
    It assumes a learning rate that ``AdaScale`` or ``AdamScale`` scales with the batch.

    Args:
      noise: critical batch size in examples.
      base_batch_size: batch size for which the learning rate was tuned.
      batch_size: examples in one local batch.
      ms_per_batch: time of a local batch of each replica in ms, ``[R]``.
      sync_ms: cost of a merge without waits in ms.
      average: ``"gradients"`` or ``"parameters"``.
      merge: merge rule of parameters.
      now: the current counts; default: one step each.
      max_anchor: largest number of steps of the slowest replica. For a single replica: the largest multiple of its
        batch; its time is assumed to be proportional.
      max_batches: largest number of batches in a round, all replicas together: those in an epoch, as a round ends with
        the epoch. None for no limit.

    Returns:
      An :class:`Advice`.

    Raises:
      ValueError: a noise, size or time is not finite or is negative, or an option is unknown.

    References:
      Qiao et al., *Pollux*, OSDI 2021 (goodput, statistical efficiency). McCandlish et al., *An empirical model of
      large-batch training*, 2018 (noise scale).

    Example:
      >>> advice = advise(
      ...     noise=960,
      ...     base_batch_size=32,
      ...     batch_size=32,
      ...     ms_per_batch=[10.0, 20.0],
      ...     sync_ms=5.0,
      ...     average="gradients",
      ...     now=(1, 1),
      ...     max_anchor=8,
      ... )
      >>> advice
      gradient noise scale 960 examples: 4:2 steps between merges should reach a target 1.48 times as soon as 1:1
      steps  batch  ms a round  examples/s  efficiency  goodput/s
        1:1     64        25.0       2,560       96.9%      2,480      now
        2:1     96        25.0       3,840       93.9%      3,607
        4:2    192        45.0       4,267       86.1%      3,674  soonest
        8:4    384        85.0       4,518       73.8%      3,334
       16:8    768       165.0       4,655       57.4%      2,672
        1:0     32        10.0       3,200      100.0%      3,200
      write: policy="cadence", average="gradients", che=jaxche.ElChe(world_size=2, anchor=2, max_anchor=2)
    """
    one_of("average", average, ("parameters", "gradients"))
    one_of("merge", merge, MERGE_RULES)
    is_listed = np.ndim(ms_per_batch) == np.ndim(now) == 1 and len(ms_per_batch) > 0
    if not is_listed or len(now) not in (0, len(ms_per_batch)):
        raise ValueError(
            f"ms_per_batch={ms_per_batch!r} and now={now!r} need one entry for each replica; write e.g. "
            "ms_per_batch=[20.0, 50.0], now=(5, 2)"
        )
    noise = finite_number("noise", noise, "noise=960.0", least=0)
    sync_ms = finite_number("sync_ms", sync_ms, "sync_ms=5.0", least=0)
    base_batch_size = positive("base_batch_size", base_batch_size, "base_batch_size=32", whole=False)
    batch_size = positive("batch_size", batch_size, "batch_size=32", whole=False)
    line = "ms_per_batch=[20.0, 50.0]"
    times = [positive(f"ms_per_batch[{rank}]", ms, line, whole=False) for rank, ms in enumerate(ms_per_batch)]
    for rank, steps in enumerate(now):
        finite_number(f"now[{rank}]", steps, "now=(5, 2)", least=0)
    if len(now) and not any(now):
        raise ValueError(f"now={now!r} must be steps of each replica, at least one in all; write e.g. now=(5, 2)")
    max_anchor = whole_number("max_anchor", max_anchor, 1, "max_anchor=200")
    if max_batches is not None:
        max_batches = whole_number("max_batches", max_batches, 1, "max_batches=len(data)")

    def choice(counts: Sequence[float]) -> Choice:
        examples = batch_size * sum(counts)
        alone = sum(n > 0 for n in counts) == 1
        ms = max(n * t for n, t in zip(counts, times, strict=True)) + (0.0 if alone else sync_ms)
        batch, steps = examples, 1.0
        if average == "parameters" and not alone:
            weights, alpha = merge_weights(merge, counts)
            batch = batch_size * effective_replicas(weights, counts, alpha)
            steps = alpha * sum(w * n for w, n in zip(weights, counts, strict=True))
        gain = batch / base_batch_size * (noise + base_batch_size) / (noise + batch)
        efficiency = steps * gain * base_batch_size / examples
        rate = examples / ms * 1e3
        return Choice(tuple(counts), batch, ms, rate, efficiency, rate * efficiency)

    candidates = _candidates(times, max_anchor)
    choices = [choice(counts) for counts in candidates if max_batches is None or sum(counts) <= max_batches]
    current = choice(tuple(now) or (1,) * len(times))
    most = max(c.goodput for c in (*choices, current))
    best = min((c for c in (*choices, current) if c.goodput >= (1 - _CLOSE) * most), key=lambda c: sum(c.counts))
    return Advice(average, noise, base_batch_size, current, best, tuple(choices))


def advise_from(history: Sequence[RoundInfo], max_anchor: int) -> Advice:
    """Advice from the noise, speeds and merge costs of a history."""
    known = [info for info in history if not math.isnan(info.noise)]
    if not known:
        raise ValueError(
            "the history has no gradient noise; a scaling rule measures it: jaxche.Trainer(..., "
            "scaling=jaxche.AdaScale()). With averaged parameters each replica needs two or more batches a round"
        )
    last = known[-1]
    if math.isinf(last.noise):
        raise ValueError(
            f"the noise of round {last.round} is {last.noise}: the gradient is still below its noise; "
            "train more rounds first"
        )
    recent = history[-_RECENT:]
    world = len(last.counts)
    done = [_batches_done(info) for info in recent]
    rounds = list(zip(recent, done, strict=True))
    speeds = [[info.wall_ms[rank] / own[rank] for info, own in rounds if own[rank]] for rank in range(world)]
    if not all(speeds):
        raise ValueError(
            f"rank {next(r for r, s in enumerate(speeds) if not s)} took no step in the last {len(recent)} rounds, so "
            "its speed is unknown; train with it, or exclude it from the run: replicas=devices[:1]"
        )
    return advise(
        noise=last.noise,
        base_batch_size=last.base_batch_size,
        batch_size=statistics.median(info.examples / info.batches for info in recent),
        ms_per_batch=[statistics.median(times) for times in speeds],
        sync_ms=statistics.median(info.sync_ms for info in recent),
        average=last.average,
        merge=last.merge or "steps",
        # A round of a single replica is many updates of a batch each.
        now=statistics.mode(tuple(round(n, 2) for n in own) for own in done) if world > 1 else (1,),
        max_anchor=max_anchor,
        max_batches=_epoch_batches(history),
    )


def _epoch_batches(history: Sequence[RoundInfo]) -> int:
    """The batches of the longest epoch in a history, or of the part of it that the history has."""
    first: dict[int, int] = {}
    ran: collections.Counter[int] = collections.Counter()
    for info in history:
        first.setdefault(info.epoch, info.cursor)
        ran[info.epoch] += info.batches
    # With the policy "async" the last round of an epoch may run batches of the next one.
    return max(first[epoch] + n - first.get(epoch + 1, 0) for epoch, n in ran.items())


def _batches_done(info: RoundInfo) -> tuple[float, ...]:
    """The batches of each replica, with parts of batches under rows by speed."""
    return tuple(n * info.batches / info.examples for n in info.rows) if info.shares else info.counts


def _candidates(times: Sequence[float], max_anchor: int) -> list[tuple[int, ...]]:
    """The counts of ElChe at every anchor for the fastest 1, 2, 4, ... replicas and for all, without duplicates."""
    world = len(times)
    if world == 1:
        return [(k,) for k in range(1, max_anchor + 1)]
    fastest = sorted(range(world), key=lambda rank: times[rank])
    found: dict[tuple[int, ...], None] = {tuple(int(r == fastest[0]) for r in range(world)): None}
    for used in sorted({2**k for k in range(1, world.bit_length()) if 2**k < world} | {world}):
        ranks = sorted(fastest[:used])
        measured = [times[r] for r in ranks]
        for anchor in range(1, max_anchor + 1):
            che = ElChe(used, anchor=anchor, max_anchor=anchor, tuner="steady").report_timing(measured, [1] * used, 0.0)
            by_rank = dict(zip(ranks, che.batch_counts, strict=True))
            found[tuple(by_rank.get(r, 0) for r in range(world))] = None
        found[tuple(int(r in ranks) for r in range(world))] = None
    return list(found)
