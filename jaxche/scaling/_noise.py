"""The gradient noise scale: its first value and its updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxche.averaging import is_float, psum_buckets, sum_dtype, weighted_mean
from jaxche.scaling._checks import refuse_unless_positive
from jaxche.scaling._combine import local_sums, refuse_one, update_from_sums
from jaxche.scaling._groups import make_groups
from jaxche.scaling._state import NoiseScale


def init(
    params: Any,
    *,
    groups: Any | Callable[[Any], Any] | None = None,
    base_batch_size: float | None = None,
    differenced: bool = False,
) -> NoiseScale:
    r"""The noise scale before any gradient: :math:`s = 1, v = 0`, so that every gain is 1.

    Args:
      params: pytree of the parameters (its structure is read, with ``differenced`` its shapes too).
      groups: parameter groups that are measured apart, as ``optax.partition`` takes labels: a tree of labels like
        ``params``, a prefix of it, or a function of ``params`` that returns one. Default: one group.
      base_batch_size: examples in a batch of scale 1, the one the learning rate was tuned for. Default: the mean
        batch of a contributor in the first update, so that R replicas are scale R.
      differenced: also measure with a single contributor, by the difference of successive gradients. It keeps one
        more gradient in memory, and is biased: the parameters move in between.

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
        refuse_unless_positive("base_batch_size", base_batch_size, "base_batch_size=32")
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
    r"""Learn from one set of gradients, each a mean over its own batch, of equal or unequal sizes.

    .. math:: \hat\Sigma = \frac{\sum_i b_i \|g_i - \bar g\|^2}{R - 1}, \qquad
              \hat s = \|\bar g\|^2 - \hat\Sigma / B, \qquad \hat v = \hat\Sigma / b_{base}

    with :math:`\bar g = \sum b_i g_i / B, B = \sum b_i`. The averages decay by :math:`\theta = 0.999^{B / b_{base}}`
    and are corrected for their start. Gradients that are not finite change nothing. It works inside ``jit``; a change
    of ``batch_sizes`` never recompiles when they are passed in as an array.

    Args:
      noise: from :func:`init` or an earlier update.
      grads: gradients with leaves ``[R, ...]``; with ``axis_name``, this device's own, leaves ``[...]``.
      batch_sizes: ``[R]`` examples behind each gradient; with ``axis_name``, this device's number. Inside ``jit`` a
        size of 0 says that a replica has nothing to contribute; with fewer than two left nothing is learnt.
      axis_name: mapped axis of ``shard_map`` or ``pmap``; the devices then sum ``G + 5`` scalars in one all-reduce.
      mean_grads: with ``axis_name``, the mean over devices weighted by ``batch_sizes``, which a training step has
        anyway; without it, it is computed here, which costs an all-reduce of the gradients.
      opt_state: state of an Adam-type optimizer: measure :math:`g / (\sqrt{\hat v} + \epsilon)`, as Adam sees it,
        once it has taken 5 steps (the averages start anew then). Its second moments are found by themselves. Or
        what :func:`preconditioner` made of such a state.
      b2: decay of these second moments, if it is not in an ``inject_hyperparams`` state.
      eps: epsilon of the optimizer, likewise.

    Returns:
      The next :class:`NoiseScale`.

    Raises:
      ValueError: sizes of 0, a single contributor without ``differenced=True``, leaves without a common leading
        axis, gradients that ``shard_map`` has summed over the axis, or an ``opt_state`` without second moments.

    References:
      AdaptDL (Qiao et al., *Pollux*, OSDI 2021); McCandlish et al., *An empirical model of large-batch training*,
      2018. For unequal batches AdaptDL's formula has no place to put the sizes: fed their mean, it is 56 % off at
      (8, 32).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> grads = jnp.array([[1.0, 0.0], [3.0, 0.0], [2.0, 1.0], [2.0, -1.0]])
      >>> noise = noise_scale.update(noise_scale.init(jnp.zeros(2)), grads, [32, 32, 32, 32])
      >>> round(float(noise.gain(4)), 4), round(float(noise.critical_batch_size), 2)
      (1.25, 11.64)
    """
    refuse_unless_positive("batch_sizes", batch_sizes, "batch_sizes=[32, 32] (leave out a replica without a batch)")
    options = {"opt_state": opt_state, "b2": b2, "eps": eps}
    b = jnp.asarray(batch_sizes)
    if axis_name is not None:
        refuse_one(noise, lax.axis_size(axis_name))
        _refuse_summed(grads, axis_name)
        if mean_grads is None:
            mean_grads = weighted_mean(grads, b, axis_name)
        sums = psum_buckets(local_sums(noise, grads, b, **options), axis_name)
        return update_from_sums(noise, sums, mean_grads, **options)
    replicas = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(grads)}
    if replicas != {b.shape} or b.ndim != 1:
        raise ValueError(
            f"grads has leading axes {sorted(replicas)} for batch_sizes of shape {b.shape}; stack the gradients of R "
            "replicas to leaves [R, ...] and give R sizes, or pass axis_name= inside shard_map"
        )
    refuse_one(noise, b.size)
    sums = jax.vmap(lambda g, size: local_sums(noise, g, size, **options))(grads, b)
    sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
    share = jnp.where(b > 0, b, jnp.zeros_like(b)).astype(jnp.float32) / sums.examples
    mean = jax.tree.map(lambda g: _weighted_sum(share, g) if is_float(g) else g[0], grads)
    return update_from_sums(noise, sums, mean, **options)


def _refuse_summed(grads: Any, axis_name: str) -> None:
    """``jax.grad`` of parameters that are the same on every device sums over the devices: no noise is left to see."""

    def varies(x: Any) -> bool:
        return axis_name in getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", ())

    # Where shard_map does not track what varies, not even the device's number is known to.
    if varies(lax.axis_index(axis_name)) and not any(map(varies, jax.tree.leaves(grads))):
        raise ValueError(
            f"grads are the same on every device of {axis_name!r}: jax.grad of replicated parameters in shard_map sums "
            f"over them; take it of each device's own, params = jax.lax.pcast(params, {axis_name!r}, to='varying')"
        )


def _weighted_sum(share: jax.Array, stacked: jax.Array) -> jax.Array:
    wide = stacked.astype(sum_dtype(stacked.dtype))
    weights = share.astype(wide.dtype).reshape(-1, *(1,) * (wide.ndim - 1))
    # A replica without examples has share 0, but may hold anything, NaN included.
    return jnp.sum(jnp.where(weights > 0, weights * wide, jnp.zeros_like(wide)), axis=0)
