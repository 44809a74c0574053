"""Who is on the same machine is reached by the shorter way, and everybody by the other."""

import json
import socket
import sys
import threading

import pytest

from jaxche.protocols._connect import connect, listen


@pytest.fixture
def listening():
    servers, where = listen("127.0.0.1")
    yield servers, json.loads(json.dumps(where))
    for server in servers:
        server.close()


def echo(server, received):
    sock, _ = server.accept()
    with sock:
        received.append(sock.recv(5, socket.MSG_WAITALL))
        sock.sendall(b"there")


def told(sock, server):
    received = []
    thread = threading.Thread(target=echo, args=(server, received))
    thread.start()
    with sock:
        sock.sendall(b"hello")
        assert sock.recv(5, socket.MSG_WAITALL) == b"there"
        assert sock.gettimeout() is None
    thread.join()
    assert received == [b"hello"]


@pytest.mark.skipif(sys.platform != "linux", reason="local sockets without files are Linux's")
def test_on_one_machine_the_local_socket_is_taken(listening):
    servers, where = listening
    sock = connect(where, 5)
    assert sock.family == socket.AF_UNIX
    told(sock, servers[1])


def test_a_name_that_is_not_of_this_machine_leaves_tcp(listening):
    servers, (host, port, _) = listening
    for name in ("jaxche-of-another-machine", None):
        sock = connect([host, port, name], 5)
        assert sock.family == socket.AF_INET
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        told(sock, servers[0])


def test_every_listener_has_names_of_its_own(listening):
    others, where = listen("127.0.0.1")
    assert not set(where[1:]) & set(listening[1][1:]) - {None}
    for server in others:
        server.close()


def test_nobody_there_is_an_error(listening):
    servers, where = listening
    for server in servers:
        server.close()
    with pytest.raises(OSError, match="refused"):
        connect(where, 5)
