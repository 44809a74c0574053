"""The measurements of a round, and its timeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxche.drawing import COLOURS, MERGE, WAIT, Bar, Lane, lanes, ranks_to_show
from jaxche.messages import per_rank
from jaxche.scaling import effective_replicas

# Metrics and results of validation in the text of a round.
_VALUES_SHOWN = 4


@dataclass(frozen=True, repr=False)
class RoundInfo:
    """One round, with equal values on all processes.

    Attributes:
      round: number of the round, from 0.
      epoch: epoch of its first batch.
      cursor: index of its first batch in that epoch.
      counts: local steps of each replica.
      planned: planned steps of each replica; a replica that takes twice the planned time stops earlier.
      weights: merge weight of each replica (with averaged gradients its share of the examples).
      wall_ms: duration of the steps of each replica.
      sync_ms: cost of the merge, without the wait for the slowest replica; with ``groups=``, of all merges.
      loss: mean loss over the examples of the round, or by the weights of a :class:`~jaxche.Weighted`; nan, as
        a metric, if all its weights in the round are 0.
      metrics: means of the metrics of the loss function over the examples of the round.
      drift: weighted root-mean-square distance of the replicas from their mean, relative to the norm of the mean.
      drift_dir: the same distance relative to the merged progress; 0 if all replicas moved alike.
      losses: mean loss of each replica (nan for a replica without steps).
      examples: number of training examples.
      anchor: planned steps of the slowest replica with steps.
      verdict: result of the divergence guard: calm, suppress or nudge.
      stop: 1 if a process requested a stop after this round, 2 if a process is preempted, else 0.
      noise: critical batch size in examples, at which noise and signal of the gradient are equal (nan before the first
        estimate, and without scaled learning rates).
      gain: progress of a step in steps on the base batch: of the update with averaged gradients, else the mean over
        local steps.
      lr_factor: factor on the learning rate, of the same step or steps.
      progress: total progress so far in steps on the base batch (nan without scaled learning rates).
      base_batch_size: batch size for which the learning rate was tuned (nan without scaled learning rates).
      average: "parameters" or "gradients".
      merge: merge rule of the parameters (empty with averaged gradients).
      alpha: step length of the merge.
      clock_ms: time of all rounds so far, to the end of this one, waiting and merging included, but not compilation,
        evaluation, callbacks and checkpoints. With several processes the last merge counts as long as the one before
        it, so that all have the same clock.
      rows: examples of each replica.
      shares: parts of the joined batch that the replicas ran, as planned; empty if they ran whole batches.
      joined: batches of the joined batch, or 0.
      policy: the policy of the round: with ``policy="auto"``, the one that was chosen.
      steps_done: batches that all replicas have trained on so far: the steps that a schedule in ``tx`` counts.
      examples_done: examples that they have trained on so far.
      validation: results of the evaluation after this round, by name; empty if there was none.
      merge_bytes: bytes that each replica sends in the merge, from the collectives of its program: by ring algorithms
        :math:`2 (R - 1) / R` times the bytes of an all-reduce.
      overlapped: with ``overlap=``, the steps that each replica took while the merge of the round before was in flight;
        empty if no merge was. Drift is then of that merge, and ``sync_ms`` the part of it that was not hidden.
      hidden_ms: with ``overlap=``, the time of that merge that ran beside steps.
      sent_after: with ``overlap=``, the steps of each replica before it sent what it had measured, so that it was
        exchanged beside the others; empty if it was sent after all steps. Loss and metrics are then of the steps until
        then, and of those of the round before that had not been sent.
      wire: the wire of the merge.
      overlap: the part of the next round that runs beside the merge of this one, 0 where replicas wait for it.
      group_merges: with ``groups=``, the merges of the round, of which the last one is of all replicas; else 1.
      groups: with ``groups=``, the number of the group of each replica, -1 for a replica in none.
      group_ms: with ``groups=``, the part of ``sync_ms`` that merges within groups took.
      loss_weight: weight of ``loss`` in a mean over rounds: the examples, or the sum of the weights of the loss.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> data = jaxche.Batches(np.ones((64, 2), np.float32), batch_size=2)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1))
      >>> state, info = trainer.round(trainer.init(jnp.zeros(2)), data)
      >>> info.round, info.loss > 0, info.examples == 2 * sum(info.counts)
      (0, True, True)
    """

    round: int
    epoch: int
    cursor: int
    counts: tuple[int, ...]
    planned: tuple[int, ...]
    weights: tuple[float, ...]
    wall_ms: tuple[float, ...]
    sync_ms: float
    loss: float
    metrics: dict[str, float]
    drift: float
    drift_dir: float
    losses: tuple[float, ...]
    examples: int
    anchor: int
    verdict: str
    stop: int = 0
    noise: float = math.nan
    gain: float = 1.0
    lr_factor: float = 1.0
    progress: float = math.nan
    base_batch_size: float = math.nan
    average: str = "parameters"
    merge: str = "steps"
    alpha: float = 1.0
    clock_ms: float = 0.0
    rows: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    joined: int = 0
    policy: str = ""
    steps_done: int = 0
    examples_done: int = 0
    validation: dict[str, float] = field(default_factory=dict)
    merge_bytes: int = 0
    overlapped: tuple[int, ...] = ()
    hidden_ms: float = 0.0
    sent_after: tuple[int, ...] = ()
    wire: str = ""
    overlap: float = 0.0
    group_merges: int = 1
    group_ms: float = 0.0
    groups: tuple[int, ...] = ()
    loss_weight: float = math.nan

    def __eq__(self, other: object) -> bool:
        """Whether all values are equal. NaN equals NaN, so a round equals its copy from a file or another process."""
        return plain(vars(self)) == plain(vars(other)) if isinstance(other, RoundInfo) else NotImplemented

    @property
    def batches(self) -> int:
        """Batches of the round."""
        return self.joined if self.shares else sum(self.counts)

    @property
    def effective_batch(self) -> float:
        """Effective batch size of an update: the examples of the round with averaged gradients, else those of one local
        batch times the :func:`~jaxche.scaling.effective_replicas` of the merge."""
        if self.average == "gradients":
            return float(self.examples)
        return self.examples / self.batches * effective_replicas(self.weights, self.counts, self.alpha)

    @property
    def period_ms(self) -> float:
        """Duration of the round: the steps of the slowest replica and the merge."""
        return max(self.wall_ms) + self.sync_ms

    @property
    def wait_ms(self) -> tuple[float, ...]:
        """Wait of each replica for the slowest."""
        return tuple(max(self.wall_ms) - wall for wall in self.wall_ms)

    @property
    def efficiency(self) -> float:
        r"""Share of the summed speeds of the replicas that the round used.

        :math:`\sum n_i / [(\max t_i n_i + C) \sum v]`, with the speeds in this round. A benchmark measures the speeds
        without merges.
        """
        return efficiency_of([self])

    def __repr__(self) -> str:
        """One line; numbers have four digits."""
        ran = f"{per_rank(self.rows, '{:,}')} rows" if self.shares else f"{per_rank(self.counts, '{:,}')} steps"
        merge = f" + {self.sync_ms:.4g} ms merge" if len(self.counts) > 1 else ""
        named = self.metrics | {f"validation {name}": value for name, value in self.validation.items()}
        values = [f"{name} {value:.4g}" for name, value in named.items()]
        shown = ", ".join([f"loss {self.loss:.4g}", *values[:_VALUES_SHOWN], *["..."] * (len(values) > _VALUES_SHOWN)])
        return (
            f"RoundInfo(round {self.round}, epoch {self.epoch}: {shown}, {ran}, "
            f"{max(self.wall_ms):.4g} ms{merge}, efficiency {100 * self.efficiency:.4g} %)"
        )

    def _repr_html_(self) -> str:
        caption = f"round {self.round}, epoch {self.epoch}: loss {self.loss:.4g}, efficiency {self.efficiency:.1%}"
        return rounds_svg([self], caption)


def plain(value: Any) -> Any:
    """The values of a round as JSON has them: nan is None, and infinities are text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def rounds_svg(rounds: Sequence[RoundInfo], caption: str) -> str:
    """A timeline of rounds as an ``<svg>`` element, with a lane for each rank."""
    steps = [max(sum(info.counts[rank] for info in rounds), 1) for rank in range(len(rounds[0].counts))]
    shown = ranks_to_show([sum(info.wall_ms[rank] for info in rounds) / n for rank, n in enumerate(steps)])
    bars: list[list[Bar]] = [[] for _ in shown]
    start = 0.0
    for info in rounds:
        slowest = max(info.wall_ms)
        for lane, rank in enumerate(shown):
            wall = info.wall_ms[rank]
            text = f"{info.counts[rank]} steps" if len(rounds) == 1 else str(info.counts[rank])
            bars[lane] += [
                Bar(start, wall, COLOURS[lane % len(COLOURS)], text),
                Bar(start + wall, slowest - wall, WAIT, f"waits {slowest - wall:.1f} ms"),
                Bar(start + slowest, info.sync_ms, MERGE, f"merge {info.sync_ms:.1f} ms"),
            ]
        start += info.period_ms
    part = f"; the last {len(rounds)}:" if len(rounds) > 1 else ""
    some = f", {len(shown)} of {len(steps)} ranks" if len(shown) < len(steps) else ""
    return lanes([Lane(f"rank {r}", row) for r, row in zip(shown, bars, strict=True)], "ms", caption + part + some)


def efficiency_of(rounds: Iterable[RoundInfo]) -> float:
    """Number of batches relative to a run of the same duration without waits and merges."""
    pairs = [(info.batches, _possible_batches(info)) for info in rounds]
    possible = sum(number for _, number in pairs)
    return sum(batches for batches, _ in pairs) / possible if possible else 1.0


def _possible_batches(info: RoundInfo) -> float:
    """The batches that the replicas would have done in the time of a round without waits and merges."""
    done = info.rows if info.shares else info.counts
    rate = sum(n / wall for n, wall in zip(done, info.wall_ms, strict=True) if wall > 0)
    return info.period_ms * rate * info.batches / sum(done)


def is_scaled(rounds: Sequence[RoundInfo]) -> bool:
    """Whether these rounds scaled learning rates."""
    return any(math.isfinite(info.progress) for info in rounds)
