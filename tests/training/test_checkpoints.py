"""Saved and found again: bit for bit with the same replicas, correctly with others, past what cannot be read."""

import errno
import functools
import gc
import itertools
import os
import re
import resource
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.checkpointers import async_checkpointer
from orbax.checkpoint._src.futures import future

import jaxche
from jaxche.checkpoints import MetricsLog, _writer
from jaxche.checkpoints._metadata import FORMAT
from jaxche.distributed import Group, PeerLostError
from jaxche.sharding import FullShard, ShardGradOp
from jaxche.training import _checkpoints, _preparation
from jaxche.training._checkpoints import CheckpointManager
from jaxche.training._plan import End


def noisy_loss(params, batch, rng, model_state):
    """Dropout, batch statistics and a counter that each replica advances by itself."""
    out = batch["x"] @ params["w"] + params["b"]
    error = jnp.tanh(out * jax.random.bernoulli(rng, 0.8, out.shape)) - batch["y"]
    after = {"mean": 0.9 * model_state["mean"] + 0.1 * out.mean(0), "steps": model_state["steps"] + 1}
    return jnp.mean(error**2), ({}, after)


@pytest.fixture
def model_state():
    return {"mean": np.zeros(2, np.float32), "steps": np.int32(0)}


def plain(state):
    """What the next round depends on, besides measured times."""
    correction = replace(state.correction, guard=replace(state.correction.guard, mean=0.0))
    numbers = (correction, state.round, state.epoch, state.cursor)
    return (state.params, state.opt_state, state.model_state, state.outer_state), numbers


def untimed(history):
    return [replace(info, wall_ms=(), sync_ms=0.0, clock_ms=0.0, noise=0.0) for info in history]


def stop_after(rounds):
    return lambda state, info: state.round == rounds


CASES = {
    "own moments": lambda che: {"che": che},
    "averaged moments, outer": lambda che: {
        "che": che,
        "opt_state": "average",
        "outer": optax.sgd(0.7, momentum=0.9),
    },
    "gradients": lambda che: {"policy": "sync", "rows": "equal"},
    "async": lambda che: {"policy": "async", "che": che},
    "scaled": lambda che: {"che": che, "scaling": jaxche.AdamScale()},
    "scaled gradients": lambda che: {"policy": "sync", "rows": "equal", "scaling": jaxche.AdaScale()},
    "one replica": lambda che: {"replicas": jax.devices()[:1]},
    "one replica, scaled": lambda che: {"replicas": jax.devices()[:1], "scaling": jaxche.AdaScale()},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:an outer optimizer over only")
@pytest.mark.parametrize("case", CASES)
def test_the_same_replicas_go_on_bit_for_bit(problem, model_state, devices, tmp_path, same, told, case, lockstep):
    def make():
        knobs = {"replicas": devices[:2]} | CASES[case](lockstep())
        return jaxche.Trainer(noisy_loss, optax.adam(0.05), **knobs)

    def run(trainer, callbacks=(), **options):
        state = trainer.init(problem.params, model_state)
        return trainer.fit(state, problem.data, epochs=3, progress=False, callbacks=callbacks, **options)

    first, second = make(), make()
    state, history = run(first)
    middle = len(history) // 2
    left, part = run(first, [stop_after(middle)], checkpoints=tmp_path)
    assert left.round == len(part) == middle
    resumed, record = run(second, checkpoints=tmp_path)
    same(plain(state)[0], plain(resumed)[0])
    if resumed.local_states[0].noise is not None:
        same([local.noise for local in state.local_states], [local.noise for local in resumed.local_states])
    assert plain(resumed)[1] == plain(state)[1]
    assert told(untimed(record)) == told(untimed(history))
    assert told(record[:middle]) == told(part)


@pytest.mark.skipif(jaxlib.__version__ == "0.11.2", reason="its compiler ends the process on such arrays")
@pytest.mark.parametrize(("replicas", "opt_state"), [(2, "average"), (2, "local"), (1, "average")])
def test_arrays_without_numbers_go_through_a_checkpoint(devices, tmp_path, same, replicas, opt_state):
    data = [np.full((2, 2), i, np.float32) for i in range(4)]

    def make(replicas):
        options = {"opt_state": opt_state, "replicas": devices[:replicas]}
        return jaxche.Trainer(lambda p, x: ((x @ p["w"] - 1) ** 2).mean(), optax.adam(0.1), **options)

    def run(one, epochs):
        state = one.init({"w": jnp.zeros(2), "none": jnp.zeros((0, 3), jnp.bfloat16)})
        return one.fit(state, data, epochs, progress=False, checkpoints=tmp_path)[0]

    saved, other = run(make(2), 1), make(replicas)
    found = run(other, 1)
    assert found.params["none"].shape == (replicas, 0, 3)
    assert found.params["none"].dtype == jnp.bfloat16
    same(jax.tree.map(lambda x: x[0], found.params), jax.tree.map(lambda x: x[0], saved.params))
    assert run(other, 2).epoch == 2
    assert not list(tmp_path.glob("unreadable-*"))


@pytest.fixture(scope="module")
def make_islands(devices):
    """Makes a trainer of two islands of these sizes, or of two devices."""

    def loss(p, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ p["w"]) @ p["v"] - batch["y"]) ** 2)

    def make(sizes=None):
        strategy, che = FullShard(min_size=1), jaxche.ElChe(2, 2, max_anchor=2, max_batch_diff=0)
        islands = [strategy.mesh(devices[: sizes[0]]), strategy.mesh(devices[sizes[0] : sum(sizes)])] if sizes else None
        options = {"replicas": islands, "strategy": strategy} if sizes else {"replicas": devices[:2]}
        return jaxche.Trainer(loss, optax.adam(0.05), che=che, **options)

    return make


@pytest.fixture(scope="module")
def others(make_islands):
    """Trainers of wide islands, of islands of one device, and of devices, which go on from checkpoints of others."""
    return [make_islands((4, 2)), make_islands((1, 1)), make_islands()]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (1, 1), (2, 1)], ids=str)
def test_islands_go_on_bit_for_bit_and_as_devices(make_islands, others, tmp_path, same, close, patient, sizes):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 8)).astype(np.float32)
    data = jaxche.Batches({"x": x, "y": np.sin(x[:, :2])}, 8)
    params = {"w": rng.normal(size=(8, 16)).astype(np.float32), "v": np.zeros((16, 2), np.float32)}

    def run(trainer, callbacks=(), **options):
        return trainer.fit(trainer.init(params), data, epochs=2, progress=False, callbacks=callbacks, **options)

    first, second = make_islands(sizes), make_islands(sizes)
    state, _ = run(first)
    half, _ = run(first, [stop_after(2)], checkpoints=tmp_path)
    resumed, _ = run(second, checkpoints=tmp_path)
    same(plain(state)[0], plain(resumed)[0])
    cut = resumed.local_states[0].opt_state[0].mu["w"]
    assert cut.addressable_shards[0].data.size * sizes[0] == cut.size
    undisturbed, _ = run(first, [stop_after(3)])
    for other in others:
        found, record = run(other, [stop_after(3)], checkpoints=jaxche.Checkpoints(_copy(tmp_path, half.round)))
        assert [info.round for info in record] == [0, 1, 2]
        close(*(jax.device_get(plain(s)[0][:2]) for s in (found, undisturbed)), rtol=2e-5)


@pytest.fixture(scope="module")
def with_noise(devices):
    """The trainer of one island, or of two of different sizes, that measures noise; made once."""
    strategy = ShardGradOp(min_size=1)
    islands = {
        "one": [strategy.mesh(devices[:2])],
        "uneven": [strategy.mesh(devices[:2]), strategy.mesh(devices[2:6])],
    }

    @functools.cache
    def make(replicas):
        return jaxche.Trainer(
            lambda p, x: jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) - 1.0) ** 2),
            optax.adam(0.05),
            replicas=islands[replicas],
            strategy=strategy,
            scaling=jaxche.AdaScale(),
            base_batch_size=4,
        )

    return make


@pytest.mark.slow
@pytest.mark.parametrize("order", [("uneven", "one"), ("one", "uneven")], ids=" to ".join)
def test_noise_goes_on_in_islands_of_another_number(with_noise, tmp_path, same, order):
    rng = np.random.default_rng(0)
    data = jaxche.Batches(rng.normal(size=(64, 8)).astype(np.float32), 8)
    params = {"w": rng.normal(size=(8, 4)).astype(np.float32), "b": np.zeros(4, np.float32)}

    def run(replicas, epochs):
        trainer = with_noise(replicas)
        state, _ = trainer.fit(trainer.init(params), data, epochs, progress=False, checkpoints=tmp_path)
        return trainer, state

    (first, left), (second, found) = (run(replicas, 2) for replicas in order)
    averages = [
        replace(t.noise(state), previous=None, has_previous=False) for t, state in ((first, left), (second, found))
    ]
    same(*averages)
    assert averages[0].unbias > 0
    noise = second.noise(found)
    assert not noise.has_previous
    if order[1] == "one":
        assert not any(np.any(x) for x in jax.tree.leaves(noise.previous))
    trainer, state = run(order[1], 3)
    assert np.isfinite(trainer.noise(state).critical_batch_size)
    assert trainer.noise(state).unbias != noise.unbias


def _copy(folder, step):
    """The checkpoints of a folder up to one of them."""
    to = folder.with_name(f"{folder.name}-{len(list(folder.parent.iterdir()))}")
    shutil.copytree(folder, to)
    for found in to.iterdir():
        if found.name.isdigit() and int(found.name) > step:
            shutil.rmtree(found)
    return to


RULES = {
    "plain": {},
    "gradients": {"average": "gradients"},
    "scaled": {"scaling": jaxche.AdamScale()},
    "scaled gradients": {"average": "gradients", "scaling": jaxche.AdaScale(), "base_batch_size": 4},
}


@pytest.fixture(scope="module")
def trainer_of(devices):
    """The trainer of so many replicas by one of RULES, made once: its programs stay compiled."""

    @functools.cache
    def get(world, rules):
        che = jaxche.ElChe(world, 2, max_anchor=2, max_batch_diff=0) if world > 1 else None
        return jaxche.Trainer(noisy_loss, optax.adam(0.05), replicas=devices[:world], che=che, **RULES[rules])

    return get


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "rules"),
    [*((2, 3, rules) for rules in RULES), *((*one, rules) for one in [(2, 1), (1, 2)] for rules in list(RULES)[2:])],
)
def test_another_number_of_replicas_goes_on_from_the_merged_state(
    problem, model_state, trainer_of, patient, tmp_path, close, told, before, after, rules
):
    def run(trainer, rounds):
        state = trainer.init(problem.params, model_state)
        stop = [stop_after(rounds)]
        return trainer.fit(state, problem.data, epochs=9, callbacks=stop, progress=False, checkpoints=tmp_path)

    first, second = trainer_of(before, rules), trainer_of(after, rules)
    left, part = run(first, 2)
    found, record = run(second, 3)
    assert told(record[:2]) == told(part)
    last = record[2]
    assert (last.round, last.epoch, last.cursor) == (2, left.epoch, left.cursor)

    # The same round from a state built by hand: merged parameters, the mean of the moments.
    def one(x):
        return x.mean(0) if x.dtype.kind == "f" else x[0]

    merged = (first.params(left), jax.tree.map(lambda x: x[0], left.model_state))
    by_hand = second.init(*jax.device_get(merged))
    moments = jax.tree.map(one, jax.device_get(left.opt_state))

    def put(tree, like):
        return jax.tree.map(lambda x, y: jax.device_put(x, y.device), tree, like)

    def begun(local):
        local = local._replace(opt_state=put(jax.tree.map(lambda m: m[None], moments), local.opt_state))
        if local.noise is None:
            return local
        # The averages continue. An earlier gradient is not known, as in a trainer that has just begun.
        assert bool(left.local_states[0].noise.has_previous[0]) == (before == 1)
        averages = ("sqr_sum", "var_sum", "unbias", "base_batch_size", "biased", "preconditioned")
        averages = {name: getattr(left.local_states[0].noise, name) for name in averages}
        assert averages["unbias"] > 0
        progress = put(left.local_states[0].progress, local.progress)
        known = put(averages, {name: getattr(local.noise, name) for name in averages})
        return local._replace(noise=replace(local.noise, **known), progress=progress)

    local_states = tuple(map(begun, by_hand.local_states))
    by_hand = replace(by_hand, local_states=local_states, round=2, epoch=left.epoch, cursor=left.cursor)
    wanted, _ = second.round(by_hand, problem.data, counts=last.counts)
    close(*(jax.device_get((state.params, state.opt_state)) for state in (found, wanted)))
    if found.local_states[0].noise is not None:
        close(*(jax.device_get([(x.noise, x.progress) for x in state.local_states]) for state in (found, wanted)))


@pytest.fixture(scope="module")
def make_trainer(make_problem, devices):
    """Makes a trainer of two replicas that take two steps a round each."""

    def make(**knobs):
        che = jaxche.ElChe(world_size=2, anchor=2, max_anchor=2, max_batch_diff=0)
        knobs = {"che": che, "replicas": devices[:2], "tx": optax.adam(0.05)} | knobs
        return jaxche.Trainer(make_problem.loss, **knobs)

    return make


@pytest.fixture(scope="module")
def saved_once(make_problem, make_trainer, tmp_path_factory):
    """A folder with checkpoints of rounds 1 to 3, the state after the last, and what was told of the rounds."""
    folder, problem, trainer = tmp_path_factory.mktemp("saved") / "run", make_problem(), make_trainer()
    options = {"callbacks": [stop_after(3)], "progress": False, "checkpoints": folder}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxche.training._plan._MIN_EXTRA_MS", 60_000.0)
        return folder, *trainer.fit(trainer.init(problem.params), problem.data, 2, **options)


@pytest.fixture(scope="module")
def resuming(make_trainer):
    """The trainer that goes on from them."""
    return make_trainer()


@pytest.fixture
def saved(saved_once, resuming, make_trainer, problem, patient, tmp_path):
    """A folder with those checkpoints, how to go on from them, the state after the last, and what was told."""
    first, state, history = saved_once
    shutil.copytree(first, tmp_path / "run")

    def run(folder=tmp_path / "run", data=problem.data, params=problem.params, epochs=2, callbacks=(), **knobs):
        trainer = make_trainer(**knobs) if knobs or params is not problem.params else resuming
        return trainer.fit(trainer.init(params), data, epochs, callbacks=callbacks, progress=False, checkpoints=folder)

    return tmp_path / "run", run, state, history


def test_what_is_torn_is_set_aside(saved, same, caplog):
    folder, run, state, _ = saved
    for torn in (folder / "3" / "state").rglob("*"):
        if torn.is_file() and torn.stat().st_size > 100:
            os.truncate(torn, torn.stat().st_size // 2)
    again, history = run(callbacks=[stop_after(3)])
    assert "checkpoint 3" in caplog.text
    assert "cannot be read" in caplog.text
    assert again.round == len(history) == 3
    same(plain(again)[0], plain(state)[0])  # round 2 was done again
    assert (folder / "unreadable-3" / "state").is_dir()
    final, record = run()
    assert [info.round for info in record] == list(range(final.round))


@pytest.mark.parametrize("where", ["params", "state", "run"])
def test_one_wrong_bit_that_orbax_reads_is_found(saved, same, caplog, monkeypatch, where):
    """Orbax loads arrays with wrong bits without an error, found by flipping bits one by one."""
    folder, run, state, _ = saved
    restore = ocp.CheckpointManager.restore

    def flipped(value):
        if isinstance(value, int):
            return value + 1
        bits = np.asarray(value).copy()
        bits.reshape(-1).view(np.uint8)[0] ^= 1
        return jax.device_put(bits, value.sharding)

    def restore_other(self, step, args):
        found = restore(self, step, args=args)
        if step != 3 or where not in dict(found.items()):
            return found
        leaves, treedef = jax.tree.flatten(found[where])
        at = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, (int, jax.Array)))
        leaves[at] = flipped(leaves[at])
        return ocp.args.Composite(**{**dict(found.items()), where: jax.tree.unflatten(treedef, leaves)})

    monkeypatch.setattr(ocp.CheckpointManager, "restore", restore_other)
    again, _ = run(callbacks=[stop_after(3)])
    same(plain(again)[0], plain(state)[0])  # round 2 was done again
    assert "checkpoint 3 cannot be read and is set aside" in caplog.text
    assert "CorruptError: the checksum of" in caplog.text
    assert (folder / "unreadable-3").is_dir()


def test_where_nothing_can_be_read_the_run_begins_anew(saved, told, caplog):
    folder, run, _, before = saved
    for step in ("1", "2", "3"):
        (folder / step / "run" / "metadata").write_text("{")
    state, history = run()
    assert caplog.text.count("cannot be read") == 3
    assert [info.round for info in history] == list(range(state.round))
    # What failed may have been the file server, and nothing is lost: each has the record as it was.
    assert {path.name for path in folder.glob("unreadable-*")} == {f"unreadable-{step}" for step in (1, 2, 3)}
    for path in folder.glob("unreadable-*"):
        assert told(jaxche.History.from_json(path / "history.jsonl")) == told(before)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "Too many open files")])
@pytest.mark.parametrize("part", ["metadata", "arrays"])
def test_an_error_of_the_process_sets_nothing_aside(saved, monkeypatch, error, part):
    folder, run, *_ = saved
    files = sorted(path.name for path in folder.iterdir())
    record = (folder / "history.jsonl").read_text()
    restore = ocp.CheckpointManager.restore

    def fail(self, step, args):
        if (part == "metadata") == ("run" in dict(args.items())):
            raise error
        return restore(self, step, args=args)

    monkeypatch.setattr(ocp.CheckpointManager, "restore", fail)
    with pytest.raises(type(error)):
        run()
    assert sorted(path.name for path in folder.iterdir()) == files
    assert (folder / "history.jsonl").read_text() == record


def test_one_that_cannot_be_set_aside_either_is_an_error(saved, monkeypatch):
    folder, run, *_ = saved
    (folder / "3" / "run" / "metadata").write_text("{")

    def fail(self, target):
        raise OSError("read-only file system")

    monkeypatch.setattr("pathlib.Path.rename", fail)
    with pytest.raises(OSError, match="read-only file system"):
        run()
    assert (folder / "3").is_dir()


def test_a_second_one_of_a_round_is_set_aside_under_a_name_of_its_own(saved, caplog):
    folder, run, *_ = saved
    for _ in range(2):
        (folder / "3" / "run" / "metadata").write_text("{")
        run(callbacks=[stop_after(3)])
    assert {path.name for path in folder.glob("unreadable-*")} == {"unreadable-3", "unreadable-3-1"}


def test_what_another_program_saved_is_refused_and_left_as_it_is(problem, devices, tmp_path):
    with ocp.CheckpointManager(tmp_path) as theirs:
        theirs.save(7, args=ocp.args.StandardSave({"w": np.ones(3)}))
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(ValueError, match="7 there was not written by jaxche; give another folder"):
        trainer.fit(trainer.init(problem.params), problem.data, checkpoints=tmp_path)
    assert (tmp_path / "7" / "default").is_dir()


def test_a_record_cut_in_mid_line_or_longer_than_the_checkpoint_is_mended(saved, told):
    folder, run, _, history = saved
    record = folder / "history.jsonl"
    record.write_text(record.read_text() + record.read_text().splitlines()[0] + "\n" + '{"round": 4, "ep')
    _, again = run(callbacks=[stop_after(4)])
    assert told(again[:3]) == told(history)
    assert told(jaxche.History.from_json(record)) == told(again)


def test_a_record_that_lacks_rounds_is_told(saved, problem, make_trainer, caplog):
    folder, run, *_ = saved
    record = folder / "history.jsonl"
    run()
    whole = record.read_bytes()
    lines = whole.splitlines(keepends=True)
    lacks = f"history.jsonl ends before round {len(lines) - 1}, the last one before this fit: rounds are missing"
    trainer = make_trainer()
    options = {"checkpoints": folder, "validation": problem.data, "progress": False}
    for damaged in (b"", b"".join(lines[:-1])):
        caplog.clear()
        record.write_bytes(damaged)
        _, history = trainer.fit(trainer.init(problem.params), problem.data, 2, **options)
        assert lacks in caplog.text
        assert not any(info.validation for info in history)  # the round that was evaluated is not there
    caplog.clear()
    record.write_bytes(whole)
    _, history = trainer.fit(trainer.init(problem.params), problem.data, 2, **options)
    assert history[-1].validation
    assert not caplog.messages


def test_a_folder_with_older_rounds_of_another_run_is_told(saved, problem, make_trainer, caplog):
    folder, trainer = saved[0], make_trainer()
    state, _ = trainer.fit(trainer.init(problem.params), problem.data, max_steps=16, progress=False)
    assert state.round > 3
    trainer.fit(state, problem.data, 2, checkpoints=folder, progress=False)
    assert f"ends before round {state.round - 1}, the last one before this fit" in caplog.text


@pytest.fixture
def full_disk():
    """Lets no file of this process grow beyond a size, or any again with None."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

    yield limit
    limit(None)


def test_a_run_that_has_ended_adds_nothing_to_its_record(saved, told):
    folder, run, _, _ = saved
    _, history = run()
    text = (folder / "history.jsonl").read_text()
    assert text.count("\n") == len(history)
    _, again = run()
    assert told(again) == told(history)
    assert (folder / "history.jsonl").read_text() == text


def test_a_round_whose_evaluation_is_interrupted_is_on_record(problem, devices, lockstep, tmp_path):
    class Validation:
        reads: ClassVar[list[int]] = []

        def __len__(self):
            return 1

        def __getitem__(self, i):
            self.reads.append(i)
            if len(self.reads) == 4:  # the first read checks it
                raise KeyboardInterrupt
            return problem.data[i]

    def run():
        trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), che=lockstep(), replicas=devices[:2])
        options = {"validation": Validation(), "eval_every": 1, "checkpoints": tmp_path, "progress": False}
        return trainer.fit(trainer.init(problem.params), problem.data, epochs=2, **options)

    state, part = run()
    assert len(part) == state.round == 3
    state, history = run()
    assert [info.round for info in history] == list(range(state.round))
    assert sum(info.examples for info in history) == history[-1].examples_done


def test_rounds_on_a_full_disk_are_on_file_when_it_has_space(
    problem, devices, lockstep, tmp_path, told, full_disk, caplog
):
    """A line that cannot be written must not end the run (chaos.py, seed 1, number 32)."""
    record = tmp_path / "history.jsonl"

    def fill(state, info):
        if info.round == 1:
            full_disk(record.stat().st_size + 50)
        elif info.round == 4:
            assert len(jaxche.History.from_json(record)) == 2  # and no part of a line
            full_disk(None)

    trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), che=lockstep(), replicas=devices[:2])
    checkpoints = jaxche.Checkpoints(tmp_path, every=100)
    _, history = trainer.fit(
        trainer.init(problem.params), problem.data, 3, callbacks=[fill], progress=False, checkpoints=checkpoints
    )
    assert len(history) > 6
    assert told(jaxche.History.from_json(record)) == told(history)
    assert [text for text in caplog.messages if "not on file yet" in text] == [
        f"{record}: File too large; its last 1 rounds are not on file yet"
    ]


def test_rounds_that_are_repeated_leave_the_record_of_a_full_disk(saved, full_disk):
    folder, *_ = saved
    log = MetricsLog(Group(), folder)
    size = log._file.stat().st_size
    full_disk(10)
    assert [info.round for info in log.truncate(2)] == [0, 1]
    full_disk(None)
    assert log._file.stat().st_size < size
    assert [info.round for info in jaxche.History.from_json(log._file)] == [0, 1]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def missing(caplog, folder):
    """The checkpoints that the log has as missing."""
    pattern = re.compile(rf"checkpoint (\d+) is missing: (?:File too large|No space left on device) in {folder}\. ")
    return [int(found[1]) for text in caplog.messages if (found := pattern.match(text))]


@pytest.fixture
def late_results():
    """Collect what a failed save has left, so that its warnings are not those of another test."""
    yield
    gc.collect()


def expects_late_results(test):
    """TensorStore has a result for a save that has failed already."""
    ignored = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    return pytest.mark.usefixtures("late_results")(ignored(test))


@expects_late_results
def test_a_save_on_a_full_disk_costs_its_checkpoint_only(
    problem, devices, lockstep, tmp_path, same, told, full_disk, caplog
):
    def run(folder, callbacks=()):
        trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), che=lockstep(), replicas=devices[:2])
        options = {"callbacks": callbacks, "progress": False, "checkpoints": jaxche.Checkpoints(folder, keep=9)}
        return trainer.fit(trainer.init(problem.params), problem.data, 2, **options)

    def fill(state, info):
        settled = names(tmp_path / "full")
        if state.round == 1:
            full_disk(100)
        elif state.round == 4:  # the save of round 3 has failed, and that of round 4 may be in flight
            assert set(settled) <= {".lock", "1", "4.orbax-checkpoint-tmp", "history.jsonl"}
            full_disk(None)

    wanted, history = run(tmp_path / "other")
    state, found = run(tmp_path / "full", [fill])
    assert len(found) == 6
    same(plain(state)[0], plain(wanted)[0])
    assert told(untimed(found)) == told(untimed(history))
    assert {2, 3} <= set(missing(caplog, tmp_path / "full")) <= {1, 2, 3, 4}
    assert {"5", "6", "history.jsonl"} <= set(names(tmp_path / "full")) <= {"1", "4", "5", "6", "history.jsonl"}
    again, _ = run(tmp_path / "full")
    same(plain(again)[0], plain(wanted)[0])


@expects_late_results
@pytest.mark.parametrize("recovers", [True, False])
def test_a_last_save_without_space_is_tried_again_and_then_an_error(
    problem, devices, lockstep, tmp_path, same, full_disk, caplog, monkeypatch, recovers
):
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if recovers and len(pauses) == 2:
            full_disk(None)

    def run(callbacks=()):
        trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), che=lockstep(), replicas=devices[:2])
        options = {"callbacks": callbacks, "progress": False, "checkpoints": tmp_path}
        return trainer, lambda: trainer.fit(trainer.init(problem.params), problem.data, **options)

    monkeypatch.setattr(_checkpoints.time, "sleep", pause)
    trainer, fit = run([lambda state, info: full_disk(100) if state.round == 2 else None])
    if recovers:
        state, _ = fit()
        assert pauses == [1.0, 3.0]
    else:
        with pytest.raises(OSError, match=r"the last checkpoint, 3, is missing: File too large.*run again: it contin"):
            fit()
        assert pauses == [1.0, 3.0, 6.0]
        state = trainer.last_good_state
        assert not [name for name in names(tmp_path) if name.startswith("3")]
    full_disk(None)
    assert state.round == 3
    assert [step for step in missing(caplog, tmp_path) if step == 3] == [3] * (2 if recovers else 4)
    again, _ = run()[1]()
    same(plain(again)[0], plain(state)[0])
    assert "3" in names(tmp_path)


@expects_late_results
@pytest.mark.parametrize("name", ["1.orbax-checkpoint-tmp", "params.orbax-checkpoint-tmp"])
def test_a_disk_without_space_for_a_folder_holds_up_nobody(
    problem, devices, lockstep, tmp_path, monkeypatch, caplog, name
):
    """Orbax's threads wait for the folders of a save, for five minutes."""
    mkdir = os.mkdir

    def full(path, *args, **kwargs):
        if Path(path).name == name and "1.orbax-checkpoint-tmp" in Path(path).parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", full)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), che=lockstep(), replicas=devices[:2])
    began = time.monotonic()
    trainer.fit(trainer.init(problem.params), problem.data, progress=False, checkpoints=tmp_path)
    assert missing(caplog, tmp_path) == [1]
    assert names(tmp_path) == ["2", "3", "history.jsonl"]
    assert time.monotonic() - began < 60
    assert not [thread for thread in threading.enumerate() if type(thread).__name__ == "_SignalingThread"]


@expects_late_results
@pytest.mark.parametrize("code", [errno.ENOENT, errno.EMFILE], ids=["missing", "open files"])
def test_another_error_of_a_save_is_raised(problem, devices, tmp_path, monkeypatch, caplog, code):
    mkdir = os.mkdir

    def refuse(path, *args, **kwargs):
        if "orbax-checkpoint-tmp" in str(path):
            raise OSError(code, os.strerror(code), str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", refuse)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(OSError, match="orbax-checkpoint-tmp") as caught:
        trainer.fit(trainer.init(problem.params), problem.data, progress=False, checkpoints=tmp_path)
    assert missing(caplog, tmp_path) == []
    # Two runs in one folder fail in many ways, but not for want of open files.
    notes = getattr(caught.value, "__notes__", [])
    assert any(f"if another run writes to {tmp_path} too" in note for note in notes) == (code == errno.ENOENT)


@expects_late_results
def test_a_preempted_run_without_space_does_not_say_that_it_saved(saved, full_disk, caplog):
    folder, run, *_ = saved

    def preempt(state, info):
        if info.round == 3:
            full_disk(100)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        run(callbacks=[preempt])
    full_disk(None)
    assert ended.value.code == 143
    assert 5 in missing(caplog, folder)
    assert len(list(folder.glob("[0-9]*"))) == 3  # older ones are kept in its place
    assert "preempted: saved" not in caplog.text
    _, history = run()
    assert len(history) == 6


def test_plain_orbax_opens_the_parameters(saved, same):
    folder, _, state, _ = saved
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(folder / "3" / "params")
    same(found, jax.tree.map(lambda x: x[0], state.params))


def test_only_the_newest_are_kept_and_only_those_that_were_asked_for(problem, devices, tmp_path, lockstep):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), che=lockstep(), replicas=devices[:2])
    asked = jaxche.Checkpoints(tmp_path, every=2, keep=2)
    state, _ = trainer.fit(trainer.init(problem.params), problem.data, 3, progress=False, checkpoints=asked)
    kept = sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit())
    assert state.round == 9
    assert kept == [8, 9]


def test_updates_of_exact_sync_share_the_checkpoint_of_a_second(problem, devices, tmp_path):
    def saved(policy, every=None):
        folder = tmp_path / f"{policy} {every}"
        fleet = jaxche.VirtualFleet(ms_per_batch=[300, 300], sync_ms=0.0)
        trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), policy, replicas=devices[:2], fleet=fleet)
        state, kept = trainer.init(problem.params), jaxche.Checkpoints(folder, every, keep=99)
        _, history = trainer.fit(state, problem.data, max_steps=16, progress=False, checkpoints=kept)
        return len(history), sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())

    assert saved("sync") == (8, [4, 7, 8])  # at 1.2, 2.1 and 2.4 s
    assert saved("sync", 1) == (8, [1, 2, 3, 4, 5, 6, 7, 8])
    rounds, steps = saved("cadence")
    assert steps == list(range(1, rounds + 1))


def test_a_checkpoint_of_an_overlapped_run_is_made_once_in_the_time_of_twenty_merges(problem, devices, tmp_path):
    """It waits for the merge, so one after each round would hide nothing."""
    fleet = jaxche.VirtualFleet(ms_per_batch=[300, 300], sync_ms=200.0)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], fleet=fleet, overlap=0.5)
    state, kept = trainer.init(problem.params), jaxche.Checkpoints(tmp_path, keep=99)
    _, history = trainer.fit(state, problem.data, max_steps=80, progress=False, checkpoints=kept)
    saved = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    seconds = [0.0, *(info.clock_ms / 1e3 for info in history)]
    due = [n for n in range(1, len(history)) if seconds[n] // 4 > seconds[n - 1] // 4]  # 20 merges take 4 s
    assert saved == [*due, len(history)]
    assert 2 <= len(saved) < len(history) / 2


def test_long_waits_for_saves_are_logged_once(problem, devices, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_writer, "_MUCH_S", 0.0)
    monkeypatch.setattr(_writer, "_MUCH", 0.0)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state, kept = trainer.init(problem.params), jaxche.Checkpoints(tmp_path, every=1)
    trainer.fit(state, problem.data, max_steps=16, progress=False, checkpoints=kept)
    (line,) = [record.message for record in caplog.records if "waited" in record.message]
    assert line.endswith("save less often: trainer.fit(..., checkpoint_every=jaxche.Every(seconds=600))")


def test_a_durable_one_is_written_when_its_round_ends(problem, devices, tmp_path):
    trainer, seen = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2]), []
    trainer.fit(
        trainer.init(problem.params),
        problem.data,
        progress=False,
        callbacks=[lambda state, info: seen.append((tmp_path / str(state.round)).exists())],
        checkpoints=jaxche.Checkpoints(tmp_path, durable=True),
    )
    assert len(seen) > 1
    assert all(seen)


def test_an_elastic_run_waits_for_nobody(problem, devices, tmp_path, monkeypatch):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    monkeypatch.setattr(Group, "elastic", True)
    with pytest.raises(ValueError, match=r"durable=True waits for all processes.*leave durable out"):
        trainer.fit(trainer.init(problem.params), problem.data, checkpoints=jaxche.Checkpoints(tmp_path, durable=True))
    assert trainer.compilations == 0


@pytest.mark.parametrize(
    ("error", "died", "ends"),
    [
        (PeerLostError("process 1 died while others waited for it"), [1], False),
        (PeerLostError("a merge failed in another process"), [], False),
        (ValueError("no such array"), [1], False),
        (ValueError("no such array"), [], True),
    ],
)
def test_a_death_in_the_last_save_ends_no_elastic_run(
    problem, devices, tmp_path, monkeypatch, caplog, error, died, ends
):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    manager = CheckpointManager(jaxche.Checkpoints(tmp_path), trainer, problem.data)

    def fail():
        raise error

    manager._writer._manager = SimpleNamespace(wait_until_finished=fail, close=lambda: None)
    manager._writer._in_flight = 3
    monkeypatch.setattr(Group, "elastic", True)
    monkeypatch.setattr(Group, "lost", lambda self: died)
    if ends:
        with pytest.raises(ValueError, match="no such array"):
            manager.close(None, None, None)
    else:
        manager.close(None, None, None)
        assert "was not finished, the loss of a process was detected" in caplog.text


def test_what_is_of_another_run_is_refused_by_name(saved, make_problem):
    _, run, *_ = saved
    wide = {"w": np.zeros((5, 2), np.float32), "b": np.zeros((2, 1), np.float32)}
    with pytest.raises(ValueError, match=r"params/b is float32\[2\] in the checkpoint and float32\[2,1\] in"):
        run(params=wide)
    with pytest.raises(ValueError, match=r"another tx: opt_state/0/count is int32.* not there in this trainer"):
        run(tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match="seed=0, and this one has 1"):
        run(seed=1)
    with pytest.raises(ValueError, match="batches=12, and this one has 6"):
        run(data=make_problem(examples=48).data)


@pytest.mark.parametrize(
    ("format", "version", "said"),
    [
        (0, "0.0.1", r"jaxche 0\.0\.1 in format 0.*pip install jaxche==0\.0\.1"),
        (FORMAT, "9.9.9", rf"jaxche 9\.9\.9 in format {FORMAT}.*pip install jaxche==9\.9\.9"),
    ],
)
def test_what_another_version_wrote_is_refused(saved, format, version, said):
    folder, run, *_ = saved
    meta = folder / "3" / "run" / "metadata"
    text = meta.read_text().replace(f'"format": {FORMAT}', f'"format": {format}')
    meta.write_text(text.replace(f'"jaxche": "{jaxche.__version__}"', f'"jaxche": "{version}"'))
    with pytest.raises(ValueError, match=said):
        run()


@pytest.fixture
def named_run(devices, lockstep, tmp_path):
    """Makes trainers, and trains parameters of any names, each with a target of its own."""

    def loss(p, x):
        leaves = jax.tree.leaves(p)
        return sum(jnp.mean((w - i * x) ** 2) for i, w in enumerate(leaves)) / len(leaves)

    def make():
        return jaxche.Trainer(loss, optax.adam(0.05), che=lockstep(), replicas=devices[:2])

    def run(trainer, params, stop=None, checkpoints=tmp_path / "named"):
        data = [np.full((2, 2), i, np.float32) for i in range(8)]
        callbacks = [] if stop is None else [stop_after(stop)]
        state, _ = trainer.fit(
            trainer.init(params), data, 2, callbacks=callbacks, progress=False, checkpoints=checkpoints
        )
        return state

    return make, run


ALIKE = {
    "dots": {"a.b": {"c": np.ones(2, np.float32)}, "a": {"b.c": np.zeros(2, np.float32)}},
    "slashes": {"a/b": {"c": np.ones(2, np.float32)}, "a": {"b/c": np.zeros((2, 2), np.float32)}},
    "escapes": {"a.b": {"c": np.ones(2, np.float32)}, "a%2Eb": {"c": np.zeros(2, np.float32)}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ALIKE)
def test_names_that_join_alike_stay_apart(named_run, tmp_path, same, case):
    make, run = named_run
    first, second = make(), make()
    run(first, ALIKE[case], stop=2)
    with ocp.CheckpointManager(tmp_path / "named") as manager:
        meta = manager.restore(2, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
    assert sum(name.startswith("params/") for name in meta["leaves"]) == 2
    undisturbed = run(first, ALIKE[case], checkpoints=None)
    same(plain(undisturbed)[0], plain(run(second, ALIKE[case]))[0])


def test_a_smaller_step_of_the_version_and_other_data_are_told(saved, problem, caplog):
    folder, run, *_ = saved
    major, minor, _ = jaxche.__version__.split(".")
    state, _ = run()
    run()
    assert not [record for record in caplog.records if record.name == "jaxche"]
    meta = folder / str(state.round) / "run" / "metadata"
    meta.write_text(meta.read_text().replace(jaxche.__version__, f"{major}.{minor}.99"))
    other = jaxche.Batches(jax.tree.map(lambda x: x + 1, problem.data.arrays), problem.data.batch_size, 3)
    run(data=other)
    assert f"was written by jaxche {major}.{minor}.99" in caplog.text
    told = "was made with other data of the same number of batches; "
    assert told + "that run has ended, so nothing is trained now: give each run a folder of its own" in caplog.text
    run(data=other, epochs=3)
    assert told + "training continues with this data" in caplog.text
    caplog.clear()
    with pytest.raises(ValueError, match="is of a run with batches="):
        run(data=jaxche.Batches(problem.data.arrays, 2 * problem.data.batch_size))
    assert told not in caplog.text


def test_a_state_beyond_the_end_of_its_fit_is_told(saved, caplog):
    _, run, *_ = saved
    run(epochs=2)
    run(epochs=2)
    assert "beyond the end" not in caplog.text
    state, _ = run(epochs=1)  # as in a loop of fits that is started again
    assert state.epoch == 2
    assert f"has epoch 2, step {state.steps} of a run, beyond the end of this fit: it trains nothing" in caplog.text
    assert not End(steps=state.steps).is_passed(state)
    assert End(steps=state.steps - 1).is_passed(state)


def test_the_record_of_a_run_that_a_callback_ended_can_be_replayed(problem, devices, tmp_path, told, same):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    options = {"validation": problem.data, "callbacks": [stop_after(3)], "progress": False}
    state, history = trainer.fit(trainer.init(problem.params), problem.data, 2, checkpoints=tmp_path, **options)
    record = jaxche.History.from_json(tmp_path / "history.jsonl")
    assert record[-1].validation  # of the evaluation after the callback
    assert told(record) == told(history)
    again, _ = trainer.replay(trainer.init(problem.params), problem.data, record)
    same(trainer.params(again), trainer.params(state))


def test_another_learning_rate_is_told(problem, devices, tmp_path, caplog):
    def run(rate, world=2, epochs=1):
        trainer = jaxche.Trainer(problem.loss, optax.adam(rate), replicas=devices[:world])
        return trainer.fit(trainer.init(problem.params), problem.data, epochs, progress=False, checkpoints=tmp_path)

    told = "was made with another tx, or other settings of it, such as its learning rate; "
    run(0.1)
    run(0.1)
    run(0.1, world=1, epochs=2)
    assert told not in caplog.text
    run(0.2, epochs=2)
    assert told + "that run has ended, so nothing is trained now: give each run a folder of its own" in caplog.text
    run(0.2, epochs=3)
    assert told + "training continues with this one" in caplog.text


def test_what_is_told_of_a_folder_is_told_by_one_process(problem, devices, tmp_path, caplog):
    class Other:
        is_first = False

        def __init__(self, group):
            self._group = group

        def __getattr__(self, name):
            return getattr(self._group, name)

    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    options = {"progress": False, "checkpoints": tmp_path}
    trainer.fit(trainer.init(problem.params), problem.data, **options)
    trainer._group = Other(trainer._group)
    other = jaxche.Batches(problem.data.arrays, problem.data.batch_size, seed=5)
    trainer.fit(trainer.init(problem.params), other, epochs=2, **options)
    assert "other data" not in caplog.text


def test_the_optimizer_is_traced_once_for_all_fits_of_a_trainer(problem, devices, tmp_path, monkeypatch):
    traced = []
    monkeypatch.setattr(_preparation, "update_digest", lambda tx, shapes: traced.append(tx) or "digest")
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(problem.params)
    for name in "ab":
        trainer.fit(state, problem.data, progress=False, checkpoints=tmp_path / name)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("knobs", "text"),
    [
        ({"scaling": jaxche.SqrtScale()}, "is of a run with another scaling=: noise/.* use the scaling= that it was"),
        ({"outer": optax.sgd(0.7, 0.9)}, "is of a run with another outer=: outer_state/.* use the outer= that it was"),
    ],
    ids=["scaling", "outer"],
)
def test_an_argument_that_a_checkpoint_was_not_made_with_is_named(saved, knobs, text):
    _, run, *_ = saved
    with pytest.raises(ValueError, match=text):
        run(**knobs)


def test_a_bucket_is_refused_with_what_to_give():
    with pytest.raises(ValueError, match=r"folder='gs://b/run' is not a folder of this system; mount"):
        jaxche.Checkpoints("gs://b/run")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(problem, devices, tmp_path):
    (tmp_path / "file").write_text("")
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(ValueError, match="file/run' cannot be written"):
        trainer.fit(trainer.init(problem.params), problem.data, checkpoints=tmp_path / "file" / "run")
    assert trainer.compilations == 0
    with pytest.raises(ValueError, match="every=0 must be"):
        jaxche.Checkpoints(tmp_path, every=0)
    with pytest.raises(ValueError, match="keep=True must be a whole number"):
        jaxche.Checkpoints(tmp_path, keep=True)
    assert jaxche.Checkpoints(tmp_path, every=np.int64(3)).every == 3
    with pytest.raises(ValueError, match="checkpoints='' is not a folder; write checkpoints='runs"):
        jaxche.Checkpoints("")
    with pytest.raises(ValueError, match="checkpoints=True is not a folder; write checkpoints='runs"):
        jaxche.Checkpoints(True)


def test_sigterm_while_the_last_round_is_being_saved_is_heeded_when_it_is(saved, monkeypatch):
    folder, run, *_ = saved
    heard, finish = [], CheckpointManager.close

    def close(self, *args):
        signal.raise_signal(signal.SIGTERM)
        assert not heard
        finish(self, *args)

    monkeypatch.setattr(CheckpointManager, "close", close)
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(sorted(p.name for p in folder.glob("[0-9]*"))))
    try:
        state, _ = run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(heard) == 1
    assert str(state.round) in heard[0]


@pytest.mark.slow
def test_a_preempted_run_is_saved_and_goes_on(saved, same):
    folder, run, *_ = saved
    wanted, _ = run(folder=folder.with_name("undisturbed"))

    def preempt(state, info):
        if info.round == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run(callbacks=[preempt])
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert (folder / "5").is_dir()  # told in the merge of round 4
    again, history = run()
    same(plain(again)[0], plain(wanted)[0])
    assert [info.stop for info in history] == [0] * 4 + [2] + [0] * (len(history) - 5)


def test_ctrl_c_within_a_save_waits_until_it_is_begun(saved, told, monkeypatch):
    folder, run, _, history = saved
    begin, calls = async_checkpointer._AsyncManager.start_async_commit, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)  # the threads of this save write, and nothing waits for them yet
        return begin(*args, **options)

    monkeypatch.setattr(async_checkpointer._AsyncManager, "start_async_commit", interrupted)
    state, record = run()
    assert state.round == len(record) == 4
    assert len(calls) == 1  # the end of the fit begins no second one
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3", "4", "history.jsonl"]
    assert told(record[:3]) == told(history)


def test_an_error_leaves_the_last_checkpoint(saved, problem, told):
    _, run, _, history = saved

    class Torn:
        def __len__(self):
            return len(problem.data)

        def __getitem__(self, i):
            if i >= 12 - 1:
                raise OSError("disk on fire")
            return problem.data[i]

    with pytest.raises(OSError, match="on fire"):
        run(data=Torn(), epochs=3)
    _, record = run(callbacks=[stop_after(4)])
    assert told(record[:3]) == told(history)


@pytest.mark.parametrize(
    "damage", [lambda text: b"\0" * len(text), lambda text: b"\xff" + text[1:]], ids=["zeros", "bytes"]
)
def test_a_damaged_record_costs_no_checkpoint(saved, told, caplog, damage):
    folder, run, _, history = saved
    record = folder / "history.jsonl"
    first, second, third = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(first + damage(second[:-1]) + b"\n" + third)
    state, again = run(callbacks=[stop_after(4)])
    assert state.round == 4
    assert told(again[:2]) == told([history[0], history[2]])
    assert [info.round for info in again] == [0, 2, 3]
    assert caplog.text.count("1 damaged line is left out") == 1
    assert not list(folder.glob("unreadable-*"))
    assert told(jaxche.History.from_json(record)) == told(again)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [lambda text: b"", lambda text: b"\0" * len(text), lambda text: text[:-9] + b"\xff"])
@pytest.mark.parametrize("name", ["run/metadata", "params/_METADATA", "state/_METADATA", "_CHECKPOINT_METADATA"])
def test_a_damaged_file_of_numbers_costs_its_own_checkpoint_only(saved, told, name, damage):
    folder, run, _, before = saved
    file = folder / "3" / name
    file.write_bytes(damage(file.read_bytes()))
    state, history = run(callbacks=[stop_after(4)])
    assert state.round == len(history) == 4
    assert told(history[:2]) == told(before[:2])
    # What Orbax notes of the times of saving is not needed.
    aside = [] if name == "_CHECKPOINT_METADATA" else ["unreadable-3"]
    assert [path.name for path in folder.glob("unreadable-*")] == aside


def test_a_clock_that_is_put_forward_in_a_save_costs_nothing(problem, devices, tmp_path, monkeypatch):
    """Found by chaos.py --elastic, seed 1: Orbax took a jump of days for its timeout, and the run ended."""
    days = itertools.count()
    jumping = SimpleNamespace(time=lambda: time.time() + 86400 * next(days))
    monkeypatch.setattr(future, "time", jumping)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    saved = jaxche.Checkpoints(tmp_path, every=1, keep=100)
    _, history = trainer.fit(trainer.init(problem.params), problem.data, checkpoints=saved, progress=False)
    assert next(days) > len(history)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {str(1 + info.round) for info in history}
