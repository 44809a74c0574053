"""The sharded train step: ``init`` makes a state on the mesh, a call takes one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh

from jaxche.messages import brief, short_traceback, whole_number
from jaxche.sharding._checks import (
    check_batch,
    check_compute_dtype,
    check_context_mesh,
    check_mesh,
    check_not_deleted,
    check_params,
    check_state,
    check_strategy,
    check_transform,
    check_update,
    is_maker,
)
from jaxche.sharding._explain import Explanation, explain
from jaxche.sharding._gradient import sharded_update, value_and_grad
from jaxche.sharding._loss import Loss, as_loss, mean_of
from jaxche.sharding._strategy import Layout, ShardingStrategy


class ShardedState(NamedTuple):
    """The state of a sharded step: a pytree of global arrays on the mesh.

    Attributes:
      params: parameters, laid out by the strategy.
      opt_state: state of the optimizer; leaves that mirror a gradient are cut as it is.
      model_state: model state of the loss function, whole on every device, or None.
      index: number of steps so far, ``int32[]``; it is folded into the key given as ``rng=``.

    Example:
      >>> import jax, jax.numpy as jnp, jaxche, optax
      >>> step = jaxche.sharded_step(
      ...     lambda p, x: jnp.mean((x * p) ** 2), optax.sgd(0.1), jaxche.FullShard(),
      ...     jaxche.FullShard().mesh(jax.devices()[:2]))
      >>> state = step.init(jnp.ones(4))
      >>> int(state.index), state.params.addressable_shards[0].data.shape
      (0, (2,))
    """

    params: Any
    opt_state: Any
    model_state: Any
    index: Any


class ShardedStep:
    """A train step on a mesh; made by :func:`sharded_step`.

    Attributes:
      strategy: the strategy.
      mesh: the mesh, its axes automatic.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxche.sharding import FullShard
      >>> step = sharded_step(
      ...     lambda p, x: jnp.mean((x - p) ** 2), optax.sgd(0.5), FullShard(), FullShard().mesh(jax.devices()[:2]))
      >>> state, metrics = step(step.init(jnp.zeros(2)), jnp.ones((2, 2)))
      >>> state.params.tolist(), float(metrics["loss"])
      ([0.5, 0.5], 1.0)
    """

    def __init__(self, loss_fn: Any, tx: Any, strategy: Any, mesh: Any, accumulate: int, compute_dtype: Any, seed: int):
        check_transform("tx", tx)
        check_strategy(strategy)
        check_compute_dtype(compute_dtype)
        accumulate = whole_number("accumulate", accumulate, 1, "accumulate=1")
        seed = whole_number("seed", seed, -(2**63), "seed=0", 2**63 - 1)
        self.strategy = strategy
        # Raises for a mesh of other axes now, not at the first step.
        self.mesh = Layout(strategy, strategy.mesh() if mesh is None else mesh, ()).mesh
        self._loss, self._tx, self._seed = as_loss(loss_fn), tx, seed
        self._accumulate, self._compute_dtype = accumulate, compute_dtype
        self._programs: dict[Any, _Programs] = {}  # by the shapes of the parameters
        self._checked: tuple[Any, _Programs] | None = None  # the layout of the last state, and its programs

    @short_traceback
    def init(self, params: Any, model_state: Any = None) -> ShardedState:
        """The state before the first step, computed directly in slices.

        Args:
          params: float parameters, or a function without arguments that returns them, such as
            ``lambda: model.init(key, x)["params"]``. The function is compiled so that each device computes only its own
            slices, so the model may be too large for one device. Arrays are copied; steps do not change them.
          model_state: model state of the loss function, or a function that returns it.

        Returns:
          A :class:`ShardedState` of arrays on the mesh.

        Raises:
          ValueError: no parameters, parameters that are not float, or parameters on another mesh.
        """
        check_context_mesh(self.mesh, "step.init")
        if is_maker(params):
            make_model_state = model_state if is_maker(model_state) else lambda: model_state
            return self._programs_for(params).lower_init(params, make_model_state).compile()()
        programs = self._programs_for(params)
        check_mesh(programs.layout, params, "params")
        if is_maker(model_state):
            model_state = jax.jit(model_state)()
        params = jax.device_put(params, programs.layout.params)
        return programs.init(params, jax.device_put(model_state, programs.layout.replicated))

    def abstract_state(self, params: Any, model_state: Any = None) -> ShardedState:
        """The state as shapes, dtypes and shardings: the target of ``restore`` of a checkpoint.

        A checkpoint contains whole arrays, so it can be restored under another strategy or number of devices.

        Args:
          params: as for :meth:`init`, or ``jax.ShapeDtypeStruct``.
          model_state: as for :meth:`init`, or ``jax.ShapeDtypeStruct``.

        Returns:
          A :class:`ShardedState` of ``jax.ShapeDtypeStruct``.

        Example:
          >>> import tempfile, jax, jax.numpy as jnp, optax
          >>> import orbax.checkpoint as ocp
          >>> from jaxche.sharding import FullShard, NoShard, sharded_step
          >>> loss_fn, params = lambda p, x: jnp.mean((x * p) ** 2), jnp.arange(8.0)
          >>> saved = sharded_step(loss_fn, optax.adam(0.1), FullShard(), FullShard().mesh(jax.devices()[:4]))
          >>> other = sharded_step(loss_fn, optax.adam(0.1), NoShard(), NoShard().mesh(jax.devices()[:2]))
          >>> with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
          ...     checkpointer.save(f"{folder}/state", saved.init(params))
          ...     checkpointer.wait_until_finished()
          ...     state = checkpointer.restore(f"{folder}/state", other.abstract_state(params))
          >>> state.params.tolist(), state.params.sharding.mesh.size
          ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 2)
        """
        return self._programs_for(params).abstract_state(_shapes(model_state))

    def layout(self, params: Any) -> Layout:
        """The layout of parameters, gradients and optimizer state.

        Args:
          params: as for :meth:`init`, or ``jax.ShapeDtypeStruct``.
        """
        return self._programs_for(params).layout

    @short_traceback
    def explain(self, params: Any, batch: Any, model_state: Any = None) -> Explanation:
        """The cost of a step for each device: bytes stored, bytes sent, and the parameters that stay whole and why.

        The step is compiled, not run, so nothing is allocated. Temporaries of XLA differ between kinds of devices;
        those of fake CPU devices are an estimate for others.

        Args:
          params: as for :meth:`init`, or ``jax.ShapeDtypeStruct``.
          batch: a batch, or its ``jax.ShapeDtypeStruct``.
          model_state: as for :meth:`init`, or ``jax.ShapeDtypeStruct``.

        Returns:
          An :class:`Explanation`; print it.

        Raises:
          ValueError: a batch whose rows the devices do not divide.

        Example:
          >>> import jax, jax.numpy as jnp, optax
          >>> from jaxche.sharding import FullShard, sharded_step
          >>> strategy = FullShard()
          >>> mesh = strategy.mesh(jax.devices()[:4])
          >>> step = sharded_step(lambda p, x: jnp.mean((x @ p) ** 2), optax.adam(0.1), strategy, mesh)
          >>> costs = step.explain(jax.ShapeDtypeStruct((64, 16), jnp.float32), jnp.zeros((8, 64)))
          >>> print(costs)
          FullShard() on 4 devices: shard 4
                                           whole  a device  share
          parameters                     4.0 KiB   1.0 KiB  0.250
          ...
          >>> costs.per_device["opt_state"], costs.theory
          (2052, 9216.0)
        """
        check_context_mesh(self.mesh, "step.explain")
        programs = self._programs_for(params)
        check_batch(programs.layout, batch, self._accumulate)
        state, batch = programs.abstract_state(_shapes(model_state)), _shapes(batch)
        compiled = programs.step.lower(state, batch).compile()
        return explain(programs.layout, compiled, state, batch, self._accumulate, self._compute_dtype)

    @short_traceback
    def __call__(self, state: ShardedState, batch: Any) -> tuple[ShardedState, dict[str, Any]]:
        """Dispatch one step, without waiting for it.

        Args:
          state: from :meth:`init` or the previous step; its buffers are donated.
          batch: pytree of arrays with a common leading axis that the devices (times ``accumulate``) divide: NumPy
            arrays of the whole batch, or global arrays as ``jax.make_array_from_process_local_data`` makes them.

        Returns:
          ``(state, metrics)``; ``metrics["loss"]`` and the loss function's metrics are means over the batch. A metric
          of the loss function that is called ``loss`` is not among them.

        Raises:
          ValueError: a batch whose rows the devices do not divide, a state of another optimizer, mesh or layout, or one
            that was given to an earlier step.
        """
        if not isinstance(state, ShardedState):
            raise ValueError(
                f"state is {brief(state)}, not the state of a sharded step; write state = step.init(params), then "
                "state, metrics = step(state, batch)"
            )
        check_context_mesh(self.mesh, "step")
        # A program on several devices that is given deleted buffers ends the process.
        check_not_deleted(state, "state", "write state, metrics = step(state, batch)")
        leaves, treedef = jax.tree.flatten(state)
        laid_out = treedef, [(getattr(x, "shape", None), getattr(x, "sharding", None)) for x in leaves]
        if self._checked is None or self._checked[0] != laid_out:
            if any(isinstance(x, Tracer) for x in leaves):
                raise ValueError(
                    "state is traced: a sharded step is a compiled program of its own, which jax.jit and jax.lax.scan "
                    "cannot contain; write for batch in data: state, metrics = step(state, batch), which does not wait"
                )
            programs = self._programs_for(state.params)
            check_state(programs.layout, state, programs.abstract_state(_shapes(state.model_state)))
            self._checked = laid_out, programs
        programs = self._checked[1]
        check_batch(programs.layout, batch, self._accumulate)
        return programs.step(state, jax.device_put(batch, programs.layout.batch))

    def _programs_for(self, params: Any) -> _Programs:
        shapes = _shapes(check_params(params, "step.init"))
        leaves, treedef = jax.tree.flatten(shapes)
        key = treedef, tuple((x.shape, x.dtype) for x in leaves)
        if key not in self._programs:
            layout = Layout(self.strategy, self.mesh, shapes)
            self._programs[key] = _Programs(
                layout, self._loss, self._tx, self._accumulate, self._compute_dtype, self._seed
            )
        return self._programs[key]


@short_traceback
def sharded_step(
    loss_fn: Callable[..., Any],
    tx: Any,
    strategy: ShardingStrategy,
    mesh: Mesh | None = None,
    *,
    accumulate: int = 1,
    compute_dtype: Any = None,
    seed: int = 0,
) -> ShardedStep:
    """A train step whose parameters, gradients and optimizer state are sharded by a strategy.

    Under every strategy the result is that of one device on the whole batch, if the loss is a mean over its rows. Batch
    normalisation, and a loss that compares rows, see the rows of one device.

    Args:
      loss_fn: ``loss_fn(params, batch)`` returns the mean loss over the batch, or ``(loss, metrics)``. If it has an
        argument ``rng``, it gets a key, different on every device and micro-batch. If it has an argument
        ``model_state``, it returns ``(loss, (metrics, new_model_state))``. A loss or metric over tokens is a
        :class:`~jaxche.Weighted`.
      tx: any ``optax.GradientTransformation``. Global norms are correct: clip with
        ``optax.chain(optax.clip_by_global_norm(1.0), ...)``.
      strategy: ``FullShard()``, ``ShardGradOp()``, ``NoShard()``, ``HybridShard(n)`` or ``HybridShardGradOp(n)``.
      mesh: from ``strategy.mesh(devices)``; default: a mesh of all devices.
      accumulate: number of micro-batches of a batch, computed one after the other; gradients are averaged, and each
        micro-batch gets the model state that the one before it returned.
      compute_dtype: dtype in which ``loss_fn`` gets real float parameters and arrays of the batch, e.g.
        ``jnp.bfloat16``; parameters, sums of gradients and the optimizer state keep their own.
      seed: seed of ``rng=``.

    Returns:
      A :class:`ShardedStep`.

    Raises:
      ValueError: an invalid argument; the message has its value.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax
      >>> from jaxche.sharding import FullShard, sharded_step
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> strategy = FullShard()
      >>> step = sharded_step(loss_fn, optax.adam(0.1), strategy, strategy.mesh(jax.devices()[:4]))
      >>> state = step.init(lambda: {"w": jax.random.normal(jax.random.key(0), (8, 2))})
      >>> state.params["w"].shape, state.params["w"].addressable_shards[0].data.shape
      ((8, 2), (2, 2))
      >>> batch = {"x": np.ones((4, 8), np.float32), "y": np.zeros((4, 2), np.float32)}
      >>> for _ in range(3):
      ...     state, metrics = step(state, batch)
      >>> int(state.index), sorted(metrics)
      (3, ['loss'])
    """
    return ShardedStep(loss_fn, tx, strategy, mesh, accumulate, compute_dtype, seed)


class _Programs:
    """The compiled programs of a step for one tree of parameters: ``init`` and ``step``."""

    def __init__(self, layout: Layout, loss: Loss, tx: Any, accumulate: int, compute_dtype: Any, seed: int):
        self.layout, self._tx, self._seed = layout, tx, seed
        check_update(tx, layout.shapes)
        self._value_and_grad = value_and_grad(loss, layout, accumulate=accumulate, compute_dtype=compute_dtype)
        whole = layout.replicated
        self.shardings = ShardedState(layout.params, layout.opt_state(tx), whole, whole)
        # Copies: jit returns unchanged inputs as the same buffers, which a step then donates.
        self.init = jax.jit(
            lambda params, model_state: self._init(*jax.tree.map(jnp.copy, (params, model_state))),
            out_shardings=self.shardings,
        )
        self.step = jax.jit(
            self._step,
            in_shardings=(self.shardings, layout.batch),
            out_shardings=(self.shardings, whole),
            donate_argnums=0,
            compiler_options=layout.compiler_options,
        )

    def lower_init(self, params: Callable[[], Any], model_state: Callable[[], Any]) -> Any:
        """The lowered program that computes the first state from functions without arguments."""

        def make() -> ShardedState:
            return self._init(lax.with_sharding_constraint(params(), self.layout.params), model_state())

        return jax.jit(make, out_shardings=self.shardings).lower()

    def abstract_state(self, model_state: Any) -> ShardedState:
        """The state as shapes with shardings."""
        state = jax.eval_shape(self._init, self.layout.shapes, model_state)
        shardings = self.shardings._replace(model_state=jax.tree.map(lambda _: self.layout.replicated, model_state))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)

    def _init(self, params: Any, model_state: Any) -> ShardedState:
        # Steps return no weakly typed arrays, such as those of Python numbers, and would be compiled again for them.
        params, model_state = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), (params, model_state))
        return ShardedState(params, self._tx.init(params), model_state, jnp.zeros((), jnp.int32))

    def _step(self, state: ShardedState, batch: Any) -> tuple[ShardedState, dict[str, Any]]:
        rng = jax.random.fold_in(jax.random.key(self._seed), state.index)
        (loss, (metrics, model_state)), grads = self._value_and_grad(state.params, state.model_state, batch, rng)
        means = {name: mean_of(value) for name, value in (metrics | {"loss": loss}).items()}
        params, opt_state = sharded_update(
            self._tx, self.layout, grads, state.opt_state, state.params, value=means["loss"]
        )
        return ShardedState(params, opt_state, model_state, state.index + 1), means


def _shapes(tree: Any) -> Any:
    return jax.eval_shape(tree) if is_maker(tree) else jax.eval_shape(lambda x: x, tree)
