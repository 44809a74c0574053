"""A scaling rule as an optax transform, and schedules that follow its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxche.messages import brief
from jaxche.scaling._checks import check_positive
from jaxche.scaling._groups import make_groups, scale_leaves
from jaxche.scaling._rules import ScalingRule


class ScaleLearningRateState(NamedTuple):
    """State of :func:`scale_learning_rate`.

    Attributes:
      factor: factor on the learning rate of the last step, ``[]``, or ``[G]`` with groups.
      progress: effective steps so far, in steps of the base batch.
      inner_state: state of the wrapped optimizer.

    Example:
      >>> import jax.numpy as jnp, jaxche, optax
      >>> state = jaxche.scale_learning_rate(optax.sgd(0.1), jaxche.LinearScale()).init(jnp.zeros(2))
      >>> float(state.factor), float(state.progress)
      (1.0, 0.0)
    """

    factor: jax.Array
    progress: jax.Array
    inner_state: Any


def scale_learning_rate(
    tx: Any, rule: ScalingRule, *, groups: Any | Callable[[Any], Any] | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Multiply the learning rate of an optimizer by the factor of a scaling rule in every step.

    .. math:: u_t \leftarrow \mathrm{factor}(S_t, \mathrm{noise}_t, p_t) \, u_t, \qquad
              p_{t+1} = p_t + \mathrm{gain}(S_t)

    It wraps a whole optimizer, including clipping, schedules, ``MultiSteps`` and ``inject_hyperparams``, and multiplies
    its updates. If the updates are proportional to the learning rate (decoupled weight decay included), this changes
    the learning rate. ``tx.update`` takes three more arguments, all arrays, so that a change of their values never
    recompiles a step:

    * ``scale``: batch divided by base batch; always needed.
    * ``noise``: a :class:`~jaxche.scaling.noise_scale.NoiseScale`. Without it a step counts as ``scale`` base
      steps, so progress counts examples.
    * ``progress``: effective steps so far, if they are counted elsewhere; by default the state counts them.

    The progress before the step reaches the wrapped optimizer as ``progress=``, for
    :func:`~jaxche.scaling.progress_schedule`. In ``optax.MultiSteps(scale_learning_rate(...), k)``, as in
    ``scale_learning_rate(optax.MultiSteps(...), rule)``, progress grows by updates and not by mini-steps.

    Args:
      tx: any ``optax.GradientTransformation``, tuned for the base batch; also an ``optax.MultiSteps``.
      rule: a scaling rule, e.g. ``jaxche.AdaScale()``.
      groups: parameter groups as given to ``noise_scale.init``; each then has its own factor.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`ScaleLearningRateState`.

    Raises:
      ValueError: ``tx`` is not a transformation, or ``rule`` is not a rule; in ``update``: no scale, a scale that is
        not one positive number, a state of another transformation, or noise of other groups.

    References:
      AdaptDL's ``ScalingRuleBase.step`` (Qiao et al., *Pollux*, OSDI 2021).

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxche.scaling import SqrtScale, scale_learning_rate
      >>> tx = scale_learning_rate(optax.sgd(0.1), SqrtScale())
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.ones(2), state, params, scale=4)
      >>> jnp.round(updates, 3).tolist(), float(state.factor), float(state.progress)
      ([-0.2..., -0.2...], 2.0, 4.0)
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(f"tx={tx!r} is not an optax transformation; write e.g. tx=optax.sgd(0.1)")
    if isinstance(rule, type) or not hasattr(rule, "lr_factor"):
        raise ValueError(f"rule={rule!r} is not a scaling rule; write e.g. rule=jaxche.AdaScale()")
    inner = with_extra_args(tx)

    def init(params: Any) -> ScaleLearningRateState:
        shape = () if groups is None else (make_groups(params, groups).count,)
        return ScaleLearningRateState(jnp.ones(shape, jnp.float32), jnp.zeros((), jnp.float32), inner.init(params))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        scale: Any = None,
        noise: Any = None,
        progress: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, ScaleLearningRateState]:
        if scale is None:
            raise ValueError(
                "scale is missing: the batch size divided by that for which the learning rate was tuned; write "
                "tx.update(grads, state, params, scale=8, noise=noise)"
            )
        if not (hasattr(state, "progress") and hasattr(state, "inner_state")):
            raise ValueError(
                f"state is {brief(state)}, not one of scale_learning_rate; write opt_state = tx.init(params), or with "
                "the moments of a state of the wrapped optimizer tx.init(params)._replace(inner_state=opt_state)"
            )
        check_positive("scale", scale, "tx.update(grads, state, params, scale=8)")
        if jnp.shape(scale) != ():
            raise ValueError(f"scale has shape {jnp.shape(scale)}, and it is one number; write e.g. scale=scale[0]")
        labelled = make_groups(updates, groups)
        before = jnp.asarray(state.progress if progress is None else progress).astype(jnp.float32)
        factor = jnp.asarray(rule.lr_factor(scale, noise, before)).astype(jnp.float32)
        # Noise may be any object; only one with groups can have other groups than this transform.
        noise_groups = getattr(noise, "groups", labelled)
        if factor.shape not in ((), state.factor.shape) or (factor.ndim and noise_groups != labelled):
            raise ValueError(
                f"noise has the groups {noise_groups.names}, but the transform has {labelled.names}; write the same: "
                "noise_scale.init(params, groups=labels) and scale_learning_rate(tx, rule, groups=labels)"
            )
        factor = jnp.broadcast_to(factor, state.factor.shape)
        updates, inner_state = inner.update(updates, state.inner_state, params, progress=before, **extra_args)
        gain = jnp.asarray(scale if noise is None else noise.gain(scale)).astype(jnp.float32)
        after = before + jnp.where(_made_update(state.inner_state, inner_state), gain, jnp.float32(0))
        return scale_leaves(labelled, updates, factor), ScaleLearningRateState(factor, after, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


class ProgressScheduleState(NamedTuple):
    """State of a :class:`ProgressSchedule`: the last progress."""

    progress: jax.Array


class ProgressSchedule:
    """A stateful schedule of optax; made by :func:`progress_schedule`."""

    def __init__(self, schedule: Callable[[Any], Any]):
        self._schedule = schedule

    def init(self) -> ProgressScheduleState:
        return ProgressScheduleState(jnp.zeros((), jnp.float32))

    def update(self, state: ProgressScheduleState, *, progress: Any = None, **extra_args: Any) -> ProgressScheduleState:
        if progress is None:
            raise ValueError(
                "a progress schedule got no progress; wrap the whole optimizer: jaxche.scale_learning_rate(tx, rule), "
                "or write tx.update(grads, state, params, progress=...)"
            )
        return ProgressScheduleState(jnp.asarray(progress).astype(jnp.float32))

    def __call__(self, state: Any, *, progress: Any = None, **extra_args: Any) -> Any:
        if not isinstance(state, ProgressScheduleState):
            raise ValueError(
                "a progress schedule needs the progress, and optax passes only a step here; write "
                "optax.inject_hyperparams(optax.sgd)(learning_rate=progress_schedule(...))"
            )
        return self._schedule(state.progress if progress is None else jnp.asarray(progress).astype(jnp.float32))


def progress_schedule(schedule: Callable[[Any], Any]) -> ProgressSchedule:
    r"""A schedule over effective steps: :math:`\eta_t = \mathrm{schedule}(\mathrm{progress}_t)`.

    A schedule over raw steps ends too late if a step has the effect of several steps of the base batch. Pass the result
    to ``optax.inject_hyperparams`` and wrap that in :func:`~jaxche.scaling.scale_learning_rate`, which passes its
    progress through chains, masks and ``MultiSteps``. The state of ``inject_hyperparams`` contains the rate.

    Args:
      schedule: any function of a step, e.g. from ``optax.schedules``; its steps are steps of the base batch.

    Returns:
      An ``optax.StatefulSchedule``.

    Raises:
      ValueError: no function; in ``update``, without progress.

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
    if not callable(schedule):
        line = "progress_schedule(optax.linear_schedule(0.4, 0.0, transition_steps=1000))"
        raise ValueError(f"schedule={brief(schedule)} is not a function of a step; write e.g. {line}")
    return ProgressSchedule(schedule)


def with_extra_args(tx: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation with extra arguments in its update, which ignores those that it does not need.

    Its states are of arrays: those of ``tx`` may have Python's numbers.
    """
    # optax.with_extra_args_support drops the extra arguments of a MultiSteps, and of its gradient_transformation().
    steps = getattr(tx.update, "__self__", None)
    wide: Any = steps if isinstance(steps, optax.MultiSteps) else optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.asarray, wide.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        updates, state = wide.update(updates, state, params, **extra_args)
        return updates, jax.tree.map(jnp.asarray, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _made_update(before: Any, after: Any) -> Any:
    """Whether this call updated parameters; with ``MultiSteps``, in a chain too, only each last mini-step does."""
    pairs = zip(_multi_steps(before), _multi_steps(after), strict=True)
    made = [jnp.asarray(new.gradient_step) != jnp.asarray(old.gradient_step) for old, new in pairs]
    return jnp.all(jnp.stack(made)) if made else True


def _multi_steps(state: Any) -> list[optax.MultiStepsState]:
    """The states of ``MultiSteps`` through which all updates pass: this state, or one in a chain."""
    if isinstance(state, optax.MultiStepsState):
        return [state]
    # Not those in the named tuples of masks and partitions, which have some of the parameters.
    return [found for part in state for found in _multi_steps(part)] if type(state) is tuple else []
