"""How the coordinator of an elastic run is started; tests/multiprocess has runs with it."""

import os
import pty
import socket
import subprocess
import sys

import pytest

from jaxche.distributed import _coordinator as module
from jaxche.distributed import coordinator_bind, liveness_here, start_coordinator


def test_it_imports_what_its_starter_does_also_from_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packages").mkdir()
    monkeypatch.setattr(sys, "path", ["", "packages", "/elsewhere"])

    def started(*_, env, **__):
        assert env["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), str(tmp_path / "packages"), "/elsewhere"]
        raise InterruptedError

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(InterruptedError):
        start_coordinator("127.0.0.1:1", 2)


@pytest.mark.parametrize("bind", ["0.0.0.0", "node1:", "[::]"])
def test_an_address_to_listen_at_without_a_port_is_refused(bind):
    """JAX listens at another port then, and the processes wait for each other, or it cannot start."""
    variable = "JAX_COORDINATOR_BIND_ADDRESS"
    with pytest.raises(ValueError, match=rf"{variable}=.* must be 'host:port'. Write: {variable}=0.0.0.0:1234"):
        coordinator_bind("node1:1234", {variable: bind})
    assert coordinator_bind("node1:1234", {variable: "0.0.0.0:99"}) == "0.0.0.0:99"


@pytest.mark.skipif(sys.platform != "linux", reason="names of local sockets")
def test_its_address_is_for_processes_of_its_user(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module._serve_address(port, "[the address]")
    assert liveness_here(port) == "[the address]"
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert not liveness_here(port)


def test_a_terminal_is_no_launcher():
    ours, theirs = pty.openpty()
    program = f"from {module.__name__} import _is_input_open; print(_is_input_open())"
    for stdin, is_open in ((theirs, "False"), (subprocess.PIPE, "True"), (subprocess.DEVNULL, "False")):
        with subprocess.Popen([sys.executable, "-c", program], stdin=stdin, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.read().strip() == is_open
    os.close(ours)
    os.close(theirs)


def test_one_that_cannot_start_leaves_nothing(monkeypatch):
    started, popen = [], subprocess.Popen

    def recorded(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(RuntimeError, match="cannot serve at"):
            start_coordinator(f"127.0.0.1:{taken.getsockname()[1]}", 2, is_launcher=True)
    assert started[0].returncode is not None  # no zombie
    assert started[0].stdin.closed
