"""`jaxche report`."""

import json
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from jaxche.cli import main
from jaxche.reports import History


@pytest.fixture
def history(round_info):
    def make(rounds=5):
        wall_ms = (200.0, 190.0)
        return History(round_info(round=r, cursor=14 * r, wall_ms=wall_ms, loss=1 / (r + 1)) for r in range(rounds))

    return make


def result(*policies):
    numbers = {
        "test": {"accuracy": 0.975},
        "seconds": 2.0,
        "examples": 4200,
        "batches": 133,
        "rates": [50.0, 20.0],
        "wait_ms": [0.0, 10.0],
        "sync_ms": 94.0,
        "rounds": 5,
        "merges": 5,
        "memory": [{"rank": 0, "parameters": 2**20, "in all": 2**21}],
    }
    return {
        "task": "mnist",
        "metric": "accuracy",
        "results": {policy: numbers | {"policy": policy} for policy in policies},
        "command": ["jaxche", "train", "--name", "<mine>"],
        "versions": {"jax": "0.10"},
    }


class Loads(HTMLParser):
    """What a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.fetched, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        found = [values.get(name) for name in ("src", "href", "xlink:href", "data")]
        self.fetched += [v for v in found if v and not v.startswith("#")]
        assert tag not in ("script", "link", "iframe", "object")


def read(path):
    text = path.read_text(encoding="utf8")
    page = Loads()
    page.feed(text)
    assert page.fetched == []
    assert "url(http" not in text
    assert "@import" not in text
    return text, page


@pytest.mark.usefixtures("undrawn")
def test_next_command(tmp_path, capsys, history):
    folder = tmp_path / "my runs" / "it's"
    folder.mkdir(parents=True)
    history().to_json(folder / "history.jsonl")
    assert main(["report", str(folder)]) == 0
    words = shlex.split(capsys.readouterr().out.split(", or ")[1])
    assert words == ["jaxche", "report", str(folder), "--open"]


def test_report_is_one_file(tmp_path, capsys, history):
    history().to_json(tmp_path / "history.jsonl")
    (tmp_path / "result.json").write_text(json.dumps(result("cadence")))
    assert main(["report", str(tmp_path)]) == 0
    assert "next: open" in capsys.readouterr().out
    text, page = read(tmp_path / "report.html")
    assert page.tags.count("svg") == 1
    assert "<td>97.5 %</td>" in text
    assert "<td>95.0 %</td>" in text
    assert "&lt;mine&gt;" in text  # what others wrote is text, never markup
    assert "the last 5 of 5 rounds" in text
    # Letters are outlines, so what the picture says is in its comments.
    drawn = re.findall(r"<!-- (.*?) -->", text)
    assert any("Memory of a device" in line for line in drawn)


@pytest.mark.usefixtures("undrawn")
def test_table_of_rounds_with_any_metric_names(tmp_path, history):
    rounds = [replace(info, metrics={"top  5": 0.5, "loss of x": 0.25}) for info in history(2)]
    History(rounds).to_json(tmp_path / "history.jsonl")
    assert main(["report", str(tmp_path)]) == 0
    text, _ = read(tmp_path / "report.html")
    assert "<th>wait_ms</th><th>ms</th><th>top  5</th><th>loss of x</th></tr>" in text
    assert "<td>0 10</td><td>210</td>" in text.replace(".0", "")
    assert text.count("<td>0.5</td><td>0.25</td></tr>") == 2


@pytest.mark.usefixtures("undrawn")
def test_compared_policies_in_order(tmp_path, history):
    for policy in ("sync", "cadence"):
        (tmp_path / policy).mkdir()
        history().to_json(tmp_path / policy / "history.jsonl")
    (tmp_path / "result.json").write_text(json.dumps(result("sync", "cadence")))
    out = tmp_path / "elsewhere.html"
    assert main(["report", str(tmp_path), "-o", str(out)]) == 0
    text, page = read(out)
    assert page.tags.count("svg") == 2
    assert text.index("policy sync") < text.index("policy cadence")
    assert "<th>sync</th><th>cadence</th><th>cadence / sync</th>" in text


@pytest.mark.usefixtures("undrawn")
def test_report_of_an_unfinished_run(tmp_path, history):
    history(2).to_json(tmp_path / "history.jsonl")
    assert main(["report", str(tmp_path)]) == 0
    assert "2 rounds" in read(tmp_path / "report.html")[0]


@pytest.mark.parametrize("content", [None, ""])
def test_directory_without_a_run(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "history.jsonl").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    assert "it has no history.jsonl with a round" in capsys.readouterr().err


def test_names_are_escaped(tmp_path, history):
    name = "a&b <script>alert(1)<"
    for policy in ("sync", name):
        (tmp_path / name / policy).mkdir(parents=True)
        rounds = [replace(info, metrics={"<script>": 0.5}) for info in history(2)]
        History(rounds).to_json(tmp_path / name / policy / "history.jsonl")
    told = result("sync", name) | {"task": "<script>", "versions": {"<script>": "</pre><script>"}}
    (tmp_path / name / "result.json").write_text(json.dumps(told))
    assert main(["report", str(tmp_path / name)]) == 0
    text, page = read(tmp_path / name / "report.html")  # refuses a tag <script>
    assert "<title>a&amp;b &lt;script&gt;alert(1)&lt;</title>" in text
    assert "<th>a&amp;b &lt;script&gt;alert(1)&lt;</th>" in text
    assert page.tags.count("svg") == 2


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "told",
    [
        {"results": None},
        {"results": [1, 2]},
        {"results": {"sync": 3}},
        {"results": {"sync": {"loss": 0.5}}},
        {"metric": "f1"},
        {"command": 3},
        result("sync")["results"]["sync"] | {"seconds": "2 s"},
        result("sync")["results"]["sync"] | {"rates": []},
        result("sync")["results"]["sync"] | {"memory": [{"bytes": 3}]},
    ],
    ids=str,
)
def test_a_result_of_another_form_is_refused_with_the_line_to_write(told, tmp_path, capsys, history):
    history().to_json(tmp_path / "history.jsonl")
    told = {"results": {"sync": told}} if "policy" in told else told
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result("sync") | told))
    assert main(["report", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert f"{path} has another form than that of jaxche train" in shown
    _, old, new = shlex.split(re.search(r"write (mv .*), and jaxche report", shown)[1])
    path.rename(new)
    assert old == str(path)
    assert main(["report", str(tmp_path)]) == 0


@pytest.mark.usefixtures("undrawn")
def test_the_page_is_opened_in_the_browser(tmp_path, capsys, history, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    history().to_json(tmp_path / "history.jsonl")
    assert main(["report", str(tmp_path), "--open"]) == 0
    assert opened == [(tmp_path / "report.html").as_uri()]
    assert "next:" not in capsys.readouterr().out
