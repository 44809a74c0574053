"""Outer optimizers: an optax transformation on the pseudo-gradient of a merge."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxche.averaging._trees import sum_dtype
from jaxche.messages import brief


def outer_init(outer: optax.GradientTransformation, params: Any) -> Any:
    """The state of an outer optimizer before the first merge, in float32 or wider.

    Args:
      outer: any ``optax.GradientTransformation``.
      params: pytree of float arrays, of any precision.

    Returns:
      Its state, for :func:`outer_step`.

    Raises:
      ValueError: ``outer`` is not an optax transformation.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> outer_init(optax.sgd(0.7, momentum=0.9), jnp.ones(2, jnp.bfloat16))[0].trace.dtype.name
      'float32'
    """
    _check(outer)
    return outer.init(_wide(params))


def outer_step(
    outer: optax.GradientTransformation, params: Any, pseudo_gradient: Any, outer_state: Any
) -> tuple[Any, Any]:
    r"""One step of an optax optimizer whose gradient is the merged progress of a round.

    .. math:: g = \alpha \sum_i w_i \Delta_i, \qquad x' = x_0 + \mathrm{outer}(g)

    ``optax.sgd(1.0)`` is plain averaging; ``optax.sgd(lr, momentum=mu)`` is SlowMo; with ``nesterov=True`` it is
    DiLoCo. (The DiLoCo paper uses ``lr=0.7, momentum=0.9`` over very many rounds; in a run of few rounds the momentum
    of the first rounds overshoots.) The step is computed in float32 or wider; the parameters are rounded once, at the
    end.

    Args:
      outer: any ``optax.GradientTransformation``.
      params: the common parameters ``x_0`` at the start of the round.
      pseudo_gradient: pytree like ``params``: the weighted mean of ``x_0 - x_i`` times alpha.
      outer_state: state of ``outer``, from :func:`outer_init`.

    Returns:
      ``(params, outer_state)`` after the step.

    Raises:
      ValueError: ``outer`` is not an optax transformation, or raised by optax when the trees do not match.

    References:
      Wang et al., *SlowMo*, ICLR 2020. Douillard et al., *DiLoCo*, 2023.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> slowmo = optax.sgd(0.5, momentum=0.9)
      >>> x = jnp.array([1.0, 2.0])
      >>> x, s = outer_step(slowmo, x, x - jnp.array([0.5, 1.0]), outer_init(slowmo, x))
      >>> x.tolist()
      [0.75, 1.5]
    """
    _check(outer)
    wide = _wide(params)
    updates, outer_state = outer.update(_wide(pseudo_gradient), outer_state, wide)
    stepped = optax.apply_updates(wide, updates)
    return jax.tree.map(lambda new, old: new.astype(jnp.asarray(old).dtype), stepped, params), outer_state


def _check(outer: Any) -> None:
    if not (hasattr(outer, "init") and hasattr(outer, "update")):
        line = "outer=optax.sgd(0.7, momentum=0.9)"
        raise ValueError(f"outer={brief(outer)} is not an optax transformation; write e.g. {line}")


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(sum_dtype(x.dtype)), jax.tree.map(jnp.asarray, tree))
