"""Going on without processes that died: who is left, from which round, on which replicas."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax

# The store in which the processes of a run met. jax has no public name for it.
from jax._src import distributed as _jax_distributed

from jaxche.cadence import ApplyPolicy, ElChe
from jaxche.distributed import (
    PeerLostError,
    TakenForDeadError,
    await_loss,
    awaited,
    broken_place,
    connect_anew,
    gather_json,
    generation,
    member_lives,
    regroup,
)
from jaxche.training._round import SOLO_ROUND
from jaxche.training._state import ReplicaState

if TYPE_CHECKING:
    from jaxche.training._trainer import Trainer

_log = logging.getLogger("jaxche")

# How often in a row, without a round in between, connections may break while all live.
_FALSE_ALARMS = 3


@dataclass
class World:
    """What a trainer keeps of processes that come and go.

    Attributes:
      newcomers: who waits to join at the next merge, or None.
      paces: steps in a round and ms a step of each rank of the start, as last learnt.
      alone: steps in a round where one replica is left.
      false_alarms: the rounds in which connections broke though all processes lived.
    """

    newcomers: dict[str, Any] | None = None
    paces: dict[int, tuple[int, float]] = field(default_factory=dict)
    alone: int = SOLO_ROUND
    false_alarms: list[int] = field(default_factory=list)


def go_on_without(trainer: Trainer, state: ReplicaState, before: ReplicaState | None, error: Exception) -> ReplicaState:
    """The state from which the processes that are left go on, on all of them the same.

    A round is merged for all or for none: where one process had finished the merge in which another saw the failure,
    it falls back by a round. Process 0 says who is left. Where nobody has died, all go on, over new connections.

    Args:
      trainer: from now on of the replicas that are left.
      state: this process's newest.
      before: the one before it, if there was one.
      error: what was seen of the failure.

    Raises:
      TakenForDeadError: the others went on without this process.
      Exception: ``error``, where what is left cannot train, or connections break again and again.
    """
    # The death of one that was to join then is detected like any other, or it asks again.
    trainer._world.newcomers = None
    while True:
        try:
            (state, order, lost), before = _fall_back(trainer, state, before, error), None
            trainer.world_size = len(order)
            trainer._engine.arrange(order, state.locals)
        except PeerLostError as another:  # died while the others agreed
            if another is error or isinstance(another, TakenForDeadError):
                raise
            error = another
            continue
        what = f"process {', '.join(map(str, lost))} died" if lost else "a merge broke off, but nobody died"
        _log.warning("%s: going on from round %s with %s", what, state.round, len(order))
        return state


def _fall_back(
    trainer: Trainer, state: ReplicaState, before: ReplicaState | None, error: Exception
) -> tuple[ReplicaState, list[int], list[int]]:
    """The last state that all have, the ranks that go on from it, and the processes that were lost."""
    engine, expected, key = trainer._engine, member_lives(), f"jaxche/left_of/{generation()}"
    client: Any = _jax_distributed.global_state.client
    # So that nobody waits for this one in the next round, and process 0 knows that it lives.
    client.key_value_set(f"{broken_place()}{jax.process_index()}", "", allow_overwrite=True)
    if jax.process_index() == 0:
        client.key_value_set(key, json.dumps(await_loss(expected, broken_place())))
    gone = json.loads(awaited(key, {0: expected[0]}))
    if jax.process_index() in gone:
        raise TakenForDeadError("this process was stopped, and the others went on without it") from error
    lost, left = ", ".join(map(str, gone)), {p: life for p, life in expected.items() if p not in gone}
    regroup(left, f"{generation()}-{lost}")
    connect_anew()
    reached = gather_json(state.round)
    if state.round > min(reached):
        assert before is not None, "who has finished a round knows where it began"
        state = before
    order = ranks_of(engine.homes, left)
    if not gone:
        _refuse_more(trainer, state.round, error)
    if not order:
        error.add_note(f"process {lost} died, and what is left cannot go on by itself")
        raise error
    state = replace(state, che=rearranged(trainer, state.che, order))
    if len(order) == 1:  # takes what it took, by the rules of several: an outer step or an update needs its round
        trainer._world.alone = 1 if trainer.policy is ApplyPolicy.SYNC else trainer._world.paces[order[0]][0]
    return state, order, gone


def _refuse_more(trainer: Trainer, round: int, error: Exception) -> None:
    """Raise the error where connections have broken for too often in one round, though all live."""
    alarms = trainer._world.false_alarms = [*(old for old in trainer._world.false_alarms if old == round), round]
    if len(alarms) > _FALSE_ALARMS:
        error.add_note(
            f"the connections between the processes broke {len(alarms)} times in round {round}, though "
            "all processes live; does something between their machines end them, as a firewall?"
        )
        raise error


def ranks_of(homes: Sequence[tuple[int, ...]], processes: Collection[int]) -> list[int]:
    """The ranks that need none but these processes: none if one of them would be without a replica.

    Args:
      homes: the processes of each rank.
      processes: who takes part.

    Example:
      >>> ranks_of([(0,), (1,), (2,)], {0, 2}), ranks_of([(0,), (1, 2)], {0, 2})
      ([0, 2], [])
    """
    ranks = [rank for rank, home in enumerate(homes) if set(home) <= set(processes)]
    at_work = {process for rank in ranks for process in homes[rank]}
    return ranks if at_work == set(processes) else []


def rearranged(trainer: Trainer, che: ElChe | None, order: Sequence[int]) -> ElChe | None:
    """The cadence of these ranks in this order, with what was learnt of each, also before it was gone; None for one.

    Of a rank of which nothing was learnt nothing is to be supposed: then all are measured anew, from the same anchor.
    """
    known, here = trainer._world.paces, trainer._engine.order
    if che is not None:
        known |= zip(here, zip(che.batch_counts, che.ms_per_batch, strict=True), strict=True)
    like = che or trainer._che
    if len(order) == 1 or like is None:
        return None
    saved: dict[str, Any] = like.to_dict() | {"world_size": len(order), "ms_samples": (), "sync_samples": ()}
    if che is not None and set(order) <= set(here):
        places = [here.index(rank) for rank in order]
        samples = tuple(tuple(row[place] for place in places) for row in che.ms_samples)
        saved |= {"ms_samples": samples, "sync_samples": che.sync_samples}
    elif not all(known.get(rank, (0, 0.0))[1] for rank in order):
        return ElChe.from_dict(saved | {"batch_counts": (), "ms_per_batch": ()})
    # Who comes back has the time that the others take.
    length = max(n * ms for n, ms in (known[rank] for rank in (here if che is not None else order)))
    ms = tuple(known[rank][1] for rank in order)
    counts = tuple(
        known[rank][0] if che is None or rank in here else max(1, int(length / known[rank][1])) for rank in order
    )
    return ElChe.from_dict(saved | {"batch_counts": counts, "ms_per_batch": ms})
