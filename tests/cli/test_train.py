"""`jaxche train` in this process."""

import json
import os
import re
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest

import jaxche
from jaxche.cli import _replay, _worker, main
from jaxche.cli._main import make_parser
from jaxche.cli._worker import work
from jaxche.cluster import ClusterInfo


def refused(words, capsys):
    assert main(["train", "--task", "digits", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize("more", [[], ["-n", "1"], ["--checkpoint-every", "1", "--name", "mine"]])
def test_unwritable_output_directory(more, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr("jaxche.cluster.launch", lambda *_, **__: pytest.fail("it started"))
    monkeypatch.setattr("jaxche.cli._worker.work", lambda *_: pytest.fail("it started"))
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "runs"
    err = refused(["--out", str(out), *more], capsys)
    assert f"--out {out}: " in err
    assert f"{tmp_path / 'file'} takes no files (Not a directory)" in err
    assert "e.g. --out ~/runs" in err
    # Where there is nothing yet it looks, and leaves nothing behind.
    with pytest.raises(pytest.fail.Exception, match="it started"):
        main(["train", "--task", "digits", "--out", str(tmp_path / "new" / "runs"), *more])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        (None, "-n 3, but 2 processes were started; leave -n out"),
        ("runs/old", "--replay runs/old was recorded with -n 3, but 2 processes were started; start 3"),
    ],
)
def test_another_number_of_processes(replay, message, monkeypatch, capsys):
    monkeypatch.setattr("jaxche.cluster.initialize", lambda **_: ClusterInfo(0, 2, "slurm"))
    assert work(Namespace(processes=3, replay=replay, out="runs"), "mine") == 2
    assert capsys.readouterr().err == f"jaxche train: error: {message}\n"


INTERRUPTED = """
from unittest import mock
from jaxche.cli import _worker, main

_worker._MEASURE_S = 0.1
run = ["train", "--task", "digits", "-n", "1", "--batch-size", "96", "--name", "mine", "--checkpoint-every", "1"]
with mock.patch("jaxche.cli._progress.Progress.__call__", side_effect=KeyboardInterrupt):
    print("code", main(run))
print("code", main([*run, "--epochs", "1"]))
"""


@pytest.mark.slow
def test_ctrl_c_writes_no_result(run_forked, tmp_path):
    # In a process of its own, which has one device.
    done = run_forked("-c", INTERRUPTED, cwd=tmp_path, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert re.findall("^code .*|^written to .*", done.stdout, re.M) == ["code 130", "written to runs/mine:", "code 0"]
    assert (tmp_path / "runs" / "mine" / "result.json").exists()


def test_hang_timeout_of_the_launcher(monkeypatch):
    started = {}
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr("jaxche.cluster.launch", lambda *words, **how: started.update(how) or 124)
    for processes in (1, 2):
        assert main(["train", "--task", "digits", "-n", str(processes), "--hang-timeout", "9", "--dry-run"]) == 124
        assert (started["hang_timeout_s"], started["pin"]) == (9.0, processes == 2)


@pytest.mark.usefixtures("under_slurm")
def test_hang_timeout_of_the_process_where_a_scheduler_started_it(monkeypatch):
    monkeypatch.setenv("JAXCHE_HANG_TIMEOUT", "")
    seen = []
    monkeypatch.setattr(
        "jaxche.cli._worker.work", lambda args, name: seen.append(os.environ["JAXCHE_HANG_TIMEOUT"]) or 0
    )
    assert main(["train", "--task", "digits", "--hang-timeout", "9"]) == 0
    assert seen == ["9"]


@pytest.mark.slow
def test_replicas_without_a_batch_leave_a_run_its_result(tmp_path, monkeypatch, capsys):
    """Two batches an epoch are those of two replicas: the speed of the others is unknown, so there is no advice."""
    monkeypatch.setattr(_worker, "_MEASURE_S", 0.05)
    words = ["train", "--task", "digits", "--batch-size", "720", "--epochs", "2", "--pace", "none"]
    args = make_parser().parse_args([*words, "--scaling", "adamscale"])
    args.words = words
    _worker.train(args, tmp_path / "mine")
    result = json.loads((tmp_path / "mine" / "result.json").read_text())
    assert result["results"]["cadence"]["rounds"] == 2
    assert result["advice"] == {}
    assert f"written to {tmp_path / 'mine'}" in capsys.readouterr().out


def test_replay_of_a_comparison(tmp_path, capsys):
    (tmp_path / "result.json").write_text(json.dumps({"arguments": {"compare": ["sync", "auto"]}, "devices": ["cpu"]}))
    assert main(["train", "--replay", str(tmp_path)]) == 2
    assert "was a comparison; run one policy by itself, and replay that" in capsys.readouterr().err


@pytest.mark.parametrize("gap", [0.0, 0.25, float("nan")])
def test_a_replay_with_other_parameters_says_where_and_fails(gap, tmp_path, monkeypatch, capsys, round_info):
    class Trainer:
        def __init__(self, loss_fn, tx, **options):
            pass

        def init(self, params):
            return params

        def replay(self, state, data, record):
            return state, record

        def params(self, state):
            return {"kernel": np.ones(2, np.float32) + np.array([0.0, gap], np.float32)}

    task = Namespace(loss_fn=None, tx=None, data=None, init=lambda seed: (None,))
    monkeypatch.setattr(_replay, "load", lambda *given: task)
    monkeypatch.setattr(_replay, "trainers", lambda *given: [{}])
    monkeypatch.setattr(_replay, "Trainer", Trainer)
    monkeypatch.setattr(_replay, "read_params", lambda folder: {"kernel": np.ones(2, np.float32)})
    jaxche.History([round_info()]).to_json(tmp_path / "history.jsonl")
    args = Namespace(replay=str(tmp_path), task="digits", batch_size=None, learning_rate=None, seed=0)
    if gap == 0.0:
        _replay.replay(args)
        assert "the same parameters, bit for bit" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit, match="1"):
        _replay.replay(args)
    err = capsys.readouterr().err
    assert f"ended with other parameters: kernel by up to {gap:.2g}; other devices or versions round" in err


def test_the_pace_of_the_launcher_is_kept_and_told(monkeypatch):
    monkeypatch.setenv("JAXCHE_PACE_MS", "20")
    assert _worker._paces(Namespace(pace=None, ratios=None), None, None, 2) == (None, ())
    assert os.environ["JAXCHE_PACE_MS"] == "20"
    trainer = SimpleNamespace(measure_rates=lambda *_, **__: [1000.0, 1000.0], init=lambda *_: None)
    monkeypatch.setattr(_worker, "Trainer", lambda *_, **__: trainer)
    task = SimpleNamespace(loss_fn=None, tx=None, data=None)
    paces, _ = _worker._paces(Namespace(pace=None, ratios=(1.0, 3.0), seed=0), task, (), 2)
    assert paces == (20.0, 60.0)  # those that are asked for
    monkeypatch.setenv("JAXCHE_PACE_MS", "20")
    data = jaxche.Batches(np.ones((8, 2)), 4)
    header = _worker._header(Namespace(name="digits", data=data), {"w": np.ones(3)}, 1, None, ())
    assert header.splitlines()[1] == "  3 parameters, 1 epoch of 2 batches of 4"
    assert header.endswith(", paced by JAXCHE_PACE_MS")
