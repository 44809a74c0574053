"""The columns of a round's sums: examples, loss, metrics, and the weights of those that have their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxche.averaging import Weighted


@dataclass(frozen=True)
class Columns:
    """The columns ``[examples, loss, *metrics, *weights]``.

    A mean over a batch counts with its examples: its column has the mean times the examples. A
    :class:`~jaxche.Weighted` counts with its own weight: its column has the total, and its weight has a column too.
    """

    metrics: tuple[str, ...] = ()
    weighted: tuple[int, ...] = ()  # positions in (loss, *metrics)

    @classmethod
    def of(cls, loss: Any, metrics: dict[str, Any]) -> Columns:
        """The columns for a loss function that returns values like these."""
        names = tuple(sorted(metrics))
        values = (loss, *(metrics[name] for name in names))
        return cls(names, tuple(i for i, value in enumerate(values) if isinstance(value, Weighted)))

    @property
    def count(self) -> int:
        """The number of columns."""
        return 2 + len(self.metrics) + len(self.weighted)

    def weight_of(self, position: int) -> int:
        """The column with the weights of the loss (position 0) or of a metric; column 0 has the examples."""
        return 2 + len(self.metrics) + self.weighted.index(position) if position in self.weighted else 0

    def row(self, loss: Any, metrics: dict[str, Any], examples: Any) -> Any:
        """The numbers that a batch adds to the sums, ``[columns]``."""
        values = [loss, *(metrics[name] for name in self.metrics)]
        sums = [value.total if isinstance(value, Weighted) else value * examples for value in values]
        return jnp.stack([examples, *sums, *(values[i].weight for i in self.weighted)])
