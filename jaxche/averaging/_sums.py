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


def weighted(tree: Any, weight: Any) -> Any:
    r"""The tree times a weight: :math:`w x`, and 0 where :math:`w` is 0, whatever :math:`x` is.

    Without the exception a replica that does not count would make the sum NaN where it has a NaN or an infinity.

    Args:
      tree: pytree of float arrays.
      weight: a scalar array.

    Returns:
      The products, in the dtypes they are summed in.

    Example:
      >>> import jax.numpy as jnp
      >>> weighted(jnp.array([2.0, jnp.nan]), jnp.float32(0)).tolist(), weighted(jnp.ones(2), jnp.int32(3)).tolist()
      ([0.0, 0.0], [3.0, 3.0])
    """

    def product(x: Any) -> Any:
        wide = sum_dtype(x.dtype)
        return jnp.where(weight != 0, x.astype(wide) * weight.astype(wide), jnp.zeros((), wide))

    return jax.tree.map(product, tree)


def add_weighted(sums: Any, tree: Any, weight: Any) -> Any:
    r"""One more term of a weighted sum: :math:`s + w x`, in the dtypes of the sums, as :func:`weighted` multiplies.

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
    return jax.tree.map(jnp.add, sums, weighted(tree, weight))
