"""The two halves of a step on a mesh: loss and gradient by explicit collectives, the update by those of XLA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxche.averaging import Weighted, from_moments, is_float, sum_dtype, to_moments
from jaxche.scaling import with_extra_args
from jaxche.sharding._checks import batch_size
from jaxche.sharding._gather import (
    DeferredTranspose,
    all_gather,
    as_real,
    deferred_gradients,
    from_real,
    gather_layer,
    gather_twice,
    is_gathered_by_layer,
    reduce_scatter,
    scatter_layer,
)
from jaxche.sharding._layers import gathered_by_layer, read_by_layer
from jaxche.sharding._strategy import SHARD, Layout


def value_and_grad(
    call: Callable[..., Any], layout: Layout, *, accumulate: int = 1, compute_dtype: Any = None
) -> Callable[..., Any]:
    r"""Value and gradient of a mean loss over a batch that is split over a mesh.

    .. math:: g = \frac{1}{W k} \sum_{d=1}^{W} \sum_{j=1}^{k} \nabla f(p; B_{d,j})

    For use inside ``jax.jit(..., compiler_options=layout.compiler_options)``, on global arrays laid out as in
    ``layout``. Sharded parameters are gathered for the forward pass and again for the backward pass; no whole copy is
    stored in between. Sharded gradients are reduce-scattered over ``shard``, then summed over ``replica``; all others
    are all-reduced. Sums are in float32 or wider. With micro-batches, the all-reduces come after the last micro-batch.

    A loss or metric may be a :class:`~jaxche.Weighted`: it is then the total over all rows divided by their weight, and
    its gradient is that of this quotient.

    If the devices (times ``accumulate``) do not divide the rows of the batch, every device computes the whole batch:
    slower, with the same result. ``rng`` is then used unchanged; otherwise the index of the device is folded into it,
    and that of the micro-batch if there are several.

    Args:
      call: ``call(params, model_state, batch, rng) -> (loss, (metrics, model_state))``, from :func:`as_loss`; the loss
        is a mean over the batch.
      layout: the layout of parameters and gradients.
      accumulate: number of micro-batches into which a batch is cut, computed one after the other.
      compute_dtype: dtype in which ``call`` gets real float parameters and arrays of the batch; default: their own.

    Returns:
      ``fn(params, model_state, batch, rng) -> ((loss, (metrics, model_state)), grads)``. Loss and metrics are means
      over the batch, or a :class:`~jaxche.Weighted` of its sums. Float leaves of the model state are means over the
      devices (variances by the law of total variance). ``grads`` are laid out as ``layout.grads``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxche.sharding import FullShard, Layout, as_loss, value_and_grad
      >>> p, x = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([2.0, 4.0])
      >>> layout = Layout(FullShard(), FullShard().mesh(jax.devices()[:2]), p)
      >>> fn = value_and_grad(as_loss(lambda p, x: (x * p.sum()).mean()), layout)
      >>> (loss, _), grads = jax.jit(fn)(jax.device_put(p, layout.params), None, x, jax.random.key(0))
      >>> float(loss), grads.tolist(), tuple(grads.sharding.spec)
      (30.0, [3.0, 3.0, 3.0, 3.0], ('shard',))
    """

    def fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        split = layout.splits(batch_size(batch), accumulate)
        micro = accumulate if split else 1
        rows = P(layout.axes) if split else P()
        local = _accumulated(_local(call, layout, compute_dtype), micro, layout.gathers)

        def over_devices(value: Any) -> Any:
            """A loss or metric of the whole batch, from its sum over the micro-batches of each device."""
            if not _is_weighted(value):
                return lax.pmean(value / micro, layout.axes)
            # Unless the batch is split, each device has the whole of it.
            return jax.tree.map(lambda x: (lax.psum if split else lax.pmean)(x, layout.axes), value)

        def part(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
            if split:
                rng = jax.random.fold_in(rng, lax.axis_index(layout.axes))
            (grads, loss, metrics), (model_state, *outputs) = local(params, model_state, batch, rng)
            if split:
                _check_outputs(outputs, batch_size(batch))
            parts = layout.devices * micro
            if _is_weighted(loss):  # the gradients are those of its total
                weight = lax.psum(loss.weight, layout.axes)
                parts = jnp.where(weight != 0, weight, 1)  # without any weight, the sums are 0
            loss, metrics = jax.tree.map(over_devices, (loss, metrics), is_leaf=_is_weighted)
            return (loss, (metrics, _pool(layout, model_state))), _reduce(layout, grads, parts), outputs

        # check_vma=False: the zeros of a scan in a loss function do not vary over the mesh.
        mapped = jax.shard_map(
            part,
            mesh=layout.mesh,
            in_specs=(layout.params_specs, P(), rows, P()),
            out_specs=(P(), layout.grads_specs, rows),
            check_vma=False,
        )
        (loss, aux), grads, outputs = mapped(params, model_state, batch, rng)
        return (loss, (*aux, *outputs)), grads

    return fn


def sharded_update(tx: Any, layout: Layout, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
    """One update by any optax transformation; each device computes its slice of the optimizer state.

    For use inside ``jax.jit``. The transformation gets global arrays. So its reductions, such as the norm of
    ``optax.clip_by_global_norm``, count every element once under every strategy: XLA adds the all-reduces over
    ``shard``, never over ``replica``.

    Args:
      tx: any ``optax.GradientTransformation``.
      layout: the layout of parameters, gradients and optimizer state.
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
    opt_shardings = layout.opt_state(tx)
    opt_state = lax.with_sharding_constraint(opt_state, opt_shardings)
    slices = lax.with_sharding_constraint(params, layout.grads)
    updates, opt_state = with_extra_args(tx).update(grads, opt_state, slices, **extra)
    # Otherwise XLA would gather the slices of whole parameters before the sum instead of after it.
    updates = lax.with_sharding_constraint(updates, layout.grads)
    slices = lax.with_sharding_constraint(optax.apply_updates(slices, updates), layout.grads)
    opt_state = lax.with_sharding_constraint(opt_state, opt_shardings)
    if layout.strategy.shards_state and not layout.strategy.shards_params:
        # Gathered over shard alone; XLA's partitioner would also gather across nodes.
        slices = jax.shard_map(
            partial(all_gather, layout),
            mesh=layout.mesh,
            in_specs=(layout.grads_specs,),
            out_specs=layout.params_specs,
            check_vma=False,
        )(slices)
    return lax.with_sharding_constraint(slices, layout.params), opt_state


def _local(call: Callable[..., Any], layout: Layout, compute_dtype: Any) -> Callable[..., Any]:
    """``(params, model_state, batch, rng) -> (grads, loss, metrics), (model_state, *outputs)`` of a device's rows."""
    # All gradients are DeferredTransposes. Those of sliced leaves are reduce-scattered.
    gathers, scatters = layout.gathers, layout.strategy.shards_state

    def local(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        batch, by_layer = _cast(batch, compute_dtype), set()

        def objective(params: Any) -> Any:
            loss, aux = call(params, model_state, batch, rng)
            # The gradient of a weighted loss is divided by the weight of the whole batch, after all sums.
            return (loss.total, (loss.weight, aux)) if _is_weighted(loss) else (loss, (None, aux))

        def whole(params: Any) -> Any:
            # Cast before the gather, which halves the bytes sent; slices of layers are cast when these are gathered.
            leaves, treedef = jax.tree.flatten(params)
            for i, x in enumerate(leaves):
                leaves[i] = _slice(layout, i, x) if i in by_layer else _cast(x, compute_dtype)
            given = treedef.unflatten(leaves)
            return all_gather(layout, given, by_layer) if gathers else given

        if scatters:
            objective, by_layer = _by_layer(objective, layout, compute_dtype, params)
        forward = partial(jax.vjp, objective, has_aux=True)
        total, pullback, (weight, aux) = gather_twice(forward, whole, params) if gathers else forward(whole(params))
        loss = total if weight is None else Weighted(total, weight)
        metrics, *after = aux
        one = jnp.ones_like(total)
        # Without a reduce-scatter the compiler folds the transpositions into the products.
        grads = deferred_gradients(pullback, one) if scatters else jax.tree.map(DeferredTranspose, pullback(one)[0])
        # Sums are in float32 at least, whatever the dtype of the computation.
        grads = jax.tree.map(lambda g: g.astype(sum_dtype(g.dtype)), grads)
        return (reduce_scatter(layout, grads, by_layer) if scatters else grads, loss, metrics), tuple(after)

    return local


def _by_layer(
    objective: Callable[..., Any], layout: Layout, compute_dtype: Any, params: Any
) -> tuple[Callable[..., Any], set[int]]:
    """The objective that takes slices of stacked parameters which only scans read, and which leaves these are."""
    stacked = [i for i, leaf in enumerate(layout.leaves) if is_gathered_by_layer(leaf)]
    if not stacked:
        return objective, set()
    shapes = jax.eval_shape(partial(_cast, dtype=compute_dtype), layout.shapes)
    closed, result = jax.make_jaxpr(objective, return_shape=True)(shapes)
    if not (by_layer := read_by_layer(closed.jaxpr, stacked)):
        return objective, by_layer
    if layout.gathers:
        layers = {i: gather_layer(layout.leaves[i], jax.tree.leaves(shapes)[i].dtype) for i in by_layer}
    else:
        layers = {i: partial(scatter_layer, leaf=layout.leaves[i]) for i in by_layer}
    run, structure = gathered_by_layer(closed, layers), jax.tree.structure(result)

    def by_slices(values: Any) -> Any:
        leaves = jax.tree.leaves(values)
        if not layout.gathers:  # with the whole array, whose gradient is that of the slice
            for i in by_layer:
                leaves[i] = _cast(jax.tree.leaves(params)[i], compute_dtype), leaves[i]
        return structure.unflatten(run(*leaves))

    return by_slices, by_layer


def _slice(layout: Layout, number: int, x: Any) -> Any:
    """This device's slice of a stacked leaf, in the dtype of sums; zeros where the leaf is whole on every device."""
    leaf, dtype = layout.leaves[number], sum_dtype(x.dtype)
    if layout.gathers or leaf.axis is None:
        return x.astype(dtype)
    shape = list(leaf.shape)
    shape[leaf.axis] //= layout.mesh.shape[SHARD]
    return jnp.zeros(shape, dtype)


def _accumulated(local: Callable[..., Any], micro: int, gathers: bool) -> Callable[..., Any]:
    """``local`` on micro-batches, one after the other: sums of gradients, losses and metrics; the last model state."""
    if micro == 1:
        return local

    def accumulated(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        def one(carry: Any, turn: Any) -> Any:
            (sums, before), slices = carry, params
            if gathers:
                # Without the barrier the compiler gathers once, before the loop, and keeps whole parameters through it.
                # XLA of jax 0.12 cannot compile it for the CPU in a small loop without collectives.
                slices, sums = lax.optimization_barrier((params, sums))
            part, index = turn
            terms, (after, *outputs) = local(slices, before, part, jax.random.fold_in(rng, index))
            if outputs:
                raise ValueError(f"accumulate={micro} keeps no outputs of a loss function; write as_loss(loss_fn)")
            # The dtypes of a scan's carry must not change.
            after = jax.tree.map(lambda new, old: jnp.asarray(new, jnp.asarray(old).dtype), after, before)
            return (jax.tree.map(jnp.add, sums, terms), after), None

        parts = jax.tree.map(lambda x: x.reshape(micro, x.shape[0] // micro, *x.shape[1:]), batch)
        first = jax.tree.map(lambda x: x[0], parts)
        terms, _ = jax.eval_shape(local, params, model_state, first, rng)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), terms)
        (sums, after), _ = lax.scan(one, (zeros, model_state), (parts, jnp.arange(micro)))
        return sums, (after,)

    return accumulated


def _reduce(layout: Layout, grads: Any, parts: Any) -> Any:
    """Sums over all devices divided by ``parts``, and transposed as they must be."""
    leaves, treedef = jax.tree.flatten(grads)
    # Slices are summed over shard, the last axis, already.
    for cut, axes in ((False, layout.axes), (True, layout.axes[:-1])):
        chosen = [i for i, leaf in enumerate(layout.leaves) if (leaf.axis is not None) == cut]
        if chosen and axes:
            totals = lax.psum([as_real(leaves[i]) for i in chosen], axes)
            for i, total in zip(chosen, totals, strict=True):
                leaves[i] = from_real(total, leaves[i])
    means = [(g / parts).astype(leaf.dtype) for g, leaf in zip(leaves, layout.leaves, strict=True)]
    deferred = jax.tree.unflatten(treedef, means)
    return jax.tree.map(lambda x: x.transposed(), deferred, is_leaf=lambda x: isinstance(x, DeferredTranspose))


def _pool(layout: Layout, state: Any) -> Any:
    """The model state of all examples, from devices with equally many each; variances take a second all-reduce."""

    def mean(tree: Any) -> Any:
        return jax.tree.map(lambda x: lax.pmean(x.astype(sum_dtype(x.dtype)), layout.axes) if is_float(x) else x, tree)

    means = mean(state)
    pooled = from_moments(mean(to_moments(state, means)), means)
    return jax.tree.map(lambda new, old: new.astype(old.dtype) if is_float(old) else new, pooled, state)


def _check_outputs(outputs: Any, rows: int) -> None:
    """Refuse outputs that cannot be joined over the devices which share a batch."""
    for leaf in jax.tree.leaves(outputs):
        if leaf.shape[:1] != (rows,):
            raise ValueError(
                f"an output has the shape {leaf.shape}, but the rows of a batch are divided among the devices of a "
                f"sharded replica, {rows} each here; return outputs with a leading axis of the rows"
            )


def _is_weighted(value: Any) -> bool:
    return isinstance(value, Weighted)


def _cast(tree: Any, dtype: Any) -> Any:
    """The tree with its real floats in ``dtype``."""

    def cast(x: Any) -> Any:
        real = jnp.issubdtype(jnp.result_type(x), jnp.floating)  # complex arrays would lose their imaginary part
        return jnp.asarray(x).astype(dtype) if real else x

    return tree if dtype is None else jax.tree.map(cast, tree)
