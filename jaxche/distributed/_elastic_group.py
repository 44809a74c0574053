"""A group that continues without processes that die, and admits processes that replace them."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

# JAX has no public name for a second client of the CPU devices, nor for the state of jax.distributed.
from jax._src import distributed as _jax_distributed
from jax._src import xla_bridge as _xla_bridge

from jaxche.distributed._group import Group, PeerLostError
from jaxche.distributed._liveness import Liveness

_log = logging.getLogger("jaxche")

# How long process 0 waits at exit for the others to write their last files; its exit ends the coordination service.
_EXIT_TIMEOUT_S, _POLL_S = 120.0, 0.2
# How many of its last keys a process keeps in the store for a barrier.
_KEPT_KEYS = 64
# Where XLA's clients keep the addresses of Gloo's sockets, and what process 0 knows of all devices.
_ADDRESSES, _TOPOLOGY = "cpu:gloo/", "cpu:global_topology/cpu"
# Requests of standby processes, the answers to them, the state sent to them, and the fits that have ended.
_REQUESTS, _ANSWERS, _STATES, _ENDED_FITS = "jaxche/request", "jaxche/answer", "jaxche/state", "jaxche/ended_fit"
# Bytes of one value in the store, whose messages are limited.
_CHUNK = 1 << 20


class TakenForDeadError(PeerLostError):
    """The other processes continued without this one, because it was stopped for too long."""


class Admission(NamedTuple):
    """What a process is given when it is admitted: the membership, JSON and bytes."""

    incarnations: dict[int, int]
    quorum_id: str
    message: dict[str, Any]
    state: bytes


class ElasticGroup(Group):
    """A group with heartbeats: members that die are detected, and a process that replaces one can be admitted.

    Each process has an incarnation, the number of processes that have had its index so far. A process that comes later
    is in standby until the members admit it.
    """

    elastic = True

    def __init__(self, state: Any = None):
        super().__init__(state)
        self._liveness = Liveness(self._state, self.watchdog)
        self._incarnations: dict[int, int] | None = None
        self._devices: dict[int, Any] | None = None
        # A script makes its fits in the same order in all its processes.
        self._fit = 0

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self.incarnations)

    @property
    def incarnation(self) -> int:
        """The incarnation of this process, from 1."""
        return self._liveness.incarnation

    @property
    def incarnations(self) -> dict[int, int]:
        """The members and their incarnations."""
        if self._incarnations is None:
            alive = self._liveness.alive()
            self._incarnations = {process: alive.get(process, 1) for process in range(self.num_processes)}
        return self._incarnations

    def lost(self) -> list[int]:
        return self._liveness.lost(self.incarnations)

    def receive(self, key: str, process: int) -> str:
        return self._liveness.wait_for_key(key, {process: self.incarnations[process]}, unless=self._failures)

    def thread_barrier(self, name: str) -> Callable[[str, float], None]:
        """A barrier of the present members that threads may use side by side, each with its own keys.

        Args:
          name: of the barrier.

        Returns:
          A function of a key and a timeout in ms. It raises :class:`PeerLostError` if a member dies.
        """
        incarnations, failures, place = dict(self.incarnations), self._failures, f"jaxche/{name}/{self.quorum_id}"
        uses: collections.Counter[str] = collections.Counter()
        own_keys: collections.deque[str] = collections.deque()

        def wait(key: str, timeout_ms: float) -> None:
            uses[key] += 1
            key = f"{place}/{key}.{uses[key]}"
            own = f"{key}/{self.process_index}"
            self.client.key_value_set(own, "")
            own_keys.append(own)
            for process, incarnation in incarnations.items():
                self._liveness.wait_for_key(f"{key}/{process}", {process: incarnation}, timeout_ms, unless=failures)
            while len(own_keys) > _KEPT_KEYS:  # after so many barriers all have read it
                self.client.key_value_delete(own_keys.popleft())

        return wait

    def connected(self, devices: np.ndarray) -> np.ndarray:
        """The same CPU devices with the newest connections; other devices unchanged."""
        if self._devices is None or any(device.platform != "cpu" for device in devices.flat):
            return devices
        return np.array([self._devices[device.id] for device in devices.flat], dtype=object).reshape(devices.shape)

    def shrink(self) -> list[int]:
        """Continue without the members that died, after a collective has failed; returns them.

        Process 0 decides which have died. If none has, all continue over new connections.

        Raises:
          TakenForDeadError: the others continue without this process.
          PeerLostError: process 0 died.
        """
        expected, key = self.incarnations, f"jaxche/lost/{self.quorum_id}"
        # So that no member waits for this one in the next round, and process 0 sees that it is alive.
        self.client.key_value_set(f"{self._failures}{self.process_index}", "", allow_overwrite=True)
        if self.process_index == 0:
            self.client.key_value_set(key, json.dumps(self._liveness.wait_for_loss(expected, self._failures)))
        lost = json.loads(self._liveness.wait_for_key(key, {0: expected[0]}))
        if self.process_index in lost:
            raise TakenForDeadError("this process was stopped, and the others went on without it")
        remaining = {process: number for process, number in expected.items() if process not in lost}
        self._configure(remaining, f"{self.quorum_id}-{', '.join(map(str, lost))}")
        return lost

    def begin_fit(self) -> None:
        """Count the fits of the script. A standby process joins the fit with its own number."""
        self._fit += 1

    def end_fit(self) -> None:
        """Answer the processes that still request admission to this fit."""
        if self.standby or self.process_index != 0:
            return
        self.client.key_value_set(f"{_ENDED_FITS}/{self._fit}/0", "", allow_overwrite=True)
        for process, request in self._requests().items():
            if process not in self.members:
                self._answer(process, request["incarnation"], {"ended": True})

    def enter_standby(self) -> None:
        """Wait, without peers, for admission at the end of a round."""
        self.standby = True
        self._incarnations = {self.process_index: self.incarnation}
        self._set_quorum(f"standby/{self.process_index}/{self.incarnation}")

    def restart(self) -> None:
        """Begin a new incarnation in standby, after the others took this process for dead."""
        self._liveness.restart()
        self.enter_standby()

    def candidates(self) -> dict[int, dict[str, Any]]:
        """The processes that request admission to this fit and are alive, with their requests."""
        alive = self._liveness.alive()
        return {
            process: request
            for process, request in self._requests().items()
            # Otherwise the death of its predecessor is not detected yet, or it has died itself.
            if process not in self.members and alive.get(process) == request["incarnation"]
            # Otherwise it will read that its fit has ended.
            if request["fit"] == self._fit
        }

    def refuse(self, process: int, incarnation: int, reason: str) -> None:
        """Refuse a candidate."""
        self._answer(process, incarnation, {"refused": reason})

    def admit(self, candidates: Mapping[int, int], message: Mapping[str, Any], state: bytes) -> None:
        """Continue with more members; all present members call it together.

        Args:
          candidates: their incarnations.
          message: JSON for them, read on process 0.
          state: bytes for them, read on process 0.
        """
        incarnations = {**self.incarnations, **candidates}
        quorum_id = f"{self.quorum_id}+{','.join(map(str, candidates))}"
        if self.process_index == 0:
            chunks = -(-len(state) // _CHUNK)
            for i in range(chunks):
                part = state[i * _CHUNK : (i + 1) * _CHUNK]
                self.client.key_value_set_bytes(f"{_STATES}/{quorum_id}/{i}", part)
            answer = {"incarnations": incarnations, "quorum_id": quorum_id, "chunks": chunks, "message": message}
            for process, incarnation in candidates.items():
                self._answer(process, incarnation, answer)
        self._configure(incarnations, quorum_id)
        self.barrier()  # the candidates have read the state
        if self.process_index == 0:
            self.client.key_value_delete(f"{_STATES}/{quorum_id}")

    def request_admission(self, fingerprint: Mapping[str, str]) -> Admission | None:
        """Wait, in standby, until the members admit this process; :meth:`join` must follow. None: the fit has ended.

        Raises:
          RuntimeError: they refuse it.
        """
        process, alive = self.process_index, self._liveness.alive()
        request = {"incarnation": self.incarnation, "fit": self._fit, "fingerprint": dict(fingerprint)}
        self.client.key_value_set(f"{_REQUESTS}/{process}", json.dumps(request), allow_overwrite=True)
        if dict(self.client.key_value_dir_get(f"{_ENDED_FITS}/{self._fit}/")):
            self._answer(process, self.incarnation, {"ended": True})
        key = f"{_ANSWERS}/{process}/{self.incarnation}"
        answer = json.loads(self._liveness.wait_for_key(key, {0: alive[0]}))
        if "refused" in answer:
            raise RuntimeError(f"process {process} cannot join the run: {answer['refused']}")
        if "ended" in answer:
            _log.warning(
                "process %s came when fit %s of its script had ended, and can join no other", process, self._fit
            )
            return None
        keys = [f"{_STATES}/{answer['quorum_id']}/{i}" for i in range(answer["chunks"])]
        state = b"".join(self.client.blocking_key_value_get_bytes(key, 10_000) for key in keys)
        incarnations = {int(process): number for process, number in answer["incarnations"].items()}
        return Admission(incarnations, answer["quorum_id"], answer["message"], state)

    def join(self, admission: Admission) -> None:
        """Become a member; all members call :meth:`admit` meanwhile."""
        self._configure(admission.incarnations, admission.quorum_id)
        self.standby = False
        self.barrier()

    def leave(self) -> None:
        """Leave the run at exit; process 0 waits until the others have left or died, because jaxlib would end them."""
        if self.client is not None and self.process_index == 0:
            self._wait_for_others()
        self._liveness.stop()

    def _wait_for_others(self) -> None:
        # Not for standby processes: they read that the run has ended.
        members = self._incarnations or self._liveness.alive()
        others = {process: incarnation for process, incarnation in members.items() if process != 0}
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        while len(self._liveness.lost(others)) < len(others) and time.monotonic() < deadline:
            self.watchdog.heartbeat_while_waiting()
            time.sleep(_POLL_S)

    @property
    def _failures(self) -> str:
        """Where each member writes once that a collective has failed."""
        return f"jaxche/failures/{self.quorum_id}/"

    def _configure(self, incarnations: Mapping[int, int], quorum_id: str) -> None:
        """Set the members and reconnect them; all of them call it together and then wait for each other."""
        self._incarnations = dict(sorted(incarnations.items()))
        self._set_quorum(quorum_id)
        self._reconnect()

    def _set_quorum(self, quorum_id: str) -> None:
        # A member may have left a collective half done, so the count of calls restarts under another name.
        self.quorum_id, self._calls = quorum_id, itertools.count()

    def _reconnect(self) -> None:
        """Make the next collectives use new connections.

        XLA connects the processes of a collective once for each order of their devices, and keeps the sockets as long
        as the client of the devices. Sockets to a process that has been replaced stay broken. So the processes use the
        devices of another client: the same CPU devices, which ``jax.devices()`` does not list.
        """
        if self.process_index == 0:
            self.client.key_value_delete(_ADDRESSES)
            # The first client of process 0 wrote it, and a second one would not replace it. The others wait for it.
            self.client.key_value_delete(_TOPOLOGY)
        self._devices = {device.id: device for device in _xla_bridge.make_cpu_client().devices()}

    def _requests(self) -> dict[int, dict[str, Any]]:
        found = self.client.key_value_dir_get(f"{_REQUESTS}/")
        return {int(key.rpartition("/")[2]): json.loads(text) for key, text in found}

    def _answer(self, process: int, incarnation: int, answer: Mapping[str, Any]) -> None:
        self.client.key_value_set(f"{_ANSWERS}/{process}/{incarnation}", json.dumps(answer), allow_overwrite=True)
        self.client.key_value_delete(f"{_REQUESTS}/{process}")


@functools.cache
def process_group() -> Group:
    """The group of this process; the only process-wide value of jaxche, as ``torch.distributed`` has a default group.

    It is made at the first call, which has to come after the process has joined its run.
    """
    state = _jax_distributed.global_state
    elastic = state.num_processes > 1 and bool(jax.config.values.get("jax_enable_recoverability"))
    return (ElasticGroup if elastic else Group)(state)
