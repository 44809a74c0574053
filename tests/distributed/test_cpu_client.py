"""The client of CPU devices on a machine whose name has no address."""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxche.distributed import _cpu_client

ROOT = Path(__file__).parents[2]
# Renames the machine for this process and those that it starts, and launches a script in two of them.
RENAMED = """
import ctypes, socket, sys
CLONE_NEWUTS = 0x04000000
if ctypes.CDLL(None).unshare(CLONE_NEWUTS):
    sys.exit("not allowed")
socket.sethostname("nowhere-7")
from jaxche.cluster import launch
sys.exit(launch([sys.executable, {script!r}], 2, pin=False))
"""


@pytest.fixture
def started(monkeypatch):
    """The arguments with which JAX starts its client, for a coordinator and a name that resolves or not."""

    def start(address, resolves, client="store"):
        calls = []

        def look_up(host, port):
            if not resolves:
                raise socket.gaierror(-2, "Name or service not known")

        state = SimpleNamespace(client=client, coordinator_address=address)
        monkeypatch.setattr(_cpu_client._jax_distributed, "global_state", state)
        monkeypatch.setattr(_cpu_client.socket, "getaddrinfo", look_up)
        monkeypatch.setattr(_cpu_client._jax_lib, "make_gloo_tcp_collectives", lambda **words: words)
        monkeypatch.setattr(_cpu_client._xla_bridge, "make_cpu_client", lambda *words: calls.append(words))
        _cpu_client.make_cpu_client()
        return calls

    return start


def test_a_run_on_one_machine_needs_no_address_of_its_name(started):
    assert started("127.0.0.1:1234", resolves=False) == [({"distributed_client": "store", "hostname": "127.0.0.1"},)]


@pytest.mark.parametrize(
    ("address", "resolves", "client"),
    [("127.0.0.1:1234", True, "store"), ("node1:1234", False, "store"), (None, False, None)],
    ids=["the name has an address", "several machines", "one process"],
)
def test_other_runs_start_as_jax_does(started, address, resolves, client):
    assert started(address, resolves, client) == [()]


def test_missing_addresses_of_lost_processes_are_written_cut_off(store, monkeypatch):
    devices = [SimpleNamespace(id=i, process_index=i // 2) for i in range(6)]
    monkeypatch.setattr(_cpu_client.jax, "devices", lambda platform: devices)
    _cpu_client.end_waits(store, [1])  # no collective has begun
    place = _cpu_client.ADDRESSES
    written = {"0,3,4/0": b"first", "1,4/0": b"second", "1,3/0": b"third", "1,3/1": b"own"}
    written = {f"{place}{key}": address for key, address in written.items()}
    for key, address in written.items():
        store.key_value_set_bytes(key, address)
    _cpu_client.end_waits(store, [1])
    assert dict(store.key_value_dir_get_bytes(place)) == written | {f"{place}0,3,4/1": b"firs"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_processes_of_a_machine_without_an_address_gather(run_forked, tmp_path):
    script = tmp_path / "gather.py"
    script.write_text(
        "import jax, jaxche, socket, numpy as np\n"
        "from jax.experimental import multihost_utils\n"
        "jaxche.initialize()\n"
        "assert socket.gethostname() == 'nowhere-7'\n"
        "print(multihost_utils.process_allgather(np.array([jax.process_index()])).ravel())\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = run_forked("-c", RENAMED.format(script=str(script)), env=env)
    if "not allowed" in done.stderr:
        pytest.skip("cannot rename the machine in a namespace")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] [0 1]", "[1] [0 1]"]


@pytest.fixture
def second_client(store):
    """Starts the second client of process 0, which raises these errors first, and gives the number of errors left."""

    def start(*errors):
        left = list(errors)

        def client():
            store.key_value_set(_cpu_client.TOPOLOGY, "")  # refused where it was not deleted
            if left:
                raise RuntimeError(left.pop(0))
            return "client"

        try:
            return _cpu_client.start_cpu_client(store, client), len(left)
        except RuntimeError as error:
            return str(error), len(left)

    return start


def test_process_0_starts_a_second_client_whoever_else_writes(second_client):
    exists, most = "ALREADY_EXISTS: key", _cpu_client._ATTEMPTS
    assert second_client(*[exists] * (most - 1)) == ("client", 0)
    assert second_client(*[exists] * (most + 1)) == (exists, 1)
    assert second_client(exists, "another", exists) == ("another", 1)
