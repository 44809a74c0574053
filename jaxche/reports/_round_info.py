"""What a round tells of itself, and its picture as lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxche.drawing import COLOURS, MERGE, WAIT, Bar, Lane, lanes, ranks_to_show
from jaxche.scaling import effective_replicas


@dataclass(frozen=True)
class RoundInfo:
    """One round, as every host saw it.

    Attributes:
      round: its number, from 0.
      epoch: epoch of its first batch.
      cursor: index of its first batch in that epoch.
      counts: local steps per replica.
      planned: those it was to take; a replica that takes twice the planned time stops earlier.
      weights: merge weight per replica (share of the examples when gradients are averaged).
      wall_ms: time each replica took for its steps.
      sync_ms: cost of the merge beyond waiting for the slowest.
      loss: mean loss over the round's examples.
      metrics: means of the loss function's metrics over the round's examples.
      drift: weighted root-mean-square distance of the replicas from their mean, relative to the mean's norm.
      drift_dir: the same relative to the merged progress: 0 when all moved alike.
      losses: mean loss per replica (nan for one without steps).
      examples: examples trained on.
      anchor: planned steps of the slowest replica, of those that had any.
      verdict: what the divergence guard said: calm, suppress or nudge.
      stop: 1 if some process asked to stop after this round, 2 if one is being preempted, else 0.
      noise: critical batch size in examples, where noise and signal of the gradient are equal (nan until it is
        known, and when learning rates are not scaled).
      gain: steps on the base batch that a step of this round was worth: the one update when gradients are averaged,
        else the mean over local steps.
      lr_factor: factor on the learning rate, likewise.
      progress: steps on the base batch that all steps so far were worth (nan when learning rates are not scaled).
      base_batch_size: examples in the batch the learning rate was tuned for (nan when it is not scaled).
      average: what was averaged, parameters or gradients.
      merge: the rule that weighed parameters (empty when gradients are averaged).
      alpha: step length of the merge.

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

    @property
    def effective_batch(self) -> float:
        """Examples that an update was worth: the round's when gradients are averaged, else those of one local batch
        times the merge's :func:`~jaxche.scaling.effective_replicas`."""
        if self.average == "gradients":
            return float(self.examples)
        return self.examples / sum(self.counts) * effective_replicas(self.weights, self.counts, self.alpha)

    @property
    def period_ms(self) -> float:
        """Length of the round: the slowest replica's steps and the merge."""
        return max(self.wall_ms) + self.sync_ms

    @property
    def wait_ms(self) -> tuple[float, ...]:
        """Time each replica waited for the slowest."""
        return tuple(max(self.wall_ms) - wall for wall in self.wall_ms)

    @property
    def efficiency(self) -> float:
        r"""Share of the replicas' summed speed that the round used: :math:`\sum n_i / [(\max t_i n_i + C) \sum v]`.

        Speeds are the round's own; a benchmark must measure them free-running instead.
        """
        speed = sum(n / wall for n, wall in zip(self.counts, self.wall_ms, strict=True) if wall > 0)
        return sum(self.counts) / (self.period_ms * speed) if speed and self.period_ms else 1.0

    def _repr_html_(self) -> str:
        caption = f"round {self.round}, epoch {self.epoch}: loss {self.loss:.4g}, efficiency {self.efficiency:.1%}"
        return rounds_svg([self], caption)


def rounds_svg(rounds: Sequence[RoundInfo], caption: str) -> str:
    """Rounds in a row as lanes: what each rank did, and when.

    Args:
      rounds: one or more.
      caption: a line above.

    Returns:
      An ``<svg>`` element.
    """
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


def efficiency_of(rounds: Sequence[RoundInfo]) -> float:
    """Batches done over what the replicas' speeds in these rounds would allow without waiting or merging."""
    possible = sum(
        info.period_ms * sum(n / wall for n, wall in zip(info.counts, info.wall_ms, strict=True) if wall > 0)
        for info in rounds
    )
    return sum(sum(info.counts) for info in rounds) / possible if possible else 1.0


def is_scaled(rounds: Sequence[RoundInfo]) -> bool:
    """Whether learning rates were scaled in these rounds."""
    return any(math.isfinite(info.progress) for info in rounds)
