"""scripts/gpu: the arithmetic of its table, the choice of parts, and a run with CPU devices in the place of a card."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import check_wheels
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gpu_parts import __main__ as script
from gpu_parts import (
    fleet_program,
    idle,
    memory_program,
    merge,
    merge_program,
    overlap_program,
    processes,
    table,
    workloads,
)
from gpu_parts import tests as tests_part
from gpu_parts.context import Context, is_out_of_memory, read_lines
from gpu_parts.table import Line

from jaxche.cluster import has_cuda

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("goal", "ratio", "met"),
    [
        ("<= 1.01", 1.01, True),
        ("<= 1.01", 1.02, False),
        (">= 0.95", 0.95, True),
        (">= 0.95", 0.94, False),
        ("0.5 to 2", 2.0, True),
        ("0.5 to 2", 0.4, False),
        ("0.5 to 2", 2.1, False),
    ],
)
def test_a_goal_bounds_the_ratio(goal, ratio, met):
    assert Line("x", ratio * 8.0, 8.0, goal=goal).met is met


def test_a_line_without_a_measurement_or_a_goal_has_no_verdict():
    assert Line("x", None, 2.0, goal="<= 1").ratio is None
    assert Line("x", None, 2.0, goal="<= 1").met is None
    assert Line("x", 1.0, None, goal="<= 1").met is None
    assert Line("x", 1.0, 2.0).met is None
    assert Line("x", 1.0, 2.0).ratio == 0.5
    with pytest.raises(ValueError, match="must be like"):
        table.bounds("about 1")


def test_lines_and_their_table_are_the_same_after_json():
    lines = [Line("fast", 10.5, 10.0, "ms", "<= 1.01", "a raw loop", "60 steps"), Line("large", 1234567.0, None, "B")]
    saved = json.loads(json.dumps([line.to_dict() for line in lines]))
    assert [Line.from_dict(one) for one in saved] == lines
    assert (saved[0]["ratio"], saved[0]["met"]) == (1.05, False)
    text = table.render({"step": {"status": "cut off", "seconds": 3.0, "lines": saved, "error": "a\nb\nc\nd"}})
    rows = text.splitlines()
    assert rows[0].split() == ["measured", "peer", "ratio", "goal", "met"]
    assert rows[2] == "step: cut off (3 s)"
    assert rows[3].split() == ["fast", "10.50", "ms", "10.00", "ms", "1.050", "<=", "1.01", "NO"]
    assert [row.strip() for row in rows[4:6]] == ["peer: a raw loop", "60 steps"]
    assert rows[6].split() == ["large", "1,234,567", "B", "-", "-", "-", "-"]
    assert [row.strip() for row in rows[7:10]] == ["b", "c", "d"]
    assert rows[-1] == "0 of 1 goals met, 0 not measured; missed: fast"


def test_parts_are_chosen_by_name_in_their_order():
    assert script.chosen("merge,step") == ["step", "merge"]
    for wrong in ("step,shard", "", ","):
        with pytest.raises(argparse.ArgumentTypeError, match="write some of step,sharded"):
            script.chosen(wrong)


def test_the_quick_parts_fit_into_four_minutes():
    assert sum(part.quick for part in script.PARTS.values()) <= 60 * script.QUICK_MINUTES < 240


def test_a_part_keeps_the_lines_before_a_half_written_one(tmp_path):
    context = Context(True, True, time.time(), tmp_path, tmp_path / "lines")
    assert read_lines(context.lines) == []
    context.add(Line("one", 1.0))
    with context.lines.open("a") as file:
        file.write('{"name": "tw')
    assert [one["name"] for one in read_lines(context.lines)] == ["one"]
    assert context.left_s == 1
    assert list(context.turns(5, 0.0)) == [0, 1]  # at least two, however late
    assert list(Context(True, True, time.time() + 60, tmp_path, tmp_path / "x").turns(5, 60.0)) == [0, 1, 2, 3, 4]


def test_the_busy_share_counts_overlapping_spans_once():
    assert idle.busy_share([]) is None
    assert idle.busy_share([(3.0, 3.0)]) is None
    assert idle.busy_share([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (7.0, 10.0)]) == pytest.approx(0.8)


def test_only_kernels_of_the_first_gpu_count():
    def plane(name, **lines):
        events = {key: [SimpleNamespace(start_ns=a, duration_ns=d) for a, d in spans] for key, spans in lines.items()}
        lines = [SimpleNamespace(name=key.replace("_", "#"), events=found) for key, found in events.items()]
        return SimpleNamespace(name=name, lines=lines)

    host = plane("/host:CPU", python=[(0.0, 99.0)])
    first = {"Stream_1(Compute)": [(1.0, 2.0)], "Stream_2(MemcpyH2D)": [(0.0, 50.0)], "Steps": [(0.0, 60.0)]}
    profile = SimpleNamespace(planes=[host, plane("/device:GPU:1"), plane("/device:GPU:0", **first)])
    assert idle.device_spans(profile) == [(1.0, 3.0)]
    first |= {"Stream_3(MemcpyD2H,CudaGraph)": [(4.0, 2.0)]}
    profile = SimpleNamespace(planes=[host, plane("/device:GPU:0", **first)])
    assert idle.device_spans(profile) == [(1.0, 3.0), (4.0, 6.0)]
    assert idle.device_spans(SimpleNamespace(planes=[host])) == []


def test_profiles_trace_no_python_and_a_profiler_without_rights_is_no_error(monkeypatch):
    ran, levels = [], []

    @contextlib.contextmanager
    def trace(folder, profiler_options):
        levels.append(profiler_options.python_tracer_level)
        yield
        if len(ran) > 1:
            raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(jax.profiler, "trace", trace)
    assert idle.busy_shares(lambda: ran.append(1), turns=2) == []
    assert (ran, levels) == ([1, 1], [0, 0])


def test_overlap_is_compared_with_waiting_and_with_running_freely(tmp_path):
    context = Context(True, True, time.time(), tmp_path, tmp_path / "lines")
    found = {"steps": 40, "free": 100.0, "waiting": 70.0, "overlap": 98.0, "mb": 100.7}
    merge._overlap(context, found | {"merge_ms": 210.0, "exposed_ms": 50.0, "hidden_ms": 150.0})
    efficiency, gain, hidden = map(Line.from_dict, read_lines(context.lines))
    assert (efficiency.ratio, efficiency.met) == (0.98, True)
    assert "100.7 MB, 40 steps a round; 70.0 batches/s" in efficiency.note
    assert (gain.ratio, gain.goal) == (1.4, ">= 1")
    assert hidden.ratio == 0.75


def test_the_first_half_of_a_round_is_longer_than_its_merge():
    assert overlap_program.steps_for(merge_ms=200.0, step_ms=10.0) == 50
    assert overlap_program.steps_for(merge_ms=1.0, step_ms=10.0) == 4
    assert overlap_program.steps_for(merge_ms=1e6, step_ms=0.5) == 1000


def test_no_merge_is_in_flight_when_the_rounds_of_another_trainer_begin():
    devices = jax.devices("cpu")[:2]
    tiny = workloads.Workload(
        "tiny",
        init=lambda: jnp.zeros(4),
        loss_fn=lambda w, x: jnp.mean((x @ w - 1) ** 2),
        tx=optax.sgd(0.1),
        batch=lambda rows, seed: np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32),
        rows=2,
    )
    rounds = overlap_program.Rounds(tiny, devices, 0.5)
    assert rounds._state.in_flight is None
    infos, seconds = rounds.timed(3)
    assert rounds._state.in_flight is None
    assert [info.overlapped for info in infos] == [(1, 1)] * 3
    assert seconds > 0
    assert len(rounds.free_rates()) == 2


def test_a_merge_for_which_the_card_has_no_memory_is_a_line_without_a_number(tmp_path, monkeypatch):
    card = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 5_000_000_000})
    monkeypatch.setattr(merge_program, "local_devices", lambda: [card])
    row = merge_program.measure(1400.0, 3, "host", [card, card])
    context = Context(True, True, time.time(), tmp_path, tmp_path / "lines")
    merge._add(context, "host", [row])
    (line,) = map(Line.from_dict, read_lines(context.lines))
    assert (line.name, line.measured, line.met) == ("merge on the host, 1400 MB", None, None)
    assert "too small" in line.note


def test_auto_gets_a_model_for_which_a_cpu_is_far_too_slow():
    asked = {"policy": "auto", "cpu": False}
    assert fleet_program.workload_of(argparse.Namespace(**asked)).name == "ResNet-18"
    assert fleet_program.workload_of(argparse.Namespace(**asked)).rows == 16
    assert fleet_program.workload_of(argparse.Namespace(**asked | {"policy": "cadence"})).name == "small CNN"
    assert fleet_program.workload_of(argparse.Namespace(**asked | {"cpu": True})).name == "small CNN"


@pytest.mark.parametrize("begin", [1, 16, 512])
def test_the_largest_batch_is_found_from_both_sides(begin):
    assert memory_program.largest(lambda rows: rows <= 100, begin) == 64
    assert memory_program.largest(lambda rows: False, begin) == 0
    assert memory_program.power_of_two(100) == 64


def test_pairs_are_started_by_the_commands_of_the_readme():
    given = {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": "3,4"}
    command, env = processes.launch_command("shared", False, dict(given), ("0",))
    assert command[1:] == ["-m", "jaxche", "launch", "-n", "2"]
    assert env == {"CUDA_VISIBLE_DEVICES": "3,3"}
    command, env = processes.launch_command("beside", False, {"JAX_PLATFORMS": "cuda"}, ("0",))
    assert command[-2:] == ["--on-cpu", "1"]
    assert env == {"CUDA_VISIBLE_DEVICES": "0"}
    assert processes.launch_command("shared", True, {}, ("0",))[1] == {"JAX_PLATFORMS": "cpu"}
    env = processes.launch_command("beside", True, {"PYTHONPATH": "x"}, ("0",))[1]
    assert env["JAX_PLATFORMS"] == "standin"
    assert (Path(env["PYTHONPATH"].split(os.pathsep)[1]) / "jax_plugins").is_dir()


def test_tests_are_counted_from_a_report():
    report = """<testsuites><testsuite><testcase classname="tests.a" name="one"/>
    <testcase classname="tests.a" name="two"><failure>x</failure></testcase>
    <testcase classname="tests.b" name="three"><skipped/></testcase>
    <testcase classname="tests.c" name="four"><error/></testcase>
    <testcase classname="" name="tests.d"><error>ModuleNotFoundError: No module named 'grain.python'</error></testcase>
    <testcase classname="" name="tests.e"><error>ModuleNotFoundError: No module named 'jaxche.x'</error></testcase>
    </testsuite></testsuites>"""
    assert tests_part.counted(report) == (1, ["a.two", "c.four", ".tests.e"], 1, ["grain"])


ABOUT = {"device": "H100", "devices": 1, "versions": {"jax": "0.11.2"}, "quick": False, "cpu": False, "cores": 16}


def test_results_of_the_same_machine_are_continued_and_others_moved_aside(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    results = script.opened(path, ABOUT)
    results["parts"]["step"] = {"status": "done", "seconds": 1.0, "lines": [Line("a", 1.0, 2.0).to_dict()]}
    script.save(results, path)
    assert script.opened(path, ABOUT | {"cores": 8})["parts"] == results["parts"]
    assert script.opened(path, ABOUT | {"versions": {"jax": "0.12.0"}})["parts"] == {}
    assert "another machine" in capsys.readouterr().out
    (aside,) = tmp_path.glob("gpu.*.json")
    assert json.loads(aside.read_text())["parts"] == results["parts"]
    # Tables of slices are joined, and those of other machines refused.
    other = {"about": ABOUT, "parts": {"merge": {"status": "done", "seconds": 1.0, "lines": []}}}
    path.write_text(json.dumps(other))
    assert script.show([aside, path]) == 0
    shown = capsys.readouterr().out
    assert shown.index("\nstep") < shown.index("\nmerge")
    path.write_text(json.dumps(other | {"about": ABOUT | {"device": "L4"}}))
    assert script.show([aside, path]) == 2


@pytest.fixture
def part(tmp_path):
    """Runs a part whose module is this text; returns what was saved."""

    def run(text, limit=60.0):
        folder = tmp_path / "modules" / "gpu_parts"
        folder.mkdir(parents=True)
        for path in (ROOT / "scripts" / "gpu_parts").glob("*.py"):
            (folder / path.name).symlink_to(path)
        (folder / "step.py").unlink()
        (folder / "step.py").write_text(f"from gpu_parts.table import Line\n{text}")
        path, results = tmp_path / "gpu.json", {"format": 1, "about": ABOUT, "parts": {}}
        env = os.environ | {"PYTHONPATH": str(folder.parent)}
        script.run_part("step", limit, limit, env, results, path)
        return json.loads(path.read_text())["parts"]["step"]

    return run


def test_a_part_that_crashes_keeps_its_lines(part, capsys):
    found = part("def run(context):\n    context.add(Line('one', 2.0, 1.0))\n    import os; os.kill(os.getpid(), 9)\n")
    assert found["status"] == f"failed with -{signal.SIGKILL.value}"
    assert [one["name"] for one in found["lines"]] == ["one"]
    assert "one  2.000  1.000  2.000" in capsys.readouterr().out


def test_a_part_for_which_the_card_has_no_memory_keeps_its_lines(part):
    text = "def run(context):\n    context.add(Line('one', 2.0, 1.0))\n    raise RuntimeError({!r})\n"
    found = part(text.format("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"))
    assert found["status"] == "done"
    assert [one["name"] for one in found["lines"]] == ["one", "step: the rest"]
    assert "too small" in found["lines"][1]["note"]
    assert is_out_of_memory(RuntimeError("CUDA_ERROR: out of memory"))
    assert not is_out_of_memory(RuntimeError("INTERNAL: no"))


def test_what_a_part_started_has_ended_before_the_next_part():
    lasting = "trap 'sleep 0.5; exit' TERM; echo ready; while :; do sleep 0.05; done"
    leader = ["sh", "-c", f'sh -c "{lasting}" & echo $!; wait']
    with subprocess.Popen(leader, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        words = {process.stdout.readline().strip(), process.stdout.readline().strip()}
        (pid,) = words - {"ready"}
        script._end(process)
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
def test_a_part_is_ended_at_its_limit_with_the_processes_that_it_started(part):
    text = """
import subprocess, sys, time
def run(context):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    context.add(Line(str(child.pid), 1.0))
    child.wait()
"""
    began = time.monotonic()
    found = part(text, limit=4.0)
    assert found["status"] == "cut off"
    assert time.monotonic() - began < 20
    (pid,) = (int(one["name"]) for one in found["lines"])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
def test_a_run_without_a_card_writes_its_table(tmp_path):
    words = ["--cpu", "--quick", "--only", "checkpoint", "--json", str(tmp_path / "gpu.json")]
    env = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": ""}
    done = subprocess.run([ROOT / "scripts" / "gpu", *words], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["about"]["cpu"]
    (line,) = results["parts"]["checkpoint"]["lines"]
    assert line["name"] == "checkpoint: stall a save"
    assert line["ratio"] == pytest.approx(line["measured"] / line["peer"])
    assert "in the place of the card" in done.stdout
    assert "of 1 goals met" in done.stdout


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="there is a driver")
def test_without_a_card_the_command_says_what_to_write(tmp_path):
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    env.pop("JAX_PLATFORMS", None)
    command = [sys.executable, "-m", "gpu_parts", "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "scripts/gpu --cpu" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.skipif(has_cuda() or Path("/proc/driver/nvidia/version").exists(), reason="there is a driver, or CUDA")
def test_without_a_driver_nothing_is_installed(tmp_path):
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    before = (ROOT / ".venv").exists()
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([ROOT / "scripts" / "gpu", "--quick"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no NVIDIA driver" in done.stderr
    assert "scripts/gpu --cpu" in done.stderr
    assert (ROOT / ".venv").exists() == before


def test_the_help_needs_no_packages_and_installs_none(tmp_path):
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": str(bare)}
    done = subprocess.run([ROOT / "scripts" / "gpu", "--help"], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "checkpoint  the stall of training for a save" in done.stdout


def test_a_table_of_no_results_says_who_writes_them(tmp_path, capsys):
    assert script.show([tmp_path / "gpu.json"]) == 2
    assert f"no results in {tmp_path / 'gpu.json'}; scripts/gpu writes them" in capsys.readouterr().out


def test_where_cuda_does_not_start_its_error_is_kept_and_the_checks_run_without_it(monkeypatch):
    asked = []

    def run(command, env, **more):
        asked.append(env)
        if "JAX_PLATFORMS" in env:
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nRuntimeError: no backend cuda\n\n")
        return subprocess.CompletedProcess(command, 0, 'noise\n{"platform": "cpu"}\n', "a warning")

    monkeypatch.setattr(subprocess, "run", run)
    about = script.describe({"JAX_PLATFORMS": "cuda,cpu", "X": "1"})
    assert about == {"platform": "cpu", "error": "RuntimeError: no backend cuda"}
    assert asked[1] == {"X": "1"}
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, "", "broken"))
    with pytest.raises(SystemExit, match="JAX does not start"):
        script.describe({})


def test_the_card_is_used_whatever_the_shell_says(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert script.environment(cpu=False)["JAX_PLATFORMS"] == "cuda,cpu"
    assert script.environment(cpu=True)["JAX_PLATFORMS"] == "cpu"


def test_plugins_must_fit_jaxlib():
    fitting = {"jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2"}
    fitting["nvidia-cudnn-cu13"] = "9.2"
    assert check_wheels.misfit("cuda13", fitting) == ""
    assert "beside jaxlib 0.12" in check_wheels.misfit("cuda13", fitting | {"jaxlib": "0.12"})
    assert check_wheels.misfit("cuda12", fitting) == "without jax-cuda12-plugin"
    del fitting["nvidia-cudnn-cu13"]
    assert check_wheels.misfit("cuda13", fitting) == "without nvidia-cudnn-cu13"


@pytest.mark.slow
def test_the_extras_resolve():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "check_wheels.py", "--python", "3.12"], capture_output=True, text=True
    )
    if done.returncode == check_wheels.NO_PYPI:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("resolves") == 2
