"""The identity of a run in a store: the processes of all its stages agree on one before any of them reads an object.

An identity is a random name, the folder of the run's objects. Each process writes a *hello*: a nonce of this start of
it, the nonces of all others that it has read, and the identity, once it has one. A hello that holds one's own nonce was
written since one began, so whoever wrote it runs now; those that an earlier run left behind never do.

- Where an earlier start has saved a state, its identity goes on, and nobody is waited for.
- Else a process takes the identity of any other that runs now, and so comes back into the first steps of a run.
- Else none has one. Once all others run, the process of stage 0 makes a new one, and clears what is of any other.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxche.stages import _names as names
from jaxche.stages._objects import Objects

_FIRST_WAIT_S, _LONGEST_WAIT_S, _WAIT_GROWTH = 0.001, 0.5, 1.3
# How often a process that waits for something else looks whether another has begun anew.
_ANSWER_S = 0.5
_HELLO_LIMIT = 1 << 20


class Hello(NamedTuple):
    """What a process writes for the others of a run; ``heard`` maps the first stage of each to its nonce."""

    nonce: str
    stages: tuple[int, ...]
    heard: Mapping[str, str]
    identity: str | None

    @classmethod
    def read(cls, data: bytes) -> Hello | None:
        """None for what no process wrote."""
        try:
            nonce, stages, heard, identity = json.loads(data)
            if identity is not None and not names.IDENTITY.fullmatch(identity):
                return None
            return cls(str(nonce), tuple(map(int, stages)), dict(heard), identity)
        except (ValueError, TypeError):
            return None

    def write(self) -> bytes:
        return json.dumps([self.nonce, self.stages, self.heard, self.identity]).encode()


class StoreRun:
    """The run of one process, with the objects that are its own.

    Args:
      root: objects under the name of the run, whatever its identity.
      stages: of this process, ascending.
      n_stages: how many there are in all.
      timeout_s: seconds to wait for the others.
      identity: of the run, where it is known.
    """

    def __init__(
        self, root: Objects, stages: Sequence[int], n_stages: int, timeout_s: float, identity: str | None = None
    ):
        self.root, self._stages, self._timeout_s = root, tuple(stages), timeout_s
        self._identity: str | None = None
        self._objects: Objects | None = None
        self._said: Hello | None = None
        self._n_stages, self._others = n_stages, set(range(n_stages)) - set(stages)
        self._nonce = secrets.token_hex(16)
        self._lock, self._answer_at = threading.Lock(), 0.0
        self._saved = identity is not None
        if identity is not None:
            self._set(identity)

    @property
    def is_agreed(self) -> bool:
        """Whether the identity is known."""
        return self._objects is not None

    @property
    def objects(self) -> Objects:
        """Of the run; after :meth:`find` or :meth:`agree`."""
        assert self._objects is not None, "the processes agree first"
        return self._objects

    def find(self) -> bool:
        """Whether a process of any stage has saved a state; then its run goes on."""
        with self._lock:
            if self._objects is None and (saved := self._saved_identity()) is not None:
                self._set(saved)
                self._saved = True
            return self._objects is not None

    def agree(self, pause: Callable[[float], None]) -> None:
        """Wait until the identity is known.

        Args:
          pause: called with the seconds to sleep between two looks; may raise to end the wait.

        Raises:
          TimeoutError: not all other processes came; says which stages miss theirs.
          ValueError: another process holds a stage of this one.
        """
        if self._objects is not None:
            return
        with self._lock:
            deadline, wait_s = time.monotonic() + self._timeout_s, _FIRST_WAIT_S
            while self._objects is None:
                missing = self._look()
                if self._objects is None:
                    if time.monotonic() > deadline:
                        raise TimeoutError(
                            f"waited {self._timeout_s:g} s for the process of stage {', '.join(map(str, missing))} in "
                            f"{self.root}. Is it running, on the same url and run? A slower one needs "
                            "DataStore(timeout_s=...); where others have ended before a state was saved, start all anew"
                        )
                    pause(wait_s)
                    wait_s = min(wait_s * _WAIT_GROWTH, _LONGEST_WAIT_S)

    def answer(self) -> None:
        """Admit processes that were started again; to be called repeatedly while waiting."""
        if self._saved or time.monotonic() < self._answer_at or not self._lock.acquire(blocking=False):
            return
        try:
            self._answer_at = time.monotonic() + _ANSWER_S
            self._look()
        finally:
            self._lock.release()

    def note_saved(self) -> None:
        """A state of this run is in the store, which says from now on what the run is."""
        self._saved = True

    def leave(self) -> None:
        """Take this process's hello away, also that of an earlier start of it."""
        mine = self._read(self._stages[0])
        if mine is not None and (self._said is None or mine.nonce == self._nonce):
            self.root.delete([names.hello_key(self._stages[0])])

    def _look(self) -> list[int]:
        """Read all hellos and write one's own if it changed; returns the stages without a running process."""
        first = str(self._stages[0])
        hellos = {stage: hello for stage in range(self._n_stages) if (hello := self._read(stage)) is not None}
        mine = hellos.pop(self._stages[0], None)
        if self._said is not None and mine is not None and mine.nonce != self._nonce:
            raise ValueError(
                f"another process that was started later holds stage {first} in {self.root}: end one of them, or give "
                'each its own DataStore(run="...")'
            )
        running = [hello for hello in hellos.values() if hello.heard.get(first) == self._nonce]
        for hello in running:
            if both := set(hello.stages) & set(self._stages):
                raise ValueError(
                    f"local_stages={list(self._stages)}: stage {min(both)} is in another process of {self.root} "
                    "already; give each stage to one process"
                )
        missing = sorted(self._others - {stage for hello in running for stage in hello.stages})
        if self._objects is None and (identity := self._choose(running, not missing)) is not None:
            self._set(identity)
        hello = Hello(self._nonce, self._stages, {str(s): h.nonce for s, h in hellos.items()}, self._identity)
        if hello != self._said or mine is None:
            self.root.replace(names.hello_key(self._stages[0]), [hello.write()])
            self._said = hello
        return missing

    def _choose(self, running: Sequence[Hello], all_run: bool) -> str | None:
        if (saved := self._saved_identity()) is not None:
            return saved
        found = {hello.identity for hello in running if hello.identity is not None}
        if len(found) > 1:
            raise ValueError(f'several runs go on in {self.root}: give each its own DataStore(run="...")')
        if found:
            return found.pop()
        if 0 not in self._stages or not all_run:
            return None
        for folder in filter(names.IDENTITY.fullmatch, self.root.folders()):
            self.root.remove(folder)
        return secrets.token_hex(16)

    def _saved_identity(self) -> str | None:
        found = [
            folder
            for folder in filter(names.IDENTITY.fullmatch, self.root.folders())
            if any(names.is_state(key) for key in self.root.names(folder))
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
        objects.remove_torn(lambda key: names.is_written_by(key, self._stages))
        self._identity, self._objects = identity, objects

    def _read(self, stage: int) -> Hello | None:
        found = self.root.read(names.hello_key(stage), _HELLO_LIMIT)
        return None if found is None else Hello.read(bytes(found[0]))
