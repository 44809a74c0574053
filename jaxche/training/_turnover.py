"""A fit whose processes change between two rounds: some come, some die, and some were only taken for dead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxche.distributed import PeerLostError, TakenForDeadError, come_back, is_elastic
from jaxche.reports import History
from jaxche.training._elastic import go_on_without
from jaxche.training._join import admit, join
from jaxche.training._keeper import Keeper
from jaxche.training._state import ReplicaState

if TYPE_CHECKING:
    from jaxche.training._trainer import Trainer


def take_place(
    trainer: Trainer, state: ReplicaState, data: Any, size: int, keeper: Keeper | None
) -> tuple[ReplicaState, History]:
    """The state and record of the run that this process joins, in the place of one that died."""
    state, history = join(trainer, state, data, size)
    if keeper:
        keeper.reopen(state.round, others_died=False)
    return state, history


def let_in(trainer: Trainer, state: ReplicaState, history: History, keeper: Keeper | None) -> ReplicaState:
    """The state from which this process goes on together with those who waited for the end of the round."""
    state = admit(trainer, state, history, keeper)
    if keeper:
        keeper.reopen(state.round, others_died=False)
    return state


def recover(
    trainer: Trainer,
    state: ReplicaState,
    before: ReplicaState | None,
    error: PeerLostError,
    history: History,
    keeper: Keeper | None,
    data: Any,
    size: int,
) -> tuple[ReplicaState, History]:
    """The state and record from which the processes that are left go on, or this one after it was taken for dead.

    Args:
      trainer: from now on of these.
      state: this process's newest.
      before: the one before it, if there was one.
      error: how the loss showed.
      history: of the run so far.
      keeper: of its checkpoints, if any.
      data: what it trains on.
      size: its batches.

    Raises:
      PeerLostError: the run is not elastic.
    """
    if not is_elastic():
        raise error
    try:
        state = go_on_without(trainer, state, before, error)
        history = History([info for info in history if info.round < state.round], history.memory)
        if keeper:
            keeper.reopen(state.round)
        return state, history
    except TakenForDeadError:
        come_back()
        return take_place(trainer, state, data, size, keeper)
