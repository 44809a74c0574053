"""Arguments of the command line."""

import argparse
import json
import re
import subprocess
import sys

import pytest

import jaxche.cli
from jaxche.cli import main
from jaxche.cli._main import make_parser
from jaxche.cli._replay import recorded_arguments
from jaxche.cli._train import _processes

COMMANDS = ["train", "report", "launch", "coordinator", "doctor", "simulate", "plan", "completion"]


def parse(*words):
    args = make_parser().parse_args(["train", *words])
    args.words = ["train", *words]
    return args


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def launched(monkeypatch):
    """What would have been launched."""
    calls = []
    monkeypatch.setattr("jaxche.cluster.launch", lambda command, processes, **more: calls.append((command, processes)))
    return calls


def test_no_arguments_print_an_overview(capsys):
    assert main([]) == 0
    assert "jaxche train" in capsys.readouterr().out


LIGHT = [[], ["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]
LIGHT += [["completion", "bash"], ["simulate", "--ms", "20,50", "--rounds", "3", "--tuner", "both"]]
LIGHT += [["launch", "--emit", "slurm", "--nodes", "2x8", "train.py"]]
LIGHT += [["launch", "-n", "2", "--max-restarts", "1", "--hang-timeout", "60", "--", sys.executable, "-c", "print(1)"]]
LIGHT += [["launch", "-n", "2", "--elastic", "--", sys.executable, "-c", "print(1)"]]


@pytest.mark.parametrize("words", LIGHT, ids=" ".join)
def test_help_and_launcher_import_no_jax(words):
    program = (
        "import sys\n"
        "from jaxche.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "heavy = {'jax', 'flax', 'optax', 'orbax', 'matplotlib'} | ({'numpy'} if '--help' in sys.argv else set())\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("jaxche 0.")


def test_package_docstring_lists_every_command():
    offered = next(a.choices for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert sorted(offered) == sorted(COMMANDS)
    assert set(re.findall(r"\w+", jaxche.cli.__doc__)) >= set(COMMANDS)


@pytest.mark.parametrize("command", [[], *([command] for command in COMMANDS)])
def test_help_fits_100_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if len(line) > 100]


@pytest.mark.parametrize(
    ("words", "usage", "message"),
    [
        (["report", "runs", "--outt", "x"], "jaxche report RUN", "--outt x; did you mean --out?"),
        (["train", "--lr", "1"], "jaxche train [options]", "unrecognized arguments: --lr 1\n"),
        (["train", "--epoch", "x"], "jaxche train [options]", "argument --epochs"),
        (["simulate", "--merge-ms", "3"], "jaxche simulate [options]", "unrecognized arguments: --merge-ms 3"),
        (["plan", "a.py:f", "b.py:g"], "jaxche plan [FILE.py:FUNCTION]", "unrecognized arguments: b.py:g"),
        (["doctor", "--processs", "2"], "jaxche doctor", "did you mean --processes?"),
        (["report"], "jaxche report RUN", "the following arguments are required: RUN"),
        (["repot"], "jaxche COMMAND", "invalid choice: 'repot'"),
        (["--versoin"], "jaxche COMMAND", "did you mean --version?"),
    ],
)
def test_usage_of_the_command_that_failed(words, usage, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: {usage}")
    assert message in err
    command = usage.split()[1]
    prog = "jaxche" if command == "COMMAND" else f"jaxche {command}"
    assert f"\n{prog}: error: " in err
    assert err.endswith(f"\n{prog} --help has the options\n")


WRITING = ["train", "report", "launch", "simulate", "plan"]


@pytest.mark.parametrize("command", WRITING)
def test_out_alike_in_all_commands(command, capsys):
    needed = {"report": ["runs"]}.get(command, [])
    for words in (["-o", "there", *needed], ["--out", "there", *needed]):
        assert make_parser().parse_args([command, *words]).out == "there"
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    kind = "FOLDER" if command == "train" else "FILE"
    # Python 3.13 names the value once.
    assert f"--out {kind} where to write: " in shown.replace(f"-o {kind}, ", "-o, ")
    assert "-o, --out" in shown.replace(f"-o {kind}, ", "-o, ")
    assert "--plot" not in shown
    assert make_parser().parse_args(["simulate", "--plot", "there"]).out == "there"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["train", "-o", ""], "folder"),
        (["train", "--replay", ""], "folder"),
        (["simulate", "-o", ""], "file"),
        (["launch", "--events", "", "train.py"], "file"),
        (["report", ""], "folder"),
        (["doctor", "--store", ""], "folder"),
    ],
)
def test_an_empty_path_is_refused(words, what, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert f"'' is not the name of a {what}; is a variable of the shell not set?" in capsys.readouterr().err


def test_a_folder_is_no_file_to_write(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["launch", "--emit", "mpirun", "--nodes", "2", "-o", ".", "train.py"]) == 2
    assert "--out .: Is a directory; write e.g. --out file\n" in capsys.readouterr().err


def test_a_command_may_have_empty_words():
    assert make_parser().parse_args(["launch", "train.py", "--name", ""]).command == ["train.py", "--name", ""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "0"], "write --epochs 3"),
        (["--batch-size", "many"], "write --batch-size 32"),
        (["--learning-rate", "nan"], "write --learning-rate 1e-3"),
        (["--learning-rate", "0"], "above 0"),
        (["--pace", "fast"], "--pace 20,50"),
        (["--pace", "20,-1"], "--pace 20,50"),
        (["--ratios", "1,x"], "--ratios 1,2.5"),
        (["--compare", "sync"], "--compare sync,cadence"),
        (["--compare", "sync,sync"], "--compare sync,cadence"),
        (["--compare", "sync,other"], "--compare sync,cadence"),
        (["--policy", "sync", "--compare", "sync,async"], "--compare: not allowed with argument --policy"),
        (["--anchor", "500"], "from 1 to 200"),
        (["--overhead-target", "0.9"], "from 0.01 to 0.5"),
        (["--task", "cifar"], "invalid choice"),
        (["--seed", str(2**63)], "from 0 to 9.22337e+18"),
        (["--name", ""], "write e.g. --name first"),
        (["--name", ".."], "'..' is no name of a folder"),
        (["--name", "../mine"], "'../mine' is no name of a folder in --out"),
        (["--name", "ü" * 128], "üü' is no name of a folder in --out"),
    ],
)
def test_invalid_values(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2", "--ratios", "1,2,3"], "--ratios has 3 for -n 2"),
        (["-n", "3", "--pace", "20,50"], "--pace has 2 for -n 3"),
        (["--pace", "20,50", "--ratios", "1,2"], "leave one of them out"),
        (["--policy", "sync", "--merge", "batch"], "--average parameters"),
        (["--average", "gradients", "--opt-state", "reset"], "--opt-state acts on averaged parameters"),
    ],
)
def test_exclusive_options(words, message, capsys, launched):
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err
    assert not launched


def test_one_process_for_each_gpu_kind(launched, monkeypatch):
    monkeypatch.setattr("jaxche.cluster._initialize.visible_devices", lambda *_: [("", "H100"), ("", "L4")])
    main(["train", "--task", "digits"])
    assert launched[0][1] == 2


@pytest.mark.usefixtures("under_slurm")
def test_exclusive_options_under_a_scheduler(capsys):
    assert main(["train", "--task", "digits", "--pace", "20,50", "--ratios", "1,2"]) == 2
    assert "leave one of them out" in capsys.readouterr().err


@pytest.mark.usefixtures("under_slurm")
@pytest.mark.parametrize("words", [["--checkpoint-every", "2"], ["--max-restarts", "2"]])
def test_a_scheduler_requires_a_name_for_checkpoints(words, capsys, monkeypatch):
    def join(**_):
        raise ConnectionError("this is where it joins")

    monkeypatch.setattr("jaxche.cluster.initialize", join)
    assert main(["train", "--task", "digits", *words]) == 2
    assert f"{words[0]} needs a name that all slurm processes have, in every start" in capsys.readouterr().err
    assert main(["train", "--task", "digits", *words, "--name", "mine"]) == 2
    assert "this is where it joins" in capsys.readouterr().err
    assert main(["train", "--task", "digits"]) == 2
    assert "this is where it joins" in capsys.readouterr().err


def record(folder, **arguments):
    folder.mkdir(parents=True)
    made_with = vars(parse("--task", "digits", *(w for name, value in arguments.items() for w in (name, value))))
    del made_with["words"], made_with["command_object"]
    (folder / "result.json").write_text(json.dumps({"arguments": made_with, "devices": ["cpu"] * 3}))
    (folder / "history.jsonl").write_text("")


def test_a_replay_does_not_restart_or_save(launched, tmp_path, monkeypatch):
    more = {}
    monkeypatch.setattr("jaxche.cluster.launch", lambda command, processes, **given: more.update(given))
    record(
        tmp_path / "old", **{"--max-restarts": "3", "--checkpoint-every": "2", "--pace": "20,30,40", "--epochs": "7"}
    )
    args = recorded_arguments(parse("--replay", "old"))
    assert (args.max_restarts, args.checkpoint_every, args.pace) == (0, None, None)
    assert (args.epochs, args.processes, args.replay, args.task) == (7, 3, "old", "digits")
    main(["train", "--replay", "old"])
    assert more["max_restarts"] == 0


@pytest.mark.parametrize("result", [None, "[1, 2]", "{}", '{"arguments": [1]}', "3", ""])
def test_a_replay_requires_the_result_of_a_run(launched, tmp_path, capsys, result):
    if result is not None:
        record(tmp_path / "old")
        (tmp_path / "old" / "result.json").write_text(result)
    assert main(["train", "--replay", "old"]) == 2
    assert "--replay old: there is no result.json of a finished run" in capsys.readouterr().err
    assert not launched


def test_a_replay_requires_a_history(launched, tmp_path, capsys):
    record(tmp_path / "old")
    (tmp_path / "old" / "history.jsonl").unlink()
    assert main(["train", "--replay", "old"]) == 2
    assert "--replay old: there is no history.jsonl of its rounds" in capsys.readouterr().err
    assert not launched


@pytest.mark.parametrize(
    "words",
    [["--epochs", "2"], ["--task", "text", "--protocol", "pipeline"], ["--dry-run"], ["--task", "digits", "-n", "3"]],
)
def test_a_replay_takes_no_other_options(words, launched, tmp_path, capsys):
    record(tmp_path / "old")
    assert main(["train", "--replay", "old", *words]) == 2
    assert f"leave {', '.join(word for word in words if word.startswith('-'))} out" in capsys.readouterr().err
    assert not launched


def test_an_existing_run_is_not_overwritten(capsys, launched, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert main(["train", "--name", "mine"]) == 2
    assert "choose another --name" in capsys.readouterr().err
    assert not launched


def test_missing_package(capsys, launched, monkeypatch):
    monkeypatch.setattr("jaxche.cli._settings._is_installed", lambda package: package != "mlxtend")
    assert main(["train"]) == 2
    assert "mlxtend; write: pip install 'jaxche[examples]'" in capsys.readouterr().err
    assert main(["train", "--task", "text"]) is None  # started
    assert launched


def test_options_of_the_processes(launched):
    main(["train", "--task", "digits", "--ratios", "1,2,4"])
    command, processes = launched[0]
    assert processes == 3
    assert command[:4] == [sys.executable, "-m", "jaxche", "train"]
    assert command[4:8] == ["--task", "digits", "--ratios", "1,2,4"]
    name = command[command.index("--name") + 1]
    assert name.startswith("digits-cadence-")


def test_processes():
    assert _processes(parse()) == (2, {})
    assert _processes(parse("-n", "4")) == (4, {})
    assert _processes(parse("--pace", "10,20,30")) == (3, {})


def test_gpus_require_jax_with_cuda(monkeypatch, capsys):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert _processes(parse()) == (2, {"JAX_PLATFORMS": "cpu"})
    assert "pip install 'jaxche[cuda13]'" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "jax_cuda12_plugin" or None)
    assert _processes(parse()) == (4, {})
    monkeypatch.setenv("JAX_PLATFORMS", "cpu,cuda")
    assert _processes(parse()) == (2, {})


def test_events_in_a_folder_that_is_missing_are_refused_by_their_option(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    events = tmp_path / "none" / "run.jsonl"
    assert main(["launch", "-n", "1", "--events", str(events), str(script)]) == 2
    assert f"--events {events}: there is no folder {events.parent}; write: mkdir -p" in capsys.readouterr().err
    assert main(["launch", "-n", "1", "--events", str(tmp_path), str(script)]) == 2
    assert f"--events {tmp_path} is a folder; write e.g. --events {tmp_path}/events.jsonl" in capsys.readouterr().err


def test_processes_on_the_cpu_leave_one_for_an_accelerator(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    assert main(["launch", "-n", "2", "--on-cpu", "2", str(script)]) == 2
    assert "--on-cpu 2 leaves none of 2 process(es) for an accelerator; write e.g. -n 2 --on-cpu 1" in (
        capsys.readouterr().err
    )
