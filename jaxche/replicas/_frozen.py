"""Frozen arrays: a loss function that is a pytree holds them, and the compiled steps take them as inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxche.replicas._placement import Placement
from jaxche.sharding import Loss, as_loss


class FrozenArrays:
    """A loss function in one signature, and the arrays of its pytree: those of a ``jax.tree_util.Partial``.

    Called with ``(params, model_state, batch, rng)`` it is ``as_loss(loss_fn)``. Arrays in a closure become constants
    of each compiled program, which are copied into every one of them; inputs are not. ``outputs`` as for ``as_loss``.
    """

    def __init__(self, loss_fn: Callable[..., Any], outputs: bool = False):
        self._outputs = outputs
        self._loss: Loss = as_loss(loss_fn, outputs)
        self._leaves, self._treedef = jax.tree.flatten(loss_fn)
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, (jax.Array, np.ndarray))]
        self.arrays = tuple(self._leaves[i] for i in self._places)
        self._placed: dict[Any, tuple[Any, ...]] = {}

    def __call__(self, params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        return self._loss(params, model_state, batch, rng)

    def put(self, placement: Placement) -> tuple[Any, ...]:
        """The arrays on the devices of a replica, once for all its programs."""
        devices = tuple(placement.devices.flat)
        if devices not in self._placed:
            self._placed[devices] = placement.put_whole(self.arrays)
        return self._placed[devices]

    def with_arrays(self, params: Any, inputs: tuple[Sequence[Any], Any], batch: Any, rng: Any) -> Any:
        """The loss with other arrays in their places; ``inputs`` are those arrays and the model state."""
        arrays, model_state = inputs
        if not self._places:  # the given object, of which a pytree may not have everything
            return self._loss(params, model_state, batch, rng)
        leaves = list(self._leaves)
        for i, array in zip(self._places, arrays, strict=True):
            leaves[i] = array
        return as_loss(jax.tree.unflatten(self._treedef, leaves), self._outputs)(params, model_state, batch, rng)
