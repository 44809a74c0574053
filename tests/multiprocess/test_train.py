"""`jaxche train` as a user runs it: real processes, real files."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxche.cli import main
from jaxche.reports import History

ROOT = pathlib.Path(__file__).parents[2]
WORDS = ("--task", "digits", "--epochs", "1", "--batch-size", "28", "--scaling", "adamscale", "--checkpoint-every", "3")
# Steps of a few ms take ten times as long beside other tests, and a rank that cannot keep its pace ends the run.
PACE = "60,120"


@pytest.fixture
def run(run_forked):
    """Runs ``jaxche train`` in a folder, in forks; those on the path may change it."""

    def run(folder, *words, path=()):
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
        return run_forked("-m", "jaxche", "train", *words, cwd=folder, env=env)

    return run


@pytest.fixture(scope="module")
def trained(run_forked, tmp_path_factory):
    """One epoch on digits with a scaled learning rate; its last batch is smaller than the others."""
    folder = tmp_path_factory.mktemp("train")
    return folder, run_forked("-m", "jaxche", "train", *WORDS, "--name", "mine", cwd=folder)


def test_it_says_what_happened(trained):
    _, done = trained
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    paces = re.search(r"2 x cpu, paced to (\d+):([\d.]+) ms a step", done.stdout)
    assert float(paces[2]) == 2.5 * int(paces[1]) >= 50
    assert re.search(r"epoch 1 of 1: test accuracy [\d.]+ % after [\d.]+ s", done.stdout)
    assert any(line.startswith("efficiency") for line in lines)
    assert lines[-4] == "written to runs/mine:"
    assert lines[-2].startswith("next: jaxche train")
    assert lines[-1].strip() == "jaxche report runs/mine"
    before = done.stdout.partition("\nadvice:")[0].splitlines()
    assert all(len(line) <= 100 for line in [*before, *lines[-4:]] if not line.startswith("[Gloo]"))
    assert all(len(line) <= 120 for line in lines if not line.startswith("[Gloo]"))


def test_every_round_is_on_file(trained):
    folder, _ = trained
    history = History.from_json(folder / "runs/mine/history.jsonl")
    result = json.loads((folder / "runs/mine/result.json").read_text())
    numbers = result["results"]["cadence"]
    assert len(history) == numbers["rounds"] == numbers["merges"]
    assert sum(info.examples for info in history) == numbers["examples"] == 1440
    assert numbers["efficiency"] == pytest.approx(numbers["batches"] / numbers["seconds"] / sum(numbers["rates"]))
    assert numbers["batches"] == sum(info.batches for info in history) == 52
    assert numbers["test"] == history[-1].validation
    assert numbers["test"]["accuracy"] > 0.5
    assert len(numbers["rates"]) == 2
    assert result["arguments"]["batch_size"] == 28
    # What was typed, and what was left out that all processes have to know, once each.
    assert (result["command"].count("--name"), result["command"][-2:]) == (1, ["-n", "2"])
    assert {"jaxche", "jax", "flax", "python"} <= set(result["versions"])
    assert (folder / "runs/mine/history.png").read_bytes().startswith(b"\x89PNG")


def test_scaled_learning_rates_end_with_advice_on_the_batch(trained):
    folder, done = trained
    assert re.search(r"\nadvice: gradient noise scale [\d,.]+ examples: ", done.stdout)
    history = History.from_json(folder / "runs/mine/history.jsonl")
    assert history[-1].lr_factor > 1
    rows = json.loads((folder / "runs/mine/result.json").read_text())["advice"]["cadence"]
    assert [row["note"] for row in rows if row["note"]]
    assert history.advice().summary in done.stdout


def test_a_start_after_the_last_round_writes_the_same_numbers(run, trained):
    folder, _ = trained
    shutil.copytree(folder / "runs/mine", folder / "runs/again")
    (folder / "runs/again/result.json").unlink()
    done = run(folder, *WORDS, "--name", "again")
    assert done.returncode == 0, done.stderr
    first, again = (
        json.loads((folder / f"runs/{name}/result.json").read_text())["results"]["cadence"]
        for name in ("mine", "again")
    )
    for number in ("seconds", "examples", "batches", "rounds", "wait_ms", "sync_ms", "test"):
        assert again[number] == first[number]


def test_a_run_is_replayed_bit_for_bit(run, trained):
    folder, _ = trained
    done = run(folder, "--replay", "runs/mine")
    assert done.returncode == 0, done.stderr
    assert "the same parameters, bit for bit" in done.stdout


def test_a_run_that_changed_its_ranks_is_not_replayed(trained, monkeypatch, capsys):
    folder, _ = trained
    shutil.copytree(folder / "runs/mine", folder / "runs/elastic", ignore=shutil.ignore_patterns("checkpoints"))
    rounds = History.from_json(folder / "runs/mine/history.jsonl")
    per_rank = {name: value for name, value in vars(rounds[-1]).items() if isinstance(value, tuple) and len(value) == 2}
    rounds[-1] = dataclasses.replace(rounds[-1], **{name: (*value, value[0]) for name, value in per_rank.items()})
    rounds.to_json(folder / "runs/elastic/history.jsonl")
    monkeypatch.chdir(folder)
    assert main(["train", "--replay", "runs/elastic"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--replay runs/elastic: the number of ranks changed from 2 to 3 at round {rounds[-1].round}," in err
    assert len(err.splitlines()) == 1


def dies_once(folder, when):
    """A folder for the path of a run in which rank 1 dies at its first start, after such a round."""
    (folder / "sitecustomize.py").write_text(
        "import os, signal\n"
        "if os.environ.get('JAXCHE_PROCESS_ID') == '1' and os.environ['JAXCHE_RESTART'] == '0':\n"
        "    from jaxche.cli._progress import Progress\n"
        "    call = Progress.__call__\n"
        "    def die(self, state, info):\n"
        "        call(self, state, info)\n"
        f"        if {when}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    Progress.__call__ = die\n"
    )


@pytest.mark.slow
def test_a_comparison_whose_process_is_killed_starts_again_where_it_was(run, tmp_path):
    dies_once(tmp_path, "info.policy == 'cadence' and info.round == 2")
    words = ("--task", "digits", "--epochs", "1", "--batch-size", "48", "--pace", PACE, "--name", "all")
    done = run(tmp_path, *words, "--compare", "sync,async,cadence", "--max-restarts", "2", path=[tmp_path])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 1 was ended by SIGKILL (out of memory?); stopping the others") == 1, done.stderr
    assert "restart 1 of 2" in done.stderr
    # Neither what was done nor the policy that was not began again.
    assert done.stdout.count("done by an earlier start") == 2
    assert done.stdout.count("\n     0      1 ") == 3
    assert "cadence / sync" in done.stdout
    assert " of each in " not in done.stderr  # whose advice is the arguments of a trainer
    results = json.loads((tmp_path / "runs/all/result.json").read_text())["results"]
    assert list(results) == ["sync", "async", "cadence"]
    assert results["sync"]["merges"] == results["sync"]["rounds"] > results["cadence"]["merges"]
    assert {numbers["examples"] for numbers in results.values()} == {1440}
    for policy, numbers in results.items():
        folder = tmp_path / "runs/all" / policy
        history = History.from_json(folder / "history.jsonl")
        assert [info.round for info in history] == list(range(len(history)))
        assert sum(info.examples for info in history) == 1440
        assert numbers["rounds"] == len(history)
        assert numbers["seconds"] == pytest.approx(history.seconds)
        assert {"history.jsonl", "history.png", "params"} <= {path.name for path in folder.iterdir()}
        assert numbers == json.loads((folder / "done.json").read_text())


def test_plain_orbax_restores_the_parameters(run_forked, trained):
    folder, _ = trained
    program = f"""
import numpy as np, orbax.checkpoint as ocp
params = ocp.StandardCheckpointer().restore({str((folder / "runs/mine/params").resolve())!r})
np.savez({str(folder / "restored.npz")!r}, kernel=params["Conv_0"]["kernel"], bias=params["Dense_1"]["bias"])
"""
    done = run_forked("-c", program)
    assert done.returncode == 0, done.stderr
    restored = np.load(folder / "restored.npz")
    assert restored["kernel"].shape == (3, 3, 1, 16)
    assert np.isfinite(restored["kernel"]).all()
    assert restored["bias"].any()


def test_a_pace_nobody_can_keep_is_one_line(run, tmp_path):
    done = run(tmp_path, "--task", "digits", "--pace", "0.01,50")
    assert done.returncode == 2
    assert "rank 0 is to take 0.01 ms a step" in done.stderr
    assert re.search(r"write --pace \d+,50", done.stderr)
    assert "Traceback" not in done.stderr
    assert "Check failure" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_worker_that_dies_fails_the_run(run, tmp_path):
    # Only rank 1 fails.
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('JAXCHE_PROCESS_ID') == '1':\n"
        "    import jaxche.cli._worker as worker\n"
        "    def train(args, folder): raise OSError('the disk is full')\n"
        "    worker.train = train\n"
    )
    done = run(tmp_path, "--task", "digits", path=[tmp_path])
    assert done.returncode == 1
    assert "jaxche train: error: the disk is full" in done.stderr


def test_bad_input_that_one_process_finds_is_not_restarted(run, tmp_path):
    # The process that finds it exits after the other one, whose error is a RankError.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('JAXCHE_PROCESS_ID') == '1':\n"
        "    import jaxche.cli._worker as worker\n"
        "    from jaxche.replicas._replica import PaceError, Replica\n"
        "    exit_at_once = worker.exit_at_once\n"
        "    def late(code): time.sleep(3); exit_at_once(code)\n"
        "    def refuse(self, *arguments): raise PaceError('the pace is too short')\n"
        "    worker.exit_at_once, Replica.warm_up = late, refuse\n"
    )
    done = run(tmp_path, "--task", "digits", "--pace", "none", "--max-restarts", "1", path=[tmp_path])
    assert done.returncode == 2, done.stderr
    assert "jaxche train: error: the pace is too short" in done.stderr
    assert "restart 1" not in done.stderr


def test_one_process_is_a_plain_loop_and_a_dry_run_writes_nothing(tmp_path):
    """In an interpreter of its own, as a user starts it."""
    command = [sys.executable, "-m", "jaxche", "train", "-n", "1", "--task", "digits", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert "a plain training loop" in done.stdout
    assert "nothing was written" in done.stdout
    assert list(tmp_path.iterdir()) == []
