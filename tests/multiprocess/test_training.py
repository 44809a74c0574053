"""Training over real processes: the same numbers as one process, the same errors everywhere."""

import functools
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxche
from jaxche.cluster import launch

PROGRAM = Path(__file__).with_name("program.py")
pytestmark = pytest.mark.usefixtures("forked")


def run(what, folder, processes=2, env=None, **options):
    env = {"PYTHONWARNINGS": "error", **(env or {})}
    code = launch([sys.executable, str(PROGRAM), what, str(folder)], processes, env=env, **options)
    return code, [json.loads(p.read_text()) for p in sorted(Path(folder).glob("*.json"))]


@pytest.fixture(scope="module")
def program(load):
    return load("program")


@pytest.fixture(scope="module")
def here(program, devices):
    """What one process computes."""
    problem, two = program.Problem(), devices[:2]
    results = {name: program.train(problem, replicas=two, **given) for name, given in program.CONFIGURATIONS.items()}
    return json.loads(json.dumps(results)), program.published(two)


@pytest.mark.parametrize("accelerated", [(), (0,)], ids=["all on the CPU", "one on an accelerator"])
def test_two_processes_compute_what_one_process_with_two_devices_does(program, tmp_path, here, stand_ins, accelerated):
    code, (zero, one) = run("results", tmp_path, env=stand_ins(*accelerated))
    assert code == 0
    assert zero == one  # every host saw the same rounds and holds the same parameters, bit for bit
    assert zero["private"] == [rank in accelerated for rank in range(2)]
    trained, published = here
    for name in program.CONFIGURATIONS:
        flat = [np.concatenate([np.ravel(x) for x in _leaves(r["trees"])]) for r in (zero[name], trained[name])]
        np.testing.assert_allclose(*flat, rtol=1e-5, atol=1e-6, err_msg=name)
        told = [np.array(list(_leaves(r["told"])), np.float64) for r in (zero[name], trained[name])]
        np.testing.assert_allclose(*told, rtol=1e-4, atol=1e-6, err_msg=name)
    wires, _ = zero["wires"]  # both processes measure, and take codes after the same round
    assert wires == sorted(wires)
    assert set(wires) == {"float32", "int4"}
    wanted = {name: gain for name, (_, gain) in program.PUBLISHED.items()}
    assert zero["published"] == pytest.approx(wanted, rel=1e-6)
    assert published == pytest.approx(wanted, rel=1e-6)


@pytest.fixture(scope="module")
def devices_alone(program, devices):
    """Trains so many devices of one process: the parameters, their averages, and what was told of the rounds."""

    @functools.cache
    def train(world):
        problem = program.Problem()
        trainer = jaxche.Trainer(program.Sums.loss, optax.adam(0.05), replicas=devices[:world], ema=0.2)
        state = trainer.init(problem.params)
        told = []
        for counts in program.COUNTS:
            state, info = trainer.round(state, problem.data, counts=counts if world > 1 else (sum(counts),))
            told.append([info.counts, info.loss, info.drift, info.losses])
        state, _ = trainer.round(state, problem.data, counts=(1,) * world)
        averages = trainer.params(trainer.with_ema(state))
        return jax.device_get([trainer.params(state), averages]), json.loads(json.dumps(told))

    return train


@pytest.mark.parametrize(
    ("what", "accelerated"),
    [
        *(
            (what, ())
            for what in ("one device each", "islands", "unequal islands", "wide islands", "one island", "host")
        ),
        ("one device each", (0,)),
        ("islands", (0,)),
        ("unequal islands", (1,)),
    ],
)
def test_islands_of_one_and_of_several_processes_train_as_devices_do(
    program, tmp_path, devices_alone, stand_ins, what, accelerated
):
    sizes, groups = program.ISLANDS[what]
    env = stand_ins(*accelerated, devices=max(sizes))
    code, results = run(what, tmp_path, processes=len(sizes), env=env, hang_timeout_s=60.0)
    assert code == 0
    world = len(groups)
    here, told = devices_alone(world)
    for process, result in enumerate(results):
        for trees, found in zip(here, result["trees"], strict=True):
            for name, leaf in trees.items():
                np.testing.assert_allclose(found[name], leaf, rtol=1e-5, atol=1e-6)
        shown = [np.array(list(_leaves(t)), np.float64) for t in (result["told"], told)]
        np.testing.assert_allclose(*shown, rtol=1e-4, atol=1e-4)
        assert result["rates"] == world
        assert result["torn"][0] == ("OSError" if process == 1 else "RankError")
        assert "disk on fire" in result["torn"][1]
        mine = next(group for group in groups if process in group)
        assert result["cut"] == (1 if what == "host" else sum(sizes[p] for p in mine))
        for found in result["donated"]:
            assert found["equal"]
            assert found["taken"] == [False, True]
            kind = "OSError" if process == 1 else "RankError"
            for errors in found["errors"]:  # a replica of one process does not read all batches
                assert errors[:2] == [kind, kind]
                assert errors[2] == (kind if (0, 1) in groups else None)


def test_replicas_of_a_process_merge_within_rounds_as_in_one_process(program, tmp_path, devices):
    code, (zero, one) = run("groups", tmp_path)
    assert code == 0
    problem = program.Problem()
    for name, options in program.GROUPS.items():
        assert zero[name] == one[name]
        assert zero[name]["measured"]
        given = {"groups": [[0, 1], [2, 3]], "replicas": devices[:4]}
        here = json.loads(json.dumps(program.groups(problem, options, **given)))
        for what in ("trees", "told"):
            shown = [np.array(list(_leaves(result[what])), np.float64) for result in (zero[name], here)]
            np.testing.assert_allclose(*shown, rtol=1e-4, atol=1e-5, err_msg=f"{name}, {what}")
    # Measurements are exchanged beside the last steps of a round, and those of these steps in the next one.
    found, (history, other) = zero["beside"], [jaxche.History.from_json(p["beside"]["history"]) for p in (zero, one)]
    assert all(found[name] == one["beside"][name] for name in ("trees", "late"))
    assert [(a.losses, a.sent_after) for a in history] == [(b.losses, b.sent_after) for b in other]
    assert all(0 < sent < n for info in history[2:] for sent, n in zip(info.sent_after, info.counts, strict=True))
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), overlap=0.5, replicas=devices[:4])
    state, again = trainer.replay(trainer.init(problem.params, problem.model_state), problem.data, history)
    shown = [[list(_leaves(info.losses)) for info in rounds] for rounds in (history, again)]
    np.testing.assert_allclose(*shown, rtol=1e-4)
    trees = jax.device_get((trainer.params(state), trainer.model_state(state)))
    shown = [list(_leaves(trees)), list(_leaves(found["trees"]))]
    np.testing.assert_allclose(*(np.concatenate([np.ravel(x) for x in one]) for one in shown), rtol=1e-4, atol=1e-5)
    sent, is_finite, failed = found["late"]
    assert sent < 3
    assert is_finite
    assert failed == [3, True, True]
    kind, message = found["ended"]
    assert (kind, one["beside"]["ended"][0]) == ("RankError", "NonFiniteLossError")
    assert message.startswith("rank 3 failed in round 4 with NonFiniteLossError")
    # The ways in which "auto" merges, in turns.
    assert zero["kinds"]["trees"] == one["kinds"]["trees"]
    history = jaxche.History.from_json(zero["kinds"]["history"])
    assert [(info.policy, info.overlap) for info in history] == program.KINDS
    fleet = jaxche.VirtualFleet(ms_per_batch=[20] * 4, sync_ms=5.0)
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), policy="auto", replicas=devices[:4], fleet=fleet)
    state, again = trainer.replay(trainer.init(problem.params, problem.model_state), problem.data, history)
    shown = [[list(_leaves(info.losses)) for info in rounds] for rounds in (history, again)]
    np.testing.assert_allclose(*shown, rtol=1e-4)
    trees = jax.device_get((trainer.params(state), trainer.model_state(state)))
    shown = [list(_leaves(trees)), list(_leaves(zero["kinds"]["trees"]))]
    np.testing.assert_allclose(*(np.concatenate([np.ravel(x) for x in one]) for one in shown), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_island_of_several_processes_that_is_late_stops_after_the_same_step_in_all(tmp_path):
    code, results = run("late", tmp_path, processes=3)
    assert code == 0
    rounds = results[0]
    assert results == [rounds] * 3
    _, _, planned, counts = rounds[0]
    assert planned == [6, 6]
    assert counts[0] in (2, 4)  # of 0.4 s each, in 1.2 s
    read = []
    for epoch, cursor, planned, counts in rounds:
        starts = (cursor, cursor + planned[0])
        read += [(epoch, start + i) for start, n in zip(starts, counts, strict=True) for i in range(n)]
    assert sorted(read) == [(epoch, i) for epoch in range(2) for i in range(20)]


@pytest.mark.parametrize("accelerated", [(), (0,)], ids=["all on the CPU", "one on an accelerator"])
def test_pipelines_in_processes_of_their_own_train_as_in_one(program, tmp_path, devices, stand_ins, accelerated):
    code, (zero, one) = run("pipelines", tmp_path, env=stand_ins(*accelerated, devices=2))
    assert code == 0
    assert zero["torn"][0] == "RankError"
    assert one["torn"] == ["OSError", "disk on fire"]
    assert (zero["trees"], zero["told"]) == (one["trees"], one["told"])
    here = json.loads(json.dumps(program.pipelines(program.Problem(), [devices[:2], devices[2:4]])))
    for what in ("trees", "told"):
        shown = [np.array(list(_leaves(result[what])), np.float64) for result in (zero, here)]
        np.testing.assert_allclose(*shown, rtol=1e-5, atol=1e-6, err_msg=what)


def test_what_goes_wrong_on_one_rank_is_an_error_on_all_and_training_goes_on(tmp_path):
    code, (zero, one) = run("faults", tmp_path)
    assert code == 0
    assert zero["torn"] == ["RankError", "rank 1 failed in round 0 with OSError: disk on fire"]
    assert one["torn"] == ["OSError", "disk on fire"]
    assert zero["nan"][0] == one["nan"][0] == "NonFiniteLossError"
    assert zero["nan"][1].startswith("the loss of rank 1 became nan in round 0")
    assert zero["plan"][0] == one["plan"][0] == "PlanMismatchError"
    assert "ranks [1]" in zero["plan"][1]
    assert zero["after"] == one["after"] == [0, True]
    refused = "data.epoch(1) has 14 batches, but len(data) is 13"
    assert zero["epochs"][0] == one["epochs"][0] == one["own epochs"][0] == "ValueError"
    assert zero["own epochs"][0] == "RankError"
    for name in ("epochs", "own epochs"):
        assert refused in zero[name][1]
        assert refused in one[name][1]
        assert zero[name][2] == one[name][2] == [1, 0]
    assert zero["stream"] == one["stream"]
    assert zero["stream"][1].startswith("data[0] is not the same when it is read again")
    assert zero["seed"][0] == one["seed"][0] == "ValueError"
    names = {
        "shuffled": ["data"],
        "contents": ["data"],
        "params": ["params/w"],
        "constants": ["constants of loss_fn/0"],
        "tx": ["code of tx"],
        "outer": ["code of outer"],
        "loss": ["code of loss_fn"],
        "che": ["che.anchor", "che.min_anchor", "che.batch_counts"],
        "data": ["batches", "data"],
    }
    assert zero["different"] == one["different"] == names
    differ = ["ValueError", "processes differ; run the same script and data everywhere:"]
    assert zero["fit"]["epochs"] == one["fit"]["epochs"] == differ
    assert zero["fit"]["one is saved"] == one["fit"]["one is saved"] == differ
    assert zero["fit"]["no epochs"][0] == zero["fit"]["own folders"][0] == "RankError"
    assert one["fit"]["no epochs"] == ["ValueError", "epochs=0 must be a whole number above 0; write epochs=3"]
    assert one["fit"]["own folders"][0] == "ValueError"
    assert "is not the folder that process 0 has under that name" in one["fit"]["own folders"][1]
    assert zero["loss"][0] == "RankError"
    assert one["loss"][0] == "ValueError"
    assert zero["pace"][0] == "RankError"
    assert "PaceError" in zero["pace"][1]
    assert one["pace"][0] == "PaceError"
    assert zero["stopped"] == one["stopped"]
    assert zero["stopped"][0] == 4  # asked in round 2, told in the merge of round 3


def test_an_error_nobody_catches_ends_all_processes_with_it(tmp_path, capfd):
    start = time.monotonic()
    code, results = run("uncaught", tmp_path, grace_s=2.0)
    assert code != 0
    assert results == []
    assert time.monotonic() - start < 60
    err = capfd.readouterr().err
    assert "OSError: disk on fire" in err


def _leaves(tree):
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree)]
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    else:
        yield np.nan if tree is None else tree
