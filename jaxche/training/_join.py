"""A process that takes the place of one that died: it waits, and is admitted between two rounds."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

# The store in which the processes of a run met. jax has no public name for it.
from jax._src import distributed as _jax_distributed

from jaxche.cadence import RoundPlan
from jaxche.distributed import (
    awaited,
    connect_anew,
    gather_json,
    generation,
    is_elastic,
    lives,
    member_lives,
    members,
    merging,
    regroup,
    stands_by,
    take_part,
    waiting_as,
)
from jaxche.reports import History
from jaxche.training._elastic import ranks_of, rearranged
from jaxche.training._fingerprint import VARIES
from jaxche.training._saved import numbers, with_numbers
from jaxche.training._state import ReplicaState

if TYPE_CHECKING:
    from jaxche.training._keeper import Keeper
    from jaxche.training._trainer import Trainer

_log = logging.getLogger("jaxche")

# Who waits, what each is told, what it is given, and that the run has ended.
_WAITING, _ANSWER, _GIVEN, _OVER = "jaxche/waiting", "jaxche/answer", "jaxche/given", "jaxche/over"
# Of one value in the store; messages of its service are limited.
_CHUNK = 1 << 20

# Which fit of its script this process is in. Who comes joins the same one: the script of a new process begins with its
# first, that of one that was only taken for dead is where it was.
_fit = 0


def newcomers(trainer: Trainer) -> dict[str, Any] | None:
    """Who comes in after this round, and in which order all ranks go on; all processes learn the same.

    Every round of an elastic run meets here before its merge: who died in the meantime is detected where one can
    still turn back, not in a collective.
    """
    if not is_elastic() or stands_by():
        return None
    return gather_json(_heard(trainer) if jax.process_index() == 0 else None)[0]


def _heard(trainer: Trainer) -> dict[str, Any] | None:
    client, engine, now = _client(), trainer._engine, lives()
    joined: dict[int, int] = {}
    for key, text in client.key_value_dir_get(f"{_WAITING}/"):
        process, said = int(key.rpartition("/")[2]), json.loads(text)
        if process in members() or now.get(process) != said["incarnation"]:
            continue  # the death of its forerunner is not detected yet, or it is gone
        if said["fit"] != _fit:
            continue  # it learns by itself that its fit is over
        refusal = _refusal(engine.fingerprint, said["fingerprint"])
        if any(process in home and len(home) > 1 for home in engine.homes):
            refusal = "its replica needs other processes too"
        if refusal is None:
            joined[process] = said["incarnation"]
        else:
            _tell(process, said["life"], {"refused": refusal})
    if not joined:
        return None
    return {"joined": joined, "order": ranks_of(engine.homes, {*members(), *joined})}


def _refusal(have: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    pairs = {name: (have.get(name), other.get(name)) for name in {*have, *other}}
    different = sorted(name for name, pair in pairs.items() if pair[0] != pair[1] and VARIES not in pair)
    return f"it differs in {', '.join(different)}; run the same script and data everywhere" if different else None


def admit(trainer: Trainer, state: ReplicaState, history: History, keeper: Keeper | None) -> ReplicaState:
    """The state from which those who were here and those who :func:`join` go on; all who were here call it.

    Args:
      trainer: from now on of more replicas.
      state: after the round in which :func:`newcomers` told of them.
      history: of the run so far.
      keeper: of its checkpoints, if any.
    """
    said, engine = trainer._world.newcomers, trainer._engine
    assert said is not None
    joined = {int(process): life for process, life in said["joined"].items()}
    with merging():
        given = jax.block_until_ready(engine.packing(state.locals).handed_over())
    if keeper:
        keeper.settle()
    gather_json(None)  # nobody turns to the newcomers, or none
    state = replace(state, che=rearranged(trainer, state.che, said["order"]))
    taking_part, name = member_lives() | joined, f"{generation()}+{','.join(map(str, joined))}"
    chunks = 0
    if jax.process_index() == 0:
        data = b"".join(_whole(leaf).tobytes() for leaf in jax.tree.leaves(given))
        chunks = -(-len(data) // _CHUNK)
        for i in range(chunks):
            _client().key_value_set_bytes(f"{_GIVEN}/{name}/{i}", data[i * _CHUNK : (i + 1) * _CHUNK])
        answer = {
            "taking_part": taking_part,
            "generation": name,
            "order": said["order"],
            "numbers": numbers(state),
            "history": history.to_json(),
            "chunks": chunks,
        }
        for key, text in _client().key_value_dir_get(f"{_WAITING}/"):
            process = int(key.rpartition("/")[2])
            if process in joined:
                _tell(process, json.loads(text)["life"], answer)
    regroup(taking_part, name)
    connect_anew()
    gather_json(None)  # who came has read it all
    if jax.process_index() == 0:
        _client().key_value_delete(f"{_GIVEN}/{name}")
    engine.arrange(said["order"], state.locals)
    trainer.world_size, trainer._world.newcomers = len(said["order"]), None
    _log.warning("process %s joined: going on from round %s with %s", _listed(joined), state.round, len(said["order"]))
    return state


def join(trainer: Trainer, state: ReplicaState, data: Any, size: int) -> tuple[ReplicaState, History]:
    """The state and the record of a run under way, of which this process is a part from now on.

    It compiles first, so that the others need not wait for that. Its optimizer states are those that a replica gets
    from a checkpoint of another number of replicas: the mean of all (of what is not a float, the first one's).

    Args:
      trainer: this process's.
      state: as a run begins.
      data: what the run trains on.
      size: its batches.

    Raises:
      RuntimeError: the others refuse it; says why.
      SystemExit: with code 0, this fit had ended.
    """
    engine, process, life = trainer._engine, jax.process_index(), waiting_as()
    own = [engine.order[rank] for rank in engine.ranks]
    engine.arrange(own, state.locals)
    trainer.world_size = len(own)
    plan = RoundPlan(0, 0, 0, (1,) * len(own), size)
    engine.prepare(state.locals, data, plan, trainer._settings(state, plan))
    now = lives()
    said = {"life": life, "incarnation": now[process], "fit": _fit, "fingerprint": engine.fingerprint}
    _client().key_value_set(f"{_WAITING}/{process}", json.dumps(said), allow_overwrite=True)
    if dict(_client().key_value_dir_get(f"{_OVER}/{_fit}/")):
        _tell(process, life, {"over": True})
    _log.warning("process %s takes the place of one that died, and waits for the end of a round", process)
    answer = json.loads(awaited(f"{_ANSWER}/{process}/{life}", {0: now[0]}))
    if "refused" in answer:
        raise RuntimeError(f"process {process} cannot join the run: {answer['refused']}")
    if "over" in answer:
        _log.warning("process %s came when fit %s of its script had ended, and can join no other", process, _fit)
        raise SystemExit(0)
    packing = engine.packing(state.locals)
    locals_ = packing.unpack(_received(packing.saved_as({}), answer), {})
    regroup({int(p): life for p, life in answer["taking_part"].items()}, answer["generation"])
    connect_anew()
    take_part()
    gather_json(None)
    engine.arrange(answer["order"], locals_)
    trainer.world_size = len(answer["order"])
    che = trainer._che and replace(
        trainer._che, world_size=trainer.world_size, batch_counts=(), ms_per_batch=(), ms_samples=()
    )
    state = with_numbers(replace(state, locals=locals_, che=che), answer["numbers"])
    return state, History.from_json(answer["history"])


def begin_fit() -> None:
    """A script goes through its fits in the same order in all its processes."""
    global _fit
    _fit += 1


def end_fit() -> None:
    """Let those who still wait to join go."""
    if is_elastic() and not stands_by() and jax.process_index() == 0:
        _client().key_value_set(f"{_OVER}/{_fit}/here", "", allow_overwrite=True)
        for key, text in _client().key_value_dir_get(f"{_WAITING}/"):
            process = int(key.rpartition("/")[2])
            if process not in members():
                _tell(process, json.loads(text)["life"], {"over": True})


def _received(wanted: dict[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """What was handed over, as arrays where ``wanted`` says."""
    keys = [f"{_GIVEN}/{answer['generation']}/{i}" for i in range(answer["chunks"])]
    data = b"".join(_client().blocking_key_value_get_bytes(key, 10_000) for key in keys)
    leaves, treedef = jax.tree.flatten(wanted)
    arrays, start = [], 0
    for leaf in leaves:
        host = np.frombuffer(data, leaf.dtype, count=int(np.prod(leaf.shape)), offset=start).reshape(leaf.shape)
        start += host.nbytes
        arrays.append(jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index, host=host: host[index]))
    return jax.tree.unflatten(treedef, arrays)


def _whole(leaf: Any) -> np.ndarray:
    """An array of which this process has all pieces."""
    host = np.empty(leaf.shape, leaf.dtype)
    for shard in leaf.addressable_shards:
        host[shard.index] = np.asarray(shard.data)
    return host


def _tell(process: int, life: int | None, answer: Mapping[str, Any]) -> None:
    _client().key_value_set(f"{_ANSWER}/{process}/{life}", json.dumps(answer), allow_overwrite=True)
    _client().key_value_delete(f"{_WAITING}/{process}")


def _client() -> Any:
    return _jax_distributed.global_state.client


def _listed(processes: Mapping[int, int]) -> str:
    return ", ".join(map(str, processes))
