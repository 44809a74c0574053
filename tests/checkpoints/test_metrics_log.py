"""The record of a run that continues: what was done again is not in it twice."""

from dataclasses import replace

import pytest

import jaxche
from jaxche.checkpoints import MetricsLog
from jaxche.distributed import Group


@pytest.fixture
def rounds(round_info):
    return [round_info(round=number) for number in range(4)]


def test_what_is_cut_is_gone_and_the_rest_goes_on(tmp_path, rounds, told):
    log = MetricsLog(Group(), tmp_path)
    assert log.truncate(0) == []
    for info in rounds:
        log.append(info)
    assert told(log.truncate(len(rounds))) == told(rounds)
    assert told(log.truncate(2)) == told(rounds[:2])
    for info in rounds[2:]:
        log.append(info)
    assert told(MetricsLog(Group(), tmp_path).truncate(99)) == told(rounds)
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]


def test_a_record_that_began_later_is_cut_by_the_numbers_of_its_rounds(tmp_path, rounds, told):
    log = MetricsLog(Group(), tmp_path)
    for info in rounds[1:]:
        log.append(info)
    assert told(log.truncate(rounds[-1].round)) == told(rounds[1:-1])
    log.append(rounds[1])  # twice
    assert told(log.truncate(99)) == told(rounds[1:-1])


def test_a_line_that_was_not_finished_is_not_read(tmp_path, rounds, told):
    log = MetricsLog(Group(), tmp_path)
    log.append(rounds[0])
    file = tmp_path / "history.jsonl"
    file.write_text(file.read_text() + '{"round": 1, "ep')
    assert told(log.truncate(2)) == told(rounds[:1])
    assert file.read_text().endswith("}\n")


DAMAGE = {
    "zeros": lambda line: b"\0" * len(line) + b"\n",
    "zeros before it": lambda line: b"\0" * 300 + line + b"\n",
    "torn": lambda line: line[: len(line) // 2] + b"\n",
    "no text": lambda line: b"\xff\xfe" + line + b"\n",
    "not a round": lambda line: b"7\n",
    "another kind of number": lambda line: line.replace(b'"round": 1', b'"round": "1"') + b"\n",
    "joined with the next": lambda line: line[: len(line) // 2],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_costs_its_round_and_is_told_once(tmp_path, rounds, told, caplog, damage):
    log, file = MetricsLog(Group(), tmp_path), tmp_path / "history.jsonl"
    for info in rounds:
        log.append(info)
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(lines[0] + b"\n" + DAMAGE[damage](lines[1]) + b"\n".join(lines[2:]))
    lost = 2 if damage == "joined with the next" else 1
    kept = [rounds[0], *rounds[1 + lost :]]
    for _ in range(2):
        assert told(log.truncate(4)) == told(kept)
    (warning,) = caplog.records
    assert warning.getMessage() == f"{file}: 1 damaged line is left out of the record (the first is line 2)"
    assert told(jaxche.History.from_json(file)) == told(kept)


@pytest.mark.parametrize("rest", [b"\0" * 40, b"\xff{", b'{"round": 2, "ep\0\0'])
def test_a_damaged_end_is_told(tmp_path, rounds, told, caplog, rest):
    """Unlike the line that a dying process did not finish."""
    log, file = MetricsLog(Group(), tmp_path), tmp_path / "history.jsonl"
    log.append(rounds[0])
    file.write_bytes(file.read_bytes() + b"\0\n" + rest)
    assert told(log.truncate(4)) == told(rounds[:1])
    assert "2 damaged lines are left out" in caplog.text


def test_a_last_line_without_its_end_is_a_round_if_it_is_whole(tmp_path, rounds, told, caplog):
    log, file = MetricsLog(Group(), tmp_path), tmp_path / "history.jsonl"
    for info in rounds[:2]:
        log.append(info)
    file.write_bytes(file.read_bytes()[:-1])
    assert told(log.truncate(4)) == told(rounds[:2])
    log.append(rounds[2])
    assert told(jaxche.History.from_json(file)) == told(rounds[:3])
    assert not caplog.records


def test_the_last_line_of_a_round_counts(tmp_path, rounds, told):
    log, evaluated = MetricsLog(Group(), tmp_path), replace(rounds[1], validation={"loss": 0.5})
    for info in (rounds[0], rounds[1], evaluated, rounds[2]):
        log.append(info)
    assert told(log.truncate(99)) == told([rounds[0], evaluated, rounds[2]])


def test_a_record_that_cannot_be_written_is_an_error(tmp_path, rounds):
    log = MetricsLog(Group(), tmp_path)
    (tmp_path / "history.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        log.append(rounds[0])


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path):
    (tmp_path / "history.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"history\.jsonl is a folder, and not the record of a run"):
        MetricsLog(Group(), tmp_path)
