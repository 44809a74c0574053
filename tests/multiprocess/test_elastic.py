"""Elastic runs of processes that no launcher of jaxche started, and of processes that are cut off from each other."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from jaxche.cluster import emit

PROGRAM = Path(__file__).with_name("resumed.py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")


@pytest.fixture
def start(tmp_path, fork):
    """Starts a process of an elastic run, as a scheduler may; all are ended after the test."""
    started = []

    def starting(what, rank, processes, address, prefix=(), **env):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        variables = {"JAX_PLATFORMS": "cpu", "JAXCHE_COORDINATOR": address, "JAXCHE_NUM_PROCESSES": str(processes)}
        variables |= {"JAXCHE_PROCESS_ID": str(rank), "JAXCHE_ELASTIC": "1"}
        log = (tmp_path / f"log-{len(started)}").open("w+")
        program = (PROGRAM, what, "3", folder)
        options = {"env": os.environ | variables | env, "stdout": log, "stderr": log}
        if prefix:
            child = subprocess.Popen([*prefix, sys.executable, *program], **options, start_new_session=True)
        else:
            child = fork(*program, **options)
        started.append((child, log))
        return child

    yield starting
    for child, log in started:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        log.seek(0)
        print(log.read())
        log.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def coordinators(address):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"jaxche.distributed._coordinator" in words and address.encode() in words:
            found.append(int(pid))
    return found


def test_process_0_starts_the_coordinator_where_nobody_else_did_and_may_die(tmp_path, start, until):
    address = f"127.0.0.1:{free_port()}"
    children = [start("JOIN zero", rank, 2, address) for rank in range(2)]
    assert children[0].wait(timeout=60) == -signal.SIGKILL
    assert coordinators(address)
    again = start("JOIN zero", 0, 2, address, JAXCHE_RESTART="1")
    assert children[1].wait(timeout=90) == 0
    assert again.wait(timeout=30) == 0
    results = [json.loads((tmp_path / "run" / f"{i}.json").read_text()) for i in range(2)]
    assert results[0] == results[1]
    worlds = [len(counts) for _, _, _, counts, _ in results[0]["rounds"]]
    assert worlds[3:5] == [2, 1]
    assert worlds[-1] == 2
    assert until(lambda: not coordinators(address), within_s=15)


def test_a_second_run_at_the_same_address_is_refused_and_the_first_goes_on(tmp_path, script, fork, until):
    _, *program = script("""
        from pathlib import Path
        import jaxche
        from jaxche.distributed import process_group
        jaxche.initialize(timeout_s=60)
        here = Path(sys.argv[1])
        (here / f"{os.getpid()}.joined").touch()
        while not (here / "stop").exists():
            time.sleep(0.05)
        group = process_group()
        assert (group.all_gather(rank), group.lost()) == ([0, 1], [])
    """)
    env = os.environ | {"JAXCHE_COORDINATOR": f"127.0.0.1:{free_port()}", "JAXCHE_NUM_PROCESSES": "2"}

    def start(rank):
        own = {"JAXCHE_PROCESS_ID": str(rank), "JAXCHE_ELASTIC": "1", "JAXCHE_RESTART": "0"}
        return fork(*program, tmp_path, env=env | own, stderr=subprocess.PIPE, text=True)

    with contextlib.ExitStack() as stack:

        def ended(child):
            with child:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)

        first = [start(rank) for rank in range(2)]
        for child in first:
            stack.callback(ended, child)
        assert until(lambda: len(list(tmp_path.glob("*.joined"))) == 2, within_s=60)
        for rank in range(2):
            second = start(rank)
            stack.callback(ended, second)
            _, err = second.communicate(timeout=60)
            assert second.returncode == 1
            assert f"process {rank} of a run at this address is alive. A second run needs another address" in err
        (tmp_path / "stop").touch()
        for child in first:
            _, err = child.communicate(timeout=60)
            assert child.returncode == 0, err
    assert len(list(tmp_path.glob("*.joined"))) == 2


@pytest.fixture
def pods(tmp_path):
    """Starts the pods of an elastic jobset of two on this machine, each time as the manifest has them."""
    folder, ports, started = tmp_path / "run", [free_port(), free_port()], []
    folder.mkdir()

    def jobset(what):
        command = ["python", str(PROGRAM), what, "3", str(folder)]
        text = emit("jobset", command, "2", name="run", image="me/train:1", elastic=True)
        for named, here in [("run-coordinator-0-0.run", "127.0.0.1"), ("61234", ports[0]), ("61235", ports[1])]:
            assert named in text
            text = text.replace(named, str(here))
        jobs = {job["name"]: job["template"]["spec"] for job in yaml.safe_load(text)["spec"]["replicatedJobs"]}

        def start(job, index):
            [container] = jobs[job]["template"]["spec"]["containers"]
            env = {variable["name"]: variable.get("value", "0") for variable in container["env"]}
            env |= {"JOB_COMPLETION_INDEX": str(index), "JAX_PLATFORMS": "cpu"}
            env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            stdin = subprocess.PIPE if container.get("stdin") else subprocess.DEVNULL
            pod = subprocess.Popen(container["command"], env=os.environ | env, stdin=stdin, start_new_session=True)
            started.append(pod)
            return pod

        return start

    yield jobset
    for pod in started:
        if pod.poll() is None:
            os.killpg(pod.pid, signal.SIGKILL)
        with pod:  # closes its standard input
            pass


def test_a_pod_of_an_elastic_jobset_is_started_again_with_the_same_environment(tmp_path, pods):
    start = pods("JOIN zero")
    coordinator, children = start("coordinator", 0), [start("nodes0", index) for index in range(2)]
    assert children[0].wait(timeout=90) == 128 + signal.SIGKILL
    children[0] = start("nodes0", 0)
    assert [child.wait(timeout=90) for child in children] == [0, 0]
    results = [json.loads((tmp_path / "run" / f"{i}.json").read_text()) for i in range(2)]
    assert results[0] == results[1]
    worlds = [len(counts) for _, _, _, counts, _ in results[0]["rounds"]]
    assert worlds[3:5] == [2, 1]
    assert worlds[-1] == 2
    used = [(epoch, cursor + i) for _, epoch, cursor, counts, _ in results[0]["rounds"] for i in range(sum(counts))]
    assert used == [(epoch, i) for epoch in range(12) for i in range(12)]
    late = start("nodes0", 1)  # as if it had died at the end
    assert late.wait(timeout=60) == 0
    assert coordinator.poll() is None
    coordinator.stdin.close()
    assert coordinator.wait(timeout=30) == 0


@pytest.mark.slow
def test_the_coordinator_of_a_jobset_fails_when_a_pod_comes_after_the_death_of_all(tmp_path, pods, monkeypatch, until):
    monkeypatch.setenv("JAXCHE_EVENTS", str(tmp_path / "events.jsonl"))
    start = pods("SLOW unsaved")
    coordinator, children = start("coordinator", 0), [start("nodes0", index) for index in range(2)]
    assert until(lambda: (tmp_path / "events.jsonl").exists(), within_s=60)  # a round has ended
    for child in children:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    time.sleep(8)  # longer than a coordinator stays without processes
    assert coordinator.poll() is None
    assert start("nodes0", 1).wait(timeout=90) == 1
    assert coordinator.wait(timeout=10) == 1


@pytest.fixture
def network():
    """Two machines, which are namespaces of this one, their addresses, and a function that cuts the link between."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip")
    names, addresses = [f"jx{os.getpid() % 10000}{side}" for side in "ab"], ["10.213.7.1", "10.213.7.2"]
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip -n {names[0]} link add {names[0]} type veth peer name {names[1]} netns {names[1]}")
    for name, address in zip(names, addresses, strict=True):
        commands += [f"ip -n {name} addr add {address}/24 dev {name}", f"ip -n {name} link set {name} up"]
        commands += [f"ip -n {name} link set lo up"]
    try:
        for command in commands:
            if subprocess.run(command.split(), capture_output=True, check=False).returncode:
                pytest.skip(f"not allowed: {command}")
        for name, address in zip(names, addresses, strict=True):
            # Gloo listens where the name of the machine leads to.
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        yield names, addresses, lambda: subprocess.run(f"ip -n {names[0]} link set {names[0]} down".split(), check=True)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@pytest.mark.slow
def test_of_two_halves_only_the_one_with_the_coordinator_goes_on(tmp_path, start, network, until, json_lines):
    names, addresses, cut = network
    address, events = f"{addresses[0]}:{free_port()}", [tmp_path / f"events-{rank}.jsonl" for rank in range(3)]
    children = []
    for rank, side in enumerate((0, 1, 1)):  # the smaller half has the coordinator
        prefix = ("ip", "netns", "exec", names[side])
        env = {"JAXCHE_EVENTS": str(events[rank]), "JAXCHE_HEARTBEAT_TIMEOUT": "6"}
        children.append(start("SLOW unsaved", rank, 3, address, prefix, **env))

    def rounds(rank):
        return [event["round"] for event in json_lines(events[rank])] if events[rank].exists() else []

    assert until(lambda: 4 in rounds(0), within_s=60)
    cut()
    time.sleep(1.0)
    last = [rounds(1)[-1], rounds(2)[-1]]
    assert children[0].wait(timeout=120) == 0
    assert [rounds(1)[-1], rounds(2)[-1]] == last
    assert not (tmp_path / "run" / "1.json").exists()
    assert not (tmp_path / "run" / "2.json").exists()
    result = json.loads((tmp_path / "run" / "0.json").read_text())
    assert len(result["rounds"][-1][3]) == 1
    found = [(epoch, cursor + i) for _, epoch, cursor, counts, _ in result["rounds"] for i in range(sum(counts))]
    assert found == [(e, i) for e in range(max(found)[0] + 1) for i in range(12)]
