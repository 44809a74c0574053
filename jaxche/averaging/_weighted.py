"""A sum with its weight, the form in which means over batches are combined."""

from __future__ import annotations

from typing import Any, NamedTuple


class Weighted(NamedTuple):
    r"""A weighted sum and the sum of its weights; together they are a mean that combines exactly.

    .. math:: \bar{x} = \frac{\sum_b \mathrm{total}_b}{\sum_b \mathrm{weight}_b}

    A loss over tokens is a mean over the tokens of a batch, and padded batches have unlike numbers of them. A mean of
    the batches' means would weigh each batch alike; the sums give every token the same weight.

    Args:
      total: the sum of weight times value, a scalar array.
      weight: the sum of the weights, a scalar array of at least 0, e.g. the number of tokens.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> batches = [Weighted(jnp.float32(6), jnp.float32(2)), Weighted(jnp.float32(4), jnp.float32(8))]
      >>> float(jax.tree.map(lambda *x: sum(x), *batches).mean)
      1.0
    """

    total: Any
    weight: Any

    @property
    def mean(self) -> Any:
        """The total divided by the weight."""
        return self.total / self.weight
