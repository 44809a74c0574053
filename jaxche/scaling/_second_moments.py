"""The second moments of an Adam-type optimizer, found anywhere in an optax state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.scaling._transform import with_extra_args

# Before this many steps the second moments depend more on the first batches than on the curvature.
_WARMUP_STEPS = 5


class Preconditioner(NamedTuple):
    """Factors by which an Adam-type optimizer scales each entry of a gradient.

    Attributes:
      factors: pytree structured as the gradients: an array like the leaf, sharded as the second moments are, or None
        without second moments.
      active: whether the optimizer has taken enough steps; until then all factors are one.

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

    Every ``opt_state`` argument of this module accepts the result instead. If you compute it once for many gradients,
    you save their square roots and divisions. :math:`\hat v` is at least :math:`1 - \beta_2` times the mean of its
    array, so that, as in Adam itself, no gradient of ordinary size weighs more than :math:`1 / (1 - \beta_2)`. An array
    without any gradient so far has weight 0.

    The function finds every state with ``mu``, ``nu`` and ``count`` (such as ``ScaleByAdamState``) in chains,
    ``masked``, ``partition``, ``MultiSteps`` and ``inject_hyperparams``; from the last it also reads ``b2`` and
    ``eps``. Leaves without second moments have no factor. The state of ``optax.adamax`` looks like Adam's, but its
    ``nu`` is not a mean of squares: leave ``opt_state`` out.

    Args:
      opt_state: state of an Adam-type optimizer; a :class:`Preconditioner` is returned as it is.
      grads: gradients, or parameters: only their structure and shapes are read.
      b2: decay of the second moments, if it is not in an ``inject_hyperparams`` state.
      eps: epsilon of the optimizer, if it is not in an ``inject_hyperparams`` state.

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
    found = _find(opt_state, b2, eps)
    per_leaf: list[tuple[Any, _Moments] | None] = []
    for path, leaf in jax.tree.leaves_with_path(grads):
        hits = ((m.by_path[path], m) for m in found if path in m.by_path and m.by_path[path].shape == jnp.shape(leaf))
        per_leaf.append(next(hits, None))
    used = [hit for hit in per_leaf if hit is not None]
    if not used:
        nodes = filter(_is_state, jax.tree.leaves(opt_state, is_leaf=_is_state))
        kinds = sorted({type(node).__name__ for node in nodes})
        raise ValueError(
            f"opt_state has {', '.join(kinds) or 'nothing'}, but no second moments of an Adam-type optimizer for these "
            "gradients. Pass the state of such an optimizer, e.g. of optax.adam(1e-3). With any other optimizer leave "
            "opt_state out, and scale SGD with jaxche.AdaScale(), others with jaxche.SqrtScale()"
        )
    count = jnp.min(jnp.stack([moments.count for _, moments in used]))
    active = count >= _WARMUP_STEPS

    def factor(nu: jax.Array, moments: _Moments) -> jax.Array:
        steps = jnp.maximum(moments.count, 1).astype(jnp.float32)
        correction = 1 - jnp.asarray(moments.b2, jnp.float32) ** steps
        v = nu.astype(jnp.float32) / correction
        # The moments do not include these gradients, so the first gradient of an entry after a long time would be
        # divided by almost 0 and dominate the estimate. Adam's own moments include it, which bounds its step.
        v = jnp.maximum(v, (1 - jnp.asarray(moments.b2, jnp.float32)) * jnp.mean(v))
        inverse = jnp.where(v > 0, 1 / (jnp.sqrt(v) + jnp.asarray(moments.eps, jnp.float32)), jnp.zeros_like(v))
        return jnp.where(active, inverse, jnp.ones_like(v))

    factors = [hit and factor(*hit) for hit in per_leaf]
    return Preconditioner(jax.tree.unflatten(jax.tree.structure(grads), factors), active)


def has_second_moments(opt_state: Any) -> bool:
    """Whether a state has those of an Adam-type optimizer."""
    return bool(_find(opt_state, 0.0, 0.0))


def has_moments_of_magnitudes(tx: Any, params: Any, **extra_args: Any) -> bool:
    """Whether ``nu`` of an optimizer grows as gradients do and not as their squares, as in ``optax.adamax``."""
    # Parameters with one entry in each array are updated once with gradients of each size.
    small = jax.tree.map(lambda x: jnp.zeros((1,) * len(x.shape), x.dtype), params)

    def nus(size: float) -> list[Any]:
        grads = jax.tree.map(lambda x: jnp.full_like(x, size), small)
        _, state = with_extra_args(tx).update(grads, tx.init(small), small, **extra_args)
        return [jnp.ravel(nu) for moments in _find(state, 0.0, 0.0) for nu in moments.by_path.values()]

    try:
        # In differences, what is added to each cancels. The sizes are too small to be clipped.
        found = np.asarray([jnp.concatenate(nus(size)) for size in 2.0 ** np.arange(-20, -16)], np.float64)
    except Exception:  # the optimizer refuses them, e.g. because of masks for the shapes of the parameters
        return False
    steps = np.diff(found, axis=0)
    return bool(((steps[0] > 0) & np.isclose(steps[1:], 2 * steps[:-1], rtol=0.05, atol=0).all(0)).any())


def _is_state(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


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
