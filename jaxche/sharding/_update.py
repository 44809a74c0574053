"""The optimizer's update on global arrays, each device computing its slice."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax import lax

from jaxche.sharding._layout import Layout
from jaxche.sharding._slices import gather


def sharded_update(tx: Any, layout: Layout, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
    """One update by any optax transformation, computed where the layout keeps the optimizer's state.

    For use inside ``jax.jit``. The transformation sees global arrays, so that what it reduces over all of them, such as
    the norm of ``optax.clip_by_global_norm``, counts every element once under every strategy: XLA adds the
    all-reduces over ``shard``, never over ``replica``.

    Args:
      tx: any ``optax.GradientTransformation``.
      layout: where everything lives.
      grads: gradients laid out as ``layout.grads``.
      opt_state: state of ``tx``, laid out as ``layout.opt_state(tx)``.
      params: parameters laid out as ``layout.params``.
      **extra: further arguments of ``tx.update``, such as ``value=loss``.

    Returns:
      ``(params, opt_state)`` after the update, laid out as before.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxche.sharding import Layout, ShardGradOp, sharded_update
      >>> tx, p = optax.sgd(0.5, momentum=0.9), jnp.zeros(4)
      >>> layout = Layout(ShardGradOp(), ShardGradOp().mesh(jax.devices()[:2]), p)
      >>> step = jax.jit(lambda g, s, p: sharded_update(tx, layout, g, s, p))
      >>> p, state = step(jnp.arange(4.0), tx.init(p), p)
      >>> p.tolist(), tuple(p.sharding.spec), tuple(state[0].trace.sharding.spec)
      ([0.0, -0.5, -1.0, -1.5], (), ('shard',))
    """
    grads = lax.with_sharding_constraint(grads, layout.grads)
    opt_state = lax.with_sharding_constraint(opt_state, layout.opt_state(tx))
    slices = lax.with_sharding_constraint(params, layout.grads)
    updates, opt_state = optax.with_extra_args_support(tx).update(grads, opt_state, slices, **extra)
    # Without this the slices of whole parameters would be gathered before the sum instead of after it.
    updates = lax.with_sharding_constraint(updates, layout.grads)
    slices = lax.with_sharding_constraint(optax.apply_updates(slices, updates), layout.grads)
    opt_state = lax.with_sharding_constraint(opt_state, layout.opt_state(tx))
    if layout.strategy.shards_state and not layout.strategy.shards_params:
        slices = _gather(layout, slices)
    return lax.with_sharding_constraint(slices, layout.params), opt_state


def _gather(layout: Layout, slices: Any) -> Any:
    """Whole parameters of slices, over ``shard`` alone; left to itself the partitioner also gathers across nodes."""

    specs = layout.grads_specs, layout.params_specs
    return jax.shard_map(
        lambda tree: gather(layout, tree), mesh=layout.mesh, in_specs=specs[:1], out_specs=specs[1], check_vma=False
    )(slices)
