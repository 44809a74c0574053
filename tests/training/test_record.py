"""The record of a run that goes on: what was done again is not in it twice."""

import optax
import pytest

import jaxche
from jaxche.training._record import Record


@pytest.fixture
def rounds(problem, devices, lockstep):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), che=lockstep(), replicas=devices[:2])
    return trainer.fit(trainer.init(problem.params), problem.data, progress=False)[1]


def test_what_is_cut_is_gone_and_the_rest_goes_on(tmp_path, rounds, told):
    record = Record(tmp_path)
    assert record.cut(0) == []
    for info in rounds:
        record.add(info)
    assert told(record.cut(len(rounds))) == told(rounds)
    assert told(record.cut(2)) == told(rounds[:2])
    for info in rounds[2:]:
        record.add(info)
    assert told(Record(tmp_path).cut(99)) == told(rounds)
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]


def test_a_record_that_began_later_is_cut_by_the_numbers_of_its_rounds(tmp_path, rounds, told):
    record = Record(tmp_path)
    for info in rounds[1:]:
        record.add(info)
    assert told(record.cut(rounds[-1].round)) == told(rounds[1:-1])
    record.add(rounds[1])  # twice
    assert told(record.cut(99)) == told(rounds[1:-1])


def test_a_line_that_was_not_finished_is_not_read(tmp_path, rounds, told):
    record = Record(tmp_path)
    record.add(rounds[0])
    file = tmp_path / "history.jsonl"
    file.write_text(file.read_text() + '{"round": 1, "ep')
    assert told(record.cut(2)) == told(rounds[:1])
    assert file.read_text().endswith("}\n")
