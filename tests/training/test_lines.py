"""Lines of several processes in this one, over a store that is a dict; their ends are real sockets."""

import json
import socket
import threading
import time

import jax
import pytest

from jaxche.training import _lines as lines


class Store:
    """What the coordination service does for them."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._changed:
            assert allow_overwrite or key not in self._values
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_ms / 1e3):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self._values[key]

    def key_value_dir_get(self, place):
        with self._changed:
            return [(key, value) for key, value in self._values.items() if key.startswith(place)]


@pytest.fixture
def kept(monkeypatch):
    """Keeps lines, and ends them with the test."""
    monkeypatch.setattr(lines, "_GRACE_S", 1.0)
    monkeypatch.setattr(lines, "_AGAIN_S", 0.02)
    store, ends = Store(), []

    def keep(process, life=1):
        ends.append(lines.keep_line(store, process, life, "127.0.0.1:1234"))
        return ends[-1]

    yield store, keep
    for end in reversed(ends):
        end.end()


def until(true):
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def test_who_lets_go_has_ended_and_nobody_else(kept):
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


def test_who_is_cut_off_and_comes_again_lives(kept):
    store, keep = kept
    exchange = keep(0)
    keep(1)
    assert until(lambda: exchange._who)
    (cut,) = exchange._who
    cut.shutdown(socket.SHUT_RDWR)
    assert until(lambda: exchange._who and cut not in exchange._who)
    assert not exchange._since
    assert not lines.ended(store)


def test_a_stranger_is_nobody(kept):
    store, keep = kept
    exchange = keep(0)
    host, port, password = json.loads(store.blocking_key_value_get("jaxche/lines", 1000))
    for words in (b"what is this\n", f"{password}x 1 1\n".encode()):
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(words)
            assert until(lambda words=words: words in exchange._heard.values())
        assert until(lambda: not exchange._heard)
    with socket.create_connection((host, port), timeout=20) as stranger:
        stranger.sendall(b"x" * 256)
        stranger.sendall(b"x")
        assert stranger.recv(1) == b""  # nobody listens to that for long
    assert not exchange._who
    assert not lines.ended(store)
