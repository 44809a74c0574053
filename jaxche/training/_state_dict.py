"""The state dict of a run: arrays and JSON for checkpoints and admitted processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.averaging import is_float, sum_dtype
from jaxche.cadence import Choice, DivergenceCorrection, ElChe, RowShares, WireChoice
from jaxche.data import StreamPosition, from_json, to_json
from jaxche.replicas import LocalState, ReplicaMesh, are_plateaus, are_subspaces
from jaxche.training._state import TrainerState

# Fields of the cadence that the trainer sets. The others are measured.
_CADENCE_SETTINGS = (
    "overhead_target",
    "max_anchor",
    "max_batch_diff",
    "tuner",
    "min_anchor",
    "overlap",
    "half_life",
)
# Fields of the state that are JSON.
_FIELDS = (
    "round",
    "epoch",
    "cursor",
    "examples",
    "pending_batches",
    "sync_ms",
    "merge_ms",
    "exchange_ms",
    "accumulated",
    "clock_ms",
    "clock_merge_ms",
    "steps",
    "ema_examples",
    "group_merges",
)


class StateDict:
    """Converts the state of all replicas to named trees and back; the trees in ``own`` differ between replicas.

    A residual belongs to its replica: where the replicas are not those that were saved, each keeps its own, zero.
    """

    def __init__(
        self, replica_mesh: ReplicaMesh, own: Sequence[str], world_size: int, local_states: Sequence[LocalState]
    ):
        self._replica_mesh, self._own, self._world_size, self._locals = replica_mesh, own, world_size, local_states

    def trees(self) -> dict[str, Any]:
        """The named trees: ``[R, ...]`` if they differ between replicas, else one row."""
        views = self._replica_mesh.stack([_present(local) for local in self._locals])
        return {name: x if name in self._own else self._replica_mesh.unreplicate(name, x) for name, x in views.items()}

    def pooled(self) -> dict[str, Any]:
        """The trees of a replica that is admitted; :meth:`load` takes them with ``rows={}``."""
        trees = {name: tree for name, tree in self.trees().items() if name != "residual"}
        return {name: _pooled(name, x) if name in self._own else x for name, x in trees.items()}

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows of the ``[R, ...]`` trees."""
        return {name: self._world_size for name in self._own if name in _present(self._locals[0])}

    def abstract_trees(self, rows: dict[str, int]) -> dict[str, Any]:
        """Shapes and shardings to restore a checkpoint whose trees have these numbers of rows."""
        return {
            name: self._replica_mesh.abstract_tree(name, tree, rows.get(name), self._keeps(name, rows))
            for name, tree in _present(self._locals[0]).items()
            if name != "residual" or self._keeps(name, rows)
        }

    def load(self, saved: dict[str, Any], rows: dict[str, int]) -> tuple[LocalState, ...]:
        """The replicas of this process with the saved trees.

        With another number of replicas each gets the mean of the saved rows: of floats and of the counts of moments.
        Of other values it gets the first row.
        """
        like, views = _present(self._locals[0]), {}
        for name, tree in saved.items():
            if not self._keeps(name, rows):
                one = _pooled(name, tree) if name in rows else tree
                tree = self._replica_mesh.replicate(name, one, like[name])
            views[name] = tree
        parts = self._replica_mesh.unstack(views)
        return tuple(local._replace(**part) for local, part in zip(self._locals, parts, strict=True))

    def _keeps(self, name: str, rows: dict[str, int]) -> bool:
        """Whether each replica gets the saved row of its own rank."""
        return name in self._own and rows.get(name) == self._world_size


def metadata(state: TrainerState) -> dict[str, Any]:
    """The fields of a state that are not arrays, as JSON."""
    return {name: getattr(state, name) for name in _FIELDS} | {
        "che": state.che and state.che.to_dict(),
        "correction": asdict(state.correction),
        "row_shares": asdict(state.row_shares),
        "choice": state.choice and state.choice.to_dict(),
        "wire": state.wire and asdict(state.wire),
        "stream": state.stream and state.stream._asdict() | {"states": [to_json(one) for one in state.stream.states]},
    }


def with_metadata(state: TrainerState, saved: Mapping[str, Any]) -> TrainerState:
    """The state with saved :func:`metadata`, under its own settings of the cadence.

    Measurements of another number of replicas are discarded.
    """
    che, correction = state.che, state.correction
    if state.wire is not None and saved["wire"]:
        state = replace(state, wire=WireChoice(**saved["wire"]))
    if che is not None and saved["che"] is not None:
        if saved["che"]["world_size"] == che.world_size:
            state = replace(state, row_shares=RowShares.from_dict(saved["row_shares"]))
            if saved["choice"]:
                state = replace(state, choice=Choice.from_dict(saved["choice"]))
            measured = {name: _tuples(value) for name, value in saved["che"].items()}
            own = {name: getattr(che, name) for name in _CADENCE_SETTINGS}
            che = ElChe.from_dict(measured | own).capped(che.max_anchor)
        else:
            anchor = min(max(saved["che"]["anchor"], che.min_anchor), che.max_anchor)
            che = replace(che, anchor=anchor, batch_counts=())
        correction = DivergenceCorrection.from_dict(saved["correction"])
    if stream := saved["stream"]:
        states = tuple(map(from_json, stream["states"]))
        state = replace(state, stream=StreamPosition(_tuples(stream["taken"]), _tuples(stream["ended"]), states))
    fields = {name: _tuples(saved[name]) for name in _FIELDS if name in saved}
    return replace(state, che=che, correction=correction, **fields)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _present(local: LocalState) -> dict[str, Any]:
    return {name: tree for name, tree in local._asdict().items() if jax.tree.leaves(tree)}


def _pooled(name: str, rows: Any) -> Any:
    """One row of the ``[n, ...]`` arrays of this name, which are whole along ``n`` everywhere."""
    # What belongs together is that of one replica.
    of_one = jax.tree.structure(rows).unflatten(map(max, are_plateaus(rows), are_subspaces(rows)))

    def pooled(x: Any, of_one: bool) -> Any:
        if of_one:
            return x[0]
        if is_float(x):
            return x.mean(0, dtype=sum_dtype(x.dtype)).astype(x.dtype)
        if name == "opt_state" and x.ndim == 1 and jnp.issubdtype(x.dtype, jnp.signedinteger):
            return x[0] + jnp.round((x - x[0]).mean()).astype(x.dtype)  # as old as the mean of the moments
        return x[0]

    shardings = jax.tree.map(lambda x: NamedSharding(x.sharding.mesh, P(*x.sharding.spec[1:])), rows)
    return jax.jit(lambda tree: jax.tree.map(pooled, tree, of_one), out_shardings=shardings)(rows)
