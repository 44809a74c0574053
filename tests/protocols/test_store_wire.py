"""A wire through a store: what is sent arrives, and whatever dies when, the run ends as if nothing had happened."""

import re
import threading
from contextlib import suppress

import jax
import numpy as np
import obstore.store
import pytest

from jaxche.protocols import DamagedObjectError, Tag, WireClosedError, _store_run
from jaxche.protocols._objects import Objects
from jaxche.protocols._store_run import StoreRun
from jaxche.protocols._store_wire import StoreWire

STAGES, STEPS, MICRO = 3, 3, 2
ARRAY = jax.ShapeDtypeStruct((2,), np.float32)
STATE = {"w": ARRAY, "momentum": ARRAY}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """A store in memory may be looked at more often."""
    monkeypatch.setattr(_store_run, "_ANSWER_S", 0.005)
    monkeypatch.setattr(_store_run, "_LONGEST_WAIT_S", 0.01)


class Dead(BaseException):
    """The process is no more."""


class Mortal:
    """A store as one process sees it, which dies at its n-th request: before it takes effect, or just after.

    Requests that find nothing are not counted: how often a reader looks is up to chance.
    """

    def __init__(self, store, dies_at=None, after=False):
        self._store, self._dies_at, self._after = store, dies_at, after
        self._lock, self.requests, self.dead = threading.Lock(), 0, False

    def _request(self, name, *arguments, **options):
        with self._lock:
            if self.dead:
                raise Dead
            last = self.requests + 1 == self._dies_at
            if last and not self._after and name in ("put", "delete"):
                self.dead = True
                raise Dead
            result = getattr(self._store, name)(*arguments, **options)
            self.requests += 1
            if last:
                self.dead = True
                raise Dead
            return result

    def __getattr__(self, name):
        return lambda *arguments, **options: self._request(name, *arguments, **options)


def wire_of(store, stages=(0,), n_stages=2, timeout_s=20.0, save_every=1, identity="0" * 32):
    """Of a run on which all agree, unless ``identity`` is None."""
    run = StoreRun(Objects(store, "memory://", "run"), stages, n_stages, timeout_s, identity)
    return StoreWire(run, stages, n_stages, timeout_s, save_every)


def train(store, stage, save_every, losses):
    """One life of the process of a stage: a chain of products, fitted by momentum; the batch is a function of step."""
    wire = wire_of(store, (stage,), STAGES, save_every=save_every, identity=None)
    try:
        found = wire.rejoin(STATE)
        fresh = {"w": np.full(2, 0.9 + 0.1 * stage, np.float32), "momentum": np.zeros(2, np.float32)}
        start, state = found if found is not None else (0, fresh)
        for step in range(start, STEPS):
            grad, inputs, outputs = np.zeros(2, np.float32), [], []
            for micro in range(MICRO):
                x = np.array([step + 1.0, micro + 1.0], np.float32)
                if stage:
                    x = np.asarray(wire.receive(Tag(step, micro, "forward", stage - 1), ARRAY, jax.devices()[0]))
                inputs.append(x)
                outputs.append(x * state["w"])
                if stage < STAGES - 1:
                    wire.send(Tag(step, micro, "forward", stage), outputs[-1])
            for micro in range(MICRO):
                back = outputs[micro] - 1
                if stage < STAGES - 1:
                    back = np.asarray(wire.receive(Tag(step, micro, "backward", stage + 1), ARRAY, jax.devices()[0]))
                grad = grad + back * inputs[micro]
                if stage:
                    wire.send(Tag(step, micro, "backward", stage), back * state["w"])
            if stage == STAGES - 1:
                losses[stage, step] = float(np.float32(sum(np.sum((y - 1) ** 2) for y in outputs)))
                wire.publish(step, losses[stage, step])
            else:
                losses[stage, step] = wire.read_loss(step)
            momentum = 0.9 * state["momentum"] + grad
            state = {"w": state["w"] - np.float32(0.01) * momentum, "momentum": momentum}
            wire.finish(step, state)
    finally:
        wire.close()
    return state


def run(deaths=(), save_every=1):
    """All processes to the end, started again whenever they die.

    Args:
      deaths: for each stage a list of (dies_at, after), one a life.

    Returns:
      Final states and losses, what is left in the store, and each stage's requests in its first life.
    """
    store = obstore.store.MemoryStore()
    states, losses, requests, errors = {}, {}, {}, []

    def process(stage, lives):
        for life in [*lives, (None, False)]:
            mortal = Mortal(store, *life)
            try:
                states[stage] = train(mortal, stage, save_every, losses)
            except Dead:
                continue
            except BaseException as error:
                errors.append(error)
                raise
            finally:
                requests.setdefault(stage, mortal.requests)
            if not mortal.dead:
                return

    threads = [threading.Thread(target=process, args=(s, dict(deaths).get(s, []))) for s in range(STAGES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    left = sorted(re.sub("run/[0-9a-f]{32}/", "run/", entry["path"]) for chunk in store.list() for entry in chunk)
    return states, losses, left, requests


def assert_undisturbed(outcome, wanted):
    states, losses, left, _ = outcome
    jax.tree.map(np.testing.assert_array_equal, states, wanted[0])
    assert losses == wanted[1]
    assert left == wanted[2]


@pytest.mark.parametrize("save_every", [1, 2, 3])
def test_only_states_and_marks_are_left_of_a_run(save_every):
    _, losses, left, _ = run(save_every=save_every)
    saved = [k for k in range(1, STEPS + 1) if k % save_every == 0][-2:]
    wanted = [f"run/stage-{s:03d}-state/step-{k:010d}" for s in range(STAGES) for k in saved]
    wanted += [f"run/stage-{s:03d}-finished" for s in range(STAGES)]
    if save_every == 2:  # what was received since the last save stays, for a process that comes back
        assert set(wanted) < set(left)
        assert all("step-0000000002" in name for name in set(left) - set(wanted))
    else:
        assert left == sorted(wanted)
    assert len({losses[0, step] for step in range(STEPS)}) == STEPS
    assert losses[0, 1] == losses[1, 1] == losses[2, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("after", "save_every"), [(False, 1), (True, 1), (True, 3)])
@pytest.mark.parametrize("stage", range(STAGES))
def test_a_process_may_die_at_any_of_its_requests(stage, after, save_every):
    wanted = run(save_every=save_every)
    requests = wanted[3][stage]
    assert requests > 15
    for n in range(1, requests + 4):  # how many there are differs a little: some find nothing
        assert_undisturbed(run({stage: [(n, after)]}, save_every), wanted)


def test_processes_may_die_again_and_again():
    wanted = run()
    rng = np.random.default_rng(0)
    for _ in range(60):
        lives = {s: [(int(rng.integers(1, 30)), bool(rng.integers(2))) for _ in range(3)] for s in range(STAGES)}
        assert_undisturbed(run(lives), wanted)


def test_a_process_may_hold_several_stages(devices):
    store = obstore.store.MemoryStore()
    first, last = wire_of(store, (0, 1), 3), wire_of(store, (2,), 3)
    tree = {"a": np.arange(3.0, dtype=np.float32), "b": (np.int32(4), None)}
    for tag, sender, receiver in [
        (Tag(7, 0, "forward", 0), first, first),
        (Tag(7, 0, "forward", 1), first, last),
        (Tag(7, 1, "backward", 2), last, first),
    ]:
        sender.send(tag, tree)
        found = receiver.receive(tag, tree, devices[2])
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        assert found["a"].devices() == {devices[2]}
        np.testing.assert_array_equal(found["a"], tree["a"])
    last.publish(7, np.float16(0.5))
    assert first.read_loss(7) == 0.5
    with pytest.raises(RuntimeError, match="in this process"):
        last.read_loss(7)
    first.finish(7)
    last.finish(7)
    first.close()
    last.close()
    assert list(store.list()) == []


def test_what_does_not_come_is_named_with_who_should_have_written_it():
    wire = wire_of(obstore.store.MemoryStore(), (1,), timeout_s=0.05)
    with pytest.raises(TimeoutError) as error:
        wire.receive(Tag(3, 2, "forward", 0), ARRAY, jax.devices()[0])
    assert "the activation of micro-batch 2 in step 3 from stage 0: stage 0 has not written" in str(error.value)
    assert "step-0000000003.micro-00002.forward.from-stage-000" in str(error.value)
    wire.close()


def test_damaged_and_foreign_objects_are_refused_by_their_key():
    store = obstore.store.MemoryStore()
    wires = wire_of(store), wire_of(store, (1,))
    tag = Tag(0, 0, "forward", 0)
    wires[0].send(tag, np.zeros(2, np.float32))
    wires[0].close()
    ((entry,),) = store.list()
    whole = bytes(store.get(entry["path"]).bytes())
    altered = bytearray(whole)
    altered[-1] ^= 1
    for content in (whole[:-1], whole[:10], b"", bytes(altered), whole + b"x", bytes(40_000_000)):
        store.put(entry["path"], content)
        with pytest.raises(DamagedObjectError, match=r"forward.from-stage-000 in memory:// \(run run/0+\)"):
            wires[1].receive(tag, ARRAY, jax.devices()[0])
    store.put(entry["path"], whole)
    with pytest.raises(ValueError, match=r"float32\[2\] where the only leaf: float32\[3\] is expected"):
        wires[1].receive(tag, jax.ShapeDtypeStruct((3,), np.float32), jax.devices()[0])
    np.testing.assert_array_equal(wires[1].receive(tag, ARRAY, jax.devices()[0]), [0, 0])
    wires[1].close()


def test_two_writers_are_an_error_of_the_second():
    store = obstore.store.MemoryStore()
    tag = Tag(0, 0, "forward", 0)
    first, second = wire_of(store), wire_of(store)
    first.send(tag, np.zeros(2, np.float32))
    first.close()
    second.send(tag, np.ones(2, np.float32))
    with pytest.raises(ValueError, match="two writers use one run"):
        second.receive(Tag(0, 0, "backward", 1), ARRAY, jax.devices()[0])  # which would otherwise wait for its deadline
    second.close()  # has been told
    third = wire_of(store)
    third.send(tag, np.ones(2, np.float32))
    with pytest.raises(ValueError, match="two writers use one run"):
        third.close()


def test_a_state_that_does_not_fit_is_refused_by_its_leaf():
    store = obstore.store.MemoryStore()
    wire = wire_of(store)
    assert wire.rejoin(STATE) is None
    wire.finish(0, {"w": np.zeros(2, np.float32), "momentum": np.zeros(2, np.float32)})
    wire.close()
    wire = wire_of(store)
    with pytest.raises(ValueError, match=r"stage-000-state/step-0000000001 .* holds \['momentum'\]"):
        wire.rejoin({"w": ARRAY})
    with pytest.raises(ValueError, match=r"begun with other parameters .* DataStore\(run="):
        wire.rejoin({**STATE, "momentum": jax.ShapeDtypeStruct((2,), np.float16)})
    assert wire.rejoin(STATE)[0] == 1
    wire.close()


def test_closing_ends_the_wait_of_others():
    wire = wire_of(obstore.store.MemoryStore())
    caught = []

    def wait():
        with suppress(WireClosedError):
            wire.receive(Tag(0, 0, "backward", 1), ARRAY, jax.devices()[0])
            return
        caught.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    wire.close()
    thread.join(10)
    assert caught == [True]
    wire.close()
