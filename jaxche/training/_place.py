"""Where a replica lives: the contract, and its simplest form, one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jaxche.sharding import Device, devices

# ``begin(params, model_state, opt_state)`` makes what a replica keeps, under the names of its trees.
Begin: TypeAlias = Callable[[Any, Any, Any], dict[str, Any]]


class Home(Protocol):
    """What the clock needs to know of a replica's devices.

    Attributes:
      devices: all of them, in two axes.
    """

    devices: np.ndarray

    def put(self, batch: Any) -> Any:
        """A batch as the compiled step takes it."""
        ...


class Place(Home, Protocol):
    """What local programs and the merge need to know of a replica's devices.

    Trees of arrays have a leading axis of 1, the replica's row of the ``[R, ...]`` view; trees inside programs do not,
    unless they are called named trees.

    Attributes:
      devices: ``[copies, shards]``: what is sharded is cut along a row, and rows hold the same.
      compiler_options: of its programs.
      makes_pieces: whether parameters that a function makes are made where they belong, piece by piece.
    """

    compiler_options: Any
    makes_pieces: bool

    def laid_out(self, params: Any) -> Place:
        """This place, with the layout of parameters of these shapes decided."""
        ...

    def resized(self, width: int) -> Place:
        """The same devices as rows of ``width``."""
        ...

    def specs(self, name: str, tree: Any) -> Any:
        """How a named tree is cut: a PartitionSpec (without the replica axis) a leaf, or one for all."""
        ...

    def value_and_grad(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``(params, model_state, batch, rng) -> ((loss, (metrics, model_state)), grads)``, for use inside ``jit``."""
        ...

    def update(self, tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """One optimizer step inside ``jit``: ``(params, opt_state)``."""
        ...

    def constrain(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Keep named trees where :meth:`specs` says, inside ``jit``."""
        ...

    def start(self, begin: Begin, params: Any, model_state: Any, opt_state: Any) -> dict[str, Any]:
        """Named trees made here from parameters (a tree; for an island also a function that makes it) and states."""
        ...

    def move(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Named trees that lie on these devices in another way, laid out as :meth:`specs` says."""
        ...

    def assemble(self, name: str, tree: Any, pieces: Sequence[Any]) -> Any:
        """A named tree from its pieces, a sequence over this process's devices for each leaf of ``tree``."""
        ...


def is_local(place: Home) -> bool:
    """Whether some of its devices belong to this process."""
    return any(d.process_index == jax.process_index() for d in place.devices.flat)


def spans_processes(place: Home) -> bool:
    """Whether several processes drive it together."""
    return len({d.process_index for d in place.devices.flat}) > 1


def devices_by_process() -> dict[int, list[Device]]:
    """All devices, in order, by the number of the process that has them."""
    found: dict[int, list[Device]] = {}
    for device in sorted(devices(), key=lambda d: d.process_index):
        found.setdefault(device.process_index, []).append(device)
    return found


def first(tree: Any) -> Any:
    """Drop the leading replica axis inside a compiled program (no copy there)."""
    return jax.tree.map(lambda x: x[0], tree)


def lift(tree: Any) -> Any:
    """Put the leading replica axis back."""
    return jax.tree.map(lambda x: x[None], tree)


def without_replica_axis(tree: Any) -> Any:
    """Shapes and dtypes of one replica's arrays, without their leading axis of 1."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


class OneDevice:
    """A replica on one device: programs as they are, arrays where they are."""

    def __init__(self, device: Device):
        self._device, self.compiler_options, self.makes_pieces = device, None, False
        self.devices = np.array([[device]], dtype=object)

    def laid_out(self, params: Any) -> OneDevice:
        return self

    def resized(self, width: int) -> OneDevice:
        return self

    def specs(self, name: str, tree: Any) -> Any:
        return P()

    def value_and_grad(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(call, has_aux=True)

    def update(self, tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    def constrain(self, trees: dict[str, Any]) -> dict[str, Any]:
        return trees

    def start(self, begin: Begin, params: Any, model_state: Any, opt_state: Any) -> dict[str, Any]:
        host = jax.tree.map(jnp.asarray, (params, model_state, opt_state))
        return jax.jit(begin)(*jax.device_put(host, self._device))

    def move(self, trees: dict[str, Any]) -> dict[str, Any]:
        return trees

    def assemble(self, name: str, tree: Any, pieces: Sequence[Any]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), [piece for (piece,) in pieces])

    def put(self, batch: Any) -> Any:
        # NumPy arrays travel with the call itself, several times faster than by device_put.
        numpy = all(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch))
        return batch if numpy else jax.device_put(batch, self._device)
