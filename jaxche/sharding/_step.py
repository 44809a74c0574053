"""The sharded train step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxche.sharding._checks import (
    refuse_bad_arguments,
    refuse_bad_params,
    refuse_other_mesh,
    refuse_other_state,
    refuse_uneven_batch,
)
from jaxche.sharding._explain import Explanation, explain
from jaxche.sharding._layout import Layout
from jaxche.sharding._loss import as_loss
from jaxche.sharding._program import Program, ShardedState
from jaxche.sharding._strategy import ShardingStrategy


class ShardedStep:
    """A train step on a mesh; made by :func:`sharded_step`.

    Attributes:
      strategy: the strategy.
      mesh: the mesh.

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
        refuse_bad_arguments(tx, strategy, accumulate, compute_dtype)
        self.strategy, self.mesh = strategy, strategy.mesh() if mesh is None else mesh
        Layout(self.strategy, self.mesh, ())  # refuses a mesh of other axes now, not at the first step
        self._loss, self._tx, self._seed = as_loss(loss_fn), tx, seed
        self._accumulate, self._compute_dtype = accumulate, compute_dtype
        self._programs: dict[Any, Program] = {}
        self._latest: Program | None = None

    def init(self, params: Any, model_state: Any = None) -> ShardedState:
        """The state before the first step, made directly in slices.

        Args:
          params: float parameters, or a function without arguments that returns them, such as
            ``lambda: model.init(key, x)["params"]``. The function is compiled so that each device computes its own
            slices: a model too large for one device can start. Arrays are copied: steps do not touch them.
          model_state: what the loss function keeps besides, or a function that returns it.

        Returns:
          A :class:`ShardedState` of arrays on the mesh.

        Raises:
          ValueError: no parameters, some that are not float, or some laid out on another mesh.
        """
        if callable(params):
            return self.lower_init(params, model_state).compile()()
        program = self._program(params)
        refuse_other_mesh(program.layout, params, "params")
        if callable(model_state):
            model_state = jax.jit(model_state)()
        params = jax.device_put(params, program.layout.params)
        return program.begin(params, jax.device_put(model_state, program.layout.replicated))

    def lower_init(self, params: Callable[[], Any], model_state: Any = None) -> Any:
        """The program of :meth:`init` for a function, not yet compiled; its ``compile()`` has a ``memory_analysis()``.

        Args:
          params: a function without arguments that returns the parameters.
          model_state: what the loss function keeps besides, or a function that returns it.

        Returns:
          A ``jax.stages.Lowered``.
        """
        return self._program(params).lower_init(params, model_state if callable(model_state) else lambda: model_state)

    def abstract_state(self, params: Any, model_state: Any = None) -> ShardedState:
        """The state as shapes, dtypes and shardings: what a checkpoint is restored into.

        A checkpoint holds whole arrays: written under one strategy and number of devices, it opens under another.

        Args:
          params: as for :meth:`init`, or ``jax.ShapeDtypeStruct``.
          model_state: likewise.

        Returns:
          A :class:`ShardedState` of ``jax.ShapeDtypeStruct``.

        Example:
          >>> import tempfile, jax, jax.numpy as jnp, optax
          >>> import orbax.checkpoint as ocp
          >>> from jaxche.sharding import FullShard, NoShard, sharded_step
          >>> loss_fn, params = lambda p, x: jnp.mean((x * p) ** 2), jnp.arange(8.0)
          >>> ours = sharded_step(loss_fn, optax.adam(0.1), FullShard(), FullShard().mesh(jax.devices()[:4]))
          >>> theirs = sharded_step(loss_fn, optax.adam(0.1), NoShard(), NoShard().mesh(jax.devices()[:2]))
          >>> with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
          ...     checkpointer.save(f"{folder}/state", ours.init(params))
          ...     checkpointer.wait_until_finished()
          ...     state = checkpointer.restore(f"{folder}/state", theirs.abstract_state(params))
          >>> state.params.tolist(), state.params.sharding.mesh.size
          ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 2)
        """
        return self._program(params).abstract(_shapes(model_state))

    def layout(self, params: Any) -> Layout:
        """What was decided for each parameter.

        Args:
          params: as for :meth:`init`, or ``jax.ShapeDtypeStruct``.
        """
        return self._program(params).layout

    def explain(self, params: Any, batch: Any, model_state: Any = None) -> Explanation:
        """What a step costs each device: bytes kept, bytes sent, and which parameters stay whole and why.

        The step is compiled, not run: nothing is allocated. What XLA keeps besides differs between kinds of devices;
        on fake CPU devices it is an estimate of what others will need.

        Args:
          params: as for :meth:`init`, or ``jax.ShapeDtypeStruct``.
          batch: a batch, or its ``jax.ShapeDtypeStruct``.
          model_state: as for :meth:`init`, or ``jax.ShapeDtypeStruct``.

        Returns:
          An :class:`Explanation`; print it.

        Raises:
          ValueError: a batch that does not divide.

        Example:
          >>> import jax, jax.numpy as jnp, optax
          >>> from jaxche.sharding import FullShard, sharded_step
          >>> strategy = FullShard()
          >>> mesh = strategy.mesh(jax.devices()[:4])
          >>> step = sharded_step(lambda p, x: jnp.mean((x @ p) ** 2), optax.adam(0.1), strategy, mesh)
          >>> costs = step.explain(jax.ShapeDtypeStruct((64, 16), jnp.float32), jnp.zeros((8, 64)))
          >>> print(costs)
          FullShard() on 4 devices: shard 4
                                                 whole    a device    share
          parameters                           4.0 KiB     1.0 KiB    0.250
          ...
          >>> costs.per_device["opt_state"], costs.theory
          (2052, 9216.0)
        """
        program = self._program(params)
        refuse_uneven_batch(program.layout, batch, self._accumulate)
        return explain(program, _shapes(batch), _shapes(model_state), self._accumulate, self._compute_dtype)

    def __call__(self, state: ShardedState, batch: Any) -> tuple[ShardedState, dict[str, Any]]:
        """One step; does not wait for it.

        Args:
          state: from :meth:`init` or the step before; its buffers are given away.
          batch: pytree of arrays with a common leading axis that the devices (times ``accumulate``) divide: NumPy
            arrays of the whole batch, or global arrays as ``jax.make_array_from_process_local_data`` makes them.

        Returns:
          ``(state, metrics)``; ``metrics["loss"]`` and the loss function's metrics are means over the batch.

        Raises:
          ValueError: a batch that does not divide, or a state of another optimizer, mesh or layout.
        """
        program = self._latest
        if program is None or not program.accepts(state):
            program = self._program(state.params)
            refuse_other_state(program.layout, state, program.abstract(_shapes(state.model_state)))
            program.accept(state)
            self._latest = program
        refuse_uneven_batch(program.layout, batch, self._accumulate)
        return program.step(state, jax.device_put(batch, program.layout.batch))

    def _program(self, params: Any) -> Program:
        shapes = _shapes(params)
        leaves, treedef = jax.tree.flatten(shapes)
        key = treedef, tuple((x.shape, x.dtype) for x in leaves)
        if key not in self._programs:
            refuse_bad_params(shapes)
            layout = Layout(self.strategy, self.mesh, shapes)
            self._programs[key] = Program(
                layout, self._loss, self._tx, self._accumulate, self._compute_dtype, self._seed
            )
        return self._programs[key]


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
    """A train step whose parameters, gradients and optimizer state are sharded as a strategy says.

    The result is that of one device on the whole batch, under every strategy.

    Args:
      loss_fn: ``loss_fn(params, batch)`` returning the mean loss over the batch, or ``(loss, metrics)``; gets ``rng=``
        (a key of its own on every device and micro-batch) and ``model_state=`` if it names them, and with the latter
        returns ``(loss, (metrics, new_model_state))``.
      tx: any ``optax.GradientTransformation``. Global norms are right as they are: clip with
        ``optax.chain(optax.clip_by_global_norm(1.0), ...)``.
      strategy: ``FullShard()``, ``ShardGradOp()``, ``NoShard()``, ``HybridShard(n)`` or ``HybridShardGradOp(n)``.
      mesh: from ``strategy.mesh(devices)``; default: of all devices.
      accumulate: micro-batches a batch is cut into, one after the other; gradients are averaged.
      compute_dtype: dtype in which ``loss_fn`` sees float parameters and float arrays of the batch, e.g.
        ``jnp.bfloat16``; parameters, sums of gradients and the optimizer keep theirs.
      seed: of ``rng=``.

    Returns:
      A :class:`ShardedStep`.

    Raises:
      ValueError: an argument that cannot be, named with its value.

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


def _shapes(tree: Any) -> Any:
    return jax.eval_shape(tree) if callable(tree) else jax.eval_shape(lambda x: x, tree)
