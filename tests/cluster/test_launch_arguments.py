"""Arguments of launch() and `jaxche launch`; no test starts a process."""

import sys

import numpy as np
import pytest

from jaxche.cli._main import make_parser
from jaxche.cluster import launch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"processes": 0}, "processes=0"),
        ({"processes": True}, "processes=True must be a whole number"),
        ({"processes": 2, "on_cpu": -1}, "on_cpu=-1 must be at least 0"),
        ({"processes": 2, "on_cpu": 2}, "on_cpu=2 must leave one of processes=2"),
        ({"processes": 2, "on_cpu": 1, "env": {"JAX_PLATFORMS": "cpu"}}, "on_cpu=1, but there are no accelerators"),
        ({"processes": 2, "pace_ms": [20.0]}, r"pace_ms=\[20.0\] must be .* each of processes=2"),
        ({"processes": 2, "pace_ms": 20}, r"pace_ms=20 must be .* each of processes=2\. Write: pace_ms=\[20, 50\]"),
        ({"processes": 2, "pace_ms": [20.0, -1.0]}, "pace_ms=-1.0 must be"),
        ({"processes": 2, "pace_ms": [20.0, 0.0]}, "must be a positive number"),
        ({"processes": 1, "pace_ms": [float("nan")]}, "pace_ms=nan must be a finite number"),
        ({"processes": 1, "env": {"A": 1}}, "env={'A': 1} must be text. Write: env={'A': '1'}"),
        ({"processes": 1, "grace_s": -1.0}, "grace_s=-1.0"),
        ({"processes": 1, "term_grace_s": float("inf")}, "term_grace_s=inf"),
        ({"processes": 1, "max_restarts": -1}, "max_restarts=-1"),
        ({"processes": 1, "max_restarts": True}, "max_restarts=True must be a whole number"),
        ({"processes": 2, "max_restarts": 1, "survivors": True}, "survivors=True with max_restarts=1.*max_restarts=3"),
        ({"processes": 1, "hang_timeout_s": 0.0}, "hang_timeout_s=0.0"),
        ({"processes": 2, "heartbeat_timeout_s": 5.0}, "heartbeat_timeout_s=5.0 is for elastic runs"),
        ({"processes": 2, "elastic": True, "heartbeat_timeout_s": 1.0}, "heartbeat_timeout_s=1.0.*at least 2"),
        (
            {"processes": 2, "elastic": True, "env": {"JAXCHE_HEARTBEAT_TIMEOUT": "soon"}},
            "JAXCHE_HEARTBEAT_TIMEOUT='soon' must be seconds",
        ),
        ({"processes": 1, "events": "/nowhere/events.jsonl"}, "events='/nowhere/events.jsonl' cannot be written"),
        ({"processes": 1, "command": "python train.py"}, "list of words"),
        ({"processes": 1, "command": []}, "list of words"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        launch(**({"command": ["true"]} | arguments))


def test_numbers_may_come_from_numpy(monkeypatch):
    given = []
    monkeypatch.setattr(
        "jaxche.cluster._launch._supervise", lambda context, placements, *more: given.append(placements)
    )
    launch(["true"], np.int64(2), [20.0, 50.0], env={"JAX_PLATFORMS": "cpu"}, max_restarts=np.int64(1))
    assert [placement.pace_ms for placement in given[0]] == [20.0, 50.0]


def test_a_missing_program_is_named():
    with pytest.raises(ValueError, match=r"no-such-program.*cannot be run.*sys.executable"):
        launch(["no-such-program"], 1, env={"JAX_PLATFORMS": "cpu"})


def test_a_file_that_is_no_program_is_named(tmp_path):
    (tmp_path / "train.sh").write_text("echo no interpreter is named above")
    (tmp_path / "train.sh").chmod(0o755)
    for program in (tmp_path / "train.sh", tmp_path / "train.sh" / "below"):
        with pytest.raises(ValueError, match=f"{program}.*cannot be run.*sys.executable"):
            launch([str(program)], 1, env={"JAX_PLATFORMS": "cpu"})


def _parse(*words):
    return make_parser().parse_args(["launch", *words])


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["-n", "2", __file__, "--lr", "1", "-n", "5"], [sys.executable, __file__, "--lr", "1", "-n", "5"]),
        (["-n", "2", "--", __file__, "--lr", "1"], [sys.executable, __file__, "--lr", "1"]),
        (["-n", "2", "-m", "a.b", "--lr", "1"], [sys.executable, "-m", "a.b", "--lr", "1"]),
        (["-n", "2", "--", "bash", "-c", "true"], ["bash", "-c", "true"]),
        # Options of the script with which several options of the launcher begin.
        (["-n", "2", __file__, "--n", "5", "--h", "1"], [sys.executable, __file__, "--n", "5", "--h", "1"]),
    ],
)
def test_the_command_line_becomes_a_command(words, command, monkeypatch):
    seen = {}
    monkeypatch.setattr("jaxche.cluster.launch", lambda command, **more: seen.update(more, command=command) or 7)
    args = _parse(*words)
    assert args.command_object.run(args) == 7
    assert seen["command"] == command
    assert seen["processes"] == 2
    assert seen["pace_ms"] is None


def test_options_reach_the_launch(monkeypatch):
    seen = {}
    monkeypatch.setattr("jaxche.cluster.launch", lambda command, **more: seen.update(more) or 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    shown = "--pace 20,50.5 --only-rank0 --no-prefix --no-pin --elastic --heartbeat-timeout 5 --grace 1"
    restarts = "--max-restarts 3 --survivors --hang-timeout 60 --term-grace 9 --events e.jsonl"
    args = _parse(*shown.split(), *restarts.split(), __file__)
    assert args.command_object.run(args) == 0
    assert seen == {
        "processes": 2,
        "pace_ms": (20, 50.5),
        "prefix": False,
        "only_rank0": True,
        "on_cpu": 0,
        "grace_s": 1,
        "pin": False,
        "elastic": True,
        "max_restarts": 3,
        "survivors": True,
        "hang_timeout_s": 60,
        "term_grace_s": 9,
        "events": "e.jsonl",
        "heartbeat_timeout_s": 5,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2"], "nothing to run"),
        (["-n", "2", "nowhere.py"], "no script 'nowhere.py'"),
        (["-n", "2", "nowhere"], "no program 'nowhere' to run; for a script write: jaxche launch"),
        (["-n", "2", "--pace", "20", __file__], "--pace has 1 value(s) for 2 process(es); write one a process"),
        (["-n", "2", "-m"], "-m has no module"),
        (["-n", "2", "--survivors", __file__], "write --max-restarts 3 --survivors"),
        (["-n", "2", "--heartbeat-timeout", "5", __file__], "write --elastic --heartbeat-timeout 5"),
        (["-n", "2", "--elastic", "--heartbeat-timeout", "1", __file__], "at least 2 seconds"),
        (["-n", "2", "--survivors", "--max-restarts", "1", __file__], "write --max-restarts 3 --survivors"),
    ],
)
def test_invalid_command_line_exits_with_2(words, message, capsys):
    args = _parse(*words)
    assert args.command_object.run(args) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "write"),
    [
        (["-n", "0"], "write -n 2"),
        (["-n", "two"], "write -n 2"),
        (["--grace", "nan"], "write --grace 5"),
        (["--grace", "-1"], "write --grace 5"),
        (["--pace", "20,0"], "write --pace 20,50"),
        (["--pace", "fast"], "write --pace 20,50"),
        (["--pace", "20,inf"], "write --pace 20,50"),
    ],
)
def test_errors_name_flags(words, write, capsys):
    with pytest.raises(SystemExit) as stop:
        _parse(*words, __file__)
    assert stop.value.code == 2
    assert write in capsys.readouterr().err


def test_the_number_of_processes_that_train_on_the_cpu_is_not_that_of_the_gpus(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    args = _parse(__file__)
    assert args.command_object.run(args) == 2
    assert "JAX_PLATFORMS excludes them. Write: jaxche launch -n 2 train.py" in capsys.readouterr().err


def test_default_processes_with_on_cpu(monkeypatch):
    seen = {}
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr("jaxche.cluster.launch", lambda command, **more: seen.update(more) or 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    args = _parse("--on-cpu", "1", __file__)
    assert args.command_object.run(args) == 0
    assert (seen["processes"], seen["on_cpu"]) == (3, 1)
