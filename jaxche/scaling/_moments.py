"""The second moments an Adam-type optimizer keeps, found wherever optax put them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Before this many steps the second moments say more about the first batch than about the curvature.
_TRUSTED_AFTER = 5


class Preconditioner(NamedTuple):
    """What to multiply gradients by to see them as an Adam-type optimizer does.

    Attributes:
      factors: pytree structured as the gradients, whose arrays it divides among devices as they are: an array like
        the leaf, or None where there are no second moments.
      active: whether the optimizer has taken enough steps; until then all factors are ones.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxche.scaling import noise_scale
      >>> state = optax.ScaleByAdamState(jnp.int32(1000), jnp.zeros(2), jnp.array([4.0, 0.25]))
      >>> bool(noise_scale.preconditioner(state, jnp.zeros(2)).active)
      True
    """

    factors: Any
    active: jax.Array

    def of(self, grads: Any) -> list[Any]:
        """The factors in the order of the leaves of these gradients."""
        return jax.tree.structure(grads).flatten_up_to(self.factors)


class _Moments(NamedTuple):
    by_path: dict[Any, jax.Array]
    count: jax.Array
    b2: Any
    eps: Any


def preconditioner(opt_state: Any, grads: Any, b2: float = 0.999, eps: float = 1e-8) -> Preconditioner:
    r"""Factors :math:`1 / (\sqrt{\hat v} + \epsilon)`, :math:`\hat v = \nu / (1 - \beta_2^t)`, from the optax state.

    Whatever takes an ``opt_state`` here takes the result instead: made once for many gradients, it saves the square
    root and the division of each. A :math:`\hat v` below :math:`1 - \beta_2` times the mean of its array counts as
    that much: as in Adam itself, no gradient of ordinary size then weighs more than :math:`1 / (1 - \beta_2)`. An array
    that had no gradient yet has no scale, and weighs nothing.

    Finds every state with ``mu``, ``nu`` and ``count`` (``ScaleByAdamState`` and its kin) in chains, ``masked``,
    ``partition``, ``MultiSteps`` and ``inject_hyperparams``; of the last it also reads ``b2`` and ``eps``. Leaves
    without second moments are left as they are.

    Args:
      opt_state: state of an Adam-type optimizer; a :class:`Preconditioner` is returned as it is.
      grads: gradients, or parameters: only their structure and shapes are read.
      b2: decay of the second moments, if it is not in an ``inject_hyperparams`` state.
      eps: epsilon of the optimizer, likewise.

    Returns:
      A :class:`Preconditioner`.

    Raises:
      ValueError: no second moments for any leaf.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxche.scaling import noise_scale
      >>> state = optax.ScaleByAdamState(jnp.int32(1000), jnp.zeros(2), jnp.array([4.0, 0.25]))
      >>> jnp.round(noise_scale.preconditioner(state, jnp.zeros(2)).factors, 2).tolist()
      [0.39..., 1.58...]
    """
    if isinstance(opt_state, Preconditioner):
        return opt_state
    paths = jax.tree.leaves_with_path(grads)
    found = _find(opt_state, b2, eps)
    per_leaf: list[tuple[Any, _Moments] | None] = []
    for path, leaf in paths:
        hits = [m for m in found if path in m.by_path and m.by_path[path].shape == leaf.shape]
        per_leaf.append((hits[0].by_path[path], hits[0]) if hits else None)
    used = [hit for hit in per_leaf if hit is not None]
    if not used:
        kinds = sorted({type(node).__name__ for node in jax.tree.leaves(opt_state, is_leaf=_is_state)})
        raise ValueError(
            f"opt_state holds {', '.join(kinds) or 'nothing'}: no second moments of an Adam-type optimizer for these "
            "gradients; to precondition, use one, e.g. optax.adam(1e-3), and pass its state; for any other optimizer "
            "leave opt_state out and scale with jaxche.AdaScale()"
        )
    count = jnp.min(jnp.stack([moments.count for _, moments in used]))
    active = count >= _TRUSTED_AFTER

    def factor(nu: jax.Array, moments: _Moments) -> jax.Array:
        steps = jnp.maximum(moments.count, 1).astype(jnp.float32)
        correction = 1 - jnp.asarray(moments.b2, jnp.float32) ** steps
        v = nu.astype(jnp.float32) / correction
        # These moments are from before the gradients, so one that wakes up is divided by next to nothing, and would
        # be the whole estimate from then on. Adam's step, whose moments hold that gradient too, is bounded.
        v = jnp.maximum(v, (1 - jnp.asarray(moments.b2, jnp.float32)) * jnp.mean(v))
        inverse = jnp.where(v > 0, 1 / (jnp.sqrt(v) + jnp.asarray(moments.eps, jnp.float32)), jnp.zeros_like(v))
        return jnp.where(active, inverse, jnp.ones_like(v))

    factors = [hit and factor(*hit) for hit in per_leaf]
    return Preconditioner(jax.tree.unflatten(jax.tree.structure(grads), factors), active)


def _is_state(node: Any) -> bool:
    return _has_moments(node) or (isinstance(node, tuple) and hasattr(node, "_fields") and not jax.tree.leaves(node))


def _has_moments(node: Any) -> bool:
    return all(hasattr(node, name) for name in ("mu", "nu", "count"))


def _is_injected(node: Any) -> bool:
    return hasattr(node, "hyperparams") and hasattr(node, "inner_state")


def _find(opt_state: Any, b2: Any, eps: Any) -> list[_Moments]:
    found: list[_Moments] = []
    for node in jax.tree.leaves(opt_state, is_leaf=lambda x: _has_moments(x) or _is_injected(x)):
        if _is_injected(node):
            injected = node.hyperparams
            found += _find(node.inner_state, injected.get("b2", b2), injected.get("eps", eps))
        elif _has_moments(node):
            found.append(_Moments(dict(jax.tree.leaves_with_path(node.nu)), node.count, b2, eps))
    return found
