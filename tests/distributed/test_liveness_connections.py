"""Lines of several processes in this one, over a store that is a dict; their ends are real sockets."""

import json
import socket

import pytest

from jaxche.distributed import _liveness_connections as lines
from jaxche.distributed import connect


@pytest.fixture
def kept(monkeypatch, store, coordinator):
    """Keeps lines, and ends them with the test."""
    monkeypatch.setattr(lines, "_GRACE_S", 1.0)
    monkeypatch.setattr(lines, "_AGAIN_S", 0.02)
    ends = []

    def keep(process, life=1):
        ends.append(lines.keep_line(store, process, life, coordinator))
        return ends[-1]

    yield store, keep
    for end in reversed(ends):
        end.end()


def test_who_lets_go_has_ended_and_nobody_else(kept, until):
    store, keep = kept
    exchange, one = keep(0), keep(1)
    keep(2, life=3)
    assert until(lambda: len(exchange._who) == 2)
    one.end()
    assert until(lambda: lines.ended(store))
    assert lines.ended(store) == {(1, 1)}
    keep(1, life=2)
    assert until(lambda: len(exchange._who) == 2)
    assert lines.ended(store) == {(1, 1)}


def test_who_is_cut_off_and_comes_again_lives(kept, until):
    store, keep = kept
    exchange = keep(0)
    keep(1)
    assert until(lambda: exchange._who)
    (cut,) = exchange._who
    cut.shutdown(socket.SHUT_RDWR)
    assert until(lambda: exchange._who and cut not in exchange._who)
    assert not exchange._since
    assert not lines.ended(store)


def test_strangers_are_nobody(kept, until, strangers):
    store, keep = kept
    exchange = keep(0)
    one = keep(1)
    assert until(lambda: exchange._who)
    address = json.loads(store.blocking_key_value_get("jaxche/lines", 1000))
    used = strangers(address, seed=1)
    assert used["threads"] <= 0
    assert used["files"] <= 100
    assert used["kib"] < 20_000
    # With the token, but without a process and a life.
    for text in ("", "1", "x y", "1 1 1"):
        with connect(address, text, 20) as sock:
            assert sock.recv(1) == b""
    assert list(exchange._who.values()) == [(1, 1)]
    assert not exchange._since
    assert not lines.ended(store)
    keep(2)
    assert until(lambda: set(exchange._who.values()) == {(1, 1), (2, 1)})
    one.end()
    assert until(lambda: lines.ended(store) == {(1, 1)})


def test_lines_that_say_something_are_not_listened_to(kept, until):
    store, keep = kept
    exchange = keep(0)
    with connect(exchange._listener.address, "3 1", 20) as line:
        for _ in range(100):
            line.sendall(b"2 1\n" * 100)
        assert until(lambda: exchange._who)
        assert list(exchange._who.values()) == [(3, 1)]
    assert until(lambda: lines.ended(store) == {(3, 1)})


def test_they_come_together_where_the_coordinator_is(kept):
    _, keep = kept
    assert keep(0)._listener.address[0] == "127.0.0.1"
