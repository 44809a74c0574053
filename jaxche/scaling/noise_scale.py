r"""The gradient noise scale, from equal or unequal replicas: ``init``, ``update``, and the properties of the state.

With gradients :math:`g_i`, each a mean over a batch of :math:`b_i` examples, and their weighted mean
:math:`\bar g = \sum c_i g_i / \sum c_i`, the true gradient :math:`G` and the covariance :math:`\Sigma` of one example's
gradient obey, for normalised weights,

.. math:: \mathbb E \sum c_i \|g_i\|^2 = \|G\|^2 + A \operatorname{tr}\Sigma, \quad A = \sum c_i / b_i
.. math:: \mathbb E \|\bar g\|^2 = \|G\|^2 + C \operatorname{tr}\Sigma, \quad C = \sum c_i^2 / b_i

Every update solves these two equations for :math:`\hat s = \|G\|^2` and :math:`\operatorname{tr}\Sigma`, without bias
for any weights and batches, and adds the solution to exponential averages. The averages decay by
:math:`\theta = 0.999^{B / b_{base}}` with :math:`B = \sum b_i` and are corrected for their start. Weights
:math:`c_i = b_i` give

.. math:: \hat\Sigma = \frac{\sum_i b_i \|g_i - \bar g\|^2}{R - 1}, \qquad
          \hat s = \|\bar g\|^2 - \hat\Sigma / B, \qquad \hat v = \hat\Sigma / b_{base}

and equal batches AdaptDL's formula. A single contributor compares successive gradients, as AdaptDL does.

References: McCandlish et al., *An empirical model of large-batch training*, 2018, appendix A; AdaptDL (Qiao et al.,
*Pollux*, OSDI 2021); Johnson et al., *AdaScale SGD*, ICML 2020.

>>> import jax.numpy as jnp
>>> from jaxche.scaling import noise_scale
>>> noise = noise_scale.init(jnp.zeros(2), base_batch_size=8)
>>> noise = noise_scale.update(noise, jnp.array([[1.0, 0.0], [2.0, 1.0]]), batch_sizes=[8, 32])
>>> [round(float(x), 3) for x in (noise.sqr, noise.var, noise.gain(5), noise.critical_batch_size)]
[3.56, 1.6, 1.33, 3.595]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxche.averaging import is_float, psum_buckets, sum_dtype, weighted_mean
from jaxche.messages import brief
from jaxche.scaling._checks import check_positive, is_concrete
from jaxche.scaling._groups import Groups, group_products, group_squares, make_groups
from jaxche.scaling._second_moments import Preconditioner, preconditioner

__all__ = [
    "NoiseScale",
    "Preconditioner",
    "Sums",
    "init",
    "local_sums",
    "preconditioner",
    "skip",
    "update",
    "update_from_sums",
]

_LOG_SMOOTHING = math.log(0.999)
_MIN_VAR = 1e-6


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class NoiseScale:
    r"""The noise of gradients: running averages from :func:`update`.

    The gradient of a batch of ``scale`` base batches has the squared norm :math:`s + v / \mathrm{scale}`: ``sqr`` is
    :math:`s = \|G\|^2` of the true gradient, ``var`` is :math:`v = \operatorname{tr}\Sigma / b_{base}`. Both are
    scalars, or ``[G]`` if the parameters are in named groups (sorted by name).

    It is a pytree of arrays, and passes through ``jit``, ``scan`` and checkpoints like any state.

    Attributes:
      sqr_sum: ``[G]``, the exponential average of the squared norm before its bias correction.
      var_sum: ``[G]``, the same of the variance.
      unbias: their bias correction: 0 before the first estimate, then towards 1, or towards the share of the examples
        that was measured.
      base_batch_size: examples in a batch of scale 1; 0 until the first update, if it was not given.
      biased: whether the averages are of differences of successive gradients of a single contributor.
      preconditioned: whether they are of gradients divided by an optimizer's second moments.
      previous: the previous gradient of a single contributor, or None without ``differenced=True``.
      has_previous: whether there is a previous gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2), base_batch_size=8)
      >>> noise = noise_scale.update(noise, jnp.array([[1.0, 0.0], [2.0, 1.0]]), batch_sizes=[8, 32])
      >>> round(float(noise.critical_batch_size), 3), round(float(noise.gain(5)), 3)
      (3.595, 1.33)
    """

    sqr_sum: jax.Array
    var_sum: jax.Array
    unbias: jax.Array
    base_batch_size: jax.Array
    biased: jax.Array
    preconditioned: jax.Array
    has_previous: jax.Array
    previous: Any = field(repr=False)
    groups: Groups = field(metadata={"static": True}, repr=False)

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the parameter groups, in the order of the entries of ``sqr`` and ``var``; empty without groups."""
        return self.groups.names or ()

    @property
    def sqr(self) -> jax.Array:
        r"""Squared norm of the true gradient, clipped to :math:`\ge 0`; 1 before the first estimate."""
        return self._per_group(self._sqr)

    @property
    def var(self) -> jax.Array:
        r"""Variance (trace of the covariance) of a base batch's gradient, clipped to :math:`\ge 10^{-6}`."""
        return self._per_group(self._var)

    def gain(self, scale: Any) -> jax.Array:
        r"""The number of base steps that have the effect of one step on ``scale`` base batches, all groups together.

        .. math:: \mathrm{gain}(S) = \frac{\sum v + \sum s}{\sum v / S + \sum s}

        Args:
          scale: batch divided by base batch, a number or an array.

        Returns:
          Between 1 (no noise) and ``scale`` (all noise), for ``scale`` above 1.

        Raises:
          ValueError: a scale that is not finite and positive.

        References:
          Johnson et al., *AdaScale SGD*, ICML 2020; AdaptDL.
        """
        check_positive("scale", scale, "noise.gain(scale=8)")
        sqr, var = jnp.sum(self._sqr), jnp.sum(self._var)
        return (var + sqr) / (var / jnp.asarray(scale).astype(jnp.float32) + sqr)

    @property
    def critical_batch_size(self) -> jax.Array:
        r"""Batch size at which noise and signal are equal, in examples: :math:`\operatorname{tr}\Sigma / \|G\|^2`.

        Well below it, twice the batch size halves the number of steps; well above it, a larger batch saves no steps.
        All groups together; infinite while no signal is measured, NaN before any update.
        """
        ratio = jnp.sum(self._var) * self.base_batch_size / jnp.sum(self._sqr)
        # Of NumPy, because jax.debug_nans refuses to make an array of NaN.
        return jnp.where(self.base_batch_size > 0, ratio, np.float32(np.nan))

    @property
    def _sqr(self) -> jax.Array:
        return jnp.maximum(self._average(self.sqr_sum, 1.0), jnp.float32(0))

    @property
    def _var(self) -> jax.Array:
        return jnp.maximum(self._average(self.var_sum, 0.0), jnp.float32(_MIN_VAR))

    def _average(self, total: jax.Array, default: float) -> jax.Array:
        known = self.unbias > 0
        return jnp.where(known, total / jnp.where(known, self.unbias, jnp.float32(1)), jnp.float32(default))

    def _per_group(self, values: jax.Array) -> jax.Array:
        return values[0] if self.groups.names is None else values


class Sums(NamedTuple):
    r"""Additive statistics of contributors with gradients :math:`g_i`, batches :math:`b_i` and weights :math:`c_i`.

    The sums of several contributors are added: in a loop over micro-batches, over a leading axis, or in any ``psum`` of
    a program. They are ``G + 5`` numbers.

    Attributes:
      squares: ``[G]``, :math:`\sum c_i \|g_i\|^2` of each parameter group.
      weight: :math:`\sum c_i`.
      weight_per_example: :math:`\sum c_i / b_i`.
      weight_sq_per_example: :math:`\sum c_i^2 / b_i`.
      examples: :math:`\sum b_i`.
      contributors: number of contributors with :math:`b_i > 0`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> sums = noise_scale.local_sums(noise_scale.init(jnp.zeros(2)), jnp.array([3.0, 4.0]), 8)
      >>> float(sums.examples), float(sums.contributors)
      (8.0, 1.0)
    """

    squares: jax.Array
    weight: jax.Array
    weight_per_example: jax.Array
    weight_sq_per_example: jax.Array
    examples: jax.Array
    contributors: jax.Array


def init(
    params: Any,
    *,
    groups: Any | Callable[[Any], Any] | None = None,
    base_batch_size: float | None = None,
    differenced: bool = False,
) -> NoiseScale:
    r"""The noise scale before any gradient: :math:`s = 1, v = 0`, so that every gain is 1.

    Args:
      params: pytree of the parameters (only its structure is read, with ``differenced`` its shapes too).
      groups: parameter groups that are measured separately, as labels of ``optax.partition``: a tree of labels like
        ``params``, a prefix of it, or a function of ``params`` that returns one. Default: one group.
      base_batch_size: examples in a batch of scale 1, for which the learning rate was tuned. Default: the mean batch
        size of a contributor in the first update, so that R replicas are scale R.
      differenced: also measure with a single contributor, by the difference of successive gradients. This needs memory
        for one more gradient, and is biased, because the parameters change in between.

    Returns:
      A :class:`NoiseScale`.

    Raises:
      ValueError: labels that do not fit, or a ``base_batch_size`` that is not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init({"w": jnp.zeros(2)})
      >>> float(noise.sqr), round(float(noise.gain(8)), 3)
      (1.0, 1.0)
    """
    if base_batch_size is not None:
        check_positive("base_batch_size", base_batch_size, "base_batch_size=32")
    if not jax.tree.leaves(params):
        raise ValueError("params holds no arrays; pass the tree you train, e.g. model.init(rng, x)['params']")
    grouping = make_groups(params, groups)
    zeros = jnp.zeros(grouping.count, jnp.float32)
    return NoiseScale(
        sqr_sum=zeros,
        var_sum=zeros,
        unbias=jnp.zeros((), jnp.float32),
        base_batch_size=jnp.asarray(0 if base_batch_size is None else base_batch_size).astype(jnp.float32),
        biased=jnp.zeros((), bool),
        preconditioned=jnp.zeros((), bool),
        has_previous=jnp.zeros((), bool),
        previous=jax.tree.map(jnp.zeros_like, params) if differenced else None,
        groups=grouping,
    )


def update(
    noise: NoiseScale,
    grads: Any,
    batch_sizes: Any,
    *,
    axis_name: str | None = None,
    mean_grads: Any = None,
    opt_state: Any = None,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> NoiseScale:
    r"""Update from one set of gradients, each a mean over its own batch, of equal or unequal sizes.

    Gradients that are not finite change nothing. The function works inside ``jit``. A change of ``batch_sizes`` never
    recompiles if they are an array.

    Args:
      noise: from :func:`init` or an earlier update.
      grads: gradients with leaves ``[R, ...]``; with ``axis_name``, this device's own, leaves ``[...]``.
      batch_sizes: ``[R]`` examples of each gradient; with ``axis_name``, this device's number. Inside ``jit`` a size
        of 0 marks a replica that contributes nothing; with fewer than two others the averages are kept.
      axis_name: mapped axis of ``shard_map`` or ``pmap``; the devices then sum ``G + 5`` scalars in one all-reduce.
      mean_grads: with ``axis_name``, the mean over devices weighted by ``batch_sizes``, if the training step computes
        it anyway; default: it is computed here, which costs an all-reduce of the gradients.
      opt_state: state of an Adam-type optimizer, or the result of :func:`preconditioner`. The update then measures
        :math:`g / (\sqrt{\hat v} + \epsilon)`, as in Adam's steps, after 5 steps of the optimizer (the averages then
        restart). The second moments are found anywhere in the state.
      b2: decay of these second moments, if it is not in an ``inject_hyperparams`` state.
      eps: epsilon of the optimizer, if it is not in an ``inject_hyperparams`` state.

    Returns:
      The next :class:`NoiseScale`.

    Raises:
      ValueError: sizes of 0, a single contributor without ``differenced=True``, leaves without a common leading
        axis, gradients that ``shard_map`` has summed over the axis, or an ``opt_state`` without second moments.

    References:
      AdaptDL (Qiao et al., *Pollux*, OSDI 2021); McCandlish et al., *An empirical model of large-batch training*,
      2018. AdaptDL's formula has no batch sizes: with their mean it is 56 % off at (8, 32).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> grads = jnp.array([[1.0, 0.0], [3.0, 0.0], [2.0, 1.0], [2.0, -1.0]])
      >>> noise = noise_scale.update(noise_scale.init(jnp.zeros(2)), grads, [32, 32, 32, 32])
      >>> round(float(noise.gain(4)), 4), round(float(noise.critical_batch_size), 2)
      (1.25, 11.64)
    """
    _check_noise(noise)
    check_positive("batch_sizes", batch_sizes, "batch_sizes=[32, 32] (leave out a replica without a batch)")
    b = jnp.asarray(batch_sizes)
    if axis_name is not None:
        if b.size != 1:
            raise ValueError(
                f"batch_sizes has shape {b.shape}, and with axis_name= it is the one number of this device; in "
                f"shard_map, cut the sizes over the axis: in_specs=P({axis_name!r})"
            )
        b = b.reshape(())  # of shape [1] in a shard_map
        check_contributors(noise, lax.axis_size(axis_name))
        _check_not_summed(grads, axis_name)
        if mean_grads is None:
            mean_grads = weighted_mean(grads, b, axis_name)
        pre = None if opt_state is None else preconditioner(opt_state, grads, b2, eps)
        sums = psum_buckets(local_sums(noise, grads, b, opt_state=pre), axis_name)
        return update_from_sums(noise, sums, mean_grads, opt_state=pre)
    replicas = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(grads)}
    if replicas != {b.shape} or b.ndim != 1:
        raise ValueError(
            f"grads has leading axes {sorted(replicas)} for batch_sizes of shape {b.shape}; stack the gradients of R "
            "replicas to leaves [R, ...] and give R sizes, or pass axis_name= inside shard_map"
        )
    check_contributors(noise, b.size)
    examples = jnp.where(b > 0, b, jnp.zeros_like(b)).astype(jnp.float32)
    share = examples / jnp.sum(examples)
    mean = jax.tree.map(lambda g: _weighted_sum(share, g) if is_float(g) else g[0], grads)
    pre = None if opt_state is None else preconditioner(opt_state, mean, b2, eps)
    sums = jax.vmap(lambda g, size: local_sums(noise, g, size, opt_state=pre))(grads, b)
    return update_from_sums(noise, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums), mean, opt_state=pre)


def local_sums(noise: NoiseScale, grads: Any, batch_size: Any, weight: Any = None, *, opt_state: Any = None) -> Sums:
    r"""One contributor's part of an update, for programs that already compute a sum over replicas or micro-batches.

    Add these numbers to that sum and pass the total to :func:`update_from_sums`. No further collective is needed.

    Args:
      noise: the noise scale; only its groups are read.
      grads: pytree of this contributor's gradients, the mean over its batch.
      batch_size: examples in the batch.
      weight: this contributor's weight in the mean gradient, if that is not ``batch_size``; weights need not be
        normalised.
      opt_state: as for :func:`update`; the same for all contributors.

    Returns:
      A :class:`Sums` of arrays ``[G]`` and ``[]``.

    Raises:
      ValueError: gradients of another tree than that of ``init``, a bad size, or no second moments.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2))
      >>> a = noise_scale.local_sums(noise, jnp.array([1.0, 0.0]), 8)
      >>> b = noise_scale.local_sums(noise, jnp.array([0.0, 1.0]), 8)
      >>> total = jax.tree.map(jnp.add, a, b)
      >>> float(noise_scale.update_from_sums(noise, total, jnp.array([0.5, 0.5])).var)
      1.0
    """
    _check_noise(noise)
    check_positive("batch_size", batch_size, "batch_size=32")
    _, factors = precondition(opt_state, grads)
    squares = group_squares(noise.groups, jax.tree.leaves(grads), factors)
    b = jnp.asarray(batch_size).astype(jnp.float32)
    c = b if weight is None else jnp.asarray(weight).astype(jnp.float32)
    present = b > 0
    c = jnp.where(present, c, jnp.float32(0))
    per_example = c / jnp.where(present, b, jnp.float32(1))
    return Sums(
        # 0 * NaN is NaN: the gradient of an idle contributor must be dropped, not multiplied by 0.
        squares=jnp.where(present, c * squares, jnp.zeros_like(squares)),
        weight=c,
        weight_per_example=per_example,
        weight_sq_per_example=c * per_example,
        examples=jnp.where(present, b, jnp.float32(0)),
        contributors=present.astype(jnp.float32),
    )


def update_from_sums(noise: NoiseScale, sums: Sums, mean_grads: Any, *, opt_state: Any = None) -> NoiseScale:
    r"""Update from the total of the contributors' :func:`local_sums` and their mean gradient.

    Args:
      noise: from :func:`init` or an earlier update.
      sums: total of all :func:`local_sums`.
      mean_grads: :math:`\sum c_i g_i / \sum c_i` with the same weights; leaves ``[...]``.
      opt_state: as for :func:`update`.

    Returns:
      The next :class:`NoiseScale`.

    Raises:
      ValueError: a single contributor without ``differenced=True``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2))
      >>> own = [noise_scale.local_sums(noise, g, 8) for g in (jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0]))]
      >>> float(noise_scale.update_from_sums(noise, jax.tree.map(jnp.add, *own), jnp.array([0.5, 0.5])).var)
      1.0
    """
    if is_concrete(sums.contributors):
        check_contributors(noise, int(sums.contributors))
    active, factors = precondition(opt_state, mean_grads)
    mean_squares = group_squares(noise.groups, jax.tree.leaves(mean_grads), factors)
    several = sums.contributors >= 2
    sqr, trace = solve(sums, mean_squares)
    if noise.previous is not None:
        alone = difference(noise, mean_grads, factors, sums.examples)
        sqr, trace = (jnp.where(several, x, y) for x, y in zip((sqr, trace), alone, strict=True))
    return add_estimate(
        noise,
        sqr,
        trace,
        grads=mean_grads,
        examples=sums.examples,
        contributors=sums.contributors,
        preconditioned=active,
    )


def skip(noise: NoiseScale, examples: Any) -> NoiseScale:
    r"""Update after a step whose gradients are not measured, to measure only some of all steps.

    .. math:: (\bar s, \bar v, u) \leftarrow \theta \, (\bar s, \bar v, u), \qquad
              \theta = 0.999^{B / b_{base}}

    The averages decay as in an update, and so does their bias correction :math:`u`: ``sqr`` and ``var`` do not change,
    and the next estimate has more weight. So the averages cover as many examples of training as if every step had been
    measured, with the variance of fewer estimates. The next gradient of a single contributor is not compared with the
    last measured one, because the parameters changed in between, which would count as noise.

    Args:
      noise: from :func:`init` or an earlier update.
      examples: number of examples without measurement, of all contributors; 0 (inside ``jit`` only) for none.

    Returns:
      The next :class:`NoiseScale`.

    Raises:
      ValueError: a number of examples that is not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> noise = noise_scale.init(jnp.zeros(2), base_batch_size=8)
      >>> noise = noise_scale.update(noise, jnp.array([[1.0, 0.0], [2.0, 1.0]]), batch_sizes=[8, 8])
      >>> later = noise_scale.skip(noise, 800)
      >>> float(noise.var) == float(later.var), round(float(later.unbias / noise.unbias), 3)
      (True, 0.905)
    """
    _check_noise(noise)
    check_positive("examples", examples, "examples=32 (leave the call out for a step of none)")
    b = jnp.asarray(examples).astype(jnp.float32)
    # Without a base batch there are no averages yet.
    base = jnp.where(noise.base_batch_size > 0, noise.base_batch_size, jnp.float32(1))
    # A difference of two gradients counts as two batches.
    decay = jnp.exp(_LOG_SMOOTHING * jnp.where(noise.biased, jnp.float32(2), jnp.float32(1)) * b / base)
    return replace(
        noise,
        sqr_sum=decay * noise.sqr_sum,
        var_sum=decay * noise.var_sum,
        unbias=decay * noise.unbias,
        has_previous=noise.has_previous & (b <= 0),
    )


def solve(sums: Sums, mean_squares: jax.Array) -> tuple[jax.Array, jax.Array]:
    r""":math:`(\|G\|^2, \operatorname{tr}\Sigma)` of each group, from two contributors or more."""
    local = sums.squares / sums.weight
    a = sums.weight_per_example / sums.weight
    c = sums.weight_sq_per_example / jnp.square(sums.weight)
    # Of one contributor both are equal, and the caller discards the result.
    trace = (local - mean_squares) / jnp.where(a > c, a - c, jnp.ones_like(a))
    return mean_squares - c * trace, trace


def difference(
    noise: NoiseScale, grads: Any, factors: list[Any] | None, examples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The same from this gradient and the previous one: AdaptDL's formula for two contributors of this batch each."""
    # The inner product of both, and half the square of their difference, which avoid cancellation.
    # A previous gradient that was not finite must not make this estimate so.
    before = [jnp.where(noise.has_previous, x, jnp.zeros_like(x)) for x in jax.tree.leaves(noise.previous)]
    products, squares = group_products(noise.groups, jax.tree.leaves(grads), before, factors)
    return products, squares / 2 * examples


def precondition(opt_state: Any, grads: Any) -> tuple[jax.Array, list[Any] | None]:
    """Whether gradients are preconditioned, and the factors of their leaves, if they have any."""
    if opt_state is None:
        return jnp.zeros((), bool), None
    found = preconditioner(opt_state, grads)
    return found.active, found.of(grads)


def add_estimate(
    noise: NoiseScale,
    sqr: jax.Array,
    trace: jax.Array,
    *,
    grads: Any,
    examples: jax.Array,
    contributors: jax.Array,
    preconditioned: jax.Array,
    alike: jax.Array | bool = True,
) -> NoiseScale:
    """The noise scale after an estimate from so many contributors; a single one's is of two gradients.

    Nothing changes if the estimate is not finite, or not of gradients that are ``alike``.
    """
    several = contributors >= 2
    usable = alike & jnp.all(jnp.isfinite(sqr)) & jnp.all(jnp.isfinite(trace))
    measured = several if noise.previous is None else several | noise.has_previous
    steps = jnp.where(several | (noise.previous is None), jnp.float32(1), jnp.float32(2))
    base = jnp.where(noise.base_batch_size > 0, noise.base_batch_size, examples / contributors)
    log_theta = _LOG_SMOOTHING * steps * examples / base
    # Biased and unbiased estimates do not mix (AdaptDL), nor do raw and preconditioned ones, which may differ by many
    # orders of magnitude.
    reset = (several & noise.biased) | (preconditioned != noise.preconditioned)
    write = measured & usable

    def average(total: jax.Array, value: jax.Array) -> jax.Array:
        kept = jnp.where(reset, jnp.zeros_like(total), total)
        return jnp.where(write, jnp.exp(log_theta) * kept - jnp.expm1(log_theta) * value, total)

    return replace(
        noise,
        sqr_sum=average(noise.sqr_sum, sqr),
        var_sum=average(noise.var_sum, trace / base),
        unbias=average(noise.unbias, jnp.float32(1)),
        base_batch_size=jnp.where(usable, base, noise.base_batch_size),
        biased=jnp.where(usable & (several | (noise.previous is not None)), ~several, noise.biased),
        preconditioned=jnp.where(write, preconditioned, noise.preconditioned),
        # A gradient that is not finite is kept too, but marked as missing: a select between two gradients would keep
        # both in memory, at more than the cost of the estimate.
        has_previous=usable & ~several,
        previous=None
        if noise.previous is None
        else jax.tree.map(lambda old, new: jnp.asarray(new).astype(old.dtype), noise.previous, grads),
    )


def _weighted_sum(share: jax.Array, stacked: jax.Array) -> jax.Array:
    stacked = jnp.asarray(stacked)
    wide = stacked.astype(sum_dtype(stacked.dtype))
    weights = share.astype(wide.dtype).reshape(-1, *(1,) * (wide.ndim - 1))
    # A replica without examples has share 0, but its gradients may be NaN.
    return jnp.sum(jnp.where(weights > 0, weights * wide, jnp.zeros_like(wide)), axis=0)


def _check_noise(noise: Any) -> None:
    if not isinstance(noise, NoiseScale):
        raise ValueError(f"noise={brief(noise)} is no NoiseScale; write noise = jaxche.noise_scale.init(params)")


def check_contributors(noise: NoiseScale, contributors: int) -> None:
    """Refuse a single contributor where nothing else is there to compare its gradient with."""
    if contributors < 2 and noise.previous is None:
        raise ValueError(
            f"grads come from {contributors} contributor; noise is measured by the difference of at least 2. Write "
            "noise_scale.init(params, differenced=True) to compare successive gradients instead"
        )


def _check_not_summed(grads: Any, axis_name: str) -> None:
    """``jax.grad`` of parameters that are equal on every device sums over the devices, which removes the noise."""

    def varies(x: Any) -> bool:
        return axis_name in getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", ())

    # If shard_map does not track what varies, it does not track it for the device's index either.
    if varies(lax.axis_index(axis_name)) and not any(map(varies, jax.tree.leaves(grads))):
        raise ValueError(
            f"grads are the same on every device of {axis_name!r}: jax.grad of replicated parameters in shard_map sums "
            f"over them; take it of each device's own, params = jax.lax.pcast(params, {axis_name!r}, to='varying')"
        )
