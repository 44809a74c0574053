"""`jaxche plan`."""

import contextlib
import io
import json
import re
import shlex
import sys
from typing import NamedTuple

import jax
import pytest

from jaxche.cli import _plan, main
from jaxche.cli._main import make_parser
from jaxche.cli._plan import _smaller
from jaxche.cluster import fake_devices
from jaxche.sharding import as_bytes, compare_strategies

SMALL = ["plan", "--task", "digits", "--devices", "4", "--batch-size", "16"]
NAMES = ["NoShard()", "ShardGradOp()", "FullShard()", "HybridShardGradOp(4)", "HybridShard(4)"]


class Row(NamedTuple):
    needed: int
    sent: int
    params: int
    fits: bool


@pytest.fixture(autouse=True)
def _fewer_devices(monkeypatch):
    """A plan has a process of its own; here all share one of eight devices."""

    def some(count):
        return jax.devices()[:count] if count < jax.device_count() else fake_devices(count)

    monkeypatch.setattr("jaxche.cluster.fake_devices", some)


def plan(capsys, *words):
    code = main(["plan", "--task", "digits", *words])
    return code, *capsys.readouterr()


def table(out):
    """By strategy: bytes in all, bytes sent, bytes of parameters, and whether it fits."""
    found = {}
    for line in out.splitlines():
        if line.endswith(("yes", "no")) and line.split()[0] in NAMES:
            params, _, _, _, needed, sent, _ = map(as_bytes, re.findall(r"[\d.]+ [KM]?i?B", line))
            found[line.split()[0]] = Row(needed, sent, params, line.endswith("yes"))
    return found


@pytest.fixture(scope="module")
def whole_table():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["plan", "--task", "digits"]) == 0
    return out.getvalue()


@pytest.mark.slow
def test_every_strategy_and_the_cheapest(whole_table):
    rows = table(whole_table)
    assert list(rows) == NAMES
    assert all(row.fits for row in rows.values())
    assert whole_table.splitlines()[0] == "task digits, batches of 64 on 8 devices, compiled for cpu"
    assert "\nadvice: NoShard(), the default of the trainer: no other strategy sends less\n" in whole_table
    assert "\nnext: jaxche.Trainer(loss_fn, tx), in which each device is a replica\n" in whole_table
    assert all(len(line) <= 100 for line in whole_table.splitlines())
    assert rows["FullShard()"].params < rows["NoShard()"].params / 4


def test_cheapest_strategy_within_the_memory(capsys, whole_table):
    sizes = sorted(row.needed for row in table(whole_table).values())
    between = (sizes[0] + sizes[-1]) // 2
    code, out, _ = plan(capsys, "--memory", str(between))
    found = table(out)
    assert code == 0
    assert all(len(line) <= 100 for line in out.splitlines())
    assert all(row.fits == (row.needed <= between) for row in found.values())
    fitting = {name: row.sent for name, row in found.items() if row.fits}
    assert 0 < len(fitting) < len(NAMES)
    named = re.search(r"\nadvice: (\w+\(\d*\))", out)[1]
    assert fitting[named] == pytest.approx(min(fitting.values()), rel=0.01)


def test_details(capsys, whole_table):
    words = ["--devices", "2", "--accumulate", "2", "--compute-dtype", "bfloat16", "--details"]
    code, out, _ = plan(capsys, *words)
    assert code == 0
    assert list(table(out)) == NAMES[:3]  # two devices have no nodes
    assert "FullShard() on 2 devices: shard 2" in out
    assert "parameters stay whole on every device" not in out
    # Gathered in 2 bytes twice for each of 2 micro-batches, and summed in 4: as much as float32 once, times 2.
    theory = re.search(r"FullShard.*?in theory ([\d.]+ KiB)", out, re.S)[1]
    whole = table(whole_table)["NoShard()"].params
    assert as_bytes(theory) == pytest.approx(4 * whole / 2, rel=0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "lots"], "memory='lots'"),
        (["--intra-node-size", "3"], "--intra-node-size 3 does not divide the 8 devices; write --intra-node-size 2"),
        (["--devices", "16"], "--devices 16: JAX has already started with 8"),
        (["--batch-size", "60"], "60 rows, which 8 devices"),
    ],
)
def test_invalid_arguments(words, message, capsys):
    code, _, err = plan(capsys, *words)
    assert code == 2
    assert err.startswith("jaxche plan: error: ")
    assert message in err


def test_nodes_of_one_device_are_no_advice(capsys, devices, monkeypatch):
    monkeypatch.setattr(_plan, "_devices", lambda count: devices[:count])
    code, _, err = plan(capsys, "--devices", "7", "--intra-node-size", "4")
    assert code == 2
    assert "--intra-node-size 4 does not divide the 7 devices; leave it out" in err


@pytest.mark.parametrize(
    "words",
    [
        ["--devices", "0"],
        ["--devices", "10001"],
        ["--task", "none"],
        ["--compute-dtype", "int8"],
        ["--intra-node-size", "1"],
    ],
)
def test_unparsable_arguments(words):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    assert stop.value.code == 2


@pytest.mark.slow
def test_no_strategy_fits(capsys):
    assert main([*SMALL, "--memory", "1KiB"]) == 1
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines())
    assert "\nnothing fits 1.0 KiB; " in out
    assert table(out)
    assert not any(row.fits for row in table(out).values())
    assert "--accumulate 2" in next(line for line in out.splitlines() if line.startswith("next: "))


@pytest.fixture
def asked(monkeypatch):
    """The strategies that were asked for; only the first of them is compiled."""
    asked = []

    def first(*values, strategies, **more):
        asked.append(strategies)
        return compare_strategies(*values, strategies=strategies[:1], **more)

    monkeypatch.setattr("jaxche.sharding.compare_strategies", first)
    return asked


@pytest.mark.parametrize("devices", [1, 3])
def test_nodes_of_an_odd_number_of_devices(devices, asked, capsys):
    assert plan(capsys, "--devices", str(devices), "--batch-size", "3")[0] == 0
    assert len(asked[0]) == 3


def test_the_suggested_line_runs(asked, capsys):
    # 4 rows on 2 devices: 2 micro-batches of a row each, so only more devices help.
    line = "plan --task digits --devices 2 --batch-size 4 --compute-dtype bfloat16 --memory 1KiB --accumulate 2"
    said = _smaller(make_parser().parse_args(line.split()), 4)
    assert main(shlex.split(said)[1:]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("task digits, batches of 4 on 4 devices")
    assert err == ""
    assert len(asked[0]) == 5


@pytest.mark.parametrize(
    ("words", "then"),
    [
        ("--devices 4 --batch-size 16", "--devices 4 --batch-size 16 --accumulate 2"),
        ("--devices 4 --batch-size 16 --accumulate 4", "--batch-size 16 --accumulate 2"),  # 8 devices are the default
        ("--devices 4 --batch-size 4", "--batch-size 8"),
        ("--devices 3 --batch-size 9", "--devices 6 --batch-size 18"),
        ("--intra-node-size 2 --details", "--intra-node-size 2 --accumulate 2 --details"),
    ],
)
def test_suggested_micro_batches(words, then):
    args = make_parser().parse_args(["plan", *words.split(), "--memory", "1KiB"])
    said = shlex.split(_smaller(args, args.batch_size or 64))[2:]
    again = make_parser().parse_args(["plan", *said])
    assert (again.batch_size or 64) % (again.devices * again.accumulate) == 0
    wanted = make_parser().parse_args(["plan", *then.split(), "--memory", "1KiB"])
    assert vars(again) == vars(wanted)


MODEL = """\
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


def make_model(width=64):
    return nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(4)]), np.zeros((5, 32), np.float32)


def sized(width, depth):
    return make_model(width)


def broken():
    return load()


def load():
    raise KeyError("no such checkpoint")


def concrete():
    return {"w": jnp.zeros(4) if float(jnp.zeros(())) else jnp.ones(4)}


rows = 3
"""


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """Writes the user's file; the command changes the path and the modules of its process."""
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("sys.argv", list(sys.argv))
    monkeypatch.chdir(tmp_path)

    def write(text=MODEL, name="users_model.py"):
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
        (tmp_path / name).write_text(text)
        return name

    yield write
    sys.modules.pop("users_model", None)


def run(capsys, *words):
    return main(["plan", *words]), *capsys.readouterr()


def test_plan_of_a_function_in_a_file(user_file, capsys, tmp_path):
    code, out, err = run(capsys, f"{user_file()}:make_model", "--devices", "4", "-o", "plan.json")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "users_model.py:make_model with 2,372 parameters, batches of 8 on 4 devices, compiled for cpu"
    assert "loss: the mean square of the outputs; with Adam" in lines
    assert lines[-1] == "written to plan.json"
    rows = json.loads((tmp_path / "plan.json").read_text())
    assert [row["strategy"] for row in rows] == [*NAMES[:3], "HybridShardGradOp(2)", "HybridShard(2)"]
    assert rows[0]["params"] == 4 * 2372


def test_plan_of_a_function_in_a_module_of_this_folder(user_file, capsys, tmp_path):
    user_file()
    code, out, _ = run(capsys, "users_model:make_model", "--devices", "3", "--batch-size", "12", "--out", "plan.txt")
    assert code == 0
    assert "batches of 12 on 3 devices" in out
    assert out.startswith((tmp_path / "plan.txt").read_text())


def test_the_suggested_line_has_the_model(user_file, capsys):
    code, out, _ = run(capsys, f"{user_file()}:make_model", "--devices", "4", "--memory", "1KiB")
    assert code == 1
    words = shlex.split(out.splitlines()[-1])
    assert words[:4] == ["next:", "jaxche", "plan", "users_model.py:make_model"]
    assert sorted(words[4:]) == sorted(["--devices", "4", "--memory", "1KiB", "--accumulate", "2"])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("make_model", "'make_model' names no function; write FILE.py:FUNCTION, e.g. train.py:make_model"),
        ("users_model.py:", "write FILE.py:FUNCTION"),
        ("other.py:make_model", "no file 'other.py' in "),
        ("no_such_module:make", "no module 'no_such_module' from "),
        ("users_model.py:make", "users_model.py has no function 'make'; it has make_model, sized, broken, load, conc"),
        ("users_model.py:rows", "users_model.py:rows is a value of type int, not a function; write in users_model.py"),
        ("users_model.py:sized", "sized needs width, depth, and a plan calls it without arguments; give them defaults"),
    ],
)
def test_invalid_targets(target, message, user_file, capsys):
    user_file()
    code, _, err = run(capsys, target, "--devices", "2")
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_the_users_traceback_is_kept(user_file, capsys):
    code, _, err = run(capsys, f"{user_file()}:broken", "--devices", "2")
    assert code == 2
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "users_model.py" in lines[1]
    assert "in broken" in lines[1]
    assert err.count("in load") == 1
    assert "KeyError: 'no such checkpoint'" in lines
    assert lines[-1] == "jaxche plan: error: users_model.py:broken raised KeyError; its traceback is above"
    code, _, err = run(capsys, "users_model.py:concrete", "--devices", "2")
    assert code == 2
    assert "in concrete" in err
    assert "raised ConcretizationTypeError; its traceback is above" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_package\n", "users_model.py raised ModuleNotFoundError; its traceback is above"),
        ("def f(:\n", "users_model.py raised SyntaxError"),
        ("raise SystemExit(3)\n", "ended with code 3; put what it runs as a script under if __name__ == '__main__':"),
        ("import sys\nassert sys.argv == ['users_model.py']\n", "has no function 'make'; it has none"),
    ],
)
def test_a_file_that_cannot_be_imported(text, message, user_file, capsys):
    code, _, err = run(capsys, f"{user_file(text)}:make", "--devices", "2")
    assert code == 2
    assert message in err


def test_one_model_at_a_time(user_file, capsys):
    code, _, err = run(capsys, f"{user_file()}:make_model", "--task", "digits")
    assert code == 2
    assert "are two models; leave one of them out" in err


def test_out_that_cannot_be_written(asked, capsys, tmp_path):
    code, _, err = run(capsys, *SMALL[1:], "-o", str(tmp_path / "none" / "plan.txt"))
    assert code == 2
    assert "plan.txt: No such file or directory; write e.g. --out plan.txt" in err
