"""A run in a store: the names of its objects, and the identity on which the processes of all stages agree.

Objects under the name of a run:

- ``plan``: how the batch is split, so that processes with other settings are refused.
- ``stage-001-hello``: written by the process of stage 1 until the identity is agreed, deleted at its end.
- ``<identity>/``: all other objects. The next run of the same name deletes them if no state was saved.

Objects under the identity:

- ``stage-001-receives/...``: activations, gradients and losses. Their reader deletes them after its own state after
  their step is saved, so a reader that was killed before finds them again.
- ``stage-001-state/step-...``: the newest two states of stage 1. Stages are at most one save apart, so all stages have
  one of the two steps.
- ``stage-001-finished``: the step from which stage 1 would resume, for restarted writers.

An identity is a random name. Each process writes a hello: a nonce of this start, the nonces of all others that it has
read, and the identity, once it has one. A hello that contains the reader's nonce was written after the reader started,
so its writer is running. Hellos of an earlier run never contain it.

- If an earlier start has saved a state, its identity is used, without waiting.
- Else a process takes the identity of a running process, and so resumes in the first steps of a run.
- Else, once all processes run, that of stage 0 makes a new identity, and deletes all others.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxche.stages._objects import Objects, polls
from jaxche.stages._wire import Tag

_log = logging.getLogger("jaxche")

PLAN = "plan"
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_STEP = re.compile(r"/step-(\d+)")
_STATE = re.compile(r"(^|/)stage-\d+-state/step-")
_FIRST_WAIT_S, _MAX_WAIT_S, _WAIT_GROWTH = 0.001, 0.5, 1.3
# How often a waiting process looks for restarted processes.
_ADMIT_S = 0.5
_HELLO_LIMIT = 1 << 20


def hello_key(stage: int) -> str:
    """The hello of the process whose first stage this is."""
    return f"stage-{stage:03d}-hello"


def state_folder(stage: int) -> str:
    """The saved states of the process whose first stage this is."""
    return f"stage-{stage:03d}-state"


def state_key(stage: int, step: int) -> str:
    """The state from which ``step`` resumes."""
    return f"{state_folder(stage)}/step-{step:010d}"


def inbox(stage: int) -> str:
    """The folder of the objects that a stage receives."""
    return f"stage-{stage:03d}-receives"


def tag_key(tag: Tag) -> str:
    """An activation or a gradient."""
    name = f"step-{tag.step:010d}.micro-{tag.micro:05d}.{tag.direction}.from-stage-{tag.stage:03d}"
    return f"{inbox(tag.target)}/{name}"


def loss_key(step: int, reader: int, writer: int) -> str:
    """The copy of a loss for one reader."""
    return f"{inbox(reader)}/step-{step:010d}.loss.from-stage-{writer:03d}"


def finished_key(stage: int) -> str:
    """The step from which a stage would resume."""
    return f"stage-{stage:03d}-finished"


def step_of(key: str) -> int:
    """The step in a key, or -1."""
    found = _STEP.search(key)
    return int(found[1]) if found else -1


def is_written_by(key: str, stages: Sequence[int]) -> bool:
    """Whether only the process of these stages writes objects with this key."""
    ends = tuple(f".from-stage-{stage:03d}" for stage in stages)
    return key.endswith(ends) or key.startswith((f"{state_folder(stages[0])}/", *map(finished_key, stages)))


class Hello(NamedTuple):
    """What a process writes for the others. ``seen`` maps the first stage of each other process to its nonce."""

    nonce: str
    stages: tuple[int, ...]
    seen: Mapping[str, str]
    identity: str | None

    @classmethod
    def decode(cls, data: bytes) -> Hello | None:
        """The hello in these bytes, or None if they are not one."""
        try:
            nonce, stages, seen, identity = json.loads(data)
            if identity is not None and not _IDENTITY.fullmatch(identity):
                return None
            return cls(str(nonce), tuple(map(int, stages)), dict(seen), identity)
        except (ValueError, TypeError):
            return None

    def encode(self) -> bytes:
        return json.dumps([self.nonce, self.stages, self.seen, self.identity]).encode()


class StoreRun:
    """The run of the process of ``stages``, ascending, which waits ``timeout_s`` for others, and its objects."""

    def __init__(self, root: Objects, stages: Sequence[int], n_stages: int, timeout_s: float):
        self.root, self.stages, self.n_stages, self.timeout_s = root, tuple(stages), n_stages, timeout_s
        self._identity: str | None = None
        self._objects: Objects | None = None
        self._written: Hello | None = None
        self._nonce = secrets.token_hex(16)
        self._lock, self._next_admit = threading.Lock(), 0.0
        self.has_saved_state = False  # from which a restarted process gets the identity

    @property
    def is_agreed(self) -> bool:
        """Whether the identity is known."""
        return self._objects is not None

    @property
    def objects(self) -> Objects:
        """The objects of the run; after :meth:`find_saved` or :meth:`agree`."""
        assert self._objects is not None, "call agree first"
        return self._objects

    def find_saved(self) -> bool:
        """Take the identity of a run with saved states, if there is one; returns whether the identity is known."""
        with self._lock:
            if self._objects is None and (saved := self._saved_identity()) is not None:
                self._set(saved)
                self.has_saved_state = True
            return self._objects is not None

    def agree(self, pause: Callable[[float], None]) -> None:
        """Wait until the identity is known; ``pause`` sleeps between two polls, and may raise to end the wait."""
        if self._objects is not None:
            return
        with self._lock:
            if self._objects is not None:  # agreed by another thread
                return
            missing = ""
            for waits_long in polls(self.timeout_s, pause, _FIRST_WAIT_S, _MAX_WAIT_S, _WAIT_GROWTH):
                missing = ", ".join(map(str, self._exchange()))
                if self._objects is not None:
                    return
                if waits_long:
                    text = "still waiting for the process of stage %s in %s, for up to %g s"
                    _log.warning(text, missing, self.root, self.timeout_s)
            raise TimeoutError(
                f"waited {self.timeout_s:g} s for the process of stage {missing} in {self.root}. Is it running, on the "
                "same url and run? A slower one needs DataStore(timeout_s=...); if others ended before a state was "
                "saved, restart all processes"
            )

    def admit(self) -> None:
        """Exchange hellos with restarted processes; called repeatedly while waiting."""
        if self.has_saved_state or time.monotonic() < self._next_admit or not self._lock.acquire(blocking=False):
            return
        try:
            self._next_admit = time.monotonic() + _ADMIT_S
            self._exchange()
        finally:
            self._lock.release()

    def leave(self) -> None:
        """Delete the hello of this process, or of an earlier start of it."""
        key = hello_key(self.stages[0])
        mine = self._read(self.stages[0])
        if mine is not None and self._written is not None and mine.nonce != self._nonce:
            return  # of a process that was started later
        self.root.delete([key])
        self.root.remove_partial(lambda name: name == key)  # of an earlier start, killed while it wrote

    def _exchange(self) -> list[int]:
        """Read all hellos, and write that of this process if it changed; returns stages without a running process."""
        first = str(self.stages[0])
        hellos = {stage: hello for stage in range(self.n_stages) if (hello := self._read(stage)) is not None}
        mine = hellos.pop(self.stages[0], None)
        if self._written is not None and mine is not None and mine.nonce != self._nonce:
            raise ValueError(
                f"another process that was started later holds stage {first} in {self.root}: end one of them, or give "
                'each its own DataStore(run="...")'
            )
        running = [hello for hello in hellos.values() if hello.seen.get(first) == self._nonce]
        for hello in running:
            if both := set(hello.stages) & set(self.stages):
                raise ValueError(
                    f"local_stages={list(self.stages)}: stage {min(both)} is in another process of {self.root} "
                    "already; give each stage to one process"
                )
        there = {*self.stages, *(stage for hello in running for stage in hello.stages)}
        missing = sorted(set(range(self.n_stages)) - there)
        if self._objects is None and (identity := self._choose(running, not missing)) is not None:
            self._set(identity)
        hello = Hello(self._nonce, self.stages, {str(s): h.nonce for s, h in hellos.items()}, self._identity)
        if hello != self._written or mine is None:
            self.root.replace(hello_key(self.stages[0]), [hello.encode()])
            self._written = hello
        return missing

    def _choose(self, running: Sequence[Hello], all_run: bool) -> str | None:
        """The identity of the run, or None if it cannot be known yet."""
        if (saved := self._saved_identity()) is not None:
            self.has_saved_state = True
            return saved
        found = {hello.identity for hello in running if hello.identity is not None}
        if len(found) > 1:
            raise ValueError(f'several runs are active in {self.root}: give each its own DataStore(run="...")')
        if found:
            return found.pop()
        if 0 not in self.stages or not all_run:
            return None
        for folder in filter(_IDENTITY.fullmatch, self.root.folders()):
            self.root.remove(folder)
        return secrets.token_hex(16)

    def _saved_identity(self) -> str | None:
        found = [
            folder
            for folder in filter(_IDENTITY.fullmatch, self.root.folders())
            if any(_STATE.search(key) for key in self.root.names(folder))
        ]
        if len(found) > 1:
            raise ValueError(
                f"several runs have saved states in {self.root}: {', '.join(found)}. Delete all but one, or begin "
                'another DataStore(run="...")'
            )
        return found[0] if found else None

    def _set(self, identity: str) -> None:
        objects = self.root.within(identity)
        # Before this process writes anything itself.
        objects.remove_partial(lambda key: is_written_by(key, self.stages))
        self._identity, self._objects = identity, objects

    def _read(self, stage: int) -> Hello | None:
        found = self.root.read(hello_key(stage), _HELLO_LIMIT)
        return None if found is None else Hello.decode(bytes(found[0]))
