"""Going on without processes that died: who is left, from which round, on which replicas."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from jaxche.cadence import ElChe
from jaxche.training._agree import gather_json, members, regroup
from jaxche.training._state import ReplicaState

if TYPE_CHECKING:
    from jaxche.training._trainer import Trainer

_log = logging.getLogger("jaxche")


def go_on_without(trainer: Trainer, state: ReplicaState, before: ReplicaState | None, error: Exception) -> ReplicaState:
    """The state from which the processes that are left go on, on all of them the same.

    A round is merged for all or for none: where one process had finished the merge in which another saw the failure,
    it falls back by a round.

    Args:
      trainer: from now on of the replicas that are left.
      state: this process's newest.
      before: the one before it, if there was one.
      error: what was seen of the failure.

    Raises:
      Exception: ``error``, where nobody died, or what is left cannot train.
    """
    from jax.experimental.multihost_utils import live_devices

    with live_devices(jax.devices()) as live:  # waits until all that live are here, and all see the same
        alive = sorted({device.process_index for device in live})
    lost = sorted(set(members()) - set(alive))
    if not lost:
        raise error
    regroup(alive)
    reached = gather_json(state.round)
    if state.round > min(reached):
        assert before is not None, "who has finished a round knows where it began"
        state = before
    kept = trainer._engine.without(lost)
    able = kept and (len(kept) > 1 or (trainer.average == "parameters" and trainer.scaling is None))
    if not all(gather_json(bool(able))):
        error.add_note(f"process {', '.join(map(str, lost))} died, and what is left cannot go on by itself")
        raise error
    trainer._engine.keep(kept, state.locals)
    trainer.world_size = len(kept)
    _log.warning("process %s died: going on from round %s with %s", ", ".join(map(str, lost)), state.round, len(kept))
    return replace(state, che=state.che and fewer(state.che, kept))


def fewer(che: ElChe, kept: list[int]) -> ElChe | None:
    """The cadence of these ranks alone, with what it has learnt of them; None for one."""
    if len(kept) == 1:
        return None
    saved: dict[str, Any] = che.to_dict()

    def of_kept(values: Any) -> Any:
        return tuple(values[rank] for rank in kept)

    learnt = {name: of_kept(saved[name]) for name in ("batch_counts", "ms_per_batch")}
    samples = tuple(map(of_kept, che.ms_samples))
    return ElChe.from_dict(saved | learnt | {"world_size": len(kept), "ms_samples": samples})
