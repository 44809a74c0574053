r"""The moving average of the parameters over the last part of a run, whatever its length so far.

A run has trained on :math:`t` examples at one merge and on :math:`t' > t` at a later one, whose parameters are
:math:`x'`:

.. math:: \bar x' = s \bar x + (1 - s) x', \qquad s = (t / t')^{1/a - 1}

The weight of parameters grows with a power of their time, so that their mean age is :math:`a t'`. No end of the run has
to be known, and merges may be left out: the shares of those between multiply to the share over all of them.

References:
  Shamir and Zhang, *Stochastic gradient descent for non-smooth optimization*, ICML 2013 (polynomial-decay averaging).
  Karras et al., *Analyzing and improving the training dynamics of diffusion models*, CVPR 2024 (power function EMA).
"""

from __future__ import annotations

from typing import Any

import jax

from jaxche.averaging._trees import change, is_float, sum_dtype

# Merges within the mean age that the average takes in; those between them would change it little.
_SAMPLES = 50


def ema_weight(age: float, before: int, now: int) -> float | None:
    """The weight :math:`1 - s` of the parameters at ``now`` examples, or None where few came since ``before``."""
    if not before:
        return 1.0
    return 1 - (before / now) ** (1 / age - 1) if now >= before * (1 + age / _SAMPLES) else None


def ema_init(tree: Any) -> Any:
    """The average before the first step: the floats of ``tree``, in the dtypes in which they are summed."""
    return jax.tree.map(lambda x: x.astype(sum_dtype(x.dtype)) if is_float(x) else None, tree)


def ema_step(ema: Any, tree: Any, weight: Any) -> Any:
    """The average after it has taken in the floats of ``tree`` with this weight."""

    def moved(x: Any, mean: Any) -> Any:
        return mean if mean is None else mean + weight * change(x, mean)

    return jax.tree.map(moved, tree, ema)


def ema_values(ema: Any, tree: Any) -> Any:
    """``tree`` with its floats from the average."""
    return jax.tree.map(lambda x, mean: x if mean is None else mean.astype(x.dtype), tree, ema)
