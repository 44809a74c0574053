"""The trainer state: all replicas between two rounds, and the position in the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jaxche.cadence import Choice, DivergenceCorrection, ElChe, RowShares, WireChoice
from jaxche.data import StreamPosition
from jaxche.replicas import LocalState, MergeInFlight, Unsent
from jaxche.reports import Reached
from jaxche.scaling import ScaleLearningRateState


@dataclass(frozen=True, eq=False)
class TrainerState:
    """All replicas between two rounds. It is immutable: a round returns the next state, and this one stays valid.

    Arrays have no single truth value: states are equal if their fields are, and their replicas are the same objects.

    ``params``, ``opt_state`` and ``model_state`` are the pmapped-replica view: every leaf ``[R, ...]``, one row per
    replica, sharded ``P("replica")``, made without a copy on access. After a merge all rows of ``params`` are equal;
    the rows of ``opt_state`` may differ.

    Attributes:
      local_states: the replicas of this process.
      che: the cadence; None for a single replica.
      correction: divergence correction (policy ``async``).
      round: number of rounds done.
      epoch: epoch of the next batch.
      cursor: index of the next batch in its epoch. ``(epoch, cursor, pending_batches, seed)`` is the whole position in
        the data.
      examples: trained on so far, by all replicas.
      sync_ms: the time that the last merge added to its round, in this process.
      merge_ms: the duration of the last merge in this process; 0 while it is in flight.
      exchange_ms: with ``overlap=``, the duration of the exchange of measurements of the last round in this process.
      pending_batches: batches before the cursor that a replica skipped at the time limit:
        ``(epoch, start, stop)``. The next rounds train on them first.
      clock_ms: time of all rounds so far, waiting and merging included; equal in all processes.
      row_shares: the rows of a joined batch for each replica, and the times they follow from.
      choice: what ``policy="auto"`` does now, or None.
      wire: what ``wire="auto"`` does now, or None.
      stream: with a stream as data, the position in it within an epoch, else None.
      accumulated: batches whose averaged gradients an ``optax.MultiSteps`` has accumulated but not applied.
      steps: batches trained on so far, by all replicas.
      ema_examples: trained on when the moving average last took in the parameters.
      group_merges: with ``groups=``, the merges of the next round, of which the last one is of all replicas.
      opt_states_differ: whether replicas have optimizer states of their own, as with ``opt_state="local"``. The first
        round that averages gradients gives all of them the mean.
      clock_merge_ms: the part of ``clock_ms`` that stands for the last merge.
      in_flight: with ``overlap=``, the merge of the last round while it runs, else None. ``local_states`` are then the
        replicas before it; the views and :meth:`merged` wait for it.
      unsent: what the steps of the last round measured after its table was sent, or None; the next round reports it.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1))
      >>> state = trainer.init(jnp.zeros(2))
      >>> state.epoch, state.params.shape == (trainer.world_size, 2)
      (0, True)
    """

    local_states: tuple[LocalState, ...]
    che: ElChe | None
    correction: DivergenceCorrection
    round: int = 0
    epoch: int = 0
    cursor: int = 0
    examples: int = 0
    sync_ms: float = 0.0
    merge_ms: float = 0.0
    exchange_ms: float = 0.0
    pending_batches: tuple[tuple[int, int, int], ...] = ()
    accumulated: int = 0
    clock_ms: float = 0.0
    row_shares: RowShares = field(default_factory=RowShares)
    choice: Choice | None = None
    wire: WireChoice | None = None
    steps: int = 0
    ema_examples: int = 0
    clock_merge_ms: float = 0.0
    group_merges: int = 1
    stream: StreamPosition | None = None
    opt_states_differ: bool = False
    in_flight: MergeInFlight | None = field(default=None, repr=False, compare=False)
    unsent: Unsent | None = field(default=None, repr=False, compare=False)
    _view: Callable[[str, Any], Any] = field(default=lambda name, trees: trees, repr=False, compare=False)

    def __eq__(self, other: object) -> bool:
        return self._compared() == other._compared() if isinstance(other, TrainerState) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.round, self.epoch, self.cursor, self.examples))

    def _compared(self) -> tuple[Any, ...]:
        names = [one.name for one in fields(self) if one.compare and one.name != "local_states"]
        return (*map(id, self.local_states), *(getattr(self, name) for name in names))

    @property
    def reached(self) -> Reached:
        """Steps, examples, whole epochs and seconds so far, equal in all processes."""
        epochs = min([self.epoch, *(epoch for epoch, _, _ in self.pending_batches)])
        return Reached(self.steps, self.examples, epochs, self.clock_ms / 1e3)

    def merged(self) -> TrainerState:
        """This state after its merge, for which it waits if that is in flight.

        Raises:
          PeerLostError: the merge failed.
          FloatingPointError: it made a number NaN or infinite.
        """
        if self.in_flight is None:
            return self
        merged = self.in_flight.result()
        if not merged.report.finite:
            raise FloatingPointError(
                f"the merge of round {self.round - 1} made parameters NaN or infinite, and those of the replicas were "
                "finite; try a smaller step of outer="
            )
        # No step has hidden it: the next round reports it as a merge that was waited for. What was measured is left
        # out then, as in a run that is resumed from here.
        known_ms, unsent = self.in_flight.cost_ms or 0.0, self.unsent
        return replace(
            self,
            local_states=merged.local_states,
            in_flight=None,
            unsent=unsent if unsent and unsent.error else None,
            sync_ms=self.sync_ms + self.in_flight.duration_ms,
            merge_ms=self.in_flight.duration_ms,
            clock_ms=self.clock_ms + known_ms,
            clock_merge_ms=self.clock_merge_ms + known_ms,
        )

    def with_values(self, local_states: Sequence[LocalState], names: Sequence[str]) -> TrainerState:
        """This state with the trees of these names from other local states."""

        def value(name: str, old: LocalState, new: LocalState) -> Any:
            if name == "opt_state" and isinstance(old.opt_state, ScaleLearningRateState):
                return old.opt_state._replace(inner_state=new.opt_state.inner_state)  # the progress goes on
            return getattr(new, name)

        pairs = zip(self.local_states, local_states, strict=True)
        replaced = tuple(old._replace(**{name: value(name, old, new) for name in names}) for old, new in pairs)
        differ = self.opt_states_differ and "opt_state" not in names
        return replace(self, local_states=replaced, opt_states_differ=differ)

    @property
    def is_deleted(self) -> bool:
        """Whether a fit with ``donate=True`` has taken arrays of it."""
        return any(array.is_deleted() for local in self.local_states for array in local.arrays)

    def __copy__(self) -> TrainerState:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainerState:
        """This state with arrays of its own; a merge in flight, which nothing changes, is shared."""
        return replace(self, local_states=jax.tree.map(jnp.copy, self.local_states))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a TrainerState cannot be pickled: its arrays are on the devices of its trainer. To save a run write "
            "trainer.fit(state, data, checkpoints='runs/mine'), which also continues it; to pickle the parameters, "
            "pickle.dumps(jax.device_get(trainer.params(state)))"
        )

    @property
    def params(self) -> Any:
        return self._all_rows("params")

    @property
    def opt_state(self) -> Any:
        return self._all_rows("opt_state")

    @property
    def model_state(self) -> Any:
        return self._all_rows("model_state")

    @property
    def outer_state(self) -> Any:
        return self._all_rows("outer_state")

    def _all_rows(self, name: str) -> Any:
        return self._view(name, [getattr(local, name) for local in self.merged().local_states])

    def __repr__(self) -> str:
        count = sum(x.size for x in jax.tree.leaves(self.local_states[0].params))
        place = f"round={self.round}, epoch={self.epoch}, cursor={self.cursor}"
        pending = f", pending={sum(stop - start for _, start, stop in self.pending_batches)}"
        return (
            f"TrainerState({place}{pending if self.pending_batches else ''}, examples={self.examples:,}, "
            f"parameters={count:,}, local_replicas={len(self.local_states)})"
        )


class Stop(IntEnum):
    """The reason to stop after a round; the merge takes the maximum over ranks."""

    NO = 0
    ASKED = 1
    PREEMPTED = 2
