"""Quorums: which process may propose the next one, and which are left out. The store is a dict, deaths are given."""

import contextlib
import json
import queue
import socket
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxche.distributed import Listener, PeerLostError, RankError, TakenForDeadError
from jaxche.distributed import _elastic_group as module


class Liveness:
    """The liveness of processes; the test says which of them are dead."""

    incarnation, is_connected = 1, True

    def __init__(self, dead):
        self.dead, self.stopped = dead, False

    def lost(self, expected):
        return [process for process, number in expected.items() if (process, number) in self.dead]

    def wait_for_loss(self, expected, place, unless):
        return None if unless() else self.lost(expected)

    def stop(self):
        self.stopped = True


@pytest.fixture
def groups(monkeypatch, store):
    """Groups of three processes over one store, and the set of those that are dead."""
    dead = set()
    monkeypatch.setattr(module, "_liveness_address", lambda store: None)
    monkeypatch.setattr(module, "Liveness", lambda state, address, watchdog: Liveness(dead))
    monkeypatch.setattr(module.ElasticGroup, "_reconnect", lambda self: None)
    made = [module.ElasticGroup(SimpleNamespace(process_id=i, num_processes=3, client=store)) for i in range(3)]
    return made, dead


def test_all_enter_the_quorum_that_was_proposed_first(groups):
    (zero, one, two), dead = groups
    dead.add((0, 1))
    assert one.shrink() == [0]
    dead.add((1, 1))  # right after
    assert two.shrink() == [0]
    assert one.incarnations == two.incarnations == {1: 1, 2: 1}
    assert one.quorum_id == two.quorum_id == "1"
    assert one.is_leader
    assert not two.is_leader
    assert two.shrink() == [1]
    assert two.is_leader
    with pytest.raises(TakenForDeadError):
        zero.shrink()


def test_a_process_that_was_left_behind_does_not_come_back_by_a_later_quorum(groups):
    (zero, one, two), dead = groups
    dead.add((2, 1))
    assert one.shrink() == zero.shrink() == [2]
    one.incarnations = zero.incarnations = {0: 1, 1: 1}
    zero._decide(module.Quorum({0: 1, 1: 1, 2: 2}, [], 0))
    with pytest.raises(TakenForDeadError):
        two.shrink()


def test_nobody_dead_is_a_quorum_of_the_same_members(groups):
    (zero, one, two), _ = groups
    assert [group.shrink() for group in (two, one, zero)] == [[], [], []]
    assert {group.quorum_id for group in (zero, one, two)} == {"1"}
    assert zero.members == (0, 1, 2)


def test_a_failure_beside_an_admission_ends_the_quorum_of_the_admission(groups, store):
    (zero, one, _), dead = groups
    dead.add((2, 1))
    assert zero.shrink() == one.shrink() == [2]
    zero._decide(module.Quorum({0: 1, 1: 1, 2: 2}, [], 0))  # and one did not hear of it
    dead.add((2, 2))
    assert one.shrink() == [2]
    assert one.quorum_id == "3"
    assert dict(store.key_value_dir_get("jaxche/failures/2/"))
    zero.incarnations, zero.quorum_id = {0: 1, 1: 1, 2: 2}, "2"
    assert zero.shrink() == [2]
    assert zero.incarnations == one.incarnations == {0: 1, 1: 1}


def test_the_sender_of_the_state_is_the_first_member_and_others_are_no_leaders_in_standby(groups):
    (zero, one, two), dead = groups
    dead.add((0, 1))
    assert one.shrink() == two.shrink() == [0]
    assert zero.is_leader  # it does not know yet
    zero.enter_standby()
    assert not zero.is_leader
    assert zero.members == (0,)
    quorum = one._decide(module.Quorum({0: 2, 1: 1, 2: 1}, [], 1))
    assert two._next() == quorum
    assert zero._newest() == ("2", quorum)


def test_an_admission_after_another_quorum_was_decided_fails(groups):
    (zero, one, _), dead = groups
    dead.add((2, 1))
    assert zero.shrink() == one.shrink() == [2]
    one._decide(module.Quorum({0: 1, 1: 1}, [], None))  # without the candidate, but with both members
    with pytest.raises(PeerLostError, match="the members decided on another quorum meanwhile"):
        zero.admit({2: 2}, {}, [])


@pytest.mark.parametrize("answer", ["admitted", "refused"])
def test_the_request_of_a_candidate_that_came_after_the_one_that_is_answered_stays(groups, store, answer, monkeypatch):
    (zero, one, _), dead = groups
    dead.add((2, 1))
    assert zero.shrink() == one.shrink() == [2]
    zero._fit, sent = 1, []

    def request(incarnation):
        value = {"incarnation": incarnation, "fit": 1, "fingerprint": {}, "address": [incarnation]}
        store.key_value_set("jaxche/request/2", json.dumps(value), allow_overwrite=True)

    def send(address, quorum_id, candidate, message, state):
        sent.append((address, candidate))
        request(3)

    request(2)
    [(process, candidate)] = zero.candidates().items()
    if answer == "admitted":
        monkeypatch.setattr(zero, "_send", send)
        monkeypatch.setattr(zero, "barrier", lambda: None)
        zero.admit({process: candidate["incarnation"]}, {}, [])
        wait_for_senders()
        assert sent == [([2], {2: 2})]
        zero.incarnations = one.incarnations
    else:
        request(3)
        zero.refuse(process, candidate["incarnation"], "it differs")
    dead.add((2, 2))
    assert {process: found["incarnation"] for process, found in zero.candidates().items()} == {2: 3}


def test_the_state_of_a_dead_candidate_is_not_sent_to_the_next_one(groups, store, monkeypatch):
    (zero, one, _), dead = groups
    dead.add((2, 1))
    assert zero.shrink() == one.shrink() == [2]
    store.key_value_set("jaxche/request/2", json.dumps({"incarnation": 3, "address": [3]}))
    sent = []
    monkeypatch.setattr(zero, "_send", lambda *given: sent.append(given))
    monkeypatch.setattr(zero, "barrier", lambda: None)
    zero.admit({2: 2}, {}, [])
    wait_for_senders()
    assert not sent


def wait_for_senders():
    for thread in threading.enumerate():
        if thread.name == "jaxche-state":
            thread.join()


def test_members_go_on_while_the_state_of_a_candidate_is_on_its_way(groups, store, monkeypatch):
    (zero, one, two), dead = groups
    dead.add((2, 1))
    assert zero.shrink() == one.shrink() == [2]
    monkeypatch.setattr(zero, "barrier", lambda: None)
    state, accepted = np.arange(10_000_000, dtype=np.uint8), queue.SimpleQueue()  # more than a socket holds
    with contextlib.closing(Listener("127.0.0.1", lambda *found: accepted.put(found))) as listener:
        store.key_value_set("jaxche/request/2", json.dumps({"incarnation": 2, "address": listener.address}))
        admission = threading.Thread(target=zero.admit, args=({2: 2}, {"order": [0, 1, 2]}, [state]), daemon=True)
        admission.start()
        admission.join(10)
        assert not admission.is_alive()
        assert zero.members == (0, 1, 2)
        sock, quorum_id = accepted.get()
    assert quorum_id == zero.quorum_id
    with sock:
        message, size = module.receive_message(sock, lambda: None)
        assert message == {"order": [0, 1, 2]}
        admission = module.Admission(*two._newest(), message, sock, size)
        found = two.receive_state(admission)
    np.testing.assert_array_equal(found[: state.size], state)
    wait_for_senders()


def test_a_candidate_whose_sender_died_does_not_wait_for_the_rest(groups):
    (_, _, two), dead = groups
    here, there = socket.socketpair()
    dead.add((0, 1))
    with here, there:
        there.settimeout(0.01)
        admission = module.Admission("4", module.Quorum({0: 1, 2: 2}, [], 0), {}, there, 64)
        late = threading.Timer(10, here.close)
        late.start()
        with pytest.raises(PeerLostError, match="process 0 died while it sent its state"):
            two.receive_state(admission)
        late.cancel()


@pytest.mark.parametrize("news", ["death", "failure", None])
def test_members_in_different_calls_have_lost_one_if_there_is_news_of_that(groups, store, monkeypatch, news):
    monkeypatch.setattr(module, "_POLL_MS", 1)
    (zero, one, _), dead = groups
    for group in (zero, one):  # process 1 was stopped for a moment, and 0 gave up a save with it
        group.incarnations = {0: 1, 1: 1}
        monkeypatch.setattr(group, "receive", lambda key, process: store.blocking_key_value_get(key, 1))
    store.key_value_set("jaxche/all_gather/0/0/1", "null\nthe save of checkpoint 40")
    if news == "death":
        dead.add((1, 1))
    elif news == "failure":
        store.key_value_set(f"{zero._failures}1", "")
    wanted = {"death": "process 1 died, and others went on", "failure": "a merge failed", None: "in another call"}
    with pytest.raises(RankError if news is None else PeerLostError, match=wanted[news]):
        zero.all_gather(None)


def test_a_process_leaves_at_once(groups, monkeypatch):
    (zero, *_), _ = groups
    ends = []
    monkeypatch.setattr(module.jax.distributed, "shutdown", lambda: ends.append("shutdown"))
    zero.leave()
    assert ends == ["shutdown"]
    zero._liveness.is_connected = False  # jaxlib would end it
    zero.leave()
    assert ends == ["shutdown"]
    assert zero._liveness.stopped


def test_a_member_may_end_alone(groups):
    (zero, *_), _ = groups
    assert zero.ends_together()


@pytest.mark.parametrize("is_dead", [False, True])
def test_the_state_is_sent_as_long_as_its_candidate_is_alive(groups, monkeypatch, is_dead):
    (zero, *_), dead = groups
    sent = []

    def send_state(sock, message, state, waiting):
        waiting()
        sent.append(message)

    monkeypatch.setattr(module, "connect", lambda address, text, timeout_s: contextlib.nullcontext())
    monkeypatch.setattr(module, "send_state", send_state)
    dead |= {(2, 2)} if is_dead else set()
    zero._send(["127.0.0.1", 1], "3", {2: 2}, {"order": [0]}, [])
    assert sent == ([] if is_dead else [{"order": [0]}])


def test_a_candidate_takes_the_state_of_its_own_quorum(groups):
    (_, _, two), dead = groups
    accepted, closed = queue.SimpleQueue(), []
    for text in ("3", "4"):
        accepted.put((SimpleNamespace(name=text, close=lambda text=text: closed.append(text)), text))
    assert two._sender_of("4", accepted, {0: 1}).name == "4"
    assert closed == ["3"]
    dead.add((0, 1))
    with pytest.raises(PeerLostError, match="process 0 died while it sent its state"):
        two._sender_of("4", accepted, {0: 1})


@pytest.fixture
def candidate(groups, monkeypatch):
    """Process 2 in standby, once the others have gone on without it, and those that are dead."""
    monkeypatch.setattr(module, "_POLL_MS", 1)
    (zero, one, two), dead = groups
    dead.add((2, 1))
    assert zero.shrink() == one.shrink() == [2]
    two._liveness.incarnation, two._fit = 2, 1
    two._liveness.end_run = lambda: dead.add("the run")
    return zero, two, dead


def test_a_candidate_that_is_refused_says_why(candidate):
    zero, two, _ = candidate
    zero.refuse(2, 2, "it differs in code")
    with pytest.raises(RuntimeError, match="process 2 cannot join the run: it differs in code"):
        two._wait_for_answer()


def test_a_candidate_of_a_run_without_members_ends_it(candidate):
    _, two, dead = candidate
    dead |= {(0, 1), (1, 1)}
    with pytest.raises(RuntimeError, match="process 2 cannot join the run: all its members have died"):
        two._wait_for_answer()
    assert "the run" in dead


def test_a_quorum_that_cannot_be_written_is_a_lost_peer(groups, store, monkeypatch):
    def fails(*given):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE")

    (zero, *_), _ = groups
    monkeypatch.setattr(store, "key_value_set", fails)
    with pytest.raises(PeerLostError, match="the store of the run cannot be reached"):
        zero._decide(module.Quorum({0: 1}, [1, 2], None))


@pytest.mark.parametrize("there", [False, True])
def test_a_topology_that_is_gone_is_written_again(groups, store, monkeypatch, there):
    monkeypatch.setattr(module, "_TOPOLOGY_MS", 1)
    monkeypatch.setattr(store, "blocking_key_value_get_bytes", store.blocking_key_value_get, raising=False)
    (_, one, _), _ = groups
    one._restore_topology()
    assert not dict(store.key_value_dir_get(module.TOPOLOGY))
    one._topology = b"old"
    if there:
        store.key_value_set(module.TOPOLOGY, b"new")
    one._restore_topology()
    wanted = b"new" if there else b"old"
    assert (one._topology, dict(store.key_value_dir_get(module.TOPOLOGY))) == (wanted, {module.TOPOLOGY: wanted})


def test_a_run_whose_coordinator_detects_no_deaths_is_refused_with_the_line_to_write(store, monkeypatch):
    monkeypatch.setattr(module, "_ADDRESS_MS", 1)
    monkeypatch.delenv("JAXCHE_LIVENESS", raising=False)
    with pytest.raises(RuntimeError, match=r"Write: jaxche.initialize\(elastic=True\) in place of"):
        module._liveness_address(store)
    monkeypatch.setenv("JAXCHE_LIVENESS", '["node1", 7]')
    for _ in range(2):  # another process has written it, too
        assert module._liveness_address(store) == ["node1", 7]
