"""Noise from what replicas did in a round of local steps: their deltas as gradients of large batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxche.averaging import is_float, sum_dtype
from jaxche.scaling._checks import known, refuse_unless_positive


def pseudo_gradients(
    deltas: Any,
    counts: Any,
    batch_sizes: Any,
    learning_rate: Any,
    *,
    momentum: float = 0.0,
    buffers: Any = None,
) -> tuple[Any, jax.Array]:
    r"""Turn each replica's delta of local SGD into a gradient, and into the batch that gradient is worth.

    .. math:: u_i = \frac{\Delta_i}{\eta \|a_i\|_1}, \qquad b_i^{eff} = b_i \frac{\|a_i\|_1^2}{\|a_i\|_2^2}

    where :math:`\Delta_i = \eta \sum_k a_{ik} g_{ik}`: every :math:`a_{ik}` is 1 for SGD and
    :math:`(1 - \mu^{n_i - k}) / (1 - \mu)` for heavy ball, :math:`k = 0 \dots n_i - 1`. :math:`u_i` is exactly the
    mean of the gradients on the replica's path with weights a. The noise estimated from it counts what the path
    itself adds (replicas that went further see other gradients), so keep :math:`\eta n` times the curvature small.

    Hand the two results to :func:`~jaxche.scaling.noise_scale.update`, or, where the merge's weighted mean of deltas
    is already at hand, to ``local_sums`` with weight :math:`w_i \eta \|a_i\|_1` (see :func:`delta_lengths`).

    Args:
      deltas: :math:`x_0 - x_i`, leaves ``[R, ...]``; leaves ``[...]`` of one replica with scalar ``counts``.
      counts: ``[R]`` local steps of each replica.
      batch_sizes: ``[R]`` examples in one local batch of each replica.
      learning_rate: :math:`\eta` of the local steps, a scalar or ``[R]``.
      momentum: :math:`\mu` of ``optax.sgd(eta, momentum=mu)`` without Nesterov; 0 for plain SGD.
      buffers: momentum buffers at the start of the round (``opt_state[0].trace``), like ``deltas``, when a round
        does not start from zero momentum; what they added to the deltas is taken out.

    Returns:
      ``(gradients, effective_batch_sizes)``: like ``deltas`` (float32 at least), and ``[R]``.

    Raises:
      ValueError: counts, sizes or a learning rate that are not positive, or a momentum outside [0, 1).

    References:
      Derived for jaxche; see McCandlish et al., *An empirical model of large-batch training*, 2018, for what it feeds.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxche.scaling import noise_scale
      >>> deltas = jnp.array([[0.1, 0.2], [0.3, 0.0]])
      >>> u, b = noise_scale.pseudo_gradients(deltas, [1, 3], [8, 8], learning_rate=0.1)
      >>> b.tolist()
      [8.0, 24.0]
      >>> jnp.round(u, 3).tolist()
      [[1.0, 2.0], [1.0, 0.0]]
    """
    refuse_unless_positive("counts", counts, "counts=[10, 23] (leave out a replica without a step)")
    refuse_unless_positive("batch_sizes", batch_sizes, "batch_sizes=[32, 32]")
    refuse_unless_positive("learning_rate", learning_rate, "learning_rate=0.1")
    length, length_sq, last = _lengths(counts, momentum)
    eta = jnp.asarray(learning_rate).astype(jnp.float32)
    # An idle replica (possible inside jit only) has no length: a gradient of zero, worth no example.
    steps = jnp.where(length > 0, length, jnp.float32(1))

    def gradient(delta: Any, buffer: Any = None) -> Any:
        if not is_float(delta):
            return delta
        x = delta.astype(sum_dtype(delta.dtype)) / _column(eta, delta)
        if buffer is not None:
            x = x - _column(jnp.asarray(momentum).astype(jnp.float32) * last, delta) * buffer.astype(x.dtype)
        return x / _column(steps, delta)

    trees = (deltas,) if buffers is None else (deltas, buffers)
    worth = jnp.where(length > 0, jnp.square(length) / jnp.where(length > 0, length_sq, jnp.float32(1)), length)
    return jax.tree.map(gradient, *trees), jnp.asarray(batch_sizes).astype(jnp.float32) * worth


def delta_lengths(counts: Any, momentum: float = 0.0) -> tuple[jax.Array, jax.Array]:
    r"""How much gradient a delta holds: :math:`(\|a\|_1, \|a\|_2^2)` of its weights a.

    Args:
      counts: local steps, a scalar or ``[R]``.
      momentum: :math:`\mu` of heavy ball; 0 for plain SGD, whose lengths are both the count.

    Returns:
      Two float32 arrays like ``counts``.

    Raises:
      ValueError: a momentum outside [0, 1).

    Example:
      >>> from jaxche.scaling import noise_scale
      >>> [x.tolist() for x in noise_scale.delta_lengths([1, 2], momentum=0.5)]
      [[1.0, 2.5], [1.0, 3.25]]
    """
    return _lengths(counts, momentum)[:2]


def effective_replicas(weights: Sequence[float], counts: Sequence[float], alpha: float = 1.0) -> float:
    r"""How many replicas a merge of local steps is worth to a scaling rule.

    .. math:: m_{eff} = \frac{\sum_i w_i n_i}{\alpha \sum_i w_i^2 n_i}

    The ratio of signal to noise of the merged progress over that of one replica's steps: R for equal counts and
    weights, less when some replicas do most of the work.

    Args:
      weights: merge weights that sum to one, from :func:`~jaxche.merge_weights`.
      counts: local steps of each replica.
      alpha: step length of the merge.

    Returns:
      A float, the ``scale`` to give to a rule when parameters are averaged.

    Raises:
      ValueError: lists of different lengths, or no progress at all.

    Example:
      >>> from jaxche.scaling import effective_replicas
      >>> effective_replicas([0.5, 0.5], [1, 3]), round(effective_replicas([0.25, 0.75], [1, 3]), 2)
      (2.0, 1.43)
      >>> effective_replicas([0.5, 0.5], [1, 3], alpha=1.25)
      1.6
    """
    if len(weights) != len(counts):
        raise ValueError(f"weights has {len(weights)} entries for {len(counts)} counts; give one per replica")
    refuse_unless_positive("alpha", alpha, "alpha=1.0")
    signal = sum(w * n for w, n in zip(weights, counts, strict=True))
    noise = sum(w * w * n for w, n in zip(weights, counts, strict=True))
    if not (signal > 0 and noise > 0):
        raise ValueError(
            f"weights={list(weights)} and counts={list(counts)} make no progress; write e.g. "
            "effective_replicas(*jaxche.merge_weights('steps', [10, 23])[:1], [10, 23])"
        )
    return signal / (alpha * noise)


def _lengths(counts: Any, momentum: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(sum a, sum a^2, largest a)`` by their recurrence: the closed form cancels badly as momentum nears 1."""
    if known(momentum) and not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum!r} must be at least 0 and less than 1; write e.g. momentum=0.9")
    n = jnp.asarray(counts).astype(jnp.float32)
    mu = jnp.asarray(momentum).astype(jnp.float32)

    def add(k: Any, carry: Any) -> Any:
        total, squares, a = carry
        here = k.astype(jnp.float32) < n
        a = jnp.where(here, mu * a + 1, a)
        return total + jnp.where(here, a, 0 * a), squares + jnp.where(here, a * a, 0 * a), a

    zero = jnp.zeros_like(n)
    return lax.fori_loop(0, jnp.max(n).astype(jnp.int32), add, (zero, zero, zero))


def _column(per_replica: jax.Array, like: Any) -> jax.Array:
    """Numbers of ``[R]`` (or one number) in a shape that multiplies leaves ``[R, ...]``."""
    if per_replica.ndim == 0:
        return per_replica.astype(sum_dtype(like.dtype))
    return per_replica.astype(sum_dtype(like.dtype)).reshape(-1, *(1,) * (like.ndim - 1))
