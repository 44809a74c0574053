"""Who greets with the token is handed over, by the shorter way where there is one; all others get nowhere."""

import contextlib
import errno
import json
import os
import queue
import resource
import socket
import sys
import threading
import time

import pytest

from jaxche.distributed import _listener as module
from jaxche.distributed import connect, own_address
from jaxche.distributed._listener import Listener

linux = pytest.mark.skipif(sys.platform != "linux", reason="local sockets without files are Linux's")


class Heard:
    """A listener, and the connections that it has handed over."""

    def __init__(self):
        self.queue = queue.SimpleQueue()
        self.listener = Listener("127.0.0.1", lambda sock, text: self.queue.put((sock, text)))
        self.address = json.loads(json.dumps(self.listener.address))

    def knock(self, greeting, local=False):
        host, port, name, _ = self.address
        sock = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
        sock.settimeout(20)
        sock.connect(f"\0{name}" if local else (host, port))
        sock.sendall(greeting)
        return sock


@pytest.fixture
def heard():
    heard = Heard()
    yield heard
    heard.listener.close()
    assert heard.queue.empty()


def talk(sock, other):
    with sock, other:
        for one, two in ((sock, other), (other, sock)):
            assert one.gettimeout() is None
            one.sendall(b"hello")
            assert two.recv(5, socket.MSG_WAITALL) == b"hello"


@linux
def test_on_one_machine_the_local_socket_is_taken(heard):
    sock = connect(heard.address, "stage 3", 5)
    other, text = heard.queue.get(timeout=20)
    assert (sock.family, text) == (socket.AF_UNIX, "stage 3")
    talk(sock, other)


@linux
def test_a_listener_that_is_stopped_holds_up_nobody():
    """Its queue of local connections is full, and the system would wait for ever."""
    name, found = f"jaxche-test-{os.getpid()}", []

    def call(port):
        with pytest.raises(TimeoutError) as raised:
            connect(["127.0.0.1", port, name, 32 * "t"], "x", 0.2)
        found.append(str(raised.value))

    with contextlib.ExitStack() as stack:
        remote = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(f"\0{name}")
        local.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.setblocking(False)
                sock.connect(f"\0{name}")
        thread = threading.Thread(target=call, args=[remote.getsockname()[1]], daemon=True)
        thread.start()
        thread.join(10)
        assert "did not accept a connection within 0.2 s" in found[0]


@pytest.mark.parametrize("name", ["jaxche-of-another-machine", None])
def test_a_name_that_is_not_of_this_machine_leaves_tcp(heard, name):
    host, port, _, token = heard.address
    sock = connect([host, port, name, token], "\u00e9" * 127, 5)
    other, text = heard.queue.get(timeout=20)
    assert (sock.family, text) == (socket.AF_INET, "\u00e9" * 127)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    talk(sock, other)


def test_what_follows_a_greeting_is_left_to_the_run(heard):
    token = heard.address[-1].encode()
    sock = heard.knock(token + b"\x03one" + b"and so on")
    other, text = heard.queue.get(timeout=20)
    assert text == "one"
    assert sock.recv(1) == module._ACCEPTED
    assert other.recv(20) == b"and so on"
    sock.close()
    other.close()


def test_a_greeting_may_come_in_pieces(heard):
    sock = heard.knock(b"")
    for byte in heard.address[-1].encode() + b"\x02" + b"12":
        sock.send(bytes([byte]))
        time.sleep(0.001)
    other, text = heard.queue.get(timeout=20)
    assert text == "12"
    sock.close()
    other.close()


def test_every_listener_has_names_and_a_token_of_its_own(heard):
    other = Listener("127.0.0.1", lambda sock, text: None)
    assert not set(other.address[1:]) & set(heard.address[1:]) - {None}
    host, port, name, _ = other.address
    with pytest.raises(TimeoutError, match="did not accept a connection within"):
        connect([host, port, name, heard.address[-1]], "x", 0.2)
    other.close()


def test_nobody_there_is_an_error(heard):
    other = Listener("127.0.0.1", lambda sock, text: None)
    other.close()
    with pytest.raises(OSError, match="refused"):
        connect(other.address, "x", 5)


@pytest.mark.parametrize("local", [False, pytest.param(True, marks=linux)])
@pytest.mark.parametrize(
    "greeting", [b"", b"\x00\x00\x00\x06[1, 0]", b"TOKEN\xff"], ids=["silent", "8 bytes", "the token and half a text"]
)
def test_a_greeting_has_a_deadline(heard, greeting, local, monkeypatch):
    monkeypatch.setattr(module, "_GREETING_S", 0.2)
    with heard.knock(greeting.replace(b"TOKEN", heard.address[-1].encode()), local) as sock:
        assert sock.recv(1) == b""


@pytest.mark.parametrize("token", [b"x" * 32, "\u00e9".encode() * 16, b"\xff" * 32, b"0" * 31 + b"\n"])
def test_a_wrong_token_is_the_end_at_once(heard, token, monkeypatch):
    monkeypatch.setattr(module, "_GREETING_S", 1000.0)
    with heard.knock(token) as sock:
        assert sock.recv(1) == b""


def test_a_text_that_is_none_and_a_handler_that_fails_cost_their_connection_alone():
    def refuse(sock, text):
        raise RuntimeError("cannot start a thread")

    listener = Listener("127.0.0.1", refuse)
    for text in (b"\x01\xff", b"\x011"):
        with socket.create_connection(listener.address[:2], timeout=20) as sock:
            sock.sendall(listener.address[-1].encode() + text)
            assert sock.recv(2) == module._ACCEPTED
            assert sock.recv(2) == b""
    listener.close()


def test_more_than_may_wait_replace_the_oldest_and_a_peer_comes_again(heard, monkeypatch):
    monkeypatch.setattr(module, "_GREETING_S", 1000.0)
    silent = [heard.knock(b"") for _ in range(module._MAX_GREETINGS + 1)]
    assert silent[0].recv(1) == b""
    sock = connect([*heard.address[:2], None, heard.address[3]], "x", 20)
    talk(sock, heard.queue.get(timeout=20)[0])
    for one in silent:
        one.close()


def test_a_peer_that_is_replaced_before_it_has_greeted_comes_again(heard, monkeypatch):
    # The first connection is closed before its greeting has come; nothing of it may be lost.
    cut, opened = module._open, []

    def open_cut(*arguments):
        sock = cut(*arguments)
        if not opened:
            for _ in range(module._MAX_GREETINGS + 1):
                opened.append(heard.knock(b"", local=sock.family == socket.AF_UNIX))
            # It is the oldest of those that wait by now.
            opened[0].recv(1)
        return sock

    monkeypatch.setattr(module, "_open", open_cut)
    sock = connect(heard.address, "x", 20)
    talk(sock, heard.queue.get(timeout=20)[0])
    for one in opened:
        one.close()


class Failing(socket.socket):
    """A server whose ``accept`` fails for a while."""

    errors = ()

    def accept(self):
        if self.errors:
            raise OSError(self.errors.pop(), "for now")
        return super().accept()


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ECONNABORTED", "ENOBUFS"])
def test_an_accept_that_fails_is_tried_again(name, monkeypatch):
    errors = [getattr(errno, name)] * 3

    def create_server(address, family, backlog, dualstack_ipv6):
        assert not dualstack_ipv6
        server = Failing(family)
        server.bind(address)
        server.listen(backlog)
        server.errors = errors
        return server

    monkeypatch.setattr(module.socket, "create_server", create_server)
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    accepted = queue.SimpleQueue()
    listener = Listener("127.0.0.1", lambda sock, text: accepted.put(sock))
    host, port, _, token = listener.address
    talk(connect([host, port, None, token], "x", 20), accepted.get(timeout=20))
    assert errors == []
    listener.close()


def test_a_process_that_can_open_no_more_files_accepts_when_it_can(heard, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    host, port, _, token = heard.address
    with socket.socket() as sock:
        sock.settimeout(20)
        free = os.dup(sock.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            sock.connect((host, port))
            sock.sendall(token.encode() + b"\x011")
            sock.settimeout(0.3)
            with pytest.raises(TimeoutError):
                sock.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        sock.settimeout(20)
        assert sock.recv(1) == module._ACCEPTED
        heard.queue.get(timeout=20)[0].close()


def test_ten_thousand_strangers_cost_nothing(heard, strangers):
    used = strangers(heard.address)
    assert used["threads"] <= 0
    assert used["files"] <= module._MAX_GREETINGS + 10
    assert used["kib"] < 20_000
    sock = connect(heard.address, "after all", 20)
    other, text = heard.queue.get(timeout=20)
    assert text == "after all"
    talk(sock, other)


def test_a_run_that_meets_on_the_loopback_listens_there(coordinator):
    assert own_address(coordinator) == "127.0.0.1"
    assert own_address(coordinator.replace("127.0.0.1", "localhost")) == "127.0.0.1"


@pytest.mark.parametrize("own", [None, "10.0.0.7"])
def test_a_machine_whose_own_name_is_on_the_loopback_gives_the_address_of_its_route(coordinator, monkeypatch, own):
    port = coordinator.rpartition(":")[2]
    connecting, route = socket.create_connection, []

    class Route(socket.socket):
        def connect(self, where):
            route.append((self.type, where[0]))
            if own is None:
                raise OSError("Network is unreachable")

        def getsockname(self):
            return own, 1234

    def connect_here(where, timeout):
        sock = connecting(("127.0.0.1", where[1]), timeout)
        monkeypatch.setattr(module.socket, "socket", Route)
        return sock

    monkeypatch.setattr(module.socket, "create_connection", connect_here)
    assert own_address(f"node1:{port}") == (own or "127.0.0.1")  # the only one it has
    assert route == [(socket.SOCK_DGRAM, "192.0.2.1")]
