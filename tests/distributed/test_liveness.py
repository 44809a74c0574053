"""Heartbeats as process 0 sees them, over a store that is a dict, and connections over real sockets."""

import json
import socket

import pytest

from jaxche.distributed import _liveness as module
from jaxche.distributed import connect


@pytest.fixture
def kept(monkeypatch, store, coordinator):
    """Opens connections, and closes them after the test."""
    monkeypatch.setattr(module, "_GRACE_S", 1.0)
    monkeypatch.setattr(module, "_RETRY_S", 0.02)
    ends = []

    def connected(process, life=1):
        ends.append(module.open_connection(store, process, life, coordinator))
        return ends[-1]

    yield store, connected
    for end in reversed(ends):
        end.close()


def test_who_lets_go_has_ended_and_nobody_else(kept, until):
    store, connected = kept
    server, one = connected(0), connected(1)
    connected(2, life=3)
    assert until(lambda: len(server._peers) == 2)
    one.close()
    assert until(lambda: module.ended(store))
    assert module.ended(store) == {(1, 1)}
    connected(1, life=2)
    assert until(lambda: len(server._peers) == 2)
    assert module.ended(store) == {(1, 1)}


def test_who_is_cut_off_and_comes_again_lives(kept, until):
    store, connected = kept
    server = connected(0)
    connected(1)
    assert until(lambda: server._peers)
    (cut,) = server._peers
    cut.shutdown(socket.SHUT_RDWR)
    assert until(lambda: server._peers and cut not in server._peers)
    assert not server._disconnected
    assert not module.ended(store)


def test_strangers_are_nobody(kept, until, strangers):
    store, connected = kept
    server = connected(0)
    one = connected(1)
    assert until(lambda: server._peers)
    address = json.loads(store.blocking_key_value_get("jaxche/connect", 1000))
    used = strangers(address, seed=1)
    assert used["threads"] <= 0
    assert used["files"] <= 100
    assert used["kib"] < 20_000
    # With the token, but without a process and a life.
    for text in ("", "1", "x y", "1 1 1"):
        with connect(address, text, 20) as sock:
            assert sock.recv(1) == b""
    assert list(server._peers.values()) == [(1, 1)]
    assert not server._disconnected
    assert not module.ended(store)
    connected(2)
    assert until(lambda: set(server._peers.values()) == {(1, 1), (2, 1)})
    one.close()
    assert until(lambda: module.ended(store) == {(1, 1)})


def test_what_a_connection_sends_is_not_read(kept, until):
    store, connected = kept
    server = connected(0)
    with connect(server._listener.address, "3 1", 20) as sock:
        for _ in range(100):
            sock.sendall(b"2 1\n" * 100)
        assert until(lambda: server._peers)
        assert list(server._peers.values()) == [(3, 1)]
    assert until(lambda: module.ended(store) == {(3, 1)})


def test_the_server_listens_where_the_coordinator_is(kept):
    _, connected = kept
    assert connected(0)._listener.address[0] == "127.0.0.1"


def test_one_that_registers_between_two_reads_does_not_end_the_heartbeats():
    stored = {module._INCARNATIONS: {"0": "1"}, module._HEARTBEATS: {"0": "7"}}

    class Store:
        def key_value_dir_get(self, place):
            seen = [(place + process, text) for process, text in stored[place].items()]
            stored[module._INCARNATIONS]["1"], stored[module._HEARTBEATS]["1"] = "1", "1"  # right after
            return seen

    one = object.__new__(module.Liveness)
    one._client, one._seen, one._checked = Store(), {}, 0.0
    one._check()
    one._check()
    assert {process: seen[:2] for process, seen in one._seen.items()} == {0: (1, "7"), 1: (1, "1")}
