"""Files for clusters, run with shell scripts in place of the programs of the schedulers."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from jaxche.cli import main
from jaxche.cluster import emit, with_tunables
from jaxche.cluster._scheduler_files import parse_nodes, total_tasks

ROOT = Path(__file__).parents[2]
COMMAND = ["python", "train.py", "--note", "it's $HOME"]
# With the image that each needs.
SCHEDULERS = [("slurm", None), ("mpirun", None), ("jobset", "me/train:1")]


def played(tmp_path, **programs):
    """A PATH on which these programs are the given shell lines."""
    for name, lines in programs.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{lines}\n")
        program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def run(text, tmp_path, environ, **programs):
    script = tmp_path / "script"
    script.write_text(text)
    env = {**os.environ, **environ, "PATH": played(tmp_path, **programs)}
    options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 20, "check": False}
    return subprocess.run(["bash", str(script)], **options)


def test_nodes():
    groups = parse_nodes("2x8:h100,4x1:l4,3")
    assert [(g.count, g.gpus, g.kind, g.tasks) for g in groups] == [
        (2, 8, "h100", 16),
        (4, 1, "l4", 4),
        (3, 0, None, 3),
    ]
    assert total_tasks(groups) == 23


def test_a_number_of_nodes_may_be_an_integer():
    assert emit("slurm", COMMAND, 2) == emit("slurm", COMMAND, "2")


@pytest.mark.parametrize("nodes", ["", "0", "x8", "2x0", "2x8:", "2,", "h100", 2.5, None])
def test_invalid_nodes(nodes):
    with pytest.raises(ValueError, match=r"--nodes .* is invalid.*Write: --nodes"):
        parse_nodes(nodes)


def only_container(text):
    """The container of a jobset of one job."""
    (job,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return container


def in_kubernetes(command):
    """The words of a container's command as it starts."""
    return [word.replace("$$", "$") for word in command]


def test_a_command_is_a_list_of_words():
    with pytest.raises(ValueError, match=r"command='python train.py' must be a list of words. Write: \['python'"):
        emit("slurm", "python train.py", "2")


def test_kubernetes_leaves_the_dollars_of_a_command():
    text = emit("jobset", ["sh", "-c", "echo $$ $(JAXCHE_RESTART)"], "2", image="me/train:1")
    container = only_container(text)
    assert container["command"][-1] == "echo $$$$ $$(JAXCHE_RESTART)"
    assert in_kubernetes(container["command"])[-1] == "echo $$ $(JAXCHE_RESTART)"


def test_image_is_for_jobsets():
    with pytest.raises(ValueError, match=r"^--emit jobset needs a container image\. Write: .*--image registry"):
        emit("jobset", COMMAND, "2")
    with pytest.raises(ValueError, match="needs a container image"):
        emit("jobset", COMMAND, "2", image="")
    with pytest.raises(ValueError, match=r"^--image me/train:1: --emit slurm takes no container image\. Leave it out$"):
        emit("slurm", COMMAND, "2", image="me/train:1")


def test_unknown_scheduler_or_empty_command():
    with pytest.raises(ValueError, match="--emit pbs: there are slurm, jobset and mpirun"):
        emit("pbs", COMMAND, "2")


@pytest.mark.parametrize(("scheduler", "image"), SCHEDULERS)
def test_quoting(scheduler, image):
    def written(made_by, name):
        return emit(scheduler, COMMAND, "2", image=image, made_by=made_by, name=name)

    plain = written("Made by: jaxche 'a  rm -rf x'", "my-run")
    assert written("Made by: jaxche 'a\n\u2028rm -rf x'", "My run\n#") == plain
    assert [line for line in plain.splitlines() if "rm -rf" in line] == ["# Made by: jaxche 'a  rm -rf x'"]
    # A name ends in a letter or digit also where it is cut.
    assert written("", "a" * 39 + " b") == written("", "a" * 39)
    # And begins with a letter.
    assert written("", "3rd run") == written("", "run-3rd-run")


@pytest.mark.parametrize(("scheduler", "image"), SCHEDULERS)
def test_hang_timeout_variable(scheduler, image, tmp_path):
    plain = emit(scheduler, COMMAND, "2", image=image)
    text = emit(scheduler, COMMAND, "2", image=image, hang_timeout_s=90.5)
    assert "HANG_TIMEOUT" not in plain
    if scheduler == "jobset":
        assert {"name": "JAXCHE_HANG_TIMEOUT", "value": "90.5"} in only_container(text)["env"]
        return
    program = 'echo "$JAXCHE_HANG_TIMEOUT $*"'
    done = run(text, tmp_path, {"HOSTS": "a,b", "SLURM_JOB_ID": "1"}, srun=program, mpirun=program)
    assert done.stdout.startswith("90.5 ")
    assert scheduler == "slurm" or "-x JAXCHE_HANG_TIMEOUT" in done.stdout


@pytest.mark.parametrize(("scheduler", "image"), SCHEDULERS)
@pytest.mark.parametrize("given", ["", "glibc.malloc.arena_max=2:glibc.malloc.check=1"])
def test_tunables_of_the_user_take_precedence(scheduler, image, given, tmp_path):
    program, environ = 'echo "$GLIBC_TUNABLES"', {"GLIBC_TUNABLES": given, "HOSTS": "a", "SLURM_JOB_ID": "1"}
    text = emit(scheduler, ["bash", "-c", program], "1", image=image)
    if scheduler == "jobset":
        container = only_container(text)
        assert "GLIBC_TUNABLES" not in {one["name"] for one in container["env"]}
        words = {"env": {**os.environ, **environ, "JOB_COMPLETION_INDEX": "0"}, "text": True}
        found = subprocess.check_output(in_kubernetes(container["command"]), **words)
    else:
        found = run(text, tmp_path, environ, srun=program, mpirun=f'echo "$*" >options; {program}').stdout
        assert scheduler == "slurm" or "-x GLIBC_TUNABLES" in (tmp_path / "options").read_text()
    # The C library takes the last value of each.
    values = dict(word.split("=") for word in found.strip().split(":"))
    expected = dict(word.split("=") for word in with_tunables(given).split(":"))
    assert values == expected


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_invalid_hang_timeout(seconds):
    with pytest.raises(ValueError, match=r"hang_timeout_s=.* must be positive seconds. Write: hang_timeout_s=600"):
        emit("slurm", COMMAND, "2", hang_timeout_s=seconds)


def test_invalid_restarts():
    with pytest.raises(ValueError, match="max_restarts=-1 must be at least 0; write"):
        emit("slurm", COMMAND, "2", max_restarts=-1)


def test_numbers_of_numpy_are_python_numbers_in_a_file():
    assert "backoffLimitPerIndex: 2\n" in emit(
        "jobset", COMMAND, "2", max_restarts=np.int64(2), image="me/train:1", elastic=True
    )


@pytest.mark.parametrize("scheduler", ["slurm", "mpirun"])
@pytest.mark.parametrize("nodes", ["4", "2x8", "2x8:h100,4x1:l4"])
def test_shell_syntax(scheduler, nodes):
    for elastic in (False, True):
        text = emit(scheduler, COMMAND, nodes, elastic=elastic)
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_slurm_requests_one_process_per_gpu():
    lines = emit("slurm", COMMAND, "2x8:h100").splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "#SBATCH --nodes=2 --ntasks-per-node=8 --gres=gpu:h100:8" in lines
    assert "#SBATCH --requeue --signal=TERM@120" in lines
    assert "#SBATCH hetjob" not in lines
    assert "#SBATCH --nodes=4 --ntasks-per-node=1" in emit("slurm", COMMAND, "4").splitlines()
    # Slurm reads directives up to the first line that is neither comment nor directive.
    assert all(line.startswith("#") for line in lines[: lines.index("")])


SLURM = {"SLURM_JOB_ID": "70001", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NODELIST_HET_GROUP_0": "h[1-2]"}
SRUN = 'echo "srun $JAXCHE_COORDINATOR $JAXCHE_NUM_PROCESSES $JAXCHE_RESTART"; printf "<%s>" "$@"; exit $CODE'
SCONTROL = 'if [ "$1" = show ]; then echo h1; echo h2; else echo "scontrol $*"; fi'


@pytest.mark.parametrize(
    ("code", "max_restarts", "requeued"), [(0, 9, False), (2, 9, False), (143, 0, True), (1, 1, True), (1, 0, False)]
)
def test_slurm_requeues(tmp_path, code, max_restarts, requeued):
    text = emit("slurm", COMMAND, "2x8:h100,4x1:l4", max_restarts)
    done = run(text, tmp_path, SLURM | {"CODE": str(code)}, srun=SRUN, scontrol=SCONTROL)
    assert done.returncode == code
    # Process 0 is on the first machine of the first kind, at the port JAX itself would take.
    assert f"srun h1:{61440 + 70001 % 4096} 20 1\n" in done.stdout
    assert "<--het-group=0,1><--kill-on-bad-exit=1><--label><python><train.py><--note><it's $HOME>" in done.stdout
    assert ("scontrol requeue 70001" in done.stdout) == requeued


def test_slurm_counts_failures_only(tmp_path):
    text = emit("slurm", COMMAND, "2", max_restarts=2)
    again = []
    for number, code in enumerate((143, 1, 143, 143, 137, 143, 1)):
        environ = {"SLURM_JOB_ID": "70001", "SLURM_RESTART_COUNT": str(number), "CODE": str(code)}
        done = run(text, tmp_path, environ, srun=SRUN, scontrol=SCONTROL)
        assert done.returncode == code
        again.append("scontrol requeue 70001" in done.stdout)
    assert again == [True] * 6 + [False]
    assert not list(tmp_path.glob(".jaxche*"))


# The coordinator of an elastic run notes its variables, and serves for $SERVES seconds.
PYTHON = 'echo "$JAXCHE_COORDINATOR $JAXCHE_LIVENESS $JAXCHE_NUM_PROCESSES" >coordinator; exec sleep "${SERVES-60}"'
# A step, or an mpirun, notes its rank, and exits with the codes of $CODES at its rank, one after another.
EACH = """
rank=$JAXCHE_PROCESS_ID
echo "$JAXCHE_ELASTIC $JAXCHE_LIVENESS" >"env-$rank"; printf "<%s>" "$@" >"args-$rank"; echo >>"starts-$rank"
codes=($CODES); IFS=, read -r -a mine <<<"${codes[rank]}"; starts=$(wc -l <"starts-$rank")
[ "$starts" != 1 ] || while [ ! -s coordinator ]; do sleep 0.02; done
exit "${mine[starts - 1]:-${mine[-1]}}"
"""


@pytest.mark.parametrize(
    ("codes", "starts", "code"),
    [
        ("0 0 0", [1, 1, 1], 0),
        ("0 137,9,0 0", [1, 3, 1], 0),
        ("0 1 0", [1, 3, 1], 0),  # it died too often, and the others came to the end
        ("0 2 0", [1, 1, 1], 0),
        ("143 143 143", [1, 1, 1], 143),
        ("2 2 2", [1, 1, 1], 2),
        ("1 2 1", [3, 1, 3], 2),
        ("1 9 1", [3, 3, 3], 1),
    ],
)
def test_slurm_starts_ranks_of_an_elastic_run_again(tmp_path, codes, starts, code):
    text = emit("slurm", COMMAND, "1x2:h100,1", 2, elastic=True)
    environ = SLURM | {"CODES": codes, "SLURM_CPUS_PER_TASK_HET_GROUP_1": "4"}
    done = run(text, tmp_path, environ, srun=EACH, scontrol=SCONTROL, python=PYTHON)
    assert done.returncode == code, done.stderr
    assert [len((tmp_path / f"starts-{rank}").read_text()) for rank in range(3)] == starts
    assert ("scontrol requeue 70001" in done.stdout) == (code in (1, 143))
    port = 61440 + 70001 % 2048 * 2
    address, *words, processes = (tmp_path / "coordinator").read_text().split()
    host, liveness, name, token = json.loads("".join(words))
    assert (address, processes) == (f"h1:{port}", "3")
    assert (host, liveness, name, len(token)) == ("h1", port + 1, None, 32)
    for rank in range(3):
        elastic, *words = (tmp_path / f"env-{rank}").read_text().split()
        assert (elastic, json.loads("".join(words))) == ("1", ["h1", port + 1, None, token])
    command = "<--exact><--nodes=1><--ntasks=1><--mem=0>{}<python><train.py><--note><it's $HOME>"
    assert (tmp_path / "args-1").read_text() == command.format("<--het-group=0><--gres=gpu:h100:1>")
    assert (tmp_path / "args-2").read_text() == command.format("<--het-group=1><--cpus-per-task=4>")
    assert "\n#SBATCH --no-kill\n" in text


@pytest.mark.parametrize("scheduler", ["slurm", "mpirun"])
@pytest.mark.parametrize("code", [0, 9])
def test_an_elastic_run_is_over_with_its_coordinator(tmp_path, scheduler, code, until):
    # Rank 1 waits for a free node, and its step ends with the job.
    each = f"""
case "$*" in *coordinator*) exec python ;; esac
[ "$JAXCHE_PROCESS_ID" != 1 ] || {{ echo $$ >waiting; exec sleep 60 >/dev/null 2>&1; }}
while [ ! -s coordinator ] || [ ! -s waiting ]; do sleep 0.02; done
exit {code}
"""
    environ = {**os.environ, **SLURM, "HOSTS": "a,b", "SERVES": "1"}
    environ["PATH"] = played(tmp_path, srun=each, mpirun=each, scontrol=SCONTROL, python=PYTHON)
    (tmp_path / "script").write_text(emit(scheduler, COMMAND, "2", 0, elastic=True))
    options = {"stdout": subprocess.DEVNULL, "timeout": 30, "check": False}
    done = subprocess.run(["bash", "script"], cwd=tmp_path, env=environ, **options)
    assert done.returncode == code
    pid = int((tmp_path / "waiting").read_text())
    assert until(lambda: not Path(f"/proc/{pid}").exists(), within_s=30)


def test_no_rank_is_started_again_after_its_coordinator(tmp_path):
    text = emit("slurm", COMMAND, "2", 2, elastic=True)
    python = "echo $$ >pid; while [ ! -s starts-0 ] || [ ! -s starts-1 ]; do sleep 0.02; done"
    each = """
echo >>"starts-$JAXCHE_PROCESS_ID"
while [ ! -s pid ] || [ -e "/proc/$(cat pid)" ]; do sleep 0.02; done
exit 9
"""
    assert run(text, tmp_path, SLURM, srun=each, scontrol=SCONTROL, python=python).returncode in (1, 9)
    # `run` returns when no process has the output of the script any more, so none can start later.
    assert [(tmp_path / f"starts-{rank}").read_text() for rank in range(2)] == ["\n", "\n"]


def test_mpirun_starts_ranks_of_an_elastic_run_again(tmp_path):
    text = emit("mpirun", COMMAND, "1x2:h100,1", 2, elastic=True)
    mpirun = (
        """
case "$*" in *coordinator*) exec python ;; esac
echo "$JAX_LOCAL_DEVICE_IDS" >"gpu-$JAXCHE_PROCESS_ID"
"""
        + EACH
    )
    done = run(text, tmp_path, {"HOSTS": "a,b", "CODES": "0 137,9,0 0"}, mpirun=mpirun, python=PYTHON)
    assert done.returncode == 0
    assert [len((tmp_path / f"starts-{rank}").read_text()) for rank in range(3)] == [1, 3, 1]
    assert [(tmp_path / f"gpu-{rank}").read_text() for rank in range(3)] == ["0\n", "1\n", "0\n"]
    assert "a:61234" in (tmp_path / "coordinator").read_text()
    for rank, host in enumerate("aab"):
        arguments = (tmp_path / f"args-{rank}").read_text()
        assert arguments.startswith(f"<-n><1><--host><{host}>")
        for name in ("ELASTIC", "LIVENESS", "PROCESS_ID", "COORDINATOR", "NUM_PROCESSES"):
            assert f"<-x><JAXCHE_{name}>" in arguments
    # All are started again if none came to the end.
    for path in tmp_path.glob("starts-*"):
        path.unlink()
    done = run(text, tmp_path, {"HOSTS": "a,b", "CODES": "1 1 1,1,1,0"}, mpirun=mpirun, python=PYTHON)
    assert done.returncode == 0
    assert [len((tmp_path / f"starts-{rank}").read_text()) for rank in range(3)] == [6, 6, 4]


def test_mpirun_arguments_and_restarts(tmp_path, monkeypatch):
    mpirun = 'echo "$JAXCHE_COORDINATOR $JAXCHE_NUM_PROCESSES $JAXCHE_RESTART"; printf "<%s>" "$@"; exit $CODE'
    text = emit("mpirun", COMMAND, "1x8:h100,2x1:l4", max_restarts=1)
    done = run(text, tmp_path, {"HOSTS": "a,b,c", "CODE": "9"}, mpirun=mpirun)
    assert done.returncode == 9
    assert "a:61234 10 0\n" in done.stdout
    assert "a:61234 10 1\n" in done.stdout
    assert "<-n><10><--host><a:8,b:1,c:1>" in done.stdout
    assert "<-x><JAXCHE_COORDINATOR>" in done.stdout
    assert "<python><train.py><--note><it's $HOME>" in done.stdout
    done = run(text, tmp_path, {"HOSTS": "a,b,c", "CODE": "2"}, mpirun=mpirun)
    assert done.stdout.count("a:61234") == 1
    done = run(text, tmp_path, {"HOSTS": "a,b", "CODE": "0"}, mpirun=mpirun)
    assert done.returncode == 2
    assert "HOSTS has 2 name(s), 3 are needed. Write: HOSTS=node1,node2,... bash " in done.stderr
    monkeypatch.delenv("HOSTS", raising=False)
    done = run(text, tmp_path, {"CODE": "0"}, mpirun=mpirun)
    assert (done.returncode, done.stderr[:18]) == (2, "HOSTS has 0 name(s")


@pytest.fixture
def started():
    """Starts scripts, and stops them at the end of a test."""
    scripts = []

    def start(*arguments, **options):
        scripts.append(subprocess.Popen(*arguments, **options))
        return scripts[-1]

    yield start
    for script in scripts:
        with script:
            if script.poll() is None:
                script.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    script.wait(timeout=20)
                script.kill()


# In the background of a shell Ctrl-C is ignored, and under nohup SIGHUP, which no script can change for itself.
HEARD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("elastic", [False, True])
def test_sigterm_stops_mpirun_without_a_restart(tmp_path, started, elastic, until):
    # Each start is in the file; the first signal that is passed on ends it, with a code that is not to be trusted.
    mpirun = 'case "$*" in *coordinator*) exec sleep 60 ;; esac; '
    mpirun += f'trap "exit 1" USR1; echo start >>{tmp_path}/starts; for i in {{1..1500}}; do sleep 0.02; done'
    path, starts = tmp_path / "starts", "start\n" * (1 + elastic)
    (tmp_path / "script").write_text(emit("mpirun", COMMAND, "1x2" if elastic else "1", 3, elastic=elastic))
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)):
        path.unlink(missing_ok=True)
        env = {**os.environ, "HOSTS": "a", "PATH": played(tmp_path, mpirun=mpirun)}
        heard = [sys.executable, "-c", HEARD, "bash", tmp_path / "script"]
        script = started(heard, env=env, stderr=subprocess.PIPE, text=True)
        assert until(lambda: path.exists() and path.read_text() == starts, within_s=30)
        script.send_signal(number)
        assert (script.communicate(timeout=20)[1], script.returncode) == ("", code)
        assert path.read_text() == starts


RANK = """
import os, signal, sys, time
rank, told = os.environ["OMPI_COMM_WORLD_RANK"], []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("starts", os.environ["JAXCHE_RESTART"], flush=True)
open(f"{rank}.pid", "w").write(str(os.getpid()))
until = time.monotonic() + 60
while not told and time.monotonic() < until:
    time.sleep(0.02)
time.sleep(4 * int(rank))
open(f"{rank}.saved", "w").close()
sys.exit(143)
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_open_mpi_waits_for_checkpoints(tmp_path, started, monkeypatch, until):
    monkeypatch.setattr("jaxche.cluster._scheduler_files._KILL_S", 1)
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "script").write_text(emit("mpirun", [sys.executable, "rank.py"], "1x2", max_restarts=3))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with open(tmp_path / "log", "w") as log:
        env = {**os.environ, **root, "HOSTS": "localhost"}
        script = started(["bash", "script"], cwd=tmp_path, env=env, stdout=log, stderr=log)
    pids = [tmp_path / f"{rank}.pid" for rank in range(2)]
    assert until(lambda: all(path.exists() and path.read_text() for path in pids), within_s=30)
    script.terminate()
    # The second saves for longer than mpirun gives those beside one that failed, twice a second.
    assert script.wait(timeout=60) == 143
    assert all((tmp_path / f"{rank}.saved").exists() for rank in range(2))
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(line for line in lines if "starts" in line) == ["[0] starts 0", "[1] starts 0"]
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_a_jobset_numbers_its_pods_over_all_kinds(tmp_path):
    jobset = yaml.safe_load(emit("jobset", COMMAND, "2x8:h100,4", 3, name="My Run!", image="me/train:1"))
    assert (jobset["kind"], jobset["metadata"]["name"]) == ("JobSet", "my-run")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
    # Evictions restart all, and are not counted.
    [rule] = jobset["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    numbers = []
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        assert spec["completionMode"] == "Indexed"
        assert spec["parallelism"] == spec["completions"]
        [rule] = spec["podFailurePolicy"]["rules"]
        assert (rule["action"], rule["onPodConditions"][0]["type"]) == ("FailJob", "DisruptionTarget")
        pod = spec["template"]["spec"]
        [container] = pod["containers"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        assert env["JAXCHE_COORDINATOR"] == "my-run-nodes0-0-0.my-run:61234"
        assert env["JAXCHE_NUM_PROCESSES"] == "20"
        assert in_kubernetes(container["command"])[-4:] == COMMAND
        for index in range(spec["completions"]):
            words = [*container["command"][:4], "sh", "-c", "echo $JAXCHE_PROCESS_ID"]
            if index in (0, spec["completions"] - 1):
                told = {**os.environ, "JOB_COMPLETION_INDEX": str(index)}
                numbers.append(int(subprocess.check_output(words, env=told, text=True)))
    assert numbers == [0, 15, 16, 19]
    h100, plain = (job["template"]["spec"]["template"]["spec"] for job in jobset["spec"]["replicatedJobs"])
    assert h100["nodeSelector"] == {"nvidia.com/gpu.product": "h100"}
    assert h100["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert "volumes" not in h100
    assert "nodeSelector" not in plain
    assert "resources" not in plain["containers"][0]


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("volume", [None, "training:/kept"])
def test_a_jobset_is_one_of_the_api_of_jobsets(volume, elastic):
    text = emit("jobset", COMMAND, "2x8:h100,4", 3, image="me/train:1", volume=volume, elastic=elastic)
    manifest = yaml.safe_load(text)
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet  # a second, also in workers that run other files

    # Made from the schema of jobset.x-k8s.io/v1alpha2: values of a wrong type are refused, unknown fields dropped.
    assert JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest
    manifest["spec"]["failurePolicy"] = {"maxRestarts": "three"}
    with pytest.raises(ValueError, match="maxRestarts"):
        JobsetV1alpha2JobSet.from_dict(manifest)


def test_pods_of_an_elastic_jobset_are_started_again_alone():
    jobset = yaml.safe_load(emit("jobset", COMMAND, "2x8:h100,4", 5, name="run", image="me/train:1", elastic=True))
    coordinator, *ranks = jobset["spec"]["replicatedJobs"]
    names = [job["name"] for job in ranks]
    assert (coordinator["name"], names) == ("coordinator", ["nodes0", "nodes1"])
    assert jobset["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": names}
    [rule] = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["targetReplicatedJobs"]) == ("FailJobSet", names)
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 5
    variables = []
    for job in (coordinator, *ranks):
        spec = job["template"]["spec"]
        [container] = spec["template"]["spec"]["containers"]
        variables.append({one["name"]: one.get("value") for one in container["env"] if "value" in one})
        if job is coordinator:
            assert (spec["backoffLimit"], spec["parallelism"], container["stdin"]) == (0, 1, True)
            assert container["command"] == ["python", "-m", "jaxche", "coordinator"]
            assert "resources" not in container
        else:
            assert (spec["backoffLimitPerIndex"], "backoffLimit" in spec) == (5, False)
            codes = spec["podFailurePolicy"]["rules"][1]["onExitCodes"]
            assert (codes["values"], codes["containerName"]) == ([2], container["name"])
    assert variables[0] == variables[1] == variables[2]
    host, port, name, token = json.loads(variables[0]["JAXCHE_LIVENESS"])
    assert variables[0]["JAXCHE_COORDINATOR"] == f"{host}:{port - 1}" == "run-coordinator-0-0.run:61234"
    assert (name, len(token), variables[0]["JAXCHE_ELASTIC"]) == (None, 32, "1")


def test_one_process_is_not_elastic():
    with pytest.raises(ValueError, match=r"there is one process, and none continues.* Write: --nodes 2"):
        emit("slurm", COMMAND, "1", elastic=True)


def test_all_pods_of_a_jobset_share_a_volume():
    text = emit("jobset", COMMAND, "2x8:NVIDIA-H100-80GB-HBM3,4", image="me/train:1", volume="training.v1:/kept/here")
    for job in yaml.safe_load(text)["spec"]["replicatedJobs"]:
        pod = job["template"]["spec"]["template"]["spec"]
        assert pod["volumes"] == [{"name": "kept", "persistentVolumeClaim": {"claimName": "training.v1"}}]
        assert pod["containers"][0]["volumeMounts"] == [{"name": "kept", "mountPath": "/kept/here"}]
    assert "kubectl get nodes -L nvidia.com/gpu.product" in text
    bare = emit("jobset", COMMAND, "4", image="me/train:1")
    assert "--volume CLAIM:/path mounts" in bare
    assert "continues from its checkpoint" not in bare
    assert "gpu.product" not in bare


@pytest.mark.parametrize("volume", ["training", "training:kept", "Training:/kept", ":/kept", "a:/", "a:/b:c", "a b:/c"])
def test_a_volume_is_a_claim_and_a_path(volume):
    with pytest.raises(ValueError, match=r"--volume .*Write: --emit jobset --volume training:/checkpoints"):
        emit("jobset", COMMAND, "2", image="me/train:1", volume=volume)
    with pytest.raises(ValueError, match="the others take none"):
        emit("slurm", COMMAND, "2", volume="training:/kept")


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [("slurm", "-le {} ] && again=yes"), ("mpirun", "JAXCHE_RESTART <= {};"), ("jobset", "maxRestarts: {}\n")],
)
def test_default_and_explicit_restarts(scheduler, line, capsys):
    words = ["launch", "--emit", scheduler, "--nodes", "2", *(["--image", "me/train"] if scheduler == "jobset" else [])]
    for more, restarts in (([], 3), (["--max-restarts", "0"], 0)):
        assert main([*words, *more, "train.py"]) == 0
        assert line.format(restarts) in capsys.readouterr().out


def test_the_script_in_the_repository_is_current(capsys):
    there = (ROOT / "scripts" / "slurm" / "train.sbatch").read_text(encoding="utf8")
    command = "jaxche train --task digits --name digits --checkpoint-every 10"
    made_by = f"jaxche launch --emit slurm --nodes 2 --max-restarts 3 -- {command}"
    words = made_by.split()[1:]
    assert main(words) == 0
    assert capsys.readouterr().out == there
    assert f"# Made by: {made_by}\n" in there


@pytest.mark.parametrize(
    "words",
    [
        ["-n", "2"],
        ["--pace", "20,50"],
        ["--survivors"],
        ["--events", "run.jsonl"],
        ["--grace", "1"],
        ["--term-grace", "9"],
        ["--only-rank0"],
        ["--no-pin"],
        ["--no-prefix"],
    ],
)
def test_local_options_are_refused(words, capsys):
    assert main(["launch", "--emit", "slurm", "--nodes", "2", *words, "train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"leave out {words[0]}." in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--emit", "slurm", "train.py"], "takes the machines in --nodes"),
        (["--emit", "slurm", "--nodes", "2", "-n", "2", "train.py"], "takes the machines in --nodes"),
        (["--emit", "slurm", "--nodes", "2"], "nothing to run"),
        (["--nodes", "2", "train.py"], "--nodes, --image, --volume and --out are for a cluster"),
        (["-o", "train.sbatch", "train.py"], "--nodes, --image, --volume and --out are for a cluster"),
        (["--volume", "training:/kept", "train.py"], "--nodes, --image, --volume and --out are for a cluster"),
    ],
)
def test_invalid_command_line(words, message, capsys):
    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_script_may_be_missing_here(capsys):
    assert main(["launch", "--emit", "slurm", "--nodes", "2x8", "-m", "my_package.train", "--lr", "1"]) == 0
    out = capsys.readouterr().out
    assert "--label python -m my_package.train --lr 1\n" in out
    assert "--job-name=train\n" in out


def test_out_is_the_file_that_would_be_printed(capsys, tmp_path):
    words = ["launch", "--emit", "mpirun", "--nodes", "2x8"]
    assert main([*words, "train.py"]) == 0
    printed = capsys.readouterr().out
    assert main([*words, "-o", str(tmp_path / "train.sh"), "train.py"]) == 0
    assert capsys.readouterr().out == f"written to {tmp_path / 'train.sh'}\n"
    written = (tmp_path / "train.sh").read_text()
    assert written.replace(f" -o {tmp_path / 'train.sh'}", "") == printed


def test_a_file_needs_a_command():
    with pytest.raises(ValueError, match=r"there is no command\. Write: jaxche launch --emit slurm "):
        emit("slurm", [], "2")
