"""A group that continues without processes that die, and admits processes that replace them."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

# JAX has no public name for the state of jax.distributed.
from jax._src import distributed as _jax_distributed

from jaxche.distributed._cpu_client import ADDRESSES, TOPOLOGY, end_waits, make_cpu_client, start_cpu_client
from jaxche.distributed._environment import LIVENESS
from jaxche.distributed._group import Group, PeerLostError, numbered, suppress_timeout
from jaxche.distributed._listener import Listener, connect, own_address
from jaxche.distributed._liveness import Liveness
from jaxche.distributed._transfer import receive_bytes, receive_message, send_state
from jaxche.messages import format_ranks

_log = logging.getLogger("jaxche")

# How long other processes wait for the topology of all devices.
_TOPOLOGY_MS = 2000
# The memberships, the address of the liveness server, requests of standby processes, the answers to them, and the fits
# that have ended.
_QUORUMS, _LIVENESS = "jaxche/quorum/", "jaxche/liveness"
_REQUESTS, _ANSWERS, _ENDED_FITS = "jaxche/request", "jaxche/answer", "jaxche/ended_fit"
# Seconds for a candidate to accept a connection, ms between its looks for an answer, and ms for process 0 to write the
# address of the liveness server.
_CONNECT_S, _POLL_MS, _ADDRESS_MS = 10.0, 200, 60_000
# How often a process that is in another call than the others looks for news of a death.
_LOOKS = 10


class TakenForDeadError(PeerLostError):
    """The other processes continued without this one, because it was stopped for too long."""


class Quorum(NamedTuple):
    """A membership: the members with their incarnations, and how it came about."""

    members: dict[int, int]
    # The members of the one before that were lost, and the member that sends the state to those that were admitted.
    lost: list[int]
    sender: int | None

    @property
    def incarnation_of_sender(self) -> dict[int, int]:
        """By its process; empty without a sender."""
        return {} if self.sender is None else {self.sender: self.members[self.sender]}

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> Quorum:
        found = json.loads(text)
        found["members"] = {int(process): number for process, number in found["members"].items()}
        return cls(**found)


class Admission(NamedTuple):
    """What a process is given when it is admitted: the membership, JSON, and a connection over which arrays follow."""

    quorum_id: str
    quorum: Quorum
    message: dict[str, Any]
    sock: socket.socket
    state_bytes: int


class ElasticGroup(Group):
    """A group with heartbeats: members that die are detected, and a process that replaces one can be admitted.

    Each process has an incarnation, the number of processes that have had its index so far. A process that comes later
    is in standby until the members admit it.

    Memberships, the quorums, are numbered. The members of a quorum agree on the next one by writing it to the store of
    the run, where the first to write wins. So a quorum has one successor at most, and of processes that cannot reach
    each other only those continue that are in it. No process has a part that another could not take.
    """

    elastic = True

    def __init__(self, state: Any):
        super().__init__(state)
        self._liveness = Liveness(self._state, _liveness_address(self.client), self.watchdog)
        self.incarnations = dict.fromkeys(range(self.num_processes), 1)  # of the members
        self._devices: dict[int, Any] | None = None
        # The topology of all devices, as a client of XLA wrote it.
        self._topology: bytes | None = None
        # A script makes its fits in the same order in all its processes.
        self._fit = 0
        self._left = threading.Event()

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self.incarnations)

    @property
    def incarnation(self) -> int:
        """The incarnation of this process, from 1."""
        return self._liveness.incarnation

    @property
    def is_leader(self) -> bool:
        return self.is_first and not self.standby

    def lost(self) -> list[int]:
        return self._liveness.lost(self.incarnations)

    def raise_if_lost(self) -> None:
        """Raise PeerLostError if a member has died, or has seen a death; waits a moment for the news."""
        for _ in range(_LOOKS):
            if lost := self.lost():
                raise PeerLostError(f"process {format_ranks(lost)} died, and others went on to another call")
            if self.client.key_value_dir_get(self._failures):
                raise PeerLostError("a merge failed in another process")
            time.sleep(_POLL_MS / 1e3)

    def receive(self, key: str, process: int) -> str:
        return self._liveness.wait_for_key(key, {process: self.incarnations[process]}, self._failures)

    def _receiver(self) -> Callable[[str, int, float], str]:
        incarnations, failures = dict(self.incarnations), self._failures

        def receive(key: str, process: int, timeout_ms: float) -> str:
            return self._liveness.wait_for_key(key, {process: incarnations[process]}, failures, timeout_ms)

        return receive

    def with_connections(self, devices: np.ndarray) -> np.ndarray:
        """The same CPU devices with the newest connections; other devices unchanged."""
        if self._devices is None or any(device.platform != "cpu" for device in devices.flat):
            return devices
        return np.array([self._devices[device.id] for device in devices.flat], dtype=object).reshape(devices.shape)

    def shrink(self) -> list[int]:
        """After a failed collective, continue over new connections without those that died, and return them."""
        # If none has died, all continue; if the others continue without this process, it raises TakenForDeadError.
        while True:
            # So that no member waits for this one in the next round.
            self.client.key_value_set(f"{self._failures}{self.process_index}", "", allow_overwrite=True)
            expected = self.incarnations
            lost = self._liveness.wait_for_loss(expected, self._failures, unless=lambda: self._next() is not None)
            if lost is None:
                quorum = self._next()
                assert quorum is not None
            else:
                remaining = {process: number for process, number in expected.items() if process not in lost}
                quorum = self._decide(Quorum(remaining, lost, None))
            if quorum.members.get(self.process_index) != self.incarnation:
                raise TakenForDeadError("this process was stopped, and the others continued without it")
            if quorum.sender is None:
                self._enter(self._next_id, quorum)
                return quorum.lost
            # Others have admitted a process, and wait for this one.
            self._set_quorum(self._next_id, quorum.members)

    def begin_fit(self) -> None:
        """Count the fits of the script. A standby process joins the fit with its own number."""
        self._fit += 1
        if self._fit == 1:
            threading.Thread(target=self._end_waits, name="jaxche-addresses", daemon=True).start()
        if self._topology is None:
            with suppress_timeout():
                self._topology = self.client.blocking_key_value_get_bytes(TOPOLOGY, _TOPOLOGY_MS)

    def end_fit(self) -> None:
        """Answer the processes that still request admission to this fit."""
        self.client.key_value_set(f"{_ENDED_FITS}/{self._fit}/0", "", allow_overwrite=True)
        for process, request in self._requests().items():
            if process not in self.members:
                self._answer(process, request["incarnation"], {"ended": True})

    def enter_standby(self) -> None:
        """Wait, without peers, for admission at the end of a round."""
        self.standby = True
        own = {self.process_index: self.incarnation}
        self._set_quorum(f"standby/{self.process_index}/{self.incarnation}", own)

    def restart(self) -> None:
        """Begin a new incarnation in standby, after the others took this process for dead."""
        self._liveness.restart()
        self.enter_standby()

    def candidates(self) -> dict[int, dict[str, Any]]:
        """The processes that request admission to this fit and are alive, with their requests."""
        return {
            process: request
            for process, request in self._requests().items()
            # Otherwise the death of its predecessor is not detected yet, or it has died itself.
            if process not in self.members and not self._liveness.lost({process: request["incarnation"]})
            # Otherwise it will read that its fit has ended.
            if request["fit"] == self._fit
        }

    def refuse(self, process: int, incarnation: int, reason: str) -> None:
        """Refuse a candidate."""
        self._answer(process, incarnation, {"refused": reason})

    def admit(self, candidates: Mapping[int, int], message: Mapping[str, Any], state: Sequence[np.ndarray]) -> None:
        """Admit candidates, by their incarnations; all members call it, the first sends JSON and then arrays."""
        # Threads send the arrays, which may arrive later. It raises PeerLostError if a candidate has died.
        members = dict(sorted({**self.incarnations, **candidates}.items()))
        wanted = Quorum(members, [], self.members[0])
        if self._decide(wanted) != wanted:
            raise PeerLostError("the members decided on another quorum meanwhile")
        self._set_quorum(self._next_id, members)
        if wanted.sender == self.process_index:
            requests = self._requests()
            for process, incarnation in candidates.items():
                if requests[process]["incarnation"] == incarnation:  # else it has died, and the barrier fails
                    sent = requests[process]["address"], self.quorum_id, {process: incarnation}, message, state
                    threading.Thread(target=self._send, args=sent, name="jaxche-state", daemon=True).start()
        self._reconnect()
        self.barrier()  # the candidates have the JSON

    def _send(
        self,
        address: list[Any],
        quorum_id: str,
        candidate: dict[int, int],
        message: Mapping[str, Any],
        state: Sequence[np.ndarray],
    ) -> None:
        def waiting() -> None:
            if self._liveness.lost(candidate):
                raise ConnectionError("the candidate died")

        # Without its answer the barrier of the new members fails, or their next merge.
        with contextlib.suppress(OSError), connect(address, quorum_id, _CONNECT_S) as sock:
            send_state(sock, message, state, waiting)

    def request_admission(self, fingerprint: Mapping[str, str]) -> Admission | None:
        """Wait in standby until members admit this process; None if the fit ended, RuntimeError if they refuse it."""
        # RuntimeError, too, if all have died. An admitted process then calls `join` and `receive_state`.
        process, incarnation = self.process_index, self.incarnation
        accepted: queue.SimpleQueue[tuple[socket.socket, str]] = queue.SimpleQueue()
        here = own_address(str(self._state.coordinator_address))
        listener = Listener(here, lambda sock, text: accepted.put((sock, text)))
        with contextlib.closing(listener):
            request = {"incarnation": incarnation, "fit": self._fit, "fingerprint": dict(fingerprint)}
            request["address"] = listener.address
            self.client.key_value_set(f"{_REQUESTS}/{process}", json.dumps(request), allow_overwrite=True)
            found = self._wait_for_answer()
            if found is None:
                _log.warning(
                    "process %s came when fit %s of its script had ended, and can join no other", process, self._fit
                )
                return None
            quorum_id, quorum = found
            sender = quorum.incarnation_of_sender
            with contextlib.ExitStack() as stack:
                sock = stack.enter_context(self._sender_of(quorum_id, accepted, sender))
                message, state_bytes = receive_message(sock, lambda: self._raise_if_lost(sender))
                stack.pop_all()
                return Admission(quorum_id, quorum, message, sock, state_bytes)

    def _sender_of(
        self, quorum_id: str, accepted: queue.SimpleQueue[tuple[socket.socket, str]], sender: Mapping[int, int]
    ) -> socket.socket:
        """Wait for the connection over which a member sends the state of this quorum; others are closed."""
        while True:
            self._raise_if_lost(sender)
            with contextlib.suppress(queue.Empty):
                sock, text = accepted.get(timeout=_POLL_MS / 1e3)
                if text == quorum_id:
                    return sock
                sock.close()

    def _raise_if_lost(self, members: Mapping[int, int]) -> None:
        self.watchdog.heartbeat_while_waiting()
        if lost := self._liveness.lost(members):
            raise PeerLostError(f"process {format_ranks(lost)} died while it sent its state")

    def _wait_for_answer(self) -> tuple[str, Quorum] | None:
        """The quorum that this process is admitted to and its name; None if the fit has ended."""
        process, incarnation = self.process_index, self.incarnation
        while True:
            answer = {}
            with suppress_timeout():
                key = f"{_ANSWERS}/{process}/{incarnation}"
                answer = json.loads(self.client.blocking_key_value_get(key, _POLL_MS))
            if "refused" in answer:
                raise RuntimeError(f"process {process} cannot join the run: {answer['refused']}")
            if "ended" in answer or dict(self.client.key_value_dir_get(f"{_ENDED_FITS}/{self._fit}/")):
                return None
            name, quorum = self._newest()
            if quorum.members.get(process) == incarnation:
                return name, quorum
            if len(self._liveness.lost(quorum.members)) == len(quorum.members):
                self._liveness.end_run()
                raise RuntimeError(f"process {process} cannot join the run: all its members have died")
            self.watchdog.heartbeat_while_waiting()

    def join(self, admission: Admission) -> None:
        """Become a member; all members call :meth:`admit` meanwhile."""
        self.standby = False
        self._enter(admission.quorum_id, admission.quorum)
        self.barrier()

    def receive_state(self, admission: Admission) -> np.ndarray:
        """The bytes of the arrays that a member sends; PeerLostError if it died, or a checksum is wrong."""
        sender = admission.quorum.incarnation_of_sender
        return receive_bytes(admission.sock, admission.state_bytes, lambda: self._raise_if_lost(sender))

    def leave(self) -> None:
        """Leave the run at exit."""
        self._left.set()
        # jaxlib ends a process that shuts down when the store is gone.
        if self.client is not None and self._liveness.is_connected:
            jax.distributed.shutdown()
        self._liveness.stop()

    def ends_together(self) -> bool:
        """True: the others continue without a member that ends."""
        return True

    def _end_waits(self) -> None:
        """Until this process leaves, end the waits of collectives for members that died before they connected."""
        while not self._left.wait(_POLL_MS / 1e3):
            if lost := self.lost():
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    end_waits(self.client, lost)

    @property
    def _failures(self) -> str:
        """Where each member writes once that a collective has failed."""
        return f"jaxche/failures/{self.quorum_id}/"

    @property
    def _next_id(self) -> str:
        return str(int(self.quorum_id) + 1)

    def _next(self) -> Quorum | None:
        """The quorum that follows the present one, if the members have agreed on it."""
        return self._quorums().get(int(self._next_id))

    def _newest(self) -> tuple[str, Quorum]:
        first = 0, Quorum(dict.fromkeys(range(self.num_processes), 1), [], None)
        number, quorum = max([first, *self._quorums().items()])
        return str(number), quorum

    def _quorums(self) -> dict[int, Quorum]:
        return {number: Quorum.from_json(text) for number, text in numbered(self.client, _QUORUMS).items()}

    def _decide(self, wanted: Quorum) -> Quorum:
        """Propose the next quorum; returns the one that was proposed first."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.client.key_value_set(f"{_QUORUMS}{self._next_id}", wanted.to_json())
        found = self._next()
        if found is None:
            raise PeerLostError("the store of the run cannot be reached")
        return found

    def _enter(self, quorum_id: str, quorum: Quorum) -> None:
        """Become a member of a quorum over new connections; all of its members call it and then wait for each other."""
        self._set_quorum(quorum_id, quorum.members)
        self._reconnect()

    def _set_quorum(self, quorum_id: str, members: dict[int, int]) -> None:
        # A member may have left a collective half done, so the count of calls restarts under another name.
        self.incarnations, self.quorum_id, self._calls = members, quorum_id, 0

    def _reconnect(self) -> None:
        """Make the next collectives use new connections.

        XLA connects the processes of a collective once for each order of their devices, and keeps the sockets as long
        as the client of the devices. Sockets to a process that has been replaced stay broken. So the processes use the
        devices of another client: the same CPU devices, which ``jax.devices()`` does not list.
        """
        place = f"jaxche/topology/{self.quorum_id}"
        if self.is_first:
            self.client.key_value_delete(ADDRESSES)
        if self.process_index == 0:
            client = start_cpu_client(self.client, make_cpu_client)
            self.client.key_value_set(place, "", allow_overwrite=True)
        else:
            if 0 in self.members:
                self._liveness.wait_for_key(place, {0: self.incarnations[0]}, self._failures)
            self._restore_topology()
            client = make_cpu_client()
        self._devices = {device.id: device for device in client.devices()}

    def _restore_topology(self) -> None:
        """Write the topology again, if process 0 died after it had removed it and before it wrote the new one."""
        with suppress_timeout():
            self._topology = self.client.blocking_key_value_get_bytes(TOPOLOGY, _TOPOLOGY_MS)
            return
        if self._topology is not None:
            self.client.key_value_set_bytes(TOPOLOGY, self._topology, allow_overwrite=True)

    def _requests(self) -> dict[int, dict[str, Any]]:
        """The last request of each process. It stays in the store: by now it may be that of a later incarnation."""
        return {process: json.loads(text) for process, text in numbered(self.client, f"{_REQUESTS}/").items()}

    def _answer(self, process: int, incarnation: int, answer: Mapping[str, Any]) -> None:
        self.client.key_value_set(f"{_ANSWERS}/{process}/{incarnation}", json.dumps(answer), allow_overwrite=True)


def _liveness_address(store: Any) -> list[Any]:
    """The address of the liveness server: from the environment, or from a process that has it there."""
    if LIVENESS in os.environ:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # it is there
            store.key_value_set(_LIVENESS, os.environ[LIVENESS])
    with suppress_timeout():
        return json.loads(store.blocking_key_value_get(_LIVENESS, _ADDRESS_MS))
    raise RuntimeError(
        "jax_enable_recoverability is set, and this run has no coordinator that detects deaths. Write: "
        "jaxche.initialize(elastic=True) in place of jax.distributed.initialize()"
    )


@functools.cache
def process_group() -> Group:
    """The group of this process; the first call, which makes it, has to come after the process has joined its run."""
    state = _jax_distributed.global_state
    elastic = state.num_processes > 1 and bool(jax.config.values.get("jax_enable_recoverability"))
    return (ElasticGroup if elastic else Group)(state)
