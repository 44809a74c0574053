"""Real processes that die, hang or are told to stop: what the launcher makes of them. No JAX in here."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxche.cluster import launch
from jaxche.cluster._reaper import Reaper


@pytest.fixture
def script(script):
    """Without what is installed these start in no time."""
    return lambda text: script(text, "-S")


def test_a_rank_that_dies_is_started_again_with_all_the_others(script, capfd, tmp_path, json_lines):
    command = script("""
        print("start", restart, os.environ["JAXCHE_COORDINATOR"])
        if restart == 0:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(100)
    """)
    events = tmp_path / "events.jsonl"
    assert launch(command, 2, max_restarts=3, grace_s=1.0, events=events) == 0
    out, err = capfd.readouterr()
    ports = dict(re.findall(r"start (\d) 127.0.0.1:(\d+)", out))
    assert ports.keys() == {"0", "1"}
    assert ports["0"] != ports["1"]
    assert "rank 1 was ended by SIGKILL" in err
    assert "restart 1 of 3 with 2 process(es)" in err
    told = json_lines(events)
    kinds = [event["event"] for event in told]
    assert kinds == ["start", "start", "exit", "exit", "restart", "start", "start", "exit", "exit", "end"]
    assert told[2] | {"time": 0} == {"time": 0, "event": "exit", "restart": 0, "rank": 1, "signal": "SIGKILL"}
    assert told[4] | {"time": 0} == {
        "time": 0,
        "event": "restart",
        "restart": 1,
        "processes": 2,
        "rank": 1,
        "code": 137,
    }
    assert told[-1]["code"] == 0


def test_restarts_are_used_up_and_bad_input_uses_none(script, capfd):
    assert launch(script("sys.exit(7)"), 1, max_restarts=2) == 7
    assert "restart 2 of 2" in capfd.readouterr().err
    assert launch(script("sys.exit(2)"), 1, max_restarts=2) == 2
    assert "restart" not in capfd.readouterr().err


def test_a_rank_that_fails_twice_in_a_row_is_left_behind(script, capfd):
    command = script("""
        pace, world = os.environ["JAXCHE_PACE_MS"], os.environ["JAXCHE_NUM_PROCESSES"]
        print("pace", pace, "rank", rank, "of", world)
        if pace == "50":
            sys.exit(3)
        time.sleep(0 if world == "2" else 100)
    """)
    code = launch(command, 3, pace_ms=[20, 50, 30], max_restarts=3, survivors=True, grace_s=1.0)
    assert code == 0
    out = capfd.readouterr().out
    assert out.count("pace 50") == 2
    # The others keep their places and paces, and are numbered again.
    assert {"[0] pace 20 rank 0 of 2", "[1] pace 30 rank 1 of 2"} <= set(out.splitlines())


def test_a_run_that_falls_silent_is_killed_and_started_again(script, capfd, tmp_path, json_lines):
    command = script("""
        for _ in range(3):
            open(os.environ["JAXCHE_HEARTBEAT"], "w").close()
            time.sleep(0.1)
        if restart == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
    """)
    events = tmp_path / "events.jsonl"
    assert launch(command, 2, max_restarts=1, hang_timeout_s=6.0, events=events) == 0
    err = capfd.readouterr().err
    assert re.search(r"no heartbeat; the last ones: rank 0 \d+ s ago, rank 1 \d+ s ago", err), err
    assert [event["event"] for event in json_lines(events)].count("hang") == 1
    hang = script("time.sleep(100)")
    assert launch(hang, 1, hang_timeout_s=0.5) == 124


def test_sigterm_leaves_time_for_a_checkpoint_and_is_no_reason_to_restart(script, launcher, tmp_path):
    ranks = script(f"""
        def checkpoint(number, frame):
            time.sleep(0.5)
            open({str(tmp_path)!r} + f"/checkpoint-{{rank}}", "w").close()
            sys.exit(143)
        signal.signal(signal.SIGTERM, checkpoint)
        print("ready", flush=True)
        time.sleep(100)
    """)
    run = launcher(ranks, "grace_s=0.0", "max_restarts=5")
    assert [run.stdout.readline()[4:] for _ in range(2)] == ["ready\n"] * 2
    run.send_signal(signal.SIGTERM)
    time.sleep(0.15)
    run.send_signal(signal.SIGTERM)  # schedulers repeat themselves, and tell a process and then its children
    _, err = run.communicate(timeout=20)
    assert run.returncode == 143
    assert "SIGKILL" not in err
    assert "restart" not in err
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-0", "checkpoint-1"}


def test_ctrl_c_does_not_wait_for_the_grace(script, launcher):
    ranks = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(100)
    """)
    run = launcher(ranks, "term_grace_s=60.0")
    assert [run.stdout.readline()[4:] for _ in range(2)] == ["ready\n"] * 2
    run.send_signal(signal.SIGTERM)
    assert any("SIGTERM: stopping" in line for line in iter(run.stderr.readline, ""))
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=20)
    assert run.returncode == 143
    assert "rank 0, 1 still runs: SIGKILL" in err


def test_sigterm_while_a_failure_is_dealt_with_is_heard(script, launcher):
    ranks = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        if rank == 0:
            time.sleep(100)
        time.sleep(0.5)
        sys.exit(3)
    """)
    run = launcher(ranks, "grace_s=2.5", "max_restarts=5")
    assert any("stopping the others" in line for line in iter(run.stderr.readline, ""))
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=20)
    assert run.returncode == 143
    assert "rank 0 still runs: SIGKILL" in err
    assert "restart" not in err


def test_ranks_that_hear_of_a_failure_say_so_before_they_are_ended(script, capfd, tmp_path):
    ranks = script(f"""
        from pathlib import Path
        there = Path({str(tmp_path)!r}) / "there"
        if rank == 1:
            while not there.exists():
                time.sleep(0.01)
            sys.exit(3)
        there.touch()
        time.sleep(0.4)
        print("rank 1 has failed", file=sys.stderr)
    """)
    assert launch(ranks, 2) == 3
    assert "[0] rank 1 has failed" in capfd.readouterr().err


def test_ranks_and_their_children_end_with_a_launcher_that_was_killed(script, launcher, gone):
    ranks = script("""
        import subprocess
        if rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("pid", os.getpid(), subprocess.Popen(["sleep", "100"]).pid, flush=True)
        time.sleep(100)
    """)
    run = launcher(ranks, "term_grace_s=1.0")
    pids = [int(pid) for _ in range(2) for pid in re.findall(r"\d+", run.stdout.readline().partition("pid")[2])]
    run.kill()
    assert len(pids) == 4
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("victim", [0, 1])
def test_in_an_elastic_run_a_rank_that_dies_is_replaced_while_the_others_go_on(
    script, capfd, tmp_path, json_lines, victim
):
    command = script(f"""
        from pathlib import Path
        come = Path({str(tmp_path)!r}) / "come"
        if rank == {victim} and restart < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        print("rank", rank, "start", restart, os.environ["JAXCHE_COORDINATOR"])
        if rank == {victim}:
            come.touch()
        while not come.exists():
            time.sleep(0.05)
    """)
    events = tmp_path / "events.jsonl"
    assert launch(command, 2, elastic=True, max_restarts=3, grace_s=1.0, events=events) == 0
    out, err = capfd.readouterr()
    starts = re.findall(r"rank (\d) start (\d) (\S+)", out)
    assert sorted(start[:2] for start in starts) == sorted([(str(1 - victim), "0"), (str(victim), "2")])
    assert starts[0][2] == starts[1][2]  # where the others are
    assert err.count("the others continue") == 2
    told = [(event["event"], event.get("restart"), event.get("rank")) for event in json_lines(events)]
    assert [one for one in told if one[0] == "replace"] == [("replace", 1, victim), ("replace", 2, victim)]
    assert told[-1][:2] == ("end", 2)


def test_replacements_are_used_up_and_one_that_comes_too_late_is_stopped(script, capfd, tmp_path):
    dies = script(f"""
        from pathlib import Path
        last = Path({str(tmp_path)!r}) / "last"
        if rank == 1:
            if restart == 2:
                last.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while not last.exists():
            time.sleep(0.05)
        time.sleep(0.5)
    """)
    assert launch(dies, 2, elastic=True, max_restarts=2, grace_s=0.5) == 0
    assert capfd.readouterr().err.count("rank 1 was ended by SIGKILL") == 3
    late = script(f"""
        from pathlib import Path
        replaced = Path({str(tmp_path)!r}) / "replaced"
        if rank == 1 and restart == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            replaced.touch()
            time.sleep(100)
        while not replaced.exists():
            time.sleep(0.05)
    """)
    start = time.monotonic()
    assert launch(late, 2, elastic=True, max_restarts=1, grace_s=0.5) == 0
    assert time.monotonic() - start < 50


def test_children_of_a_rank_that_dies_end_at_once_and_its_number_gets_no_later_signal(
    script, monkeypatch, tmp_path, json_lines
):
    command = script(f"""
        import fcntl
        from pathlib import Path
        signal.alarm(30)
        with open({str(tmp_path / "lock")!r}, "w") as lock:
            held = Path(lock.name + "ed")
            if rank == 1:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if os.fork():
                    held.touch()
                    os._exit(3)
                time.sleep(100)  # a child that stays, and holds the lock
            while not held.exists():
                time.sleep(0.05)
            fcntl.flock(lock, fcntl.LOCK_EX)
    """)
    signalled, removed = recorded(monkeypatch)
    events = tmp_path / "events.jsonl"
    assert launch(command, 2, elastic=True, grace_s=0.5, events=events) == 0
    dead = pid_of(1, json_lines(events))
    assert [group for group, _ in signalled].count(dead) == 1
    assert dead in removed


def test_the_number_of_a_rank_that_has_succeeded_gets_no_later_signal(script, monkeypatch, tmp_path, json_lines):
    command = script(f"""
        import fcntl
        with open({str(tmp_path / "lock")!r}, "w") as lock:
            held = lock.name + "ed"
            if rank == 1:
                fcntl.flock(lock, fcntl.LOCK_EX)
                open(held, "w").close()
                sys.exit(0)
            while not os.path.exists(held):
                time.sleep(0.05)
            fcntl.flock(lock, fcntl.LOCK_EX)  # once the other has ended
            time.sleep(1.0)
            sys.exit(3)
    """)
    signalled, removed = recorded(monkeypatch)
    events = tmp_path / "events.jsonl"
    assert launch(command, 2, grace_s=0.5, events=events) == 3
    ended = pid_of(1, json_lines(events))
    assert [number for group, number in signalled if group == ended] == [0]  # whether it has left children
    assert ended in removed


def recorded(monkeypatch):
    """The signals that the launcher sends to process groups, and the groups that its reaper forgets."""
    signalled, send = [], os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: signalled.append((group, number)) or send(group, number))
    removed, remove = [], Reaper.remove
    monkeypatch.setattr(Reaper, "remove", lambda self, group: removed.append(group) or remove(self, group))
    return signalled, removed


def pid_of(rank, events):
    (pid,) = [event["pid"] for event in events if (event["event"], event.get("rank")) == ("start", rank)]
    return pid


def test_signals_without_a_name_are_numbers(script, capfd, tmp_path, json_lines):
    command = script("os.kill(os.getpid(), signal.SIGRTMIN + 6) if rank else time.sleep(100)")
    events = tmp_path / "events.jsonl"
    number = signal.SIGRTMIN + 6
    assert launch(command, 2, grace_s=0.5, events=events) == 128 + number
    assert f"rank 1 was ended by signal {number}" in capfd.readouterr().err
    assert f"signal {number}" in [event.get("signal") for event in json_lines(events)]


def test_a_launch_within_an_elastic_run_is_a_run_of_its_own(script, monkeypatch, capfd):
    for name in ("JAXCHE_ELASTIC", "JAXCHE_LIVENESS"):
        monkeypatch.setenv(name, "outer")
    command = script('print(os.environ.get("JAXCHE_ELASTIC"), os.environ.get("JAXCHE_LIVENESS", "none")[:10])')
    assert launch(command, 2, prefix=False) == 0
    assert launch(command, 2, prefix=False, elastic=True) == 0
    assert capfd.readouterr().out.split("\n") == [*["None none"] * 2, *['1 ["127.0.0.'] * 2, ""]


def test_a_rank_that_refuses_its_input_is_not_replaced(script, capfd, tmp_path):
    command = script("""
        while rank and '"event": "exit"' not in open(os.environ["JAXCHE_EVENTS"]).read():
            time.sleep(0.02)
        sys.exit(2)
    """)
    assert launch(command, 2, elastic=True, max_restarts=3, grace_s=0.5, events=tmp_path / "events.jsonl") == 2
    assert capfd.readouterr().err.count("rank 0 failed with exit code 2") == 1


def test_replacements_alone_are_no_run_that_has_ended_well(script, capfd):
    command = script("""
        if rank == 0 and restart == 0:
            time.sleep(1)
        sys.exit(7 if restart else 3)
    """)
    assert launch(command, 2, elastic=True, max_restarts=2, grace_s=0.5) in (3, 7)
    assert "the others continue" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
def test_the_coordinator_ends_with_the_run_and_the_run_with_the_coordinator(script, capfd, tmp_path, gone, until):
    command = script(f"""
        from pathlib import Path
        open({str(tmp_path)!r} + f"/{{rank}}", "w").write(str(os.getppid()))
        time.sleep(100 if rank else 0)
    """)
    found = []

    def coordinators():
        pids = map(int, filter(str.isdigit, os.listdir("/proc")))
        return [pid for pid in pids if b"distributed._coordinator" in words(pid) and parent(pid) == os.getpid()]

    def strike():
        assert until(lambda: (tmp_path / "1").exists())
        time.sleep(0.3)
        (pid,) = [pid for pid in coordinators() if pid not in before]
        found.append(pid)
        os.kill(pid, signal.SIGKILL)

    before = coordinators()
    thread = threading.Thread(target=strike)
    thread.start()
    assert launch(command, 2, elastic=True, grace_s=0.5) == 1
    thread.join()
    assert "the coordinator of the run has ended; stopping all" in capfd.readouterr().err
    assert gone(found[0])
    assert coordinators() == before


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def words(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_in_an_elastic_run_a_rank_that_alone_is_silent_is_killed(script, capfd, tmp_path):
    command = script("""
        beat = 0
        while '"event": "hang"' not in open(os.environ["JAXCHE_EVENTS"]).read():
            if rank != 1 or beat < 3:
                open(os.environ["JAXCHE_HEARTBEAT"], "w").close()
            beat += 1
            time.sleep(0.1)
        if rank == 1:
            time.sleep(100)
    """)
    events = tmp_path / "events.jsonl"
    assert launch(command, 3, elastic=True, hang_timeout_s=4.0, grace_s=0.5, events=events) == 0
    err = capfd.readouterr().err
    assert "rank 1 has no heartbeat, while others have" in err
    assert "out of memory?" not in err
    assert "rank 1 was ended by SIGKILL" in err
    assert "stopping all" not in err
