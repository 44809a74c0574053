"""Connections of processes to the server that detects their ends, over real sockets and a store that is a dict."""

import socket
import sys
import threading
from types import SimpleNamespace

import pytest

from jaxche.distributed import PeerLostError, connect
from jaxche.distributed import _liveness as client_module
from jaxche.distributed import _liveness_server as module
from jaxche.distributed._liveness_server import LivenessServer
from jaxche.distributed._watchdog import Watchdog


@pytest.fixture
def run(monkeypatch, store):
    """A server in a thread, and processes that connect to it; both are closed after the test."""
    monkeypatch.setattr(client_module, "_RETRY_S", 0.02)
    monkeypatch.setattr(module, "_POLL_S", 0.02)
    server, over, ends = LivenessServer("127.0.0.1"), threading.Event(), []

    def serve():
        while not over.is_set():
            server.step()

    def connected(process, local=True):
        state, (host, port, name, token) = SimpleNamespace(process_id=process, client=store), server.address
        ends.append(client_module.Liveness(state, [host, port, name if local else None, token], Watchdog()))
        return ends[-1]

    thread = threading.Thread(target=serve)
    thread.start()
    yield server, connected
    for end in ends:
        end.stop()
    over.set()
    thread.join()
    server.close()


def test_an_incarnation_that_closes_its_connection_has_ended_for_all(run, until):
    server, connected = run
    zero, one = connected(0), connected(1)
    assert (zero.incarnation, one.incarnation) == (1, 1)
    zero.stop()
    assert until(lambda: one.lost({0: 1, 1: 1}) == [0])
    again = connected(0)
    assert again.incarnation == 2
    assert until(lambda: again.lost({0: 1}) == [0])  # what ended before it came
    assert one.lost({0: 2}) == []
    assert server.ended == {(0, 1)}


def test_a_process_that_can_join_no_other_ends_the_server(run, until):
    server, connected = run
    one, _ = connected(0), connected(1)
    server.is_run_lost = False
    one.end_run()
    assert until(lambda: server.is_run_lost)
    server.serve(empty_s=60.0)  # at once, though both are alive
    assert len(server.alive) == 2


def test_the_server_waits_for_the_first_process_as_long_as_it_may(monkeypatch):
    now, server = [0.0], LivenessServer("127.0.0.1")
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def step():
        now[0] += 1.0
        if now[0] == 1000.0:
            server._heartbeats[module.Incarnation(0, 1)] = now[0]
            server.ended.add(module.Incarnation(0, 1))

    monkeypatch.setattr(server, "step", step)
    server.serve(empty_s=5.0)
    assert now == [1005.0]
    server._heartbeats.clear()
    server.serve(empty_s=5.0, start_s=20.0)
    assert now == [1025.0]
    server.close()


def test_without_the_launcher_that_held_it_the_server_ends_with_the_last_process(monkeypatch):
    now, server, last = [0.0], LivenessServer("127.0.0.1"), module.Incarnation(0, 1)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def step():
        now[0] += 1.0
        server._heartbeats[last] = now[0]
        if now[0] == 50.0:
            server.ended.add(last)

    monkeypatch.setattr(server, "step", step)
    server.serve(empty_s=5.0, has_launcher=lambda: now[0] < 30.0)  # the launcher dies first: no process is replaced
    assert now == [50.0]
    server.serve(empty_s=5.0, has_launcher=lambda: now[0] < 60.0)  # the last process dies first, and may be replaced
    assert now == [60.0]
    server.close()


def test_processes_may_have_the_address_before_the_server():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for host in ("127.0.0.1", "::" if socket.has_dualstack_ipv6() else "0.0.0.0"):
        server = LivenessServer(host, port=port, token=32 * "t")
        with connect(["127.0.0.1", port, None, 32 * "t"], "1 1", 10.0):
            server.step()
        server.close()


def test_a_later_incarnation_ends_the_one_before(run, until):
    server, connected = run
    connected(1)
    two = connected(1)
    assert until(lambda: server.ended == {(1, 1)})
    assert two.incarnation == 2
    assert server.alive == {(1, 2)}


def test_whether_a_process_is_alive(run, monkeypatch):
    monkeypatch.setattr(module, "_ALIVE_S", 0.1)
    monkeypatch.setattr(module, "_SILENT_S", 30.0)
    server, connected = run
    one = connected(1)
    assert client_module.is_alive(server.address, 1)
    assert not client_module.is_alive(server.address, 0)  # it has not come
    one.stop()
    assert not client_module.is_alive(server.address, 1)
    assert server.alive == set()
    assert server.ended == {(1, 1)}


def test_a_process_is_alive_if_it_sends_heartbeats_after_the_question(monkeypatch):
    now, one, ends = [100.0], module.Incarnation(1, 1), []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    server = LivenessServer("127.0.0.1")

    def asked(last):
        """A question that comes now, about a process whose last heartbeat was read at this time."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        ends.append(ours)
        server._heartbeats = {one: last}
        server._accepted.put((theirs, module.Incarnation(1, 0)))
        step()
        return ours

    def step(to=None):
        now[0] = to or now[0]
        server.step()

    question = asked(99.8)
    server._heartbeats[one] = 100.9  # sent before its death, perhaps
    step(102.8)
    with pytest.raises(BlockingIOError):
        question.recv(1)
    step(103.0)
    assert question.recv(2) == module.NOT_ALIVE
    question = asked(102.9)
    server._heartbeats[one] = 104.1
    step(104.2)
    assert question.recv(2) == module.ALIVE
    question = asked(104.1)
    step(110.0)  # the server was stopped, and has read nothing
    with pytest.raises(BlockingIOError):
        question.recv(1)
    step(112.1)
    assert question.recv(2) == module.NOT_ALIVE
    assert server.ended == set()
    server.close()
    for end in ends:
        end.close()


def test_a_process_that_is_cut_off_and_connects_again_is_alive(run, until, monkeypatch):
    """On a clock of the server that stands still until it has connected again, however late that is."""
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    server, connected = run
    one = connected(1, local=False)
    assert until(lambda: server._peers)
    (cut,) = server._peers
    cut.shutdown(socket.SHUT_RDWR)
    assert until(lambda: server._peers and cut not in server._peers)
    steps, step = [], server.step
    monkeypatch.setattr(server, "step", lambda: step() or steps.append(now[0]))
    now[0] += 1.2 * module._GRACE_S
    assert until(lambda: steps.count(now[0]) > 1)  # the second of them began after that
    assert server.ended == set()
    assert one.is_connected


def test_a_process_that_stops_while_it_connects_again_leaves_no_connection(run, until):
    server, connected = run
    one = connected(1, local=False)
    assert until(lambda: server._peers)
    (cut,), connect_again, connecting = server._peers, one._connect, threading.Event()

    def connect_late():
        connecting.set()
        one._closed.wait()
        return connect_again()

    one._connect = connect_late
    cut.shutdown(socket.SHUT_RDWR)
    assert connecting.wait(20)
    one.stop()
    assert one._sock.fileno() == -1
    assert until(lambda: server.ended == {(1, 1)})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has local sockets with names that are not files")
def test_only_a_process_of_another_machine_has_time_to_connect_again(monkeypatch, until):
    now, local, remote = [0.0], module.Incarnation(0, 1), module.Incarnation(1, 1)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    server = LivenessServer("127.0.0.1")
    host, port, _, token = server.address
    ends = [connect(server.address, "0 1", 10.0), connect([host, port, None, token], "1 1", 10.0)]
    assert until(lambda: server.step() or server.alive == {local, remote})
    for sock in ends:
        sock.close()
    assert until(lambda: server.step() or not server._peers)
    now[0] = 0.2  # no more than what connects again after a stop of the server
    server.step()
    assert server.ended == {local}
    now[0] = 0.9
    server.step()
    assert server.ended == {local}
    now[0] = 1.1
    server.step()
    assert server.ended == {local, remote}
    server.close()


def test_silence_ends_an_incarnation_but_not_a_pause_of_the_server(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    server = LivenessServer("127.0.0.1")
    server._heartbeats = {module.Incarnation(0, 1): 0.0, module.Incarnation(1, 1): 0.0}
    for second in range(1, 12):
        now[0] = float(second)
        server.step()
    now[0] = 40.0  # the server was stopped
    server.step()
    assert server.ended == set()
    server._heartbeats[module.Incarnation(0, 1)] = 11.0  # of the clock that was stopped too
    for second in range(41, 45):
        now[0] = float(second)
        server.step()
    assert server.ended == set()
    now[0] = 44.5
    server.step()
    assert server.ended == {(1, 1)}
    server.close()


def test_what_was_sent_before_a_pause_of_the_server_is_no_later_heartbeat(monkeypatch):
    now, one, (ours, theirs) = [0.0], module.Incarnation(0, 1), socket.socketpair()
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    server = LivenessServer("127.0.0.1")
    server._accepted.put((theirs, one))
    server.step()
    ours.send(b".")
    now[0] = 1000.0  # the server was stopped, and its machine slept
    server.step()
    while now[0] < 1015.0:
        now[0] += 1.0
        server.step()
    assert server.ended == set()
    now[0] = 1015.5
    server.step()
    assert server.ended == {one}
    server.close()
    ours.close()


@pytest.mark.parametrize("timeout_s", [4.0, 15.0])
def test_the_timeout_is_that_of_the_run_and_a_stall_of_the_server_delays_it(monkeypatch, timeout_s):
    now, one = [0.0], module.Incarnation(0, 1)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    server = LivenessServer("127.0.0.1", timeout_s)
    server._heartbeats = {one: 0.0}
    stall = min(3.0, timeout_s / 4) + 0.01  # on an overloaded machine all are late
    now[0] = stall
    server.step()
    while now[0] < stall + timeout_s - 0.1:
        now[0] += 0.4
        server.step()
        assert server.ended == set() or now[0] - stall > timeout_s
    now[0] = stall + timeout_s + 0.1
    server.step()
    assert server.ended == {one}
    server.close()


def test_the_server_stays_a_while_after_the_last_process(monkeypatch):
    now, server = [0.0], LivenessServer("127.0.0.1")
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    came, step = {3.0: module.Incarnation(0, 1), 8.0: module.Incarnation(0, 2)}, []

    def pass_a_second():
        now[0] += 1.0
        step.append(now[0])
        if now[0] in came:
            server._heartbeats[came[now[0]]] = now[0]
        if now[0] == 5.0:
            server.ended.add(module.Incarnation(0, 1))
        if now[0] == 9.0:
            server.ended.add(module.Incarnation(0, 2))

    monkeypatch.setattr(server, "step", pass_a_second)
    server.serve(empty_s=4.0, start_s=10.0)
    assert step[-1] == 13.0
    server.close()


def test_greetings_of_strangers_are_no_processes(run, until, strangers):
    server, connected = run
    one = connected(1)
    used = strangers(server.address, hellos=1000, seed=1)
    assert used["threads"] <= 0
    assert used["files"] <= 100
    assert used["kib"] < 20_000
    # With the token, but without a process and an incarnation.
    for text in ("", "1", "x y", "1 1 1"):
        with connect(server.address, text, 20) as sock:
            assert sock.recv(1) == b""
    assert server.alive == {(1, 1)}
    one.stop()
    assert until(lambda: server.ended == {(1, 1)})


def test_what_a_connection_sends_is_not_read(run, until):
    server, _ = run
    with connect(server.address, "3 1", 20) as sock:
        for _ in range(100):
            sock.sendall(b"2 1\n" * 100)
        assert until(lambda: server._peers)
        assert server.alive == {(3, 1)}
    assert until(lambda: server.ended == {(3, 1)})


def test_a_wait_for_a_key_ends_with_its_writer_but_not_before_what_it_wrote(run, store, until):
    _, connected = run
    zero, one = connected(0), connected(1)
    store.key_value_set("here", "yes")
    zero.stop()
    assert until(lambda: one.lost({0: 1}))
    assert one.wait_for_key("here", {0: 1}, "failures/") == "yes"
    with pytest.raises(PeerLostError, match="process 0 died while others waited for it"):
        one.wait_for_key("missing", {0: 1}, "failures/")


def test_a_loss_is_known_when_all_others_have_come(run, store, until):
    _, connected = run
    zero, one = connected(0), connected(1)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(zero.wait_for_loss({0: 1, 1: 1, 2: 1}, "failures/", unless=lambda: False))
    )
    store.key_value_set("failures/0", "")
    store.key_value_set("failures/2", "")
    thread.start()
    reads = store.reads
    assert until(lambda: store.reads > reads + 2)
    assert not found
    one.stop()
    thread.join(20)
    assert found == [[1]]
    assert zero.wait_for_loss({0: 1, 2: 1}, "failures/", unless=lambda: False) == []
    assert zero.wait_for_loss({0: 1, 5: 1}, "failures/", unless=lambda: True) is None


def test_a_replacement_that_ends_at_once_ends_its_predecessor():
    server = LivenessServer("127.0.0.1")
    own, process = socket.socketpair(), socket.socketpair()
    for (sock, other), number in ((own, 1), (process, 2)):
        server._accepted.put((sock, module.Incarnation(0, number)))
        if number == 2:
            other.close()
        server._register_accepted()
    assert server.ended == {(0, 1)}
    assert [*server._peers.values()] == [(0, 1)]
    server.close()
    own[1].close()


def test_a_wait_for_a_key_ends_where_a_merge_has_failed(run, store, monkeypatch):
    monkeypatch.setattr(client_module, "_SLICE_MS", 10)
    _, connected = run
    zero, _ = connected(0), connected(1)
    store.key_value_set("failures/1/1", "")
    with pytest.raises(PeerLostError, match="a merge failed in another process"):
        zero.wait_for_key("missing", {1: 1}, "failures/1/")


def test_whether_the_server_can_be_reached(run, monkeypatch):
    def refused():
        raise ConnectionRefusedError

    _, connected = run
    zero = connected(0)
    assert zero.is_connected
    with monkeypatch.context() as patch:
        patch.setattr(zero, "_connect", refused)
        assert not zero.is_connected


def test_a_connection_that_breaks_ends_its_process_and_open_questions_end_with_the_server():
    class Broken:
        def recv(self, size):
            raise ConnectionResetError

    server, (ours, theirs), broken = LivenessServer("127.0.0.1"), socket.socketpair(), Broken()
    server._questions[theirs] = 1
    dropped, server._drop = [], lambda sock: dropped.append(sock)
    server._read(broken)
    assert dropped == [broken]
    server.close()
    assert theirs.fileno() == -1
    ours.close()
