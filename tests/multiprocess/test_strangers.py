"""A run on this machine listens on the loopback only, and connections of other programs do not change it."""

import ipaddress
import json
import sys
import threading
from pathlib import Path

import pytest

from jaxche.cluster import launch

PROGRAM = Path(__file__).with_name("strangers.py")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="who listens is read from /proc"),
    pytest.mark.usefixtures("forked"),
]


@pytest.fixture
def run(tmp_path, until):
    """Trains with two processes, and calls something with what they say of themselves while they do."""

    def running(visit):
        def visiting():
            try:
                ready = [tmp_path / f"ready-{i}.json" for i in range(3)]
                assert until(lambda: over.is_set() or all(path.exists() for path in ready), within_s=120)
                visit([json.loads(path.read_text()) for path in ready])
            except BaseException as error:
                errors.append(error)
            (tmp_path / "enough").touch()

        errors, over = [], threading.Event()
        thread = threading.Thread(target=visiting)
        thread.start()
        command, env = [sys.executable, str(PROGRAM), str(tmp_path)], {"PYTHONWARNINGS": "error"}
        code = launch(command, 2, env=env, elastic=True)
        over.set()
        thread.join()
        if errors:
            raise errors[0]
        assert code == 0
        results = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
        for result in results:
            assert result["other"] == []
            assert result["merged"] == result["before"]
            assert result["merged"][1:] == [True, 2]
            assert result["lives"] == {"0": 1, "1": 1}
        assert results[0]["first"][0] == results[1]["first"][0]
        return results

    return running


def test_a_run_on_this_machine_listens_on_the_loopback_alone(run):
    seen = []
    run(seen.extend)
    for told in seen:
        listening = {port: ipaddress.ip_address(host) for host, port in told["listening"]}
        # Gloo listens at the address of the host name, and no process listens at all addresses.
        assert not [host for host in listening.values() if host.is_unspecified]
        for host, port, *_ in told["addresses"].values():
            assert host == str(listening[port]) == "127.0.0.1"
    zero, one, coordinator = ({port for _, port in told["listening"]} for told in seen)
    assert zero  # stages, and gloo
    assert one
    assert len(coordinator) == 2  # that of JAX and that of jaxche


def test_strangers_at_every_listener_leave_a_run_as_it_was(run, strangers):
    used = []

    def visit(told):
        for process in told:
            for number, address in enumerate(process["addresses"].values()):
                used.append(strangers(address, process["pid"], hellos=3000, seed=number))

    results = run(visit)
    assert len(used) == 3
    for one in used:
        assert one["threads"] <= 2
        assert one["files"] <= 100
        assert one["kib"] < 100_000
    assert results[0]["done"] == results[1]["done"] > 10
