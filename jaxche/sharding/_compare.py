"""The costs of several strategies side by side, and the cheapest that fits."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxche.messages import aligned, html_table
from jaxche.sharding._checks import batch_size, check_strategy
from jaxche.sharding._explain import Explanation, as_bytes, show_bytes
from jaxche.sharding._step import sharded_step
from jaxche.sharding._strategy import (
    Device,
    FullShard,
    HybridShard,
    HybridShardGradOp,
    NoShard,
    ShardGradOp,
    ShardingStrategy,
)

# Bytes sent count as equal up to this factor: the loss and norms are sent too.
_EQUAL = 1.01
_PARTS = ("params", "gradients", "opt_state", "temporaries")
_SIZES = (*_PARTS, "peak", "sent", "theory")
_HEAD = ("strategy", "params", "grads", "opt", "other", "in all", "counted", "theory", "fits")


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The costs of a step under several strategies; its ``repr`` is a table, and one line of advice.

    Attributes:
      explanations: an :class:`Explanation` for each strategy.
      memory: bytes of a device's memory, or None.
      batch_size: examples in the batch, on all devices.
      note: the parts that the costs do not include, in one line, or nothing.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxche.sharding import NoShard, compare_strategies
      >>> costs = compare_strategies(
      ...     lambda p, x: jnp.mean((x @ p) ** 2), optax.sgd(0.1), jnp.zeros((8, 4)), jnp.zeros((2, 8)),
      ...     strategies=[NoShard()], devices=jax.devices()[:2])
      >>> costs.rows[0]["fits"], costs.cheapest
      (True, NoShard(min_size=0, scanned=()))
    """

    explanations: tuple[Explanation, ...]
    memory: int | None
    batch_size: int
    note: str = ""

    @property
    def cheapest(self) -> ShardingStrategy | None:
        """The strategy that fits and sends least; None if none fits.

        If several send equal bytes (within 1 %), it is one that cuts nothing (``NoShard``), or else the one with the
        least memory. Without ``memory`` every strategy fits.
        """
        fitting = [e for e in self.explanations if self._fits(e)]
        least = min((e.sent for e in fitting), default=0.0)
        best = sorted((e for e in fitting if e.sent <= _EQUAL * least), key=lambda e: (e.strategy.shards_state, e.peak))
        return best[0].strategy if best else None

    @property
    def advice(self) -> str:
        """The strategy to use and the reason, in one line."""
        cheapest, least = self.cheapest, min(self.explanations, key=lambda e: e.peak)
        size = "" if self.memory is None else show_bytes(self.memory)
        if cheapest is None:
            return (
                f"nothing fits {size}; {least.strategy} needs least, {show_bytes(least.peak)}: take more devices, or "
                "accumulate="
            )
        fits = f"it fits {size}, and " if size else ""
        whole = [e for e in self.explanations if not e.strategy.shards_state]
        if not cheapest.shards_state:
            return f"advice: {cheapest}, the default of the trainer: {fits}no other strategy sends less"
        if self.memory is not None and whole and whole[0].peak > self.memory:
            why = f"it fits {size} and {whole[0].strategy} does not, and no other that fits sends less"
        else:
            why = f"{fits or 'it '}sends least"
        return f"advice: {cheapest}: {why}"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table as data, a row a strategy: bytes a device, bytes sent a step, and whether it ``fits``."""
        return [
            {
                "strategy": str(e.strategy),
                **{name: e.per_device[name] for name in _PARTS},
                "peak": e.peak,
                "sent": e.sent,
                "theory": e.theory,
                "fits": self._fits(e),
            }
            for e in self.explanations
        ]

    def __repr__(self) -> str:
        table = aligned([_HEAD, *self._cells()], left=1, gap=1)  # at most 100 characters wide
        sent = table.index("theory") + len("theory")  # the end of the columns of bytes sent
        lines = [f"bytes a device{'sent a step':>{sent - len('bytes a device')}}", table, self.note, self.advice]
        return "\n".join(filter(None, lines))

    def _repr_html_(self) -> str:
        notes = map(html.escape, filter(None, [self.note, self.advice]))
        return html_table(_HEAD, self._cells()) + "<br>".join(notes)

    def _fits(self, explanation: Explanation) -> bool:
        return self.memory is None or explanation.peak <= self.memory

    def _cells(self) -> list[list[str]]:
        return [
            [row["strategy"], *(show_bytes(row[name]) for name in _SIZES), "yes" if row["fits"] else "no"]
            for row in self.rows
        ]


def compare_strategies(
    loss_fn: Callable[..., Any],
    tx: Any,
    params: Any,
    batch: Any,
    *,
    strategies: Sequence[ShardingStrategy] | None = None,
    devices: Sequence[Device] | None = None,
    memory: int | str | None = None,
    model_state: Any = None,
    accumulate: int = 1,
    compute_dtype: Any = None,
) -> Comparison:
    """Compare the costs of a step under several strategies, and find the cheapest that fits a device's memory.

    Each step is compiled, not run, so nothing is allocated. See :meth:`ShardedStep.explain`.

    Args:
      loss_fn: as for :func:`sharded_step`.
      tx: as for :func:`sharded_step`.
      params: parameters, their ``jax.ShapeDtypeStruct``, or a function that returns them.
      batch: a batch or its shapes.
      strategies: the strategies; default: those without nodes and, if a node has two devices or more, the hybrid ones.
        A node is the devices of one process, or half the devices of a single process.
      devices: the devices; default: all.
      memory: bytes of a device's memory, or text such as ``"16GiB"``.
      model_state: the model state of the loss function, its shapes, or a function that returns it.
      accumulate: number of micro-batches in a batch.
      compute_dtype: dtype in which ``loss_fn`` computes.

    Returns:
      A :class:`Comparison`; print it.

    Raises:
      ValueError: as for :func:`sharded_step`; no strategies; or a ``memory`` that is not a size.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxche.sharding import FullShard, NoShard, compare_strategies
      >>> costs = compare_strategies(
      ...     lambda p, x: jnp.mean((x @ p) ** 2), optax.adam(0.1), jnp.zeros((256, 64)), jnp.zeros((8, 256)),
      ...     strategies=[NoShard(), FullShard()], devices=jax.devices()[:4], memory="200KiB")
      >>> [(row["strategy"], row["fits"]) for row in costs.rows], str(costs.cheapest)
      ([('NoShard()', False), ('FullShard()', True)], 'FullShard()')
    """
    devices = list(jax.devices() if devices is None else devices)
    if strategies is not None and (isinstance(strategies, ShardingStrategy) or not strategies):
        raise ValueError(
            f"strategies={strategies!r} has nothing to compare; write strategies=[jaxche.NoShard(), "
            "jaxche.FullShard()], or leave it out for all of them"
        )
    chosen = default_strategies(devices) if strategies is None else tuple(strategies)
    for strategy in chosen:
        check_strategy(strategy)
    limit = None if memory is None else as_bytes(memory)
    # All meshes before the first compilation, so that errors come at once.
    steps = [
        sharded_step(loss_fn, tx, strategy, strategy.mesh(devices), accumulate=accumulate, compute_dtype=compute_dtype)
        for strategy in chosen
    ]
    explanations = tuple(step.explain(params, batch, model_state) for step in steps)
    return Comparison(explanations, limit, batch_size(batch))


def default_strategies(devices: Sequence[Device], node: int | None = None) -> tuple[ShardingStrategy, ...]:
    """The strategies to compare; hybrid ones only where nodes of ``node`` devices have at least two, and divide all."""
    # By default a node is a process, or half of a single one.
    processes = len({device.process_index for device in devices})
    node = node or len(devices) // (processes if processes > 1 else 2)
    flat = (NoShard(), ShardGradOp(), FullShard())
    if node < 2 or len(devices) % node:
        return flat
    return (*flat, HybridShardGradOp(node), HybridShard(node))
