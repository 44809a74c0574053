"""An optimizer for the merge itself: optax on the pseudo-gradient."""

from __future__ import annotations

from typing import Any

import optax


def outer_step(
    outer: optax.GradientTransformation, params: Any, pseudo_gradient: Any, outer_state: Any
) -> tuple[Any, Any]:
    r"""Take the merged progress of a round as a gradient and step an optax optimizer along it.

    .. math:: g = \alpha \sum_i w_i \Delta_i, \qquad x' = x_0 + \mathrm{outer}(g)

    ``optax.sgd(1.0)`` is plain averaging; ``optax.sgd(lr, momentum=mu)`` is SlowMo; with ``nesterov=True`` it is
    DiLoCo (its paper uses ``lr=0.7, momentum=0.9`` over very many rounds: in a run of few rounds the momentum of
    the first ones overshoots and hurts).

    Args:
      outer: any ``optax.GradientTransformation``.
      params: the common parameters ``x_0`` at the start of the round.
      pseudo_gradient: pytree like ``params``: the weighted mean of ``x_0 - x_i`` times alpha.
      outer_state: its state, from ``outer.init(params)``.

    Returns:
      ``(params, outer_state)`` after the step.

    Raises:
      ValueError: raised by optax when the trees do not match.

    References:
      Wang et al., *SlowMo*, ICLR 2020. Douillard et al., *DiLoCo*, 2023.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> slowmo = optax.sgd(0.5, momentum=0.9)
      >>> x = jnp.array([1.0, 2.0])
      >>> x, s = outer_step(slowmo, x, x - jnp.array([0.5, 1.0]), slowmo.init(x))
      >>> x.tolist()
      [0.75, 1.5]
    """
    updates, outer_state = outer.update(pseudo_gradient, outer_state, params)
    return optax.apply_updates(params, updates), outer_state
