"""The trees of a state as they are saved, and as one who joins is given them: each replica's own, and the rest once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.averaging import is_float, sum_dtype
from jaxche.training._programs import Local
from jaxche.training._replica_mesh import Meeting


class Packing:
    """What is saved of these replicas' state, and the way back.

    Args:
      meeting: of all replicas.
      own: names of the trees of which each replica has its own; all others are equal after a merge.
      world_size: how many replicas there are.
      locals_: those of this process.
    """

    def __init__(self, meeting: Meeting, own: Sequence[str], world_size: int, locals_: Sequence[Local]):
        self._meeting, self._own, self._world_size, self._locals = meeting, own, world_size, locals_

    def pack(self) -> dict[str, Any]:
        """The named trees to save: what each replica has its own of as ``[R, ...]``, the rest once."""
        views = self._meeting.stack([_present(local) for local in self._locals])
        return {name: x if name in self._own else self._meeting.once(name, x) for name, x in views.items()}

    def handed_over(self) -> dict[str, Any]:
        """What a replica that joins begins with, as :meth:`unpack` takes it where no rows were saved."""
        return {name: _pooled(name, x) if name in self._own else x for name, x in self.pack().items()}

    @property
    def rows(self) -> dict[str, int]:
        """How many rows :meth:`pack` has of the trees that are not there once."""
        return {name: self._world_size for name in self._own if name in _present(self._locals[0])}

    def saved_as(self, rows: dict[str, int]) -> dict[str, Any]:
        """What to read from a checkpoint in which these trees have so many rows, and the others are there once."""
        return {
            name: self._meeting.saved_as(name, tree, rows.get(name), self._keeps(name, rows))
            for name, tree in _present(self._locals[0]).items()
        }

    def unpack(self, saved: dict[str, Any], rows: dict[str, int]) -> tuple[Local, ...]:
        """The state of which :meth:`pack` made ``saved``, in the place of these replicas'.

        Where there are not as many replicas as were saved, each gets the mean of the saved rows: of moments and of the
        counts that say how old they are. Of what else is not a float it gets the first.
        """
        like, views = _present(self._locals[0]), {}
        for name, tree in saved.items():
            if not self._keeps(name, rows):
                one = _pooled(name, tree) if name in rows else tree
                tree = self._meeting.everywhere(name, one, like[name])
            views[name] = tree
        parts = self._meeting.unstack(views)
        return tuple(local._replace(**part) for local, part in zip(self._locals, parts, strict=True))

    def _keeps(self, name: str, rows: dict[str, int]) -> bool:
        """Whether each replica goes on with a saved row of its own."""
        return name in self._own and rows.get(name) == self._world_size


def _present(local: Local) -> dict[str, Any]:
    return {name: tree for name, tree in local._asdict().items() if jax.tree.leaves(tree)}


def _pooled(name: str, rows: Any) -> Any:
    """One row of the ``[n, ...]`` arrays of this name, which are whole along ``n`` everywhere."""

    def pooled(x: Any) -> Any:
        if is_float(x):
            return x.mean(0, dtype=sum_dtype(x.dtype)).astype(x.dtype)
        if name == "opt_state" and x.ndim == 1 and jnp.issubdtype(x.dtype, jnp.signedinteger):
            return x[0] + jnp.round((x - x[0]).mean()).astype(x.dtype)  # as old as the mean of the moments
        return x[0]

    shardings = jax.tree.map(lambda x: NamedSharding(x.sharding.mesh, P(*x.sharding.spec[1:])), rows)
    return jax.jit(lambda tree: jax.tree.map(pooled, tree), out_shardings=shardings)(rows)
