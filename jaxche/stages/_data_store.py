"""DataStore: stages that share only a folder or a bucket, and the wire of one process through it.

A restarted process repeats its last steps and writes their objects again. Objects that still exist are left alone.
Objects whose reader has finished their step are deleted by the writer: the reader writes its finished step before it
deletes, and the writer writes its object before it reads the finished step, so in any order one of the two deletes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxche.messages import brief, type_of, whole_number
from jaxche.sharding import Device
from jaxche.stages import _tensors as tensors
from jaxche.stages._buffers import are_small_and_ready, on_device
from jaxche.stages._objects import Objects, open_objects
from jaxche.stages._schedule import checked_micro_batch_size
from jaxche.stages._store_run import (
    PLAN,
    StoreRun,
    finished_key,
    inbox,
    loss_key,
    state_folder,
    state_key,
    step_of,
    tag_key,
)
from jaxche.stages._wire import Tag, Wire, WireClosedError, check_timeout

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_UPLOADS = 4  # parallel transfers; each reads its arrays, computes their checksum and writes them
# Ready trees up to this size are written to a folder from the caller's thread, within about a millisecond, which saves
# the time to wake another thread and to share the interpreter with it.
_INLINE_BYTES = 4 << 20
_STATES = 2
# A restarted process repeats at most the steps between two saves, and one more save that was in progress.
_REPEATED_SAVES = 2
_LOSS = jax.ShapeDtypeStruct((), np.float64)


@dataclass(frozen=True)
class DataStore:
    """Activations and gradients go through shared storage: a folder, or a bucket of an object store.

    The processes of the stages share nothing else. Each runs the same script with ``local_stages=[i]``. Every object is
    written atomically, verified when it is read, and deleted by its reader after the reader's own state after that step
    is saved. A process that dies at any moment can be restarted with the same command. It resumes at its step, and the
    run ends with the same parameters as without the failure. Until one stage has saved a state, a process can restart
    only while all others run.

    Args:
      url: a folder (``"/shared/run"``, ``"file:///shared/run"``), a bucket (``"s3://bucket/path"``,
        ``"gs://bucket/path"``), or ``"memory://name"`` for stages of one process.
      micro_batch_size: examples in a micro-batch; None for the whole batch at once.
      schedule: order of a stage's forward and backward passes, ``"1f1b"`` or ``"gpipe"``.
      run: name of the run, the first part of the names of its objects. A run with saved states is resumed by its name.
        Objects of a run without saved states are never read again: each start of all processes makes a new identity,
        the second part of the names, and a restarted process takes the identity of the running ones.
      timeout_s: seconds that a stage waits for an object, or for the processes of other stages.
      save_every: steps from one saved state to the next; objects received since the last one stay in the store.
      options: options of obstore for the URL in addition to the environment, such as ``endpoint``, ``access_key_id``,
        ``secret_access_key``, ``region`` or ``client_options``; ``client_options={"timeout": "5m"}`` lets one
        transfer take more than 30 s. Not shown by ``repr``.
      settings: what else a run is made with, as JSON, e.g. ``{"batch_size": 32, "seed": 0}``. A process with other
        settings is refused, and so is the resume of a run that was begun with others.

    Raises:
      ValueError: an invalid argument.

    Example:
      >>> store = DataStore("/shared/run", micro_batch_size=8)
      >>> store.schedule, store.run
      ('1f1b', 'run')
    """

    url: str
    micro_batch_size: int | None = None
    schedule: str = "1f1b"
    run: str = "run"
    timeout_s: float = 600.0
    save_every: int = 1
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        if not isinstance(self.url, str | os.PathLike) or not os.fspath(self.url):
            raise ValueError(f'url={self.url!r} must be a folder or a bucket; write e.g. DataStore("/shared/run")')
        object.__setattr__(self, "url", os.fspath(self.url))
        size = checked_micro_batch_size(self.micro_batch_size, self.schedule)
        object.__setattr__(self, "micro_batch_size", size)
        if not isinstance(self.run, str) or not _RUN.fullmatch(self.run):
            raise ValueError(f"run={self.run!r} must be letters, digits, '.', '_' and '-'; write e.g. run='run-2'")
        check_timeout(self.timeout_s)
        object.__setattr__(self, "save_every", whole_number("save_every", self.save_every, 1, "save_every=1"))
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options is {type_of(self.options)}; write e.g. options={{'region': 'us-east-1'}}")
        try:
            json.dumps(dict(self.settings), sort_keys=True)
        except (TypeError, ValueError):
            raise ValueError(
                f"settings={brief(self.settings)} is not a dict of JSON; write e.g. settings={{'batch_size': 32}}"
            ) from None

    def wire(self, stages: Sequence[int], n_stages: int, devices: Sequence[Device | None]) -> StoreWire:
        """Open the wire of one process, after a test of the store.

        Raises:
          ImportError: obstore is not installed.
          ConnectionError: the test of the store failed.
          ValueError: the run was begun with other stages, micro-batches or settings.
        """
        objects = open_objects(self.url, self.run, self.options)
        plan = {"stages": n_stages, "micro_batch_size": self.micro_batch_size, "schedule": self.schedule}
        if self.settings:
            plan["settings"] = {name: self.settings[name] for name in sorted(self.settings)}
        objects.agree(PLAN, json.dumps(plan))
        return StoreWire(StoreRun(objects, stages, n_stages, self.timeout_s), self.save_every)


class _Sent(NamedTuple):
    """An object that was sent: the stage that reads it, its key, and the end of its upload."""

    reader: int
    key: str
    done: Future


class StoreWire(Wire):
    """The wire of one process through the objects of a run, which saves a state every ``save_every`` steps."""

    def __init__(self, run: StoreRun, save_every: int):
        self._run, self._save_every = run, save_every
        self._stages = run.stages
        self._uploads = ThreadPoolExecutor(_UPLOADS, "jaxche-upload")
        self._committer = ThreadPoolExecutor(1, "jaxche-commit")
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._sent: dict[int, list[_Sent]] = {}
        self._received: dict[int, list[str]] = {}
        self._committed: Future | None = None
        self._failure: BaseException | None = None
        self._raised = False  # whether the failure was raised to a caller
        self._stateless: int | None = None  # the last step finished without a state, whose objects are being deleted
        self._saves = 0

    def send(self, tag: Tag, tree: Any) -> None:
        self._write(tag.step, tag.target, tag_key(tag), tree)

    def receive(self, tag: Tag, like: Any, device: Device) -> Any:
        return on_device(self._read(tag.step, tag_key(tag), like, str(tag), tag.stage), device)

    def publish(self, step: int, loss: Any) -> None:
        # One copy a reader, because the reader of an object deletes it.
        for reader in set(range(self._run.n_stages)) - set(self._stages):
            self._write(step, reader, loss_key(step, reader, self._stages[-1]), np.float64(loss))

    def read_loss(self, step: int) -> float:
        last, what = self._run.n_stages - 1, f"the loss of step {step}"
        copies = [self._read(step, loss_key(step, stage, last), _LOSS, what, last) for stage in self._stages]
        return float(copies[0])

    def finish(self, step: int, state: Any = None) -> None:
        self._run.agree(self._sleep)
        self._wait_committed()  # one save at a time: a slow store limits the stage here
        if state is not None and (step + 1) % self._save_every:
            return
        with self._lock:
            sent = [entry for k in sorted(self._sent) if k <= step for entry in self._sent.pop(k)]
            received = [key for k in sorted(self._received) if k <= step for key in self._received.pop(k)]
        if state is None:
            self._stateless = step
            futures.wait([entry.done for entry in sent])  # the process may end after its last step
            self._raise()
        else:
            # Copy now: the next step may donate these buffers.
            state = tensors.on_host(state)
        self._committed = self._committer.submit(self._keep_error, self._commit, sent, received, state, step + 1)

    def rejoin(self, like_state: Any) -> tuple[int, Any] | None:
        limit = tensors.read_limit(like_state)  # before the first step, refuses dtypes that cannot be stored
        self._wait_committed()
        if not self._run.find_saved():
            return None
        states = self._states()
        if not states:
            return None
        key = states[-1]
        step, found = step_of(key), self._objects.read(key, limit)
        if found is None:
            raise ConnectionError(f"{key} in {self._objects} was deleted meanwhile: do two processes hold one stage?")
        try:
            state = self._decode(found, like_state, key)
        except tensors.DamagedObjectError:
            raise
        except ValueError as error:
            raise ValueError(
                f"{error}. This run was begun with other parameters or another optimizer: for a new run write another "
                'DataStore(run="...")'
            ) from error
        # Delete what remains if the process died between the save and the deletes.
        self._write_finished(step)
        stale = [key for stage in self._stages for key in self._objects.names(inbox(stage)) if step_of(key) < step]
        self._objects.delete(stale + states[:-_STATES])
        return step, state

    def close(self) -> None:
        self._closed.set()
        self._uploads.shutdown()
        self._committer.shutdown()
        if self._stateless is not None and self._failure is None and not self._run.has_saved_state:
            # No state is left of this run: the next of its name may have other micro-batches.
            self._run.root.delete([PLAN])
        with contextlib.suppress(ConnectionError):  # a remaining hello is harmless
            self._run.leave()
        if not self._raised:
            self._raise()

    # -- one object

    @property
    def _objects(self) -> Objects:
        return self._run.objects

    def _write(self, step: int, reader: int, key: str, tree: Any) -> None:
        self._check()
        self._wait_deleted(step)
        inline = self._run.is_agreed and self._objects.is_local
        if inline and are_small_and_ready(jax.tree.leaves(tree), _INLINE_BYTES):
            self._keep_error(self._upload, key, tree)
            done = Future()
            done.set_result(None)
        else:
            done = self._uploads.submit(self._keep_error, self._upload, key, tree)
        with self._lock:
            self._sent.setdefault(step, []).append(_Sent(reader, key, done))

    def _upload(self, key: str, tree: Any) -> None:
        try:
            self._run.agree(self._sleep_open)
        except WireClosedError:
            return  # the wire was closed before its reader started
        self._objects.create(key, tensors.encode(tree))

    def _read(self, step: int, key: str, like: Any, what: str, writer: int) -> Any:
        self._wait_deleted(step)
        self._run.agree(self._sleep)
        timeout_s = self._run.timeout_s
        try:
            found = self._objects.wait(key, tensors.read_limit(like), timeout_s, self._pause)
        except TimeoutError as error:
            raise TimeoutError(
                f"waited {timeout_s:g} s for {what}: stage {writer} has not written {key} in {self._objects}. "
                "Is its process running, on the same url and run? A slower one needs DataStore(timeout_s=...)"
            ) from error
        tree = self._decode(found, like, key)
        with self._lock:
            self._received.setdefault(step, []).append(key)
        return tree

    def _decode(self, found: tuple[Any, int], like: Any, key: str) -> Any:
        try:
            return tensors.decode(*found, like, f"{key} in {self._objects}")
        except tensors.DamagedObjectError as error:
            raise tensors.DamagedObjectError(
                f"{error}. To resume, stop all processes, delete it, and delete the states (stage-*-state/step-*) of "
                "later steps than the last of which every stage has one"
            ) from None

    def _pause(self, seconds: float) -> None:
        self._run.admit()
        self._sleep(seconds)

    def _sleep(self, seconds: float) -> None:
        self._raise()
        self._sleep_open(seconds)

    def _sleep_open(self, seconds: float) -> None:
        """Sleep while the wire is open, in a background thread, which leaves errors to the caller's thread."""
        self._check_open()
        self._closed.wait(seconds)

    # -- background threads

    def _keep_error(self, action: Callable[..., None], *arguments: Any) -> None:
        """Record the first error of a background thread for the next call of the wire."""
        try:
            action(*arguments)
        except BaseException as error:
            if self._failure is None:
                self._failure = error
            raise

    def _raise(self) -> None:
        if self._failure is not None:
            self._raised = True
            raise self._failure

    def _wait_committed(self) -> None:
        self._check()
        if self._committed is not None:
            futures.wait([self._committed])
            self._raise()

    def _wait_deleted(self, step: int) -> None:
        """Wait for the deletes of a step before its keys are used again."""
        if self._stateless is not None and step <= self._stateless:
            self._wait_committed()

    def _check(self) -> None:
        self._raise()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise WireClosedError("the wire was closed while a stage used it")

    def _commit(self, sent: list[_Sent], received: list[str], state: Any, next_step: int) -> None:
        for entry in sent:  # before the state, after which they would not be sent again
            entry.done.result()
        if state is not None:
            if self._saves < _REPEATED_SAVES:
                self._delete_repeated(sent)
            key = state_key(self._stages[0], next_step)
            self._objects.replace(key, tensors.encode(state))
            self._saves += 1
            self._run.has_saved_state = True
            self._write_finished(next_step)
            self._objects.delete(self._states()[:-_STATES])
        self._objects.delete(received)

    def _delete_repeated(self, sent: list[_Sent]) -> None:
        """Delete objects that were written again for readers that had finished their step."""
        finished = {reader: self._read_finished(reader) for reader in {entry.reader for entry in sent}}
        self._objects.delete([entry.key for entry in sent if step_of(entry.key) < finished[entry.reader]])

    def _write_finished(self, step: int) -> None:
        for stage in self._stages:
            self._objects.replace(finished_key(stage), [str(step).encode()])

    def _read_finished(self, stage: int) -> int:
        found = self._objects.read(finished_key(stage), 20)
        text = bytes(found[0]) if found else b""
        return int(text) if text.isdigit() else 0

    def _states(self) -> list[str]:
        """Keys of the saved states of this process, also those of earlier wires, the newest last."""
        return self._objects.names(state_folder(self._stages[0]))
