"""Making processes fail together: the same error everywhere instead of a hang."""

from __future__ import annotations

import collections
import itertools
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

# The store in which the processes of a run met. jax has no public name for it.
from jax._src import distributed as _jax_distributed

from jaxche.distributed._liveness import awaited, lives, lost, part
from jaxche.distributed._watchdog import beat_again

# Others may compile a large model meanwhile. One that has died is noticed much earlier, by JAX itself.
_PATIENCE_MS = 3_600_000
# How long others may take over their last files before process 0 leaves, and the service ends them.
_FAREWELL_S, _LOOK_S = 120.0, 0.2
# How many of its last keys a process leaves at a meeting place.
_REMEMBERED = 64
_turns = itertools.count()
# How often those that keep in step have begun.
_times: dict[str, Iterator[int]] = {}
# The processes that take part and their lives, or None for all from the start; and how often that changed.
_members: dict[int, int] | None = None
_generation: int | str = 0


class RankError(RuntimeError):
    """Another process failed; the message says which, where and with what.

    Attributes:
      rank: the replica (or process, before training starts) that failed.

    Example:
      >>> try:
      ...     raise RankError("rank 3 failed in round 7: no space left on device", rank=3)
      ... except RankError as error:
      ...     print(error.rank, error)
      3 rank 3 failed in round 7: no space left on device
    """

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


def gather_json(value: Any) -> list[Any]:
    """One small JSON value from every process, in process order; all must call this together.

    It goes through the coordination service, not the devices: processes may have unlike numbers and kinds of them.
    """
    if jax.process_count() == 1:
        return [value]
    client = _client()
    turn, own = next(_turns), jax.process_index()
    place = f"jaxche/agree/{_generation}"
    client.key_value_set(f"{place}/{turn}/{own}", json.dumps(value))
    everyone = [_heard(f"{place}/{turn}/{process}", process) for process in members()]
    if turn:  # whoever has begun this turn has read all of the last one
        client.key_value_delete(f"{place}/{turn - 1}/{own}")
    return [json.loads(text) for text in everyone]


def _heard(key: str, process: int) -> str:
    if is_elastic():
        return awaited(key, {process: member_lives()[process]}, unless=broken_place())
    return _client().blocking_key_value_get(key, _PATIENCE_MS)


def _client() -> Any:
    return _jax_distributed.global_state.client


def meeting_place(name: str) -> Callable[[str, float], None]:
    """A barrier of the processes that take part now, which lets go as soon as the death of one of them is detected.

    Unlike all others here, threads may use it side by side, each with keys of its own.

    Args:
      name: of what it is for.

    Returns:
      A function of a key and the longest wait in ms. It raises :class:`PeerLostError`.
    """
    taking_part, broken, place = dict(member_lives()), broken_place(), f"jaxche/{name}/{_generation}"
    times: collections.Counter[str] = collections.Counter()
    said: collections.deque[str] = collections.deque()

    def meet(key: str, timeout_ms: float) -> None:
        times[key] += 1
        key = f"{place}/{key}.{times[key]}"
        own = f"{key}/{jax.process_index()}"
        _client().key_value_set(own, "")
        said.append(own)
        for process, life in taking_part.items():
            awaited(f"{key}/{process}", {process: life}, timeout_ms, unless=broken)
        while len(said) > _REMEMBERED:  # so many meetings later all have read it
            _client().key_value_delete(said.popleft())

    return meet


class InStep:
    """Some processes that do the same again and again, and stop together when the first of them says so.

    Args:
      processes: who, in the same order everywhere.
      name: of what they do; they do it equally often.
    """

    def __init__(self, processes: tuple[int, ...], name: str):
        self._leader, self._asked = processes[0], 0
        place = f"jaxche/in_step/{_generation}/{'-'.join(map(str, processes))}/{name}"
        time = next(_times.setdefault(place, itertools.count()))
        self._place = f"{place}/{time}"
        if time and jax.process_index() == self._leader:  # who does it again has heard all of the last time
            _client().key_value_delete(f"{place}/{time - 1}")

    def stop(self, wanted: bool) -> bool:
        """Whether to stop now; all have to ask equally often, and only the first one's wish counts."""
        key = f"{self._place}/{self._asked}"
        self._asked += 1
        if jax.process_index() == self._leader:
            _client().key_value_set(key, str(int(wanted)))
            return wanted
        return _heard(key, self._leader) == "1"


def is_elastic() -> bool:
    """Whether this run goes on when processes die, as ``jaxche.initialize(elastic=True)`` has it."""
    return jax.process_count() > 1 and bool(jax.config.values.get("jax_enable_recoverability"))


def members() -> tuple[int, ...]:
    """The processes that take part, in order."""
    return tuple(range(jax.process_count())) if _members is None else tuple(_members)


def member_lives() -> dict[int, int]:
    """The processes that take part in an elastic run, each with its life."""
    global _members
    if _members is None:
        now = lives()
        _members = {process: now.get(process, 1) for process in range(jax.process_count())}
    return _members


def generation() -> int | str:
    """A name for the processes that take part and their connections, changed with them."""
    return _generation


def broken_place() -> str:
    """Where the processes that take part say, each once, that a merge of theirs broke off."""
    return f"jaxche/broken/{_generation}/"


def regroup(taking_part: Mapping[int, int], generation: int | str) -> None:
    """Go on with these processes and lives; all of them call this at the same place.

    Args:
      taking_part: their lives.
      generation: a name for them that was not used before.
    """
    global _members, _generation, _turns
    # Somebody may have been in the middle of a turn: turns are counted anew, in a place of their own.
    _members, _generation, _turns = dict(sorted(taking_part.items())), generation, itertools.count()


def farewell() -> None:
    """Leave an elastic run, on process 0 when the others have left or died; without it jaxlib ends those that are left.

    It is called at exit: nothing else keeps the processes together there.

    Example:
      >>> farewell()  # alone, there is nobody to wait for
    """
    state = _jax_distributed.global_state
    if state.client is not None and state.process_id == 0:
        _wait_for_others()
    part()


def _wait_for_others() -> None:
    # One that has not come in is not waited for: it is told that the run is over.
    others = {process: life for process, life in (_members or lives()).items() if process != 0}
    deadline = time.monotonic() + _FAREWELL_S
    while len(lost(others)) < len(others) and time.monotonic() < deadline:
        beat_again()
        time.sleep(_LOOK_S)


def raise_everywhere(error: Exception | None, rank: int, place: str) -> None:
    """Raise if any process has an error: its own where it happened, a :class:`RankError` elsewhere.

    Every process must call this together.

    Args:
      error: this process's error, if any.
      rank: the replica it happened on.
      place: where, for the message, e.g. ``"round 3"``.
    """
    own = None
    if error is not None:
        last = "".join(traceback.format_exception(error)[-3:])[-1500:]
        own = {"rank": rank, "kind": type(error).__name__, "message": str(error)[:1000], "trace": last}
    reports = [report for report in gather_json(own) if report is not None]
    if error is not None:
        error.add_note(f"raised on rank {rank} in {place}; the state from before it is intact")
        raise error
    if reports:
        r = reports[0]
        raise RankError(
            f"rank {r['rank']} failed in {place} with {r['kind']}: {r['message']}\n--- there ---\n{r['trace']}",
            r["rank"],
        )
