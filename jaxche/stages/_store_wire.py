"""The wire of one process through a store, and what survives the process.

A process that was started again computes its last steps once more and writes what it wrote before: objects that are
still there are left alone, and those whose reader has finished with their step are taken away again by the writer. The
reader writes its mark before it deletes, the writer writes its object before it reads the mark; so whatever the
order, one of the two deletes it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxche.sharding import Device
from jaxche.stages import _names as names
from jaxche.stages import _tensors as tensors
from jaxche.stages._base import Tag, WireClosedError
from jaxche.stages._objects import Objects
from jaxche.stages._store_run import StoreRun

_UPLOADS = 4  # transfers side by side; each reads its arrays, sums and writes them
# What is ready and not larger goes into a folder from the caller's thread, within about a millisecond: sooner by the
# time it takes to wake another, which then shares the interpreter with the caller's waiting.
_INLINE_BYTES = 4 << 20
_STATES = 2
# A process that comes back repeats at most what lies between two saves, and one save more that was under way.
_REPEATED_SAVES = 2
_LOSS = jax.ShapeDtypeStruct((), np.float64)


class _Sent(NamedTuple):
    reader: int
    key: str
    done: Future


def _is_small_and_ready(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    small = sum(getattr(leaf, "nbytes", 0) for leaf in leaves) <= _INLINE_BYTES
    return small and all(leaf.is_ready() for leaf in leaves if hasattr(leaf, "is_ready"))


class StoreWire:
    """Carries what the stages of one process exchange with all others through the objects of a run.

    Args:
      run: whose objects carry it. The processes agree on it when the first of them is sent or awaited.
      stages: the stages of this process, ascending.
      n_stages: how many there are in all.
      timeout_s: seconds to wait for an object.
      save_every: steps from one saved state to the next.
    """

    def __init__(self, run: StoreRun, stages: Sequence[int], n_stages: int, timeout_s: float, save_every: int):
        self._run, self._stages, self._n_stages = run, tuple(stages), n_stages
        self._timeout_s, self._save_every = timeout_s, save_every
        self._uploads = ThreadPoolExecutor(_UPLOADS, "jaxche-upload")
        self._keeper = ThreadPoolExecutor(1, "jaxche-keeper")
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._sent: dict[int, list[_Sent]] = {}
        self._received: dict[int, list[str]] = {}
        self._settled: Future | None = None
        self._failure: BaseException | None = None
        self._told = False  # whether a caller has seen the failure
        self._forgetful = False  # whether steps were finished without a state to go on from
        self._deleted = -1  # the last of those steps, whose objects are being taken away
        self._states: list[str] = []
        self._saves = 0

    def send(self, tag: Tag, tree: Any) -> None:
        self._write(tag.step, tag.target, names.key(tag), tree)

    def receive(self, tag: Tag, like: Any, device: Device) -> Any:
        return tensors.on_device(self._read(tag.step, names.key(tag), like, str(tag), tag.stage), device)

    def publish(self, step: int, loss: Any) -> None:
        # One copy a reader: whoever reads an object takes it away, so no two may share one.
        for reader in set(range(self._n_stages)) - set(self._stages):
            self._write(step, reader, names.loss_key(step, reader, self._n_stages - 1), loss, np.float64)

    def read_loss(self, step: int) -> float:
        last = self._n_stages - 1
        if last in self._stages:
            raise RuntimeError(f"the loss of step {step} is in this process: its last stage returned it")
        what = f"the loss of step {step}"
        copies = [self._read(step, names.loss_key(step, stage, last), _LOSS, what, last) for stage in self._stages]
        return float(copies[0])

    def finish(self, step: int, state: Any = None) -> None:
        self._run.agree(self._nap)
        self._wait_settled()  # one save at a time: a store slower than the steps holds the stage back here
        if state is not None and (step + 1) % self._save_every:
            return
        with self._lock:
            sent = [entry for k in sorted(self._sent) if k <= step for entry in self._sent.pop(k)]
            received = [key for k in sorted(self._received) if k <= step for key in self._received.pop(k)]
        if state is None:
            self._forgetful, self._deleted = True, step
            futures.wait([entry.done for entry in sent])  # a process may end after its last step
            self._raise()
        else:
            # Read now: the next step may be given these buffers to write into.
            state = (tensors.on_host(state),)
        self._settled = self._keeper.submit(self._guarded, self._settle, sent, received, state, step + 1)

    def rejoin(self, like_state: Any) -> tuple[int, Any] | None:
        self._wait_settled()
        if not self._run.find():
            return None
        self._states = self._objects.names(self._state_folder())
        if not self._states:
            return None
        key = self._states[-1]
        step, size = names.step(key), tensors.object_size(like_state)
        found = self._objects.read(key, max(size, tensors.HEAD_LIMIT))
        if found is None:
            raise ConnectionError(f"{key} in {self._objects} was there and is gone: do two processes hold one stage?")
        try:
            state = self._decode(*found, like_state, key)
        except tensors.DamagedObjectError:
            raise
        except ValueError as error:
            raise ValueError(
                f"{error}. This run was begun with other parameters or another optimizer: to start anew write another "
                'DataStore(run="...")'
            ) from error
        # What a death between the save and the deletes left behind.
        self._mark(step)
        stale = [
            key for stage in self._stages for key in self._objects.names(names.folder(stage)) if names.step(key) < step
        ]
        self._objects.delete(stale)
        self._forget_states()
        return step, state

    def close(self) -> None:
        self._closed.set()
        self._uploads.shutdown()
        self._keeper.shutdown()
        if self._forgetful and self._failure is None:
            # Nothing is left of this run: the next of its name may be cut otherwise.
            self._run.root.delete([names.PLAN])
        with contextlib.suppress(ConnectionError):  # a hello that is left behind does no harm
            self._run.leave()
        if not self._told:
            self._raise()

    # -- one object

    @property
    def _objects(self) -> Objects:
        return self._run.objects

    def _write(self, step: int, reader: int, key: str, tree: Any, dtype: Any = None) -> None:
        self._check()
        self._wait_deleted(step)
        if self._run.is_agreed and self._objects.is_near and _is_small_and_ready(tree):
            self._guarded(self._upload, key, tree, dtype)
            done = Future()
            done.set_result(None)
        else:
            done = self._uploads.submit(self._guarded, self._upload, key, tree, dtype)
        with self._lock:
            self._sent.setdefault(step, []).append(_Sent(reader, key, done))

    def _upload(self, key: str, tree: Any, dtype: Any) -> None:
        if dtype is not None:
            tree = np.asarray(tree).astype(dtype)
        try:
            self._run.agree(self._nap)
        except WireClosedError:
            return  # nobody came to read it
        self._objects.create(key, tensors.encode(tree))

    def _read(self, step: int, key: str, like: Any, what: str, writer: int) -> Any:
        self._wait_deleted(step)
        self._run.agree(self._nap)
        limit = max(tensors.object_size(like), tensors.HEAD_LIMIT)
        try:
            found = self._objects.wait(key, limit, self._timeout_s, self._pause)
        except TimeoutError as error:
            raise TimeoutError(
                f"waited {self._timeout_s:g} s for {what}: stage {writer} has not written {key} in {self._objects}. "
                "Is its process running, on the same url and run? A slower one needs DataStore(timeout_s=...)"
            ) from error
        tree = self._decode(*found, like, key)
        with self._lock:
            self._received.setdefault(step, []).append(key)
        return tree

    def _decode(self, data: Any, size: int, like: Any, key: str) -> Any:
        if size != tensors.object_size(like):
            raise tensors.explain(data, size, like, f"{key} in {self._objects}")
        return tensors.decode(data, like, f"{key} in {self._objects}")

    def _pause(self, seconds: float) -> None:
        self._run.answer()
        self._nap(seconds)

    def _nap(self, seconds: float) -> None:
        self._check()
        self._closed.wait(seconds)

    # -- what happens behind the stages' backs

    def _guarded(self, action, *arguments) -> None:
        """Keep the first error of a background thread for the next call of the wire."""
        try:
            action(*arguments)
        except BaseException as error:
            if self._failure is None:
                self._failure = error
            raise

    def _raise(self) -> None:
        if self._failure is not None:
            self._told = True
            raise self._failure

    def _wait_settled(self) -> None:
        self._check()
        if self._settled is not None:
            futures.wait([self._settled])
            self._raise()

    def _wait_deleted(self, step: int) -> None:
        """Whoever uses the names of a step again must not lose them to its deletes."""
        if step <= self._deleted:
            self._wait_settled()

    def _check(self) -> None:
        self._raise()
        if self._closed.is_set():
            raise WireClosedError("the wire was closed while a stage used it")

    def _settle(self, sent: list[_Sent], received: list[str], state: tuple[Any] | None, next_step: int) -> None:
        for entry in sent:  # before the state: after it nobody would send them again
            entry.done.result()
        if state is not None:
            if self._saves < _REPEATED_SAVES:
                self._take_back(sent)
            key = f"{self._state_folder()}/step-{next_step:010d}"
            self._objects.replace(key, tensors.encode(state[0]))
            self._saves += 1
            self._run.note_saved()
            self._mark(next_step)
            self._states.append(key)
        self._objects.delete(received)
        self._forget_states()

    def _take_back(self, sent: list[_Sent]) -> None:
        """Delete what was written again for readers that had finished with it."""
        finished = {reader: self._finished(reader) for reader in {entry.reader for entry in sent}}
        self._objects.delete([entry.key for entry in sent if names.step(entry.key) < finished[entry.reader]])

    def _mark(self, step: int) -> None:
        for stage in self._stages:
            self._objects.replace(names.finished_key(stage), [str(step).encode()])

    def _finished(self, stage: int) -> int:
        found = self._objects.read(names.finished_key(stage), 20)
        with contextlib.suppress(ValueError):
            return int(bytes(found[0])) if found else 0
        return 0

    def _state_folder(self) -> str:
        return names.state_folder(self._stages[0])

    def _forget_states(self) -> None:
        self._objects.delete(self._states[:-_STATES])
        del self._states[:-_STATES]
