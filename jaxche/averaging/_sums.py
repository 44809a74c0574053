"""Sums of trees that lose nothing of what is added."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def sum_dtype(dtype: Any) -> Any:
    """The dtype a float leaf is summed in: its own, but float32 at least.

    Args:
      dtype: of the leaf.

    Returns:
      The dtype of the sum.

    Example:
      >>> import jax.numpy as jnp
      >>> [jnp.dtype(sum_dtype(dtype)).name for dtype in (jnp.bfloat16, jnp.float32)]
      ['float32', 'float32']
    """
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def zero_sums(tree: Any) -> Any:
    """Where a sum of trees begins.

    Args:
      tree: pytree of float arrays.

    Returns:
      Zeros of the same shapes, in the dtypes they are summed in.

    Example:
      >>> import jax.numpy as jnp
      >>> zero_sums({"w": jnp.ones(2, jnp.bfloat16)})["w"].dtype.name
      'float32'
    """
    return jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x.dtype)), tree)


def add_weighted(sums: Any, tree: Any, weight: Any) -> Any:
    r"""One more term of a weighted sum: :math:`s + w x`, in the dtypes of the sums.

    Args:
      sums: from :func:`zero_sums` or the term before.
      tree: pytree like ``sums``, e.g. the mean gradient of a batch.
      weight: a scalar array, e.g. the examples of the batch.

    Returns:
      The next sums.

    Example:
      >>> import jax.numpy as jnp
      >>> gradient = jnp.array([1.0, 2.0], jnp.bfloat16)
      >>> add_weighted(add_weighted(zero_sums(gradient), gradient, jnp.int32(8)), gradient, jnp.int32(3)).tolist()
      [11.0, 22.0]
    """
    return jax.tree.map(lambda s, x: s + weight.astype(s.dtype) * x.astype(s.dtype), sums, tree)
