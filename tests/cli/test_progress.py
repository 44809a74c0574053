"""The history of a run over several starts, and its result."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxche.cli import main
from jaxche.cli._progress import Progress
from jaxche.cli._replay import recorded_arguments
from jaxche.cli._result import result_from_history
from jaxche.cli._run_folder import read_params, refuse_directory, write_atomic, write_policy
from jaxche.cli._worker import _DONE, _earlier_result
from jaxche.reports import History


@pytest.fixture
def infos(round_info):
    """Makes rounds of these numbers, two in an epoch."""

    def make(*numbers, **changes):
        fields = {"wall_ms": (200.0, 190.0), "examples": 100} | changes
        return [round_info(round=number, epoch=number // 2, **fields) for number in numbers]

    return make


@pytest.fixture
def start(infos):
    """Starts a run of three epochs, or starts it again, and gives the function that ends rounds of it."""

    def begin(folder):
        trainer = SimpleNamespace(policy="cadence", world_size=2)
        progress = Progress(trainer, SimpleNamespace(metric="accuracy"), 3, folder)

        def rounds(*numbers, **changes):
            for info in infos(*numbers, **changes):
                progress(None, info)

        return rounds

    return begin


def record(folder):
    return [info.round for info in History.from_json(folder / "history.jsonl")]


@pytest.mark.usefixtures("undrawn")
def test_each_round_is_saved_and_can_be_reported(tmp_path, start):
    start(tmp_path)(0, 1, 2)
    assert record(tmp_path) == [0, 1, 2]
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"round": 3, "ep')  # cut off
    assert main(["report", str(tmp_path)]) == 0
    assert "the last 3 of 3 rounds" in (tmp_path / "report.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"history.jsonl", "report.html"}


def test_repeated_rounds_are_saved_once(tmp_path, start):
    start(tmp_path)(0, 1, 2, 3)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"round": 4, "ep')
    second = start(tmp_path)
    second(3, 4)
    assert record(tmp_path) == [0, 1, 2, 3, 4]
    second(2, 3)  # back, after the death of a process
    assert record(tmp_path) == [0, 1, 2, 3]
    start(tmp_path)(0)  # no checkpoint could be read
    assert record(tmp_path) == [0]


def test_an_evaluation_is_printed_with_the_time_of_all_starts(tmp_path, capsys, start):
    start(tmp_path)(0, 1)
    start(tmp_path)(2, 3, validation={"accuracy": 0.5})
    assert capsys.readouterr().out.splitlines()[-1] == "epoch 2 of 3: test accuracy 50.0 % after 0.8 s"


def test_result_covers_all_rounds(infos):
    history = History([*infos(0, 1, 2), *infos(3, validation={"accuracy": 0.9})])
    result = result_from_history("cadence", history, (50.0, 20.0))
    assert result.test == {"accuracy": 0.9}
    assert result.seconds == pytest.approx(4 * 0.21)
    assert result.examples_per_second == pytest.approx(400 / 0.84)
    assert result.efficiency == pytest.approx(56 / 70 / 0.84)
    assert result.wait_share == pytest.approx((0.0, 0.04 / 0.84))
    assert result.sync_share == pytest.approx(0.04 / 0.84)


def test_result_covers_rounds_with_the_final_ranks(tmp_path, infos):
    history = History([*infos(0, 1), *infos(2, counts=(7,), wall_ms=(140.0,)), *infos(3, 4)])
    result = result_from_history("cadence", history, (50.0, 20.0))
    assert (result.rounds, result.batches, len(result.wait_ms)) == (2, 28, 2)
    history.to_json(tmp_path / "history.jsonl")
    assert main(["report", str(tmp_path)]) == 0


def test_a_later_start_overwrites_files(tmp_path, infos):
    for value in (1.0, 2.0):
        write_policy(tmp_path, History(infos(0)), {"w": value})
    assert read_params(tmp_path / "params")["w"] == 2.0


def test_done_file_marks_a_finished_policy(tmp_path, infos):
    assert _earlier_result(tmp_path) is None
    result = result_from_history("sync", History(infos(0, validation={"accuracy": 0.9})), (50.0, 20.0))
    write_atomic(tmp_path / _DONE, json.dumps(result.to_dict()))
    assert json.dumps(_earlier_result(tmp_path).to_dict()) == json.dumps(result.to_dict())
    assert [path.name for path in tmp_path.iterdir()] == [_DONE]


def test_a_full_disk_leaves_a_file_as_it_was(tmp_path, monkeypatch, infos):
    write_policy(tmp_path, History(infos(0)), {"w": 1.0})
    before = (tmp_path / "history.jsonl").read_text()
    write = Path.write_text

    def part(self, text, encoding):
        write(self, text[:10], encoding)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", part)
    with pytest.raises(OSError, match="No space left"):
        write_policy(tmp_path, History(infos(0, 1)), {"w": 2.0})
    assert (tmp_path / "history.jsonl").read_text() == before
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("text", [b"", b"\0" * 40, b'{"results": ', b"7", b"\xff{}"])
def test_a_damaged_result_is_ignored(tmp_path, caplog, text, start):
    start(tmp_path)(0, 1)
    for name in ("result.json", _DONE):
        (tmp_path / name).write_bytes(text)
    assert main(["report", str(tmp_path)]) == 0
    assert "2 rounds" in (tmp_path / "report.html").read_text()
    assert caplog.text.count("result.json cannot be read and is ignored") == 1
    assert _earlier_result(tmp_path) is None
    out = str(tmp_path)
    refuse_directory(tmp_path, out, resumable=True)  # the run continues from its checkpoints, and writes them again
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ValueError, match="exists; choose another --name"):
        refuse_directory(tmp_path, out, resumable=True)


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_record_is_reported_but_not_replayed(tmp_path, caplog, start):
    start(tmp_path)(0, 1)
    file = tmp_path / "history.jsonl"
    file.write_bytes(file.read_bytes() + b"\0\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "history.jsonl: 1 damaged line is left out" in caplog.text
    result = {"arguments": {"compare": None}, "devices": ["cpu"]}
    (tmp_path / "result.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match=r"line 3 of .*history\.jsonl"):
        recorded_arguments(SimpleNamespace(replay=str(tmp_path)))
