"""`jaxche coordinator`: its variables; tests/multiprocess/test_elastic.py has runs with it."""

import json
import socket
import subprocess
import sys

import pytest

from jaxche.cli import main
from jaxche.distributed import connect

TOKEN = 32 * "t"
VARIABLES = {
    "JAXCHE_COORDINATOR": "127.0.0.1:61234",
    "JAXCHE_NUM_PROCESSES": "2",
    "JAXCHE_LIVENESS": json.dumps(["127.0.0.1", 61235, None, TOKEN]),
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"JAXCHE_COORDINATOR": ""}, "JAXCHE_COORDINATOR must be set. Write: JAXCHE_COORDINATOR=node1:61234"),
        ({"JAXCHE_COORDINATOR": "node1"}, "JAXCHE_COORDINATOR='node1' must be 'host:port'"),
        ({"JAXCHE_NUM_PROCESSES": "1"}, "a single process needs no coordinator"),
        ({"JAXCHE_NUM_PROCESSES": "two"}, "JAXCHE_NUM_PROCESSES='two' is not a number"),
        ({"JAXCHE_LIVENESS": "node1:61235"}, "JAXCHE_LIVENESS='node1:61235' is no address. Write:"),
        ({"JAXCHE_LIVENESS": '["node1", 0, null, "' + TOKEN + '"]'}, "is no address"),
        ({"JAXCHE_LIVENESS": '["node1", 61235, null, "short"]'}, "is no address"),
    ],
)
def test_variables_are_checked_first(monkeypatch, capsys, changed, message):
    for name, value in (VARIABLES | changed).items():
        monkeypatch.setenv(name, value)
    assert main(["coordinator"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("start", [[], ["sh", "-c", 'exec "$@" <&-', "sh"]], ids=["open", "closed from the start"])
def test_it_serves_as_long_as_its_standard_input_is_open(monkeypatch, start):
    ports = []
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    monkeypatch.setenv("JAXCHE_COORDINATOR", f"127.0.0.1:{ports[0]}")
    monkeypatch.setenv("JAXCHE_NUM_PROCESSES", "2")
    address = ["127.0.0.1", ports[1], None, TOKEN]
    monkeypatch.setenv("JAXCHE_LIVENESS", json.dumps(address))
    command = [*start, sys.executable, "-m", "jaxche", "coordinator"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            sock = None
            while sock is None:
                assert process.poll() is None
                try:
                    sock = connect(address, "0 1", timeout_s=10.0)
                except ConnectionRefusedError:
                    continue
            sock.close()
            assert process.stdin is not None
            if not start:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(timeout=1.0)
                process.stdin.close()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
