"""The history of a run."""

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxche.reports import History


def test_efficiency(round_info):
    assert round_info(sync_ms=0.0).efficiency == pytest.approx(1.0)
    assert round_info().efficiency == pytest.approx(200 / 210)
    slow = round_info(counts=(1, 1), wall_ms=(20.0, 50.0), sync_ms=0.0)
    assert slow.efficiency == pytest.approx(2 / (50 * (1 / 20 + 1 / 50)))  # R v_min / sum v
    assert slow.wait_ms == (30.0, 0.0)
    assert History([round_info(), round_info(round=1)]).efficiency == pytest.approx(200 / 210)
    assert History([round_info(), round_info(round=1)]).seconds == pytest.approx(0.42)


def test_learning_rates_are_scaled_where_one_of_them_was(round_info):
    assert not History([round_info()]).scaled
    assert History([round_info(), round_info(round=1, progress=2.0)]).scaled


def test_idle_replicas_have_no_speed(round_info):
    idle = round_info(counts=(3, 0), wall_ms=(60.0, 0.0), sync_ms=0.0, losses=(1.0, math.nan))
    assert idle.efficiency == pytest.approx(1.0)
    assert History([idle, idle]).efficiency == pytest.approx(1.0)


@pytest.mark.parametrize(("worlds", "last"), [((3, 3, 2, 2), 2), ((2, 3, 2), 1), ((2, 2, 2), 3), ((), 0)])
def test_rounds_with_the_final_ranks(worlds, last, round_info):
    history = History([round_info(counts=(4,) * world, round=r) for r, world in enumerate(worlds)], [{"rank": 0}])
    assert [info.round for info in history.last_ranks] == list(range(len(worlds)))[len(worlds) - last :]
    assert history.last_ranks.memory == history.memory


def test_a_sum_of_histories_is_one(round_info):
    one, other = History([round_info()], [{"rank": 0}]), History([round_info(round=1)])
    for both in (one + other, other + one):
        assert isinstance(both, History)
        assert sorted(info.round for info in both) == [0, 1]
        assert both.memory == one.memory


def test_a_copy_is_a_history(round_info):
    history = History([round_info()], [{"rank": 0}])
    copy = history.copy()
    copy.append(round_info(round=1))
    assert (len(history), len(copy), copy.table().count("\n"), copy.memory) == (1, 2, 2, history.memory)


def test_effective_batch(round_info):
    """(10, 4) steps, weighted by their number: (sum of n^2 / 14)^2 over (sum of n^3 / 14^2), batches of 32."""
    assert round_info().effective_batch == pytest.approx(32 * (116 / 14) / (1064 / 196))
    assert round_info(average="gradients").effective_batch == 32 * 14


def test_a_second_line_of_a_round_with_its_evaluation_replaces_the_first(round_info, told):
    first, last = round_info(), round_info(round=1)
    evaluated = replace(last, validation={"loss": 0.5})
    lines = History([first, last, evaluated]).to_json()
    assert told(History.from_json(lines)) == told([first, evaluated])
    other = replace(evaluated, loss=0.1)  # of another run
    assert len(History.from_json(lines + History([other]).to_json())) == 3


def test_json_round_trip(tmp_path: Path, told, round_info):
    history = History([round_info(), round_info(round=1, loss=0.25)])
    path = tmp_path / "history.jsonl"
    text = history.to_json(path)
    assert path.read_text() == text
    assert [json.loads(line)["round"] for line in text.splitlines()] == [0, 1]
    for source in (path, str(path), text):
        assert told(History.from_json(source)) == told(history)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        History.from_json("nowhere/history.jsonl")
    with pytest.raises(ValueError, match=r"source=3 is no file; write History\.from_json\(Path"):
        History.from_json(3)


def test_json_of_nan_and_infinity(told, round_info):
    odd = replace(
        round_info(losses=(1.0, math.nan)), noise=math.inf, loss=-math.inf, metrics={"a": math.inf, "b": math.nan}
    )
    text = History([odd]).to_json()
    json.loads(text, parse_constant=pytest.fail)  # nothing but what every reader of JSON knows
    back = History.from_json(text)[0]
    assert math.isnan(back.losses[1])
    assert math.isnan(back.metrics["b"])
    assert (back.noise, back.loss, back.metrics["a"]) == (math.inf, -math.inf, math.inf)
    assert math.isnan(back.progress)
    whole = replace(odd, losses=(1.0, math.inf), metrics={"a": math.inf}, progress=4.0)
    assert told(History.from_json(History([whole]).to_json())) == told([whole])


def test_rounds_are_equal_to_their_copies(round_info):
    info = replace(round_info(losses=(1.0, math.nan)), metrics={"a": math.nan}, validation={"b": math.nan})
    history = History([info, round_info(round=1)], [{"rank": 0}])
    for copied in (pickle.loads(pickle.dumps(history)), History.from_json(history.to_json())):
        assert isinstance(copied, History)
        assert copied == history
    assert pickle.loads(pickle.dumps(history)).memory == history.memory
    for other in ({"losses": (1.0, 1.0)}, {"losses": (1.0,)}, {"metrics": {"c": math.nan}}, {"noise": 1.0}):
        assert info != replace(info, **other)
    assert info != "a round"


def test_what_is_no_round_is_refused():
    for rounds, shown in (([1], "1"), ("history.jsonl", "'h'")):
        with pytest.raises(ValueError, match=rf"a list of RoundInfo, and {shown} is none; .*History\.from_json\(Path"):
            History(rounds)
    with pytest.raises(ValueError, match=r"and \{'round': 0\} is none"):
        History().append({"round": 0})


def test_invalid_file():
    with pytest.raises(ValueError, match="line 1"):
        History.from_json('{"step": 3}\n')


def test_a_table_has_a_row_or_more(round_info):
    with pytest.raises(ValueError, match="rows=0 must be at least 1"):
        History([round_info()]).table(0)


def test_table_header(round_info):
    history = History([round_info(round=r) for r in range(30)])
    lines = history.table(rows=5).splitlines()
    assert len(lines) == 6
    assert lines[0].split()[:4] == ["round", "epoch", "counts", "loss"]
    assert "accuracy" in lines[0]
    assert "10 4" in lines[1]
    html = history._repr_html_()
    assert html.count("<tr>") == 21
    assert "30 rounds, 6.3 s, efficiency 95.2%" in html
    assert History().table() == "no rounds yet"
    assert "no rounds yet" in History()._repr_html_()


def test_metric_names_are_escaped(round_info):
    names = {"<script>alert(1)</script>": 0.5, "top & 5": 0.25}
    history = History([replace(round_info(), metrics=names)])
    page = f"<div>{history._repr_html_()}</div>"
    titles = [cell.text for cell in ElementTree.fromstring(page).iter("th")]
    assert titles[-2:] == list(names)
    assert "<script" not in page


def test_damaged_lines(tmp_path, told, round_info, caplog):
    history, path = History([round_info(round=r) for r in range(3)]), tmp_path / "history.jsonl"
    first, second, third = history.to_json().encode().splitlines(keepends=True)
    path.write_bytes(first + b"\0" * 9 + b"\n" + second[:50] + b"\n" + third + first[:20])
    with pytest.raises(ValueError, match=r"line 2 of .*history\.jsonl.*skip_damaged=True"):
        History.from_json(path)
    with pytest.raises(ValueError, match="line 2 of the text"):
        History.from_json(path.read_text())
    assert not caplog.records
    assert told(History.from_json(path, skip_damaged=True)) == told([history[0], history[2]])
    assert "history.jsonl: 2 damaged lines are left out of the record (the first is line 2)" in caplog.text


def test_rounds_with_other_metrics_are_in_one_table(round_info):
    history = History([round_info((2, 1), metrics={}), round_info((2, 1), metrics={"accuracy": 0.5})])
    assert [row["accuracy"] for row in history.rows()] == [pytest.approx(math.nan, nan_ok=True), 0.5]
    titles, first, second = (line.split() for line in history.table().splitlines())
    assert len(titles) == len(first) - 2 == len(second) - 2  # counts and waits have two numbers


def test_metrics_are_columns_whatever_their_names(round_info):
    history = History([round_info(metrics={"accuracy": 0.25, "loss": 7.0})])
    [row] = history.rows()
    assert (row["loss"], row["metric loss"], row["accuracy"]) == (1.0, 7.0, 0.25)
    for text in (history.table(), repr(history), history._repr_html_()):
        assert "accuracy" in text
        assert "0.25" in text


def test_metrics_whose_names_end_as_those_of_times_keep_their_digits(round_info):
    history = History([round_info(metrics={"rms": 0.0123}, validation={"rms": 0.0456})])
    assert {"0.0123", "0.0456"} <= set(history.table().split())


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"metrics": {}}, "round 0, epoch 0: loss 1, 10:4 steps, 200 ms + 10 ms merge, efficiency 95.24 %"),
        (
            {
                "metrics": {},
                "counts": (1, 1),
                "rows": (2300, 900),
                "shares": (23, 9),
                "joined": 2,
                "loss": 0.123456,
                "round": 12,
            },
            "round 12, epoch 0: loss 0.1235, 2,300:900 rows, 200 ms + 10 ms merge, efficiency 95.24 %",
        ),
        (
            {"metrics": {}, "counts": (3,), "wall_ms": (412.3456,), "sync_ms": 0.0},
            "round 0, epoch 0: loss 1, 3 steps, 412.3 ms, efficiency 100 %",
        ),
        (
            {"metrics": {"accuracy": 0.25}, "validation": {"loss": 0.51239, "accuracy": 0.5}},
            "round 0, epoch 0: loss 1, accuracy 0.25, validation loss 0.5124, validation accuracy 0.5, 10:4 steps, "
            "200 ms + 10 ms merge, efficiency 95.24 %",
        ),
        (
            {"metrics": dict.fromkeys("abcde", 2.0)},
            "round 0, epoch 0: loss 1, a 2, b 2, c 2, d 2, ..., 10:4 steps, 200 ms + 10 ms merge, efficiency 95.24 %",
        ),
    ],
)
def test_repr_of_a_round(fields, shown, round_info):
    info = round_info(**fields)
    assert repr(info) == f"RoundInfo({shown})"


def test_repr_of_a_round_of_many_ranks_is_short(round_info):
    assert len(repr(round_info(counts=tuple(range(1, 65))))) < 110


def test_evaluations_are_in_the_table_and_the_file(told, round_info):
    history = History(
        [round_info(), round_info(round=1, steps_done=28, validation={"loss": 0.5, "accuracy": math.nan})]
    )
    first, last = history.rows()
    assert (last["validation_loss"], math.isnan(first["validation_loss"])) == (0.5, True)
    assert list(first) == list(last)
    assert "validation_loss" in history.table()
    assert [line.split()[-2:] for line in history.table().splitlines()[1:]] == [["-", "-"], ["0.5", "-"]]
    assert "validation_accuracy" in history._repr_html_()
    assert told(History.from_json(history.to_json())) == told(history)
    assert "validation" not in History([round_info()]).table()


def test_files_of_earlier_versions_are_read(told, round_info):
    line = json.loads(History([round_info()]).to_json())
    for name in ("clock_ms", "steps_done", "examples_done", "validation"):
        del line[name]
    assert told(History.from_json(json.dumps(line) + "\n")) == told([round_info()])
    del line["loss"]
    with pytest.raises(ValueError, match="not a round"):
        History.from_json(json.dumps(line) + "\n")
