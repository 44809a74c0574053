"""Whether a round broke the numbers of a model: what was finite when it began and is NaN or infinite at its end."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxche.averaging import is_float


def all_finite(tree: Any) -> Any:
    """Whether every number of the tree is finite."""
    return _all(jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if is_float(x))


def stayed_finite(before: Any, after: Any) -> Any:
    """Whether every number that was finite before still is; a state may begin with an infinite best value."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return _all((jnp.isfinite(new) | ~jnp.isfinite(old)).all() for old, new in pairs if is_float(new))


def _all(flags: Any) -> Any:
    return jnp.all(jnp.stack([jnp.bool_(True), *flags]))
