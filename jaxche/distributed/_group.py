"""The group of processes that train together: its members, their collectives, and errors raised on all of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

# The coordination service that the processes of a run joined. It has no public name.
from jax._src import distributed as _jax_distributed

from jaxche.distributed._thread_barrier import ThreadBarrier
from jaxche.distributed._watchdog import Watchdog

# Other processes may compile a large model meanwhile. JAX itself detects a dead one much earlier.
_TIMEOUT_MS = 3_600_000
# How long to wait for a key before checking whether its process has left.
_POLL_MS = 5_000
# How long a process that ends within a fit waits for the others to end too.
_EXIT_MS = 30_000
# How long to wait for another process without a line in the log.
_LOG_S = 60.0
_LEFT, _MERGING = "jaxche/left", "jaxche/merging"

_SAME_CALLS = (
    "all processes must make the same calls of fit, evaluate and other methods of the trainer, also in callbacks; take "
    "them out of `if jax.process_index() == 0:`"
)

_log = logging.getLogger("jaxche")


@contextlib.contextmanager
def suppress_timeout() -> Iterator[None]:
    """A context that ends without an error if a key of the store is not set in time."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise


def numbered(store: Any, folder: str) -> dict[int, str]:
    """The values in a folder of the store of a run, by the numbers of their keys."""
    return {int(key.rpartition("/")[2]): text for key, text in store.key_value_dir_get(folder)}


class RankError(RuntimeError):
    """Another process failed; the message has the rank, the place and the error.

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

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.rank), self.__dict__


class PeerLostError(RuntimeError):
    """A merge between processes failed, as it does when one of them dies.

    The state from before the round is intact, unless ``fit(donate=True)`` has taken it. In an elastic run
    ``Trainer.fit`` continues, and raises this only if the remaining processes cannot train.

    Example:
      >>> try:
      ...     raise PeerLostError("the merge of all processes failed; did one of them die?")
      ... except PeerLostError as error:
      ...     print(error)
      the merge of all processes failed; did one of them die?
    """


class Group:
    """The processes of a run, whose number never changes; :class:`ElasticGroup` can shrink and admit processes.

    The collectives carry small JSON values through the coordination service and not over the devices, because processes
    may have different numbers and kinds of them. All members make the same calls in the same order.
    """

    elastic = False  # whether members can be lost and admitted
    standby = False  # whether this process waits to be admitted

    def __init__(self, state: Any = None):
        self._state = state or _jax_distributed.global_state
        self.quorum_id = "0"  # name of the present membership; it changes with the members and their connections
        self.watchdog = Watchdog()
        self.launcher = "jax"  # what started the processes
        self._calls = 0
        self._broadcasts: dict[str, Iterator[int]] = {}
        # How many programs of several processes this one has begun, and whether it is in one.
        self._begun, self._in_program = 0, False
        self._publishes = False

    @property
    def process_index(self) -> int:
        """The number of this process."""
        return self._state.process_id

    @property
    def num_processes(self) -> int:
        """The number of processes that the run was started with."""
        return self._state.num_processes

    @property
    def members(self) -> tuple[int, ...]:
        """The processes that take part now, in order."""
        return tuple(range(self.num_processes))

    @property
    def is_first(self) -> bool:
        """Whether this process is the first member."""
        return self.process_index == self.members[0]

    @property
    def is_leader(self) -> bool:
        """Whether this process prints and writes what one process of the run does; not in standby."""
        return self.is_first

    @property
    def client(self) -> Any:
        """The key-value store of the run."""
        return self._state.client

    def lost(self) -> list[int]:
        """The members that have died; only an elastic group detects them."""
        return []

    def raise_if_lost(self) -> None:
        """Raise PeerLostError if a member has died, or has seen a death; only an elastic group detects that."""

    def with_connections(self, devices: np.ndarray) -> np.ndarray:
        """The same devices with the present connections between the members."""
        return devices

    def all_gather(self, value: Any, place: str = "") -> list[Any]:
        """One small JSON value of each member, in process order; RankError if they are in different places."""
        if self.num_processes == 1:
            return [value]
        call, path = self._calls, f"jaxche/all_gather/{self.quorum_id}"
        self._calls += 1
        texts = {self.process_index: f"{json.dumps(value)}\n{place}"}
        self.client.key_value_set(f"{path}/{call}/{self.process_index}", texts[self.process_index])
        while missing := [process for process in self.members if process not in texts]:
            texts[missing[0]] = self.receive(f"{path}/{call}/{missing[0]}", missing[0])
            if len(missing) > 1:  # all that are set in one message: one for each key were N² of N processes
                texts |= numbered(self.client, f"{path}/{call}/")
        if call:  # a process that has started this call has read all values of the last one
            self.client.key_value_delete(f"{path}/{call - 1}/{self.process_index}")
        found = {process: texts[process].partition("\n") for process in self.members}
        for process, (_, _, other) in found.items():
            if other != place:
                self.raise_if_lost()
                here, there = place or "another call", other or "another call"
                raise RankError(
                    f"process {self.process_index} is in {here}, and process {process} in {there}: {_SAME_CALLS}",
                    process,
                )
        return [json.loads(value) for value, _, _ in found.values()]

    def broadcast(self, value: Any) -> Any:
        """The value of the first member, on all members."""
        return self.all_gather(value if self.is_first else None)[0]

    def barrier(self) -> None:
        """Wait for all members."""
        self.all_gather(None)

    def relay(self, processes: Sequence[int], add: Callable[[Any], Any]) -> Any:
        """Hand JSON along these processes, each of which changes it by ``add``; all members get the last value."""
        if self.num_processes == 1:
            return add(None)
        # The number of the call is that of the all-gather at its end.
        place, own, value = f"jaxche/relay/{self.quorum_id}/{self._calls}", self.process_index, None
        if own in processes:
            before = {second: first for first, second in itertools.pairwise(processes)}.get(own)
            value = add(None if before is None else json.loads(self.receive(f"{place}/{before}", before)))
            self.client.key_value_set(f"{place}/{own}", json.dumps(value))
        last = self.all_gather(value if own == processes[-1] else None)[self.members.index(processes[-1])]
        if own in processes:
            self.client.key_value_delete(f"{place}/{own}")
        return last

    def receive(self, key: str, process: int) -> str:
        """The value of a key of another process; RankError if it has ended, or waits for this one in a merge."""
        absent, start, is_logged = "", time.monotonic(), False
        while True:
            with suppress_timeout():
                return self.client.blocking_key_value_get(key, _POLL_MS)
            waited = time.monotonic() - start
            if absent:
                raise RankError(
                    f"process {process} {absent}, and process {self.process_index} waits for it: {_SAME_CALLS}", process
                )
            if waited > _TIMEOUT_MS / 1e3:
                raise TimeoutError(f"process {process} did not set {key} within {_TIMEOUT_MS / 1e3:.0f} s")
            if waited > _LOG_S and not is_logged:
                _log.warning(
                    "process %s has waited %.0f s for process %s, which may compile; if this does not end, does one "
                    "of them call fit or evaluate alone, as in a callback of process 0?",
                    self.process_index,
                    waited,
                    process,
                )
                is_logged = True
            # Read once more after this: a process sets its keys before it leaves or merges.
            if process in numbered(self.client, f"{_LEFT}/"):
                absent = "has ended its script"
            # A merge that this process has not begun cannot end.
            elif int(numbered(self.client, f"{_MERGING}/").get(process, 0)) > self._begun:
                absent = "is in the merge of a round that this process has not begun"

    def _publish_merges(self) -> None:
        """Set the number of a merge that takes long, for processes that do not take part in it."""
        before = 0
        while True:
            time.sleep(_POLL_MS / 1e3)
            begun = self._begun
            if self._in_program and begun == before:
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator has ended
                    self.client.key_value_set(f"{_MERGING}/{self.process_index}", str(begun), allow_overwrite=True)
            before = begun

    def leave(self) -> None:
        """Leave the run at exit: others do not wait for keys of this process."""
        if self.client is not None and self.num_processes > 1:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator has ended
                self.client.key_value_set(f"{_LEFT}/{self.process_index}", "")

    def ends_together(self) -> bool:
        """Whether all members end within a fit, as this one does; waits for them for a while."""
        if self.num_processes > 1:
            try:
                self.client.wait_at_barrier(f"jaxche/exit/{self.quorum_id}", _EXIT_MS)
            except jax.errors.JaxRuntimeError:
                return False
        return True

    def thread_barrier(self, name: str) -> ThreadBarrier:
        """A barrier for threads of the present members; each has another name."""
        place = f"jaxche/{name}/{self.quorum_id}"
        return ThreadBarrier(self.client, place, self.process_index, self.members, self._receiver())

    def _receiver(self) -> Callable[[str, int, float], str]:
        """A function that waits for a key of a present member: the key, the process, and ms until TimeoutError."""

        def receive(key: str, process: int, timeout_ms: float) -> str:
            with suppress_timeout():
                return self.client.blocking_key_value_get(key, int(timeout_ms))
            raise TimeoutError(f"no process set {key}")

        return receive

    def flag_broadcast(self, processes: Sequence[int], name: str) -> Callable[[bool], bool]:
        """A function that returns the flag of the first of these processes on all of them, as often as all call it."""
        sender = processes[0]
        place = f"jaxche/broadcast/{self.quorum_id}/{'-'.join(map(str, processes))}/{name}"
        start, calls = next(self._broadcasts.setdefault(place, itertools.count())), itertools.count()
        if start and self.process_index == sender:  # the others have read all of the previous one
            self.client.key_value_delete(f"{place}/{start - 1}")

        def broadcast(flag: bool) -> bool:
            key = f"{place}/{start}/{next(calls)}"
            if self.process_index != sender:
                return self.receive(key, sender) == "1"
            self.client.key_value_set(key, str(int(flag)))
            return flag

        return broadcast

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """A context for a program of several processes; its errors after the death of one are PeerLostError."""
        if self.num_processes > 1 and not self.elastic and not self._publishes:
            self._publishes = True
            threading.Thread(target=self._publish_merges, name="jaxche-merging", daemon=True).start()
        self._begun, self._in_program = self._begun + 1, True
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            # Failures of Gloo have either type.
            is_lost = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
            if self.num_processes == 1 or not is_lost:
                raise
            message = f"the merge with the other processes failed; did one of them die? {error}"
            raise PeerLostError(message) from error
        finally:
            self._in_program = False

    @contextlib.contextmanager
    def errors_everywhere(self, rank: int, place: str) -> Iterator[None]:
        """A context of all members, at whose end an error within it is raised as by :meth:`raise_everywhere`."""
        error = None
        try:
            yield
        except Exception as e:
            error = e
        self.raise_everywhere(error, rank, place)

    def raise_everywhere(self, error: Exception | None, rank: int, place: str, is_kept: bool = True) -> None:
        """Raise an error of one member on all: there as it is, with ``rank`` and ``place``, elsewhere as RankError."""
        # is_kept: whether the state from before the place is.
        own = None
        if error is not None:
            last = "".join(traceback.format_exception(error)[-3:])[-1500:]
            own = {"rank": rank, "kind": type(error).__name__, "message": str(error)[:1000], "trace": last}
        reports = []
        try:
            reports = [report for report in self.all_gather(own, place) if report is not None]
        except RankError:  # of another process that does not take part
            if error is None:
                raise
        if error is not None:
            error.add_note(f"raised on rank {rank} in {place}" + "; the state from before it is intact" * is_kept)
            raise error
        if reports:
            r = reports[0]
            raise RankError(
                f"rank {r['rank']} failed in {place} with {r['kind']}: {r['message']}\n--- there ---\n{r['trace']}",
                r["rank"],
            )
