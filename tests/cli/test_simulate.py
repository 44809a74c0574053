"""`jaxche simulate`."""

import re

import pytest

from jaxche.cli import main


def test_table_width(capsys):
    assert main(["simulate", "--ms", "20,50", "--rounds", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 ranks, 20 to 50 ms a batch, 8 ms a merge"
    assert "20 8" in lines[-4]
    assert all(len(line) <= 100 for line in lines)


def test_ten_thousand_ranks(capsys):
    assert main(["simulate", "--ranks", "10000", "--spread", "4", "--rounds", "4", "--jitter", "0.05"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("10000 ranks, 20 to 80 ms a batch")
    assert re.fullmatch(r"controller: [\d.]+ ms a report, [\d.]+ ms a plan", lines[-1])
    assert all(len(line) <= 100 for line in lines)


@pytest.mark.parametrize("option", ["-o", "--plot"])
def test_both_tuners_and_their_plots(option, capsys, tmp_path):
    words = ["--slowdown", "0@5x2", "--rounds", "10", "--tuner", "both", option, str(tmp_path / "fleet.PNG")]
    assert main(["simulate", *words]) == 0
    out = capsys.readouterr().out
    assert "tuner seed" in out
    assert "tuner steady" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fleet-seed.PNG", "fleet-steady.PNG"]


def test_the_same_seed_gives_the_same_fleet(capsys):
    def first_line(seed):
        main(["simulate", "--ranks", "5", "--jitter", "0.1", "--seed", seed, "--rounds", "3"])
        return capsys.readouterr().out.split("controller")[0]

    assert first_line("1") == first_line("1") != first_line("2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ms", "20"], "two or more ranks"),
        (["--spread", "4"], "--ranks 64 --spread 4"),
        (["--slowdown", "9@1x2"], "--slowdown: there is no rank 9, only 0 to 1"),
        (["--slowdown", "1@1x0.000001"], "--slowdown: the slowest device takes 4e+05 times"),
        (["--ms", "1e9,1e-6"], "--ms: the slowest device takes 1e+15 times as long as the fastest, and at most 10000"),
        (["--ms", "1e300,1e-300"], "--ms: the slowest device takes inf times"),
        (["--rounds", "2", "-o", "x.nothing"], "--out x.nothing"),
    ],
)
def test_invalid_arguments(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--slowdown", "0@1"], ["--ms", "20,50", "--ranks", "3"], ["--jitter", "2"]])
def test_unparsable_arguments(words):
    with pytest.raises(SystemExit) as stop:
        main(["simulate", *words])
    assert stop.value.code == 2
