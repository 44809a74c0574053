"""The scripts that start processes, in short: what a run withstands, and how long it takes."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import uuid

import pytest
import slow_link

import jaxche

ROOT = pathlib.Path(__file__).parents[2]


def run(script, *words):
    command = [sys.executable, str(ROOT / "scripts" / script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)


def growth(output):
    """The numbers that slow_link.py --growth prints: target, anchors, steps, shares of merging, and that of the end."""
    target = float(re.search(r"target (\d+)%", output)[1])
    rounds = re.findall(r"^ *\d+ +(\d+) +([\d:]+) +[\d.]+ +[\d.]+ +([\d.]+)% +[\d.]+%$", output, re.M)
    anchors, counts, shares = zip(*rounds, strict=True)
    last = float(re.search(r"merging takes ([\d.]+)% of the last rounds", output)[1])
    steps = sum(int(n) for one in counts for n in one.split(":"))
    return target, [int(anchor) for anchor in anchors], steps, [float(share) for share in shares], last


@pytest.mark.slow
def test_the_anchor_grows_until_a_slow_link_costs_little(devices, monkeypatch, capsys):
    """On the clock of a virtual fleet whose merge takes what the link needs for its bytes."""
    merge_ms = 2 * 2**20 * 8 / 200e6 * 1e3
    fleet = jaxche.VirtualFleet(slow_link.GROWTH_PACES, sync_ms=merge_ms)
    monkeypatch.setattr(slow_link, "run", lambda link, paces, job: slow_link.grow(job["growth"], fleet=fleet))
    assert slow_link.growth(1000) == 0
    target, anchors, steps, shares, last = growth(capsys.readouterr().out)
    assert steps == 1000
    assert anchors[0] < anchors[-2]
    assert last <= 1.2 * target < shares[0]


@pytest.mark.slow
def test_the_growth_of_the_anchor_is_measured_over_a_link():
    done = run("slow_link.py", "--growth", "--steps", "1000")
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    # Times are those of this machine, and so is the code: 1 if merging takes more of the last rounds than the target.
    assert done.returncode in (0, 1), done.stdout + done.stderr
    target, anchors, steps, shares, last = growth(done.stdout)
    assert steps == 1000
    assert max(anchors) > anchors[0] or shares[0] <= target
    assert last <= 1.2 * target or done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["slow_link.py", "--links", "none"], "--worker"),
        (["chaos.py", "--join-mb", "1", "--link", "none/0ms"], "bare"),
        (["chaos.py", "--faults", "1"], "worker.py"),
    ],
)
def test_a_script_that_is_stopped_leaves_nothing(words, last, until):
    mark = f"OF_THIS_TEST={uuid.uuid4()}"
    env = os.environ | dict([mark.split("=")])
    command = [sys.executable, str(ROOT / "scripts" / words[0]), *words[1:]]

    def started():
        """The words of the processes that the script has started."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if mark in (path / "environ").read_text().split("\0") and path.name != str(script.pid):
                    found.append((path / "cmdline").read_text().replace("\0", " "))
        return found

    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as script:
        assert until(lambda: script.poll() is not None or any(last in one for one in started()), within_s=60)
        script.terminate()
        output, _ = script.communicate(timeout=60)
    if script.returncode == 77:
        pytest.skip(output.strip())
    assert script.returncode == 143
    assert until(lambda: not started(), within_s=60), started()
    assert not list(pathlib.Path("/run/netns").glob(f"jaxche{script.pid}-*"))
    assert not list(pathlib.Path("/etc/netns").glob(f"jaxche{script.pid}-*"))


def test_no_process_outlives_its_namespace():
    try:
        with slow_link.machines(slow_link.Link.parse("none/0ms"), 2) as names:
            left = subprocess.Popen(["ip", "netns", "exec", names[1], "sleep", "600"])
            until_inside = f"until ip netns pids {names[1]} | grep -q {left.pid}; do sleep 0.01; done"
            subprocess.run(["bash", "-c", until_inside], check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no namespaces: {error}")
    assert left.wait(60) == -9


@pytest.mark.slow
def test_runs_come_through_faults(run_forked):
    # test_resumed.py has the other kinds: a rank that dies, and one that hangs.
    words = ["--kinds", "term,throttle,disk full,torn checkpoint", "--faults", "4", "--undisturbed", "8", "--seed", "7"]
    done = run_forked(ROOT / "scripts/chaos.py", *words, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 runs came through" in done.stdout


@pytest.mark.slow
def test_an_elastic_run_comes_through_a_stop_and_a_wrong_bit(tmp_path):
    results = tmp_path / "results.jsonl"
    # With this seed of three processes.
    words = ["--elastic", "--faults", "2", "--faults-a-run", "2", "--kinds", "stop,flip", "--seed", "16"]
    done = run("chaos.py", *words, "--heartbeat-timeout", "4", "--results", str(results))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 faults came through, in 1 runs, of which 1 were run again" in done.stdout
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["kind"], row["run"], row["replaced"]) for row in rows] == [("stop", 0, 1), ("flip", 0, 1)]
    # By a clock that does not jump.
    assert all(0 < row["gap_s"] <= row["seconds"] for row in rows)


@pytest.mark.slow
def test_peers_are_compared_in_one_table(run_forked, tmp_path):
    done = run_forked(ROOT / "scripts/bench_peers.py", "--quick", "--json", tmp_path / "peers.json", timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    fleet = json.loads((tmp_path / "peers.json").read_text())["fleets"]["20/50"]
    assert list(fleet) == ["jaxche", "plain jit"]
    for name, row in fleet.items():
        (trial,) = row["runs"]
        seconds, batches, loss, _ = zip(*trial["curve"], strict=True)
        assert list(seconds) == sorted(seconds)
        assert seconds[0] == batches[0] == 0
        assert seconds[-1] >= 2
        assert loss[-1] < loss[0]
        assert re.search(rf"^{name} +0\.002 .*\d$", done.stdout, re.M), done.stdout
    # All begin with the same parameters.
    assert len({row["runs"][0]["curve"][0][2] for row in fleet.values()}) == 1


def partitions(run_forked, *words):
    done = run_forked(ROOT / "scripts/bench_partitions.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " of each in " not in done.stderr  # which is for those who train a model, not for those who compare runs
    return done.stdout


@pytest.mark.slow
def test_pipelines_are_compared_with_the_time_of_their_schedule(run_forked):
    output = partitions(run_forked, "--only", "pipelines", "--turns", "1", "--pace", "1,1")
    row = r"^(devices|processes) +(\d) +(\d+) +(1f1b|gpipe) +\d+ ms +[\d.]+ ms +[\d.]+  ([\d ]+) \(as expected\)$"
    rows = re.findall(row, output, re.M)
    assert len(rows) == 20, output
    assert ("devices", "3", "8", "1f1b", "3 2 1") in rows
    assert ("processes", "2", "16", "gpipe", "16 16") in rows


@pytest.mark.slow
def test_wires_of_stages_are_compared_with_what_is_under_them(run_forked):
    output = partitions(run_forked, "--only", "wires", "--turns", "1", "--mib", "0.01")
    rows = re.findall(r"^(\w+, [\w ]+?) +[\d.]+ +\d+   (.+?) +\d+ +\d+\.\d+  [\d.]+ to [\d.]+$", output, re.M)
    assert rows == [
        ("Direct, devices", "device_put"),
        ("DataStore, 1 process", "obstore, no waits"),
        ("Direct, processes", "ppermute (gloo)"),
        ("Direct, processes", "jax transfer"),
        ("DataStore, processes", "obstore"),
    ]
