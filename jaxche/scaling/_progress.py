"""Schedules that follow progress instead of counting steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class ProgressScheduleState(NamedTuple):
    """What a progress schedule carries: the progress it last saw."""

    progress: jax.Array


class ProgressSchedule:
    """A stateful schedule of optax; made by :func:`progress_schedule`."""

    def __init__(self, schedule: Callable[[Any], Any]):
        self._schedule = schedule

    def init(self) -> ProgressScheduleState:
        return ProgressScheduleState(jnp.zeros((), jnp.float32))

    def update(self, state: ProgressScheduleState, *, progress: Any = None, **extra_args: Any) -> ProgressScheduleState:
        del extra_args
        if progress is None:
            raise ValueError(
                "a progress schedule got no progress; wrap the whole optimizer: jaxche.scale_learning_rate(tx, rule), "
                "or write tx.update(grads, state, params, progress=...)"
            )
        return ProgressScheduleState(jnp.asarray(progress).astype(jnp.float32))

    def __call__(self, state: Any, *, progress: Any = None, **extra_args: Any) -> Any:
        del extra_args
        if not isinstance(state, ProgressScheduleState):
            raise ValueError(
                "a progress schedule counts no steps, so optax must give it more than a step; write "
                "optax.inject_hyperparams(optax.sgd)(learning_rate=progress_schedule(...))"
            )
        return self._schedule(state.progress if progress is None else jnp.asarray(progress).astype(jnp.float32))


def progress_schedule(schedule: Callable[[Any], Any]) -> ProgressSchedule:
    r"""Let a schedule follow effective steps: :math:`\eta_t = \mathrm{schedule}(\mathrm{progress}_t)`.

    A schedule over raw steps ends too late when steps are worth more than one of the base batch. Give the result to
    ``optax.inject_hyperparams`` and wrap that in :func:`~jaxche.scaling.scale_learning_rate`, which passes
    its progress down through chains, masks and ``MultiSteps``; the state shows the rate.

    Args:
      schedule: any function of a step, e.g. from ``optax.schedules``; its steps are steps of the base batch.

    Returns:
      An ``optax.StatefulSchedule``.

    Raises:
      ValueError: later, where it gets no progress.

    References:
      AdaptDL (Qiao et al., *Pollux*, OSDI 2021), which advances schedulers by progress.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxche.scaling import LinearScale, progress_schedule, scale_learning_rate
      >>> decay = progress_schedule(optax.linear_schedule(0.4, 0.0, transition_steps=16))
      >>> tx = scale_learning_rate(optax.inject_hyperparams(optax.sgd)(learning_rate=decay), LinearScale())
      >>> params = jnp.zeros(1)
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     _, state = tx.update(jnp.ones(1), state, params, scale=4)
      >>> round(float(state.inner_state.hyperparams["learning_rate"]), 3), float(state.progress)
      (0.2, 12.0)
    """
    return ProgressSchedule(schedule)
