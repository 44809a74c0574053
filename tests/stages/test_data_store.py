"""DataStore is a value, stages trained through it are the whole model, and a process may die at any request."""

import re
import threading
from concurrent import futures
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import obstore.store
import optax
import pytest

import jaxche
from jaxche.stages import DamagedObjectError, Tag, WireClosedError, _store_run
from jaxche.stages._data_store import StoreWire
from jaxche.stages._objects import Objects
from jaxche.stages._store_run import StoreRun

STAGES, STEPS, MICRO = 3, 3, 2
ARRAY = jax.ShapeDtypeStruct((2,), np.float32)
STATE = {"w": ARRAY, "momentum": ARRAY}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """A store in memory may be polled more often."""
    monkeypatch.setattr(_store_run, "_ADMIT_S", 0.005)
    monkeypatch.setattr(_store_run, "_MAX_WAIT_S", 0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": ""}, r"url=''.*DataStore\(\"/shared/run\"\)"),
        ({"url": 3}, "url=3"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"schedule": "fast"}, "schedule='fast'"),
        ({"run": "a/b"}, "run='a/b'.*run='run-2'"),
        ({"run": "../x"}, "run="),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"save_every": 0}, "save_every=0 must be at least 1; write e.g. save_every=1"),
        ({"save_every": True}, "save_every=True"),
        ({"options": "region"}, "options is a str"),
    ],
)
def test_bad_arguments_are_refused_with_the_line_to_write(arguments, message):
    with pytest.raises(ValueError, match=message):
        jaxche.DataStore(**{"url": "/shared/run", **arguments})


def test_it_is_a_value_that_keeps_its_secrets(tmp_path):
    assert jaxche.DataStore(tmp_path) == jaxche.DataStore(str(tmp_path))
    eight = np.int64(8)
    assert repr(jaxche.DataStore("/run", eight, save_every=eight)) == repr(jaxche.DataStore("/run", 8, save_every=8))
    assert "hush" not in repr(jaxche.DataStore("s3://bucket", options={"secret_access_key": "hush"}))


@pytest.fixture(params=["memory", "folder", "bucket", "google_bucket"])
def protocol(request, tmp_path):
    urls = {"memory": f"memory://{tmp_path}", "folder": tmp_path, "bucket": f"s3://bucket/{tmp_path.name}"}
    urls["google_bucket"] = f"gs://bucket/{tmp_path.name}"
    options = request.getfixturevalue(request.param) if "bucket" in request.param else {}
    return jaxche.DataStore(urls[request.param], micro_batch_size=3, timeout_s=60, options=options)


@pytest.mark.slow
def test_steps_through_any_store_go_on_where_they_ended(protocol, make_model, twin, close):
    model, tx = make_model("trees", 2), optax.adam(0.05)
    params, opt_state = model.params, tx.init(model.params)
    for life in range(2):
        partitioned = jaxche.Partitioned(model.stages, model.loss, protocol)
        state = partitioned.init(model.params, tx)
        assert state.step == 2 * life
        for _ in range(2):
            state, loss = partitioned.step(state, model.batch)
            wanted, grads = twin(model, params, model.batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            close(loss, wanted)
        partitioned.close()
    close(list(state.params), params)


def test_a_run_is_cut_alike_by_all_its_processes(tmp_path, make_model, devices):
    model = make_model()
    whole = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path))
    with pytest.raises(ValueError, match=r'"micro_batch_size": null.* this process has .*"micro_batch_size": 4'):
        jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path, micro_batch_size=4))
    whole.value_and_grad(model.params, model.batch)
    whole.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # and of gradients nothing is left
    jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path, micro_batch_size=4)).close()


def test_a_run_is_resumed_with_the_settings_that_it_was_begun_with(tmp_path, make_model, devices):
    model, tx = make_model(), optax.sgd(0.1)
    given = {"batch_size": 4, "names": ["x"] * 300}

    def begin(**settings):
        partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path, settings=settings))
        return partitioned, partitioned.init(model.params, tx)

    first, state = begin(**given)
    first.step(state, model.batch)
    first.close()
    resumed, state = begin(**dict(reversed(given.items())))  # in any order
    assert state.step == 1
    resumed.close()
    for other in ({}, given | {"batch_size": 8}, given | {"seed": 1}, given | {"names": ["x"] * 301}):
        with pytest.raises(ValueError, match=r"was begun with .*batch_size"):
            begin(**other)
    for bad in ({"x": {1, 2}}, 3):
        with pytest.raises(ValueError, match=r"settings=.* is not a dict of JSON; write e\.g\. settings="):
            jaxche.DataStore(tmp_path, settings=bad)


def test_a_plan_stays_while_there_are_saved_states(tmp_path, make_model, devices):
    model, tx = make_model(), optax.sgd(0.1)
    first = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path))
    first.value_and_grad(model.params, model.batch)  # a step without a state before those with one
    first.step(first.init(model.params, tx), model.batch)
    first.close()
    second = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path))
    second.value_and_grad(model.params, model.batch)  # without init, which looks for saved states
    second.close()
    with pytest.raises(ValueError, match=r'"micro_batch_size": null.* this process has .*"micro_batch_size": 4'):
        jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path, micro_batch_size=4))


def test_numbers_of_64_bits_stay_such_in_all_stages(tmp_path, devices):
    stages = [lambda params, x: x * params, lambda params, x: x + params]
    model = jaxche.Partitioned(stages, lambda y, x: y.mean(), jaxche.DataStore(tmp_path), devices[:2])
    with jax.enable_x64(True):
        _, grads = model.value_and_grad([np.float64(2), np.float64(1)], np.array([1, 2 + 2**-40]))
        assert float(grads[0]) == 1.5 + 2**-41
    model.close()


def test_activations_a_stage_does_not_expect_are_refused(tmp_path, make_model, devices):
    # Two processes that run different code: this one's stage 1 expects what stage 0 of the other does not send.
    model = make_model()
    sender = jaxche.DataStore(tmp_path).wire([0], 2, devices)
    sender.send(Tag(0, 0, "forward", 0), jnp.zeros((12, 5)))
    receiver = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path), local_stages=[1])
    with pytest.raises(ValueError, match=r"from-stage-000 .* float32\[12, 5\] where .* float32\[12, 6\] is expected"):
        receiver.value_and_grad(model.params, model.batch)
    sender.close()


def test_parameters_are_kept_bit_for_bit(tmp_path, make_model, same):
    model = make_model()
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path))
    state = partitioned.init(model.params, optax.adam(0.1))
    state, _ = partitioned.step(state, model.batch)
    partitioned.close()
    again = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path))
    found = again.init(model.params, optax.adam(0.1))
    same(found, state)
    again.close()


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_what_an_earlier_run_left_is_never_trained_on(tmp_path, make_model, twin, close, devices, until, order):
    model, forward, protocol = make_model(), Tag(0, 0, "forward", 0), jaxche.DataStore(tmp_path)
    # The stages of an earlier run of the same name ended when the first had sent what the second had not yet read.
    killed = [protocol.wire([stage], 2, devices) for stage in range(2)]
    activations = model.stages[0](model.params[0], model.batch)
    killed[0].send(forward, 10 * activations)
    killed[1].receive(forward, activations, devices[1])
    old = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any("from-stage-000" in path.name for path in old)
    results = {}

    def run(stage):
        made = jaxche.Partitioned(
            model.stages, model.loss, protocol, local_stages=[stage], devices=devices[stage : stage + 1]
        )
        results[stage] = made.value_and_grad(model.params, model.batch)
        made.close()

    threads = {stage: threading.Thread(target=run, args=(stage,)) for stage in order}
    threads[order[0]].start()
    hello = tmp_path / "run" / f"stage-00{order[0]}-hello"
    assert until(lambda: hello.read_bytes() != old[hello])  # it has begun, and looks for what it is to read
    threads[order[1]].start()
    for thread in threads.values():
        thread.join()
    loss, grads = twin(model, model.params, model.batch)
    for stage in range(2):
        close(results[stage][0], loss)
        close(results[stage][1][stage], grads[stage])
    for wire in killed:
        wire.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_was_sent_before_the_others_came_arrives_and_is_dropped_where_nobody_came(tmp_path, devices):
    protocol, forward = jaxche.DataStore(tmp_path, timeout_s=60), Tag(0, 0, "forward", 0)
    first = protocol.wire([0], 2, devices)
    first.send(forward, jnp.ones(3))
    second = protocol.wire([1], 2, devices)
    assert second.receive(forward, jnp.ones(3), devices[1]).tolist() == [1, 1, 1]
    second.finish(0)
    first.finish(0)
    second.close()
    first.close()
    alone = protocol.wire([0], 2, devices)
    alone.send(forward, jnp.ones(3))
    alone.close()
    assert not [path for path in tmp_path.rglob("*") if "from-stage" in path.name]


def test_stages_that_nobody_holds_are_named(tmp_path, devices):
    wire = jaxche.DataStore(tmp_path, timeout_s=0.1).wire([1], 3, devices)
    with pytest.raises(TimeoutError, match=r"waited 0.1 s for the process of stage 0, 2 in .* \(run run\)"):
        wire.receive(Tag(0, 0, "forward", 0), jnp.ones(3), devices[1])
    wire.close()


class Dead(BaseException):
    """The process was killed."""


class Mortal:
    """A store as one process sees it, which dies when its n-th request has taken effect.

    To die before a request takes effect is to die after the one before it. Requests that find nothing are not counted:
    how often a reader looks is up to chance.
    """

    def __init__(self, store, dies_after=None):
        self._store, self._dies_after = store, dies_after
        self._lock, self.requests, self.dead = threading.Lock(), 0, False

    def _request(self, name, *arguments, **options):
        with self._lock:
            if self.dead:
                raise Dead
            result = getattr(self._store, name)(*arguments, **options)
            self.requests += 1
            if self.requests == self._dies_after:
                self.dead = True
                raise Dead
            return result

    def __getattr__(self, name):
        return lambda *arguments, **options: self._request(name, *arguments, **options)


def wire_of(store, stages=(0,), n_stages=2, timeout_s=20.0, save_every=1, identity="0" * 32):
    """The wire of a run on which all agree, unless ``identity`` is None."""
    run = StoreRun(Objects(store, "memory://", "run"), stages, n_stages, timeout_s)
    if identity is not None:
        run._set(identity)
        run.has_saved_state = True
    return StoreWire(run, save_every)


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


def run(deaths=(), save_every=1, store=None):
    """All processes to the end, started again whenever they die.

    Args:
      deaths: for each stage a list of requests after which it dies, one a life.
      store: of an earlier run, which goes on.

    Returns:
      Final states and losses, what is left in the store, and each stage's requests in its first life.
    """
    store = store or obstore.store.MemoryStore()
    states, losses, requests, errors = {}, {}, {}, []

    def process(stage, lives):
        for dies_after in [*lives, None]:
            mortal = Mortal(store, dies_after)
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


@pytest.mark.parametrize("steps", [[[0, 1, 2], [3], [4, 5]], [[0, 1, 1, 2]], [[0, 1], [1, 2]]])
def test_the_newest_two_states_stay_over_several_wires_and_repeated_steps(steps):
    store = obstore.store.MemoryStore()
    for own in steps:  # a closed wire, or an error in a step, is followed by a new wire of the same process
        wire = wire_of(store)
        for step in own:
            wire.finish(step, {"w": np.full(2, step, np.float32)})
        wire.close()
    last = steps[-1][-1] + 1
    wanted = [f"stage-000-state/step-{step:010d}" for step in (last - 1, last)]
    assert wire_of(store)._objects.names("stage-000-state") == wanted


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [1, 3])
@pytest.mark.parametrize("stage", range(STAGES))
def test_a_process_may_die_at_any_of_its_requests(stage, save_every):
    wanted = run(save_every=save_every)
    requests = wanted[3][stage]
    assert requests > 15
    for n in range(1, requests + 4):  # how many there are differs a little: some find nothing
        assert_undisturbed(run({stage: [n]}, save_every), wanted)


def test_processes_may_die_again_and_again():
    wanted = run()
    rng = np.random.default_rng(0)
    for _ in range(60):
        lives = {s: rng.integers(1, 30, 3).tolist() for s in range(STAGES)}
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
    with pytest.raises(ValueError, match=r"float32\[2\] where the only leaf: float32\[3\] is expected$"):
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


@pytest.mark.parametrize("sends", [1, 2])
def test_an_upload_that_failed_is_an_error_of_close(sends):
    wire = wire_of(obstore.store.MemoryStore(), timeout_s=0.05, identity=None)
    for micro in range(sends):  # the second upload waits for the partner when the first fails
        wire.send(Tag(0, micro, "forward", 0), np.zeros(2, np.float32))
    futures.wait([entry.done for entry in wire._sent[0]])
    with pytest.raises(TimeoutError, match="the process of stage 1"):
        wire.close()


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


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path):
    model = jaxche.Partitioned([lambda p, x: x * p], lambda y, x: jnp.mean(y), jaxche.DataStore(f"memory://{tmp_path}"))
    with pytest.raises(ValueError, match=r"rng_key has dtype key<fry>, which cannot be stored"):
        model.init([jnp.ones(2)], optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)))
    model.close()


def test_a_saved_state_that_was_damaged_or_deleted_is_told(monkeypatch):
    store = obstore.store.MemoryStore()
    first, state = wire_of(store), {"w": np.zeros(2, np.float32), "momentum": np.ones(2, np.float32)}
    first.finish(0, state)
    first.close()
    (key,) = [entry["path"] for chunk in store.list() for entry in chunk if "/stage-000-state/" in entry["path"]]
    again = wire_of(store)
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "read", lambda *args: None)
        with pytest.raises(ConnectionError, match="was deleted meanwhile: do two processes hold one stage"):
            again.rejoin(STATE)
    whole = bytes(store.get(key).bytes())
    store.put(key, whole[:-1])
    with pytest.raises(DamagedObjectError, match=r"or altered\. To resume, .*, delete it, and delete the states"):
        again.rejoin(STATE)
    store.put(key, whole)
    step, found = again.rejoin(STATE)
    assert step == 1
    np.testing.assert_array_equal(found["momentum"], state["momentum"])
    again.close()


def test_a_run_goes_on_from_the_last_step_of_which_every_stage_has_a_state():
    wanted, store = run(), obstore.store.MemoryStore()
    run(store=store)
    newest = f"state/step-{STEPS:010d}"  # as the error of a damaged one says, those of all stages are deleted
    store.delete([entry["path"] for chunk in store.list() for entry in chunk if entry["path"].endswith(newest)])
    states, losses, left, _ = run(store=store)
    assert_undisturbed((states, wanted[1] | losses, left, {}), wanted)
    assert {step for _, step in losses} == {STEPS - 1}


@pytest.mark.parametrize(("content", "step"), [(b"12", 12), (b"", 0), (b"\0\0", 0)])
def test_a_damaged_note_of_what_is_finished_deletes_nothing(content, step):
    wire = wire_of(obstore.store.MemoryStore())
    assert wire._read_finished(1) == 0
    wire._objects.replace(_store_run.finished_key(1), [content])
    assert wire._read_finished(1) == step
    wire.close()
