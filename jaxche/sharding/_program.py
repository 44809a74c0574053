"""The compiled programs of a sharded step for one tree of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxche.sharding._gradient import value_and_grad
from jaxche.sharding._layout import Layout
from jaxche.sharding._loss import Loss
from jaxche.sharding._update import sharded_update


class ShardedState(NamedTuple):
    """What a sharded step carries: a pytree of global arrays on the mesh.

    Attributes:
      params: parameters, laid out by the strategy.
      opt_state: state of the optimizer; what mirrors sliced gradients is sliced as they are.
      model_state: what the loss function returns besides, whole on every device; None if it keeps nothing.
      index: steps taken so far, ``int32[]``; it numbers the keys given as ``rng=``.

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


class Program:
    """Programs for one tree of parameters.

    Args:
      layout: where everything lives.
      loss: the loss in its one form.
      tx: the optimizer.
      accumulate: micro-batches a batch.
      compute_dtype: dtype in which the loss function computes, or None.
      seed: of ``rng=``.

    Attributes:
      layout: as given.
      shardings: of a :class:`ShardedState`; one for the whole model state.
      begin: ``begin(params, model_state)``, compiled: the first state.
      step: ``step(state, batch)``, compiled: the next state and the metrics.
    """

    def __init__(self, layout: Layout, loss: Loss, tx: Any, accumulate: int, compute_dtype: Any, seed: int):
        self.layout, self._tx, self._seed = layout, tx, seed
        self._value_and_grad = value_and_grad(loss, layout, accumulate=accumulate, compute_dtype=compute_dtype)
        whole = layout.replicated
        self.shardings = ShardedState(layout.params, layout.opt_state(tx), whole, whole)
        # Copies: jit hands unchanged inputs through as the same buffers, which a step then gives away.
        self.begin = jax.jit(
            lambda params, model_state: self._begin(*jax.tree.map(jnp.copy, (params, model_state))),
            out_shardings=self.shardings,
        )
        self.step = jax.jit(
            self._step,
            in_shardings=(self.shardings, layout.batch),
            out_shardings=(self.shardings, whole),
            donate_argnums=0,
            compiler_options=layout.compiler_options,
        )
        self._accepted: tuple[Any, list[Any]] | None = None

    def lower_init(self, params: Callable[[], Any], model_state: Callable[[], Any]) -> Any:
        """The program that makes the first state from nothing, lowered."""

        def make() -> ShardedState:
            return self._begin(lax.with_sharding_constraint(params(), self.layout.params), model_state())

        return jax.jit(make, out_shardings=self.shardings).lower()

    def abstract(self, model_state: Any) -> ShardedState:
        """The state as shapes with shardings."""
        state = jax.eval_shape(self._begin, self.layout.shapes, model_state)
        places = self.shardings._replace(model_state=jax.tree.map(lambda _: self.layout.replicated, model_state))
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places)

    def accept(self, state: ShardedState) -> None:
        """Remember how a state that was found right is laid out."""
        leaves, treedef = jax.tree.flatten(state)
        self._accepted = treedef, [(x.shape, x.sharding) for x in leaves]

    def accepts(self, state: ShardedState) -> bool:
        """Whether a state is laid out as one that was accepted: all that a step has time to look at."""
        if self._accepted is None:
            return False
        leaves, treedef = jax.tree.flatten(state)
        known, pairs = self._accepted
        return treedef == known and all(
            x.shape == shape and getattr(x, "sharding", None) == sharding
            for x, (shape, sharding) in zip(leaves, pairs, strict=True)
        )

    def _begin(self, params: Any, model_state: Any) -> ShardedState:
        return ShardedState(params, self._tx.init(params), model_state, jnp.zeros((), jnp.int32))

    def _step(self, state: ShardedState, batch: Any) -> tuple[ShardedState, dict[str, Any]]:
        rng = jax.random.fold_in(jax.random.key(self._seed), state.index)
        value, grads = self._value_and_grad(state.params, state.model_state, batch, rng)
        loss, (metrics, model_state) = value
        params, opt_state = sharded_update(self._tx, self.layout, grads, state.opt_state, state.params, value=loss)
        return ShardedState(params, opt_state, model_state, state.index + 1), metrics | {"loss": loss}
