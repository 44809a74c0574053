"""Real processes: they find each other, and end together."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxche.cluster import launch


def test_two_processes_find_each_other_and_add_up(script, capfd):
    command = script("""
        from jaxche.cluster import initialize
        info = initialize(timeout_s=60)
        assert initialize() == info
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P
        assert jax.process_index() == info.process_id
        mesh = jax.make_mesh((2,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
        mine = jax.device_put(jnp.full((1,), 1.0 + info.process_id), jax.local_devices()[0])
        x = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, P("replica")), [mine])
        add = jax.shard_map(lambda x: jax.lax.psum(x, "replica"), mesh=mesh, in_specs=P("replica"), out_specs=P())
        print(info.launcher, info.num_processes, float(jax.jit(add)(x).addressable_data(0)[0]))
    """)
    assert launch(command, 2) == 0
    lines = capfd.readouterr().out.splitlines()
    assert {"[0] jaxche 2 3.0", "[1] jaxche 2 3.0"} <= set(lines)


def test_processes_of_other_versions_refuse_each_other_with_a_table(script, launch_forks, capfd):
    command = script("""
        from jaxche.cluster import _initialize, initialize
        if rank == 1:
            installed = _initialize.versions()
            _initialize.versions = lambda: installed | {"optax": "0.1.0"}
        try:
            initialize(timeout_s=60)
        except RuntimeError as error:
            print(str(error))
            # Having refused, each is on its own again.
            import jax.numpy as jnp
            print("alone", jnp.ones(2).sum())
    """)
    assert launch_forks(command, 2) == 0
    lines = capfd.readouterr().out.splitlines()
    for rank in (0, 1):
        mine = [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}] ")]
        assert mine[0] == "1 of 2 processes run other versions of optax:"
        assert mine[3].split()[::2] == ["1", "0.1.0"]
        assert mine[-1] == "alone 2.0"


def test_processes_that_expect_different_worlds_are_named(script, launch_forks, capfd):
    command = script("""
        from jaxche.cluster import initialize
        initialize(os.environ["JAXCHE_COORDINATOR"], 2 + rank, rank, timeout_s=60)
    """)
    assert launch_forks(command, 2, grace_s=2.0) == 1
    err = capfd.readouterr().err
    assert "num_processes=2 on process 0; num_processes=3 on process 1" in err


@pytest.mark.parametrize("who", [1, 0])
def test_an_exception_after_joining_ends_both_at_once(script, launch_forks, capfd, who):
    # Left to itself JAX would have rank 1 wait at exit for rank 0, and rank 0 for ever for rank 1.
    command = script(f"""
        from jaxche.cluster import initialize
        info = initialize(timeout_s=60)
        import jax
        jax.devices()
        if info.process_id == {who}:
            raise KeyError("the data is missing")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)
    """)
    start = time.monotonic()
    assert launch_forks(command, 2, grace_s=0.3) == 1
    assert time.monotonic() - start < 40
    err = capfd.readouterr().err
    assert f"rank {who} failed with exit code 1" in err
    assert "    KeyError: 'the data is missing'" in err


def test_others_may_write_a_last_file_when_process_0_has_left_an_elastic_run(script, launch_forks, capfd, tmp_path):
    # They meet at the coordinator, and where that has gone jaxlib ends them.
    command = script(f"""
        from jaxche.cluster import initialize
        info = initialize(timeout_s=60)
        if info.process_id == 1:
            while '"event": "exit"' not in open(os.environ["JAXCHE_EVENTS"]).read():
                time.sleep(0.02)
            time.sleep(1)  # an end of the coordinator is seen at once
            open({str(tmp_path)!r} + "/written", "w").close()
    """)
    assert launch_forks(command, 2, elastic=True, events=tmp_path / "events.jsonl") == 0
    err = capfd.readouterr().err
    assert (tmp_path / "written").exists()
    assert "rank 1" not in err, err
    assert "Traceback" not in err, err


@pytest.mark.parametrize("first", [1, 0])
def test_a_rank_that_fails_after_another_has_succeeded_fails_the_elastic_run(script, capfd, tmp_path, first):
    # The others take over from a rank that fails before, so that the run succeeds.
    command = script(f"""
        def wait_for_exit(other):
            while '"event": "exit"' not in "".join(line for line in open(events) if f'"rank": {{other}},' in line):
                time.sleep(0.02)

        events = os.environ["JAXCHE_EVENTS"]
        order = [{first}, {1 - first}, 2]
        if rank != order[0]:
            wait_for_exit(order[order.index(rank) - 1])
        sys.exit(7 if rank == 1 else 0)
    """)
    code = launch(command, 3, elastic=True, events=tmp_path / "events.jsonl")
    err = capfd.readouterr().err
    assert code == (0 if first == 1 else 7), err
    assert "rank 1 failed with exit code 7; the others continue" in err


@pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
def test_the_coordinator_of_a_launcher_that_was_killed_ends_too(script, fork, gone):
    command = script("""
        from jaxche.cluster import initialize
        initialize(timeout_s=60)
        print("joined", rank, flush=True)
        time.sleep(100)
    """)
    code = f"from jaxche.cluster import launch; launch({command!r}, 2, elastic=True, grace_s=1.0, term_grace_s=8.0)"
    run = fork("-c", code, stdout=subprocess.PIPE)
    children = []
    for _ in range(2):
        assert b"joined" in run.stdout.readline()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == run.pid:
                children.append(pid)
    run.kill()
    run.wait()
    run.stdout.close()
    assert len(children) == 4  # the reaper, the coordinator and the ranks
    assert all(gone(pid, within_s=20.0) for pid in children)


def test_a_failing_rank_stops_one_that_ignores_sigterm_and_its_children(script, capfd, tmp_path, gone):
    command = script(f"""
        import pathlib, subprocess
        there = pathlib.Path({str(tmp_path)!r}) / "pids"
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen(["sleep", "100"])
            there.with_suffix(".new").write_text(f"{{os.getpid()}} {{child.pid}}")
            there.with_suffix(".new").rename(there)
            time.sleep(100)
        while not there.exists():
            time.sleep(0.01)
        print("broken", file=sys.stderr)
        sys.exit(3)
    """)
    start = time.monotonic()
    assert launch(command, 2, grace_s=0.5) == 3
    assert time.monotonic() - start < 10
    err = capfd.readouterr().err
    assert "[1] broken" in err
    assert "rank 0 still runs: SIGKILL" in err
    assert err.index("rank 1 failed with exit code 3. Its last lines") < err.index("    broken")
    for pid in (tmp_path / "pids").read_text().split():
        assert gone(int(pid))


def test_a_rank_ended_by_a_signal_gives_128_and_the_signal(script, capfd):
    assert launch(script("os.kill(os.getpid(), signal.SIGKILL)"), 1) == 128 + 9
    assert "rank 0 was ended by SIGKILL (out of memory?)" in capfd.readouterr().err


def test_lines_paces_and_pins(script, capfd):
    command = script("""
        for i in range(200):
            print(str(rank) * 300)
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        print("pace", os.environ["JAXCHE_PACE_MS"], "cores", cores)
    """)
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    assert launch(command, 3, pace_ms=[20, 50, 7.5]) == 0
    lines = capfd.readouterr().out.splitlines()
    for rank, pace in enumerate(["20", "50", "7.5"]):
        assert lines.count(f"[{rank}] " + str(rank) * 300) == 200
        pin = [sorted(before)[rank % len(before)]] if before else None
        assert f"[{rank}] pace {pace} cores {pin}" in lines
    assert len(lines) == 3 * 201
    if before:
        assert os.sched_getaffinity(0) == before


def test_one_voice(script, capfd):
    command = script("""
        print("out"); print("err", rank, file=sys.stderr)
    """)
    assert launch(command, 2, only_rank0=True, prefix=False) == 0
    out, err = capfd.readouterr()
    assert out == "out\n"
    assert {"err 0", "err 1"} <= set(err.splitlines())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_the_ranks(script, launcher, gone, number):
    ranks = script("""
        if rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("pid", os.getpid(), flush=True)
        time.sleep(100)
    """)
    run = launcher(ranks, "grace_s=0.3", "term_grace_s=0.3")
    pids = [int(re.findall(r"pid (\d+)", run.stdout.readline())[0]) for _ in range(2)]
    run.send_signal(number)
    _, err = run.communicate(timeout=20)
    assert run.returncode == 128 + number
    assert f"{number.name}: stopping 2 process(es)" in err
    assert all(gone(pid) for pid in pids)


def test_a_rank_that_hangs_ends_all_where_nobody_hears_heartbeats(script, launch_forks, capfd):
    command = script("""
        import threading
        import jax.numpy as jnp, numpy as np, optax
        import jaxche

        def waits_for_ever():
            threading.Event().wait()

        class Data(list):
            def __getitem__(self, i):
                return waits_for_ever() if i == 3 else super().__getitem__(i)

        jaxche.initialize(timeout_s=60)
        data = Data([np.ones(4, np.float32)] * 8)
        trainer = jaxche.Trainer(lambda w, batch: jnp.mean((w - batch) ** 2), optax.sgd(0.1))
        state, _ = trainer.round(trainer.init(jnp.zeros(4)), data, counts=(1, 1))
        os.environ["JAXCHE_HANG_TIMEOUT"] = "3"  # from here on, for the first round has compiled
        trainer.round(state, data, counts=(1, 1))
    """)
    assert launch_forks(command, 2, grace_s=2.0) == 1
    told = capfd.readouterr().err.splitlines()
    assert any(re.fullmatch(r"\[[01]\] Timeout \(0:00:03\)!", line) for line in told)
    # Only one has something to tell of where it hangs.
    assert {line[:3] for line in told if line.startswith("[") and "in waits_for_ever" in line} == {"[1]"}


def test_an_error_of_all_ranks_is_printed_by_each(script, launch_forks, capfd, monkeypatch):
    """Without lines of the coordinator, which process 0 would otherwise end first."""
    monkeypatch.setattr("jaxche.cluster._worker_group._ERROR_OUTPUT_S", 30.0)
    command = script("""
        import time
        import optax
        import jaxche

        jaxche.initialize(timeout_s=60)
        time.sleep(0.3 * jaxche.process_shard()[0])
        jaxche.Trainer(lambda w, batch: w, optax.sgd(0.1), policy="often")
    """)
    assert launch_forks(command, 2, grace_s=30.0) == 1
    told = capfd.readouterr().err.splitlines()
    for rank in range(2):
        assert any(line.startswith(f"[{rank}] ValueError: ") and "'often'" in line for line in told)
    assert not any("oordination" in line for line in told)


def test_the_rank_that_failed_prints_its_error_also_if_it_is_slow(script, launch_forks, capfd, monkeypatch):
    """JAX ends it as soon as process 0 has exited."""
    monkeypatch.setattr("jaxche.cluster._worker_group._ERROR_OUTPUT_S", 30.0)
    command = script("""
        import time
        import jax.numpy as jnp, numpy as np, optax
        import jaxche

        class Data(list):
            def __getitem__(self, i):
                if rank == 1:
                    raise OSError("disk on fire")
                return super().__getitem__(i)

        jaxche.initialize(timeout_s=60)
        show, rank = sys.excepthook, jaxche.process_shard()[0]
        sys.excepthook = lambda *error: (time.sleep(rank), show(*error))
        trainer = jaxche.Trainer(lambda w, batch: jnp.mean((w - batch) ** 2), optax.sgd(0.1))
        trainer.fit(trainer.init(jnp.zeros(4)), Data([np.ones(4, np.float32)] * 8))
    """)
    assert launch_forks(command, 2, grace_s=30.0) == 1
    told = capfd.readouterr().err.splitlines()
    assert any(line.startswith("[0] jaxche.distributed._group.RankError: rank 1 failed") for line in told)
    assert "[1] OSError: disk on fire" in told


def test_a_worker_process_that_imports_the_script_again_does_not_join(script, launch_forks, capfd):
    command = script("""
    import multiprocessing
    import jaxche
    jaxche.initialize()
    if multiprocessing.parent_process() is None:
        worker = multiprocessing.get_context("spawn").Process(target=print)
        worker.start()
        worker.join()
        from jaxche.distributed import Group
        print("gathered", Group().all_gather([rank, worker.exitcode]))
    """)
    assert launch_forks(command, 2) == 0
    out, err = capfd.readouterr()
    assert out.count("gathered [[0, 1], [1, 1]]") == 2
    for rank in range(2):
        assert f"RuntimeError: process {rank} of the run has started this process" in err
    assert 'under `if __name__ == "__main__":`' in err
