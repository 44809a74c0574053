"""Runs of real processes that stop, die, hang or are preempted, and continue from their checkpoints."""

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxche.cluster import launch

PROGRAM = Path(__file__).with_name("resumed.py")
pytestmark = pytest.mark.usefixtures("forked")


def run(folder, what="nothing", round=0, processes=2, rules="plain", grace_s=2.0, **options):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(PROGRAM), what, str(round), str(folder), rules]
    code = launch(command, processes, grace_s=grace_s, **options)
    return code, [json.loads(p.read_text()) for p in sorted(folder.glob("[0-9].json"))]


def read(rounds):
    """The batches that a run trained on, by its record."""
    return [(epoch, cursor + i) for _, epoch, cursor, counts, _ in rounds for i in range(sum(counts))]


@pytest.fixture(scope="module")
def program(load):
    return load("resumed")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    code, (zero, one) = run(tmp_path_factory.mktemp("undisturbed"))
    assert code == 0
    assert zero == one
    return zero


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Makes folders of a run that stopped early, which has run once."""
    first = tmp_path_factory.mktemp("stopped")
    code, results = run(first, "stop", 3)
    assert code == 0
    assert [len(r["rounds"]) for r in results] == [5, 5]
    assert max(int(p.name) for p in (first / "checkpoints").iterdir() if p.name.isdigit()) == 5

    def copy(folder):
        shutil.copytree(first / "checkpoints", folder / "checkpoints")

    return copy


def test_a_run_that_stopped_goes_on_bit_for_bit(undisturbed, stopped, tmp_path):
    stopped(tmp_path)
    code, results = run(tmp_path)
    assert code == 0
    assert results == [undisturbed, undisturbed]


# Killed on the CPU alone: `test_a_rank_that_dies_and_one_that_hangs_are_made_up_for`.
@pytest.mark.parametrize(("what", "first", "accelerated"), [("TERM", 143, ()), ("KILL", 137, (0,))])
def test_a_run_that_ended_early_goes_on_bit_for_bit(undisturbed, tmp_path, stand_ins, what, first, accelerated):
    env = stand_ins(*accelerated)
    code, results = run(tmp_path, what, 3, env=env)
    assert code == first
    assert results == []
    saved = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    assert saved in ((3, 4) if what == "KILL" else (5,))
    code, results = run(tmp_path, env=env)
    assert code == 0
    assert results == [undisturbed, undisturbed]


@pytest.mark.slow
def test_a_rank_that_dies_and_one_that_hangs_are_made_up_for(undisturbed, tmp_path, json_lines):
    events = tmp_path / "events.jsonl"
    code, results = run(tmp_path / "dies", "KILL", 2, max_restarts=1, events=events)
    assert code == 0
    assert results == [undisturbed, undisturbed]
    told = json_lines(events)
    rounds = [event for event in told if event["event"] == "round"]
    assert {(e["rank"], e["round"]) for e in rounds if e["restart"]} >= {(r, n) for r in (0, 1) for n in range(4, 9)}
    assert all(e["steps"] == 2 and e["merged_bytes"] == 4 * 12 for e in rounds)
    code, results = run(tmp_path / "hangs", "STOP", 4, max_restarts=1, hang_timeout_s=12.0)
    assert code == 0
    assert results == [undisturbed, undisturbed]


def test_another_number_of_processes_goes_on(program, undisturbed, stopped, tmp_path, devices):
    stopped(tmp_path)
    code, results = run(tmp_path, processes=3)
    assert code == 0
    (zero, one, two) = results
    assert zero == one == two
    assert zero["rounds"][:5] == undisturbed["rounds"][:5]
    assert read(zero["rounds"]) == [(e, i) for e in range(program.EPOCHS) for i in range(12)]
    problem = program.Problem()
    trainer = problem.trainer(3, replicas=devices[:3])
    state, _ = trainer.fit(
        trainer.init(problem.params),
        problem.data,
        program.EPOCHS,
        progress=False,
        checkpoints=tmp_path / "checkpoints",
    )
    here = jax.device_get(trainer.params(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.float32(b), rtol=1e-6), here, dict(zero["params"]))


def test_a_checkpoint_that_one_process_cannot_read_is_set_aside_by_all(undisturbed, stopped, tmp_path, capfd):
    stopped(tmp_path)
    code, results = run(tmp_path, "UNREADABLE 5")
    assert code == 0
    assert results == [undisturbed, undisturbed]
    assert "checkpoint 5 cannot be read and is set aside" in capfd.readouterr().err
    assert (tmp_path / "checkpoints" / "unreadable-5").is_dir()


@pytest.mark.parametrize(
    ("what", "elastic"),
    [("FULL", True), ("FULL zero", False), ("FULL zero folders", False), ("FULL zero folders", True)],
)
def test_a_disk_that_is_full_for_one_process_costs_all_a_checkpoint(undisturbed, tmp_path, capfd, what, elastic):
    code, results = run(tmp_path, what, 3, elastic=elastic)
    err = capfd.readouterr().err
    assert code == 0, err
    assert results == [undisturbed, undisturbed]
    missing = [int(step) for step in re.findall(r"\[0\] WARNING:jaxche:checkpoint (\d+) is missing: ", err)]
    assert 5 in missing  # the one before was perhaps written already, and the one after is perhaps not yet
    assert set(missing) <= {4, 5, 6}
    assert not re.findall(r"\[1\] .*checkpoint \d+ is missing", err)
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.suffix != ".jsonl")
    assert steps == sorted(str(step) for step in range(10) if step not in missing)[-3:]


@pytest.mark.parametrize("elastic", [False, True])
def test_a_last_checkpoint_without_space_is_an_error_on_all(undisturbed, tmp_path, capfd, elastic):
    code, results = run(tmp_path, "FULL last", 5, elastic=elastic)
    err = capfd.readouterr().err
    assert code == 1, err
    assert results == []
    for rank in range(2):
        assert f"[{rank}] OSError: the last checkpoint, 9, is missing: File too large in {tmp_path}" in err
    assert len(list((tmp_path / "checkpoints").glob("[0-9]*"))) == 3  # older ones are kept in its place
    code, results = run(tmp_path)
    assert code == 0
    assert results == [undisturbed, undisturbed]


def test_data_that_one_rank_cannot_read_ends_all_by_name_and_keeps_the_checkpoint(
    undisturbed, tmp_path, capfd, monkeypatch
):
    # On a busy machine a process needs more than a second to print its error.
    monkeypatch.setattr("jaxche.cluster._worker_group._ERROR_OUTPUT_S", 30.0)
    code, results = run(tmp_path, "error", 4, grace_s=30.0)
    assert code == 1
    assert results == []
    said = capfd.readouterr().err.splitlines()
    assert "[1] OSError: disk on fire" in said
    assert "[1] raised on rank 1 in round 4; the state from before it is intact" in said
    assert [
        line for line in said if line.startswith("[0] jaxche.distributed._group.RankError: rank 1 failed in round 4")
    ]
    assert [line for line in said if line.startswith("[0] ") and "OSError: disk on fire" in line]
    assert max(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()) == 4
    code, results = run(tmp_path)
    assert code == 0
    assert results == [undisturbed, undisturbed]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "accelerated", "rules"),
    [
        ("LOST", (), "plain"),
        ("KILL", (), "plain"),
        ("LOST", (0, 1), "plain"),
        ("KILL", (), "codes"),
        ("LOST donated", (), "gradients"),
    ],
    ids=["without checkpoints", "with checkpoints", "on accelerators", "codes", "donated"],
)
def test_survivors_go_on_in_memory(program, tmp_path, devices, what, capfd, stand_ins, accelerated, rules):
    options = {"elastic": True, "events": tmp_path / "events.jsonl", "env": stand_ins(*accelerated), "rules": rules}
    code, (zero, two) = run(tmp_path / "run", what, 3, processes=3, **options)
    err = capfd.readouterr().err
    assert code == 0, err
    assert "rank 1 was ended by SIGKILL" in err
    assert zero == two
    told = [json.loads(line) for line in options["events"].read_text().splitlines()]
    assert {event["event"] for event in told} == {"start", "round", "exit", "end"}  # no restart
    died = next(event["time"] for event in told if event["event"] == "exit" and event.get("signal"))
    after = min(event["time"] for event in told if event["event"] == "round" and event["time"] > died)
    assert after - died < 30
    # Nor does a save that the death broke hold up those who are done.
    last = max(event["time"] for event in told if event["event"] == "round")
    assert max(event["time"] for event in told if event["event"] == "exit") - last < 25
    # Every batch of every epoch once, by three and then by two.
    rounds = zero["rounds"]
    assert [len(counts) for _, _, _, counts, _ in rounds] == [3] * 4 + [2] * (len(rounds) - 4)
    assert read(rounds) == [(e, i) for e in range(program.EPOCHS) for i in range(12)]
    # The same steps on devices of one process.
    problem = program.Problem()
    first, second = (
        problem.trainer(n, replicas=[devices[i] for i in ids], **program.RULES[rules])
        for n, ids in ((3, (0, 1, 2)), (2, (0, 2)))
    )
    state = first.init(problem.params)
    for _, _, _, counts, _ in rounds[:4]:
        state, _ = first.round(state, problem.data, counts=counts)
    other = second.init(problem.params)
    place = {name: getattr(state, name) for name in ("round", "epoch", "cursor")}
    other = dataclasses.replace(other, local_states=(state.local_states[0], state.local_states[2]), **place)
    for _, _, _, counts, loss in rounds[4:]:
        other, info = second.round(other, problem.data, counts=counts)
        assert info.loss == pytest.approx(loss, rel=1e-5)
    here = jax.device_get(second.params(other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.float32(b), rtol=1e-5, atol=1e-6), here, zero["params"])


@pytest.mark.parametrize(("what", "rules"), [("LOST", "scaled"), ("JOIN", "scaled gradients")])
def test_one_that_is_left_goes_on_by_the_rules_of_several(program, tmp_path, devices, what, rules, capfd):
    options = {"elastic": True, "max_restarts": int(what == "JOIN")}
    code, results = run(tmp_path / "run", what, 3, rules=rules, **options)
    err = capfd.readouterr().err
    assert code == 0, err
    zero = results[0]
    assert results == [zero] * (2 if what == "JOIN" else 1)
    rounds = zero["rounds"]
    worlds = [len(counts) for _, _, _, counts, _ in rounds]
    assert worlds[:5] == [2, 2, 2, 2, 1]
    assert worlds[-1] == (2 if what == "JOIN" else 1)
    # A replica that takes no steps adds nothing to a merge.
    problem = program.Problem()
    trainer = problem.trainer(2, replicas=devices[:2], **program.RULES[rules])
    state = trainer.init(problem.params)
    for _, epoch, cursor, counts, loss in rounds:
        assert (epoch, cursor) == (state.epoch, state.cursor)
        state, info = trainer.round(state, problem.data, counts=(*counts, 0)[:2])
        assert info.loss == pytest.approx(loss, rel=1e-5)
    assert state.epoch == (program.MANY_EPOCHS if what == "JOIN" else program.EPOCHS)
    assert trainer.noise(state).unbias > 0
    here = jax.device_get(trainer.params(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.float32(b), rtol=1e-4, atol=1e-5), here, zero["params"])


@pytest.mark.parametrize(("what", "processes"), [("KILL zero", 3), ("LOST zero", 2)])
def test_the_loss_of_process_0_costs_what_another_costs(program, tmp_path, capfd, json_lines, what, processes):
    events = tmp_path / "events.jsonl"
    code, results = run(tmp_path / "run", what, 3, processes=processes, elastic=True, events=events)
    err = capfd.readouterr().err
    assert code == 0, err
    assert f"process 0 died: continuing from round 4 with {processes - 1}" in err
    assert len(results) == processes - 1
    assert all(result == results[0] for result in results)
    rounds = results[0]["rounds"]
    assert [len(counts) for _, _, _, counts, _ in rounds][:5] == [processes] * 4 + [processes - 1]
    assert read(rounds) == [(e, i) for e in range(program.EPOCHS) for i in range(12)]
    told = json_lines(events)
    died = next(event["time"] for event in told if event["event"] == "exit" and event.get("signal"))
    assert min(event["time"] for event in told if event["event"] == "round" and event["time"] > died) - died < 15
    if what == "KILL zero":  # the others wrote the record and the last checkpoint, from which a new start ends at once
        record = (tmp_path / "run" / "checkpoints" / "history.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in record] == list(range(len(rounds)))
        code, again = run(tmp_path / "run", processes=processes)
        assert code == 0
        assert again == [results[0]] * processes


@pytest.mark.slow
@pytest.mark.parametrize(("what", "processes"), [("JOIN zero", 3), ("JOIN saved zero", 2)])
def test_a_replacement_of_process_0_joins_the_survivors(program, tmp_path, capfd, what, processes):
    code, results = run(tmp_path / "run", what, 3, processes=processes, elastic=True, max_restarts=1)
    err = capfd.readouterr().err
    assert code == 0, err
    assert "process 0 joined: continuing" in err
    assert results == [results[0]] * processes
    rounds = results[0]["rounds"]
    worlds = [len(counts) for _, _, _, counts, _ in rounds]
    few = worlds.count(processes - 1)
    assert few
    assert worlds == [processes] * 4 + [processes - 1] * few + [processes] * (len(worlds) - 4 - few)
    assert worlds[-1] == processes
    assert read(rounds) == [(e, i) for e in range(program.MANY_EPOCHS) for i in range(12)]


@pytest.mark.parametrize("what", ["FIRST zero unsaved", "MERGE zero unsaved", "END zero"])
def test_process_0_dies_in_a_merge_and_at_the_end(program, tmp_path, capfd, what):
    code, results = run(tmp_path / "run", what, 3 if "MERGE" in what else 5, processes=3, elastic=True)
    err = capfd.readouterr().err
    assert code == 0, err
    assert "GetKeyValue() timed out" not in err  # Gloo's wait of 30 s for the address of a process that died
    assert results == [results[0]] * 2
    assert read(results[0]["rounds"]) == [(e, i) for e in range(program.EPOCHS) for i in range(12)]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["sender", "candidate", "member"])
def test_a_death_in_an_admission_costs_another_try(program, tmp_path, capfd, moment):
    what, victim = f"JOIN unsaved dies-{moment}", {"sender": 0, "candidate": 1, "member": 2}[moment]
    code, results = run(tmp_path / "run", what, 3, processes=3, elastic=True, max_restarts=2)
    err = capfd.readouterr().err
    assert code == 0, err
    assert len(results) >= 2
    assert all(result == results[0] for result in results)
    assert read(results[0]["rounds"]) == [(e, i) for e in range(program.MANY_EPOCHS) for i in range(12)]
    assert f"rank {victim} was ended by SIGKILL" in err
    if moment == "sender":
        assert "was not admitted, and tries again" in err


def test_a_death_while_the_survivors_of_another_begin_to_save_stops_nobody(program, tmp_path, capfd):
    options = {"processes": 3, "elastic": True, "hang_timeout_s": 40.0}
    code, (zero,) = run(tmp_path / "run", "KILL dies-reopening", 3, **options)
    err = capfd.readouterr().err
    assert code == 0, err
    assert "rank 1 was ended by SIGKILL" in err
    assert "rank 2 was ended by SIGKILL" in err
    worlds = [len(counts) for _, _, _, counts, _ in zero["rounds"]]
    assert worlds == [3] * 4 + [1] * (len(worlds) - 4)
    assert read(zero["rounds"]) == [(e, i) for e in range(program.EPOCHS) for i in range(12)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rules"),
    [("JOIN", "plain"), ("JOIN saved", "plain"), ("JOIN saved", "codes")],
    ids=["without checkpoints", "with checkpoints", "codes"],
)
def test_a_replacement_joins_the_survivors(program, tmp_path, devices, what, rules, capfd, json_lines):
    options = {"elastic": True, "max_restarts": 1, "events": (events := tmp_path / "events.jsonl"), "rules": rules}
    code, results = run(tmp_path / "run", what, 3, processes=3, **options)
    err = capfd.readouterr().err
    assert code == 0, err
    zero = results[0]
    assert results == [zero, zero, zero]  # the record too, which the third has been given
    told = json_lines(events)
    assert [(event["event"], event["rank"]) for event in told if event["event"] in ("start", "replace")] == [
        *[("start", rank) for rank in range(3)],
        ("replace", 1),
        ("start", 1),
    ]
    rounds = zero["rounds"]
    worlds = [len(counts) for _, _, _, counts, _ in rounds]
    two = worlds.count(2)
    assert worlds == [3] * 4 + [2] * two + [3] * (len(worlds) - 4 - two)
    assert two
    assert worlds[-1] == 3
    assert read(rounds) == [(e, i) for e in range(program.MANY_EPOCHS) for i in range(12)]
    # An undisturbed run of three, on devices of one process.
    problem = program.Problem()
    trainer = problem.trainer(3, replicas=devices[:3], **program.RULES[rules])
    _, history = trainer.fit(trainer.init(problem.params), problem.data, epochs=program.MANY_EPOCHS, progress=False)
    assert rounds[-1][-1] == pytest.approx(history[-1].loss, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["plain", "scaled", "codes", "overlapped"])
def test_the_others_take_local_steps_while_a_replacement_gets_its_state(program, tmp_path, capfd, rules):
    options = {"elastic": True, "max_restarts": 1, "rules": rules}
    code, results = run(tmp_path / "run", "JOIN unsaved late", 3, processes=3, **options)
    err = capfd.readouterr().err
    assert code == 0, err
    assert results == [results[0]] * 3
    counts = [counts for _, _, _, counts, _ in results[0]["rounds"]]
    first = max(i for i, found in enumerate(counts) if len(found) == 2) + 1
    assert counts[first][1] == 0
    assert min(counts[first][0], counts[first][2]) > 0
    assert counts[first + 1][1] > 0
    assert read(results[0]["rounds"]) == [(e, i) for e in range(program.MANY_EPOCHS) for i in range(12)]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["JOIN unsaved stream", "JOIN unsaved stream restored"])
def test_a_stream_is_read_once_by_survivors_and_a_replacement(program, tmp_path, capfd, what):
    code, results = run(tmp_path / "run", what, 4, processes=3, elastic=True, max_restarts=1)
    err = capfd.readouterr().err
    assert code == 0, err
    assert results == [results[0]] * 3
    rounds = results[0]["rounds"]
    worlds = [len(counts) for _, _, _, counts, _ in rounds]
    assert {2, 3} == set(worlds)
    assert worlds[-1] == 3
    assert read(rounds) == [(e, i) for e in range(program.MANY_EPOCHS) for i in range(12)]
    _, _, cursor, _, _ = rounds[max(i for i, world in enumerate(worlds) if world == 2) + 1]
    assert cursor > 0, "the replacement came at the start of an epoch, where nothing has to be skipped"
    # A source with a state goes back; another is read again.
    assert ("were read again and skipped" in err) == ("restored" not in what)


@pytest.mark.slow
def test_a_death_takes_its_group_and_a_replacement_brings_it_back(program, tmp_path, capfd):
    options = {"elastic": True, "max_restarts": 1, "rules": "groups"}
    code, results = run(tmp_path / "run", "JOIN", 3, processes=3, **options)
    err = capfd.readouterr().err
    assert code == 0, err
    assert results == [results[0]] * 3
    rounds = results[0]["rounds"]
    worlds = [len(counts) for _, _, _, counts, _ in rounds]
    four = worlds.count(4)
    assert four
    assert worlds == [6] * 4 + [4] * four + [6] * (len(worlds) - 4 - four)
    assert read(rounds) == [(e, i) for e in range(program.MANY_EPOCHS) for i in range(12)]


@pytest.mark.slow
def test_a_rank_that_is_stopped_holds_up_nobody(program, tmp_path, capfd, json_lines):
    events = tmp_path / "events.jsonl"
    options = {"elastic": True, "heartbeat_timeout_s": 4.0, "hang_timeout_s": 16.0, "events": events}
    code, results = run(tmp_path / "run", "STOP unsaved", 3, processes=3, **options)
    err = capfd.readouterr().err
    assert code == 0, err
    assert len(results) == 2
    assert results[0] == results[1]
    rounds = results[0]["rounds"]
    assert [len(counts) for _, _, _, counts, _ in rounds] == [3] * 4 + [2] * (len(rounds) - 4)
    told = json_lines(events)
    # The others did not wait for the launcher, which puts an end to the stopped one after its silence.
    assert [event["rank"] for event in told if event["event"] == "hang"] == [1]
    hang = next(event["time"] for event in told if event["event"] == "hang")
    rounds_of_two = [event for event in told if event["event"] == "round" and event["round"] >= 4]
    assert max(event["time"] for event in rounds_of_two) < hang
    # By the names that the launcher has for them.
    assert {event["rank"] for event in rounds_of_two} == {0, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    ["CUT", "PAUSE6 unsaved", "PAUSE6 unsaved zero"],
    ids=["connections end", "stopped in a merge", "process 0 stopped"],
)
def test_a_merge_that_fails_while_all_live_costs_a_round_and_nobody(program, tmp_path, capfd, what, json_lines):
    # A merge fails long before the process that is stopped counts as dead.
    env = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_cpu_collective_timeout_seconds=3"}
    events = tmp_path / "events.jsonl"
    code, results = run(tmp_path / "run", what, 3, processes=3, elastic=True, events=events, env=env)
    err = capfd.readouterr().err
    assert code == 0, err
    assert "a merge failed, but no process died: continuing from round 4 with 3" in err
    zero = results[0]
    assert results == [zero, zero, zero]
    assert all(len(counts) == 3 for _, _, _, counts, _ in zero["rounds"])
    assert read(zero["rounds"]) == [(e, i) for e in range(program.EPOCHS) for i in range(12)]
    told = json_lines(events)
    assert [(event["rank"], event["code"]) for event in told if event["event"] == "exit"].count((1, 0)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rules"),
    [("PAUSE8 unsaved", "plain"), ("PAUSE8 unsaved zero", "plain"), ("PAUSE8 unsaved", "overlapped")],
)
def test_a_rank_that_is_stopped_for_long_is_detected_and_comes_back_by_itself(program, tmp_path, capfd, what, rules):
    options = {"elastic": True, "heartbeat_timeout_s": 4.0, "hang_timeout_s": 40.0}
    code, results = run(tmp_path / "run", what, 3, processes=3, rules=rules, **options)
    err = capfd.readouterr().err
    assert code == 0, err
    zero = results[0]
    assert results == [zero, zero, zero]
    worlds = [len(counts) for _, _, _, counts, _ in zero["rounds"]]
    two, first = worlds.count(2), worlds.index(2)
    # With overlap the merge of the round before may have been in flight, which then is dropped too.
    assert first in ((4,) if rules == "plain" else (3, 4))
    assert worlds == [3] * first + [2] * two + [3] * (len(worlds) - first - two)
    assert worlds[-1] == 3
    assert read(zero["rounds"]) == [(e, i) for e in range(program.MANY_EPOCHS) for i in range(12)]


@pytest.mark.slow
def test_a_replacement_that_would_be_in_another_fit_leaves_again(program, tmp_path, capfd):
    code, results = run(tmp_path / "run", "JOIN unsaved twice", 3, processes=3, elastic=True, max_restarts=1)
    err = capfd.readouterr().err
    assert code == 0, err
    assert "came when fit 1 of its script had ended" in err
    assert "joined: continuing" not in err
    assert len(results) == 2
    assert results[0] == results[1]
    assert [len(counts) for _, _, _, counts, _ in results[0]["rounds"]].count(3) == 4


@pytest.mark.slow
@pytest.mark.parametrize("what", ["AGAIN", "AGAIN zero"])
def test_two_processes_take_in_replacement_after_replacement(program, tmp_path, capfd, what):
    code, results = run(tmp_path / "run", what, processes=2, elastic=True, max_restarts=program.DEATHS)
    err = capfd.readouterr().err
    assert code == 0, err
    assert err.count("joined: continuing") == program.DEATHS
    assert len(results) == 2
    assert results[0] == results[1]
    rounds = results[0]["rounds"]
    assert len(rounds[-1][3]) == 2
    assert read(rounds) == [(e, i) for e in range(program.MORE_EPOCHS) for i in range(12)]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["evaluates", "evaluates unsaved"])
def test_a_death_in_an_evaluation_costs_no_round(program, tmp_path, capfd, what):
    code, results = run(tmp_path / "run", what, processes=3, elastic=True)
    err = capfd.readouterr().err
    assert code == 0, err
    assert "the evaluation after round 3 failed" in err
    assert len(results) == 2
    assert results[0] == results[1]
    rounds, validation = results[0]["rounds"], results[0]["validation"]
    assert read(rounds) == [(e, i) for e in range(program.EPOCHS) for i in range(12)]
    # The evaluation after the second epoch is made up for after the next round, by two.
    after = sum(sum(counts) for _, _, _, counts, _ in rounds[:5])
    assert [steps for steps, _ in validation] == sorted({12, after, 36})


@pytest.mark.slow
@pytest.mark.parametrize("what", ["LOST", "CUT unsaved"], ids=["a process dies", "connections end"])
def test_a_merge_in_flight_that_fails_costs_its_round_and_the_next(program, tmp_path, capfd, what):
    code, results = run(tmp_path / "run", what, 3, processes=3, rules="overlapped", elastic=True)
    err = capfd.readouterr().err
    assert code == 0, err
    zero = results[0]
    assert results == [zero] * (2 if what == "LOST" else 3)
    # Either all had the merge of round 3 when the connections ended, or none continues from it.
    assert "continuing from round 3" in err or "continuing from round 4" in err
    worlds = [len(counts) for _, _, _, counts, _ in zero["rounds"]]
    assert worlds[:3] == [3, 3, 3]
    assert worlds[-1] == len(results)
    assert read(zero["rounds"]) == [(e, i) for e in range(program.EPOCHS) for i in range(12)]


def test_overlapped_merges_give_what_one_process_gets(program, tmp_path, devices):
    code, (zero, one) = run(tmp_path / "run", "unsaved", rules="overlapped")
    assert code == 0
    assert zero == one
    problem = program.Problem()
    trainer = problem.trainer(2, replicas=devices[:2], **program.RULES["overlapped"])
    state, history = trainer.fit(trainer.init(problem.params), problem.data, program.EPOCHS, progress=False)
    assert [info.counts for info in history] == [tuple(counts) for _, _, _, counts, _ in zero["rounds"]]
    assert any(info.overlapped for info in history)
    here = jax.device_get(trainer.params(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.float32(b), rtol=1e-5, atol=1e-6), here, zero["params"])
    averages = jax.tree.leaves(jax.device_get(state.local_states[0].ema))
    pairs = zip(averages, zero["averages"], strict=True)
    assert all(np.allclose(x, np.float32(found), rtol=1e-5, atol=1e-6) for x, found in pairs)
    assert not np.allclose(averages[0], here["b"], rtol=1e-3)
