"""Going on without processes that died: who is left, from which round, on which replicas."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

# The store in which the processes of a run met. jax has no public name for it.
from jax._src import distributed as _jax_distributed

from jaxche.cadence import ApplyPolicy, ElChe
from jaxche.training._agree import gather_json, generation, member_lives, regroup
from jaxche.training._lives import PeerLostError, await_loss, awaited
from jaxche.training._state import ReplicaState

if TYPE_CHECKING:
    from jaxche.training._trainer import Trainer

_log = logging.getLogger("jaxche")

# The service knows of a death by the silence of its heartbeat, which is later than the end of a connection.
_NOTICE_S = 20.0
# Which orders of ranks have met, with the lives their processes had. Kept by process 0, which lives as long as the run.
_met: dict[tuple[int, ...], tuple[int, ...]] = {}


def go_on_without(trainer: Trainer, state: ReplicaState, before: ReplicaState | None, error: Exception) -> ReplicaState:
    """The state from which the processes that are left go on, on all of them the same.

    A round is merged for all or for none: where one process had finished the merge in which another saw the failure,
    it falls back by a round. Process 0 says who is left.

    Args:
      trainer: from now on of the replicas that are left.
      state: this process's newest.
      before: the one before it, if there was one.
      error: what was seen of the failure.

    Raises:
      Exception: ``error``, where nobody died, or what is left cannot train.
    """
    while True:
        try:
            return _fall_back(trainer, state, before, error)
        except PeerLostError as another:  # died while the others agreed
            if another is error:
                raise
            error = another


def _fall_back(trainer: Trainer, state: ReplicaState, before: ReplicaState | None, error: Exception) -> ReplicaState:
    engine, expected, key = trainer._engine, member_lives(), f"jaxche/left_of/{generation()}"
    if jax.process_index() == 0:
        gone = await_loss(expected, _NOTICE_S)
        left = {process: life for process, life in expected.items() if process not in gone}
        _met.setdefault(tuple(engine.order), tuple(expected[p] for rank in engine.order for p in engine.homes[rank]))
        order = fresh_order(engine.homes, engine.without(gone), left)
        said = json.dumps({"lost": gone, "order": order})
        client: Any = _jax_distributed.global_state.client
        client.key_value_set(key, said)
    said = json.loads(awaited(key, {0: expected[0]}))
    if not said["lost"] or jax.process_index() in said["lost"]:  # this one was stopped, and taken for dead
        raise error
    lost, order = ", ".join(map(str, said["lost"])), said["order"]
    regroup({p: life for p, life in expected.items() if p not in said["lost"]}, f"{generation()}-{lost}")
    reached = gather_json(state.round)
    if state.round > min(reached):
        assert before is not None, "who has finished a round knows where it began"
        state = before
    if not order:
        error.add_note(f"process {lost} died, and what is left cannot go on by itself")
        raise error
    state = replace(state, che=rearranged(trainer, state.che, order))
    if len(order) == 1:  # takes what it took, by the rules of several: an outer step or an update needs its round
        trainer._alone = 1 if trainer.policy is ApplyPolicy.SYNC else trainer._pace_of[order[0]][0]
    engine.arrange(order, state.locals)
    trainer.world_size = len(order)
    _log.warning("process %s died: going on from round %s with %s", lost, state.round, len(order))
    return state


def fresh_order(homes: Sequence[tuple[int, ...]], ranks: Sequence[int], lives: Mapping[int, int]) -> list[int]:
    """An order of ranks in which these processes may meet: a list without entries if there is none.

    Connections between processes are made once for every order of their devices and kept. One that was made with a
    process that has since been replaced leads nowhere, so who took its place meets the others in another order.

    Args:
      homes: the processes of each rank.
      ranks: who meets.
      lives: of the processes that take part.

    Example:
      >>> homes, first, later = [(0,), (1,)], {0: 5, 1: 6}, {0: 5, 1: 7}
      >>> fresh_order(homes, [0, 1], first), fresh_order(homes, [0, 1], later), fresh_order(homes, [0, 1], {0: 5, 1: 8})
      ([0, 1], [1, 0], [])
      >>> _met.clear()
    """
    groups = [list(group) for _, group in itertools.groupby(sorted(ranks), key=lambda rank: homes[rank])]
    for groups_in_order in itertools.permutations(groups):
        order = list(itertools.chain.from_iterable(groups_in_order))
        here = tuple(lives[process] for rank in order for process in homes[rank])
        if len(groups) < 2 or _met.setdefault(tuple(order), here) == here:
            return order
    return []


def rearranged(trainer: Trainer, che: ElChe | None, order: Sequence[int]) -> ElChe | None:
    """The cadence of these ranks in this order, with what was learnt of each, also before it was gone; None for one.

    Of a rank of which nothing was learnt nothing is to be supposed: then all are measured anew, from the same anchor.
    """
    known, here = trainer._pace_of, trainer._engine.order
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
