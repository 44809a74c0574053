"""Rounds of a fit with ``donate=True``: they take the arrays of the state, and give the same numbers."""

import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.replicas import _merge, _packing
from jaxche.replicas._merge import Merge
from jaxche.replicas._packing import Deferred
from jaxche.replicas._programs import LocalPrograms
from jaxche.replicas._replica import Replica

LARGE = 1 << 15  # numbers of an array that is not packed


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jnp.mean((hidden.mean(1) + params["b"][0] - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def data():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    return jaxche.Batches({"x": x, "y": x[:, 0]}, batch_size=4)


def params(small=0):
    # Small arrays that are large together, once they are packed.
    more = {f"p{i}": np.full(12_000, i, np.float32) for i in range(small)}
    w = np.random.default_rng(1).normal(size=(4, LARGE // 4)).astype(np.float32)
    return {"w": w, "b": np.zeros(3, np.float32)} | more


def fleet(replicas=2):
    return jaxche.VirtualFleet(ms_per_batch=[20.0, 30.0][:replicas], sync_ms=5.0)


@pytest.fixture
def one(devices):
    return jaxche.Trainer(loss, optax.adam(0.02), replicas=devices[:1], fleet=fleet(1))


def taken(state):
    """Whether large arrays were deleted, of the parameters and of the optimizer's state of the first replica."""
    local, found = state.local_states[0], []
    for name in ("params", "opt_state"):
        tree = local[local._fields.index(name)]
        if isinstance(tree, Deferred):
            packed, made = tree.made
            tree = packed or made or local.views.trees[name]
        found.append(
            {leaf.is_deleted() for leaf in jax.tree.leaves(tree) if leaf.size and leaf.size % LARGE == 0} == {True}
        )
    return found


POLICIES = {
    # Policy, other arguments, replicas, and whether rounds take parameters and optimizer state.
    "single": ({}, 1, [True, True]),
    "sync": ({"policy": "sync"}, 2, [True, True]),
    "cadence": ({}, 2, [False, True]),
    "local": ({"opt_state": "local"}, 2, [False, True]),
    "reset": ({"opt_state": "reset"}, 2, [False, True]),
    "int4": ({"wire": "int4"}, 2, [False, True]),
    "outer": ({"outer": optax.sgd(1.0, momentum=0.5)}, 2, [False, True]),
    "overlap": ({"overlap": 0.5}, 2, [False, False]),
    "scaling": ({"scaling": jaxche.AdamScale(), "base_batch_size": 4}, 2, [False, False]),
    "single scaling": ({"scaling": jaxche.AdamScale(), "base_batch_size": 4}, 1, [True, True]),
}


def arrays_of(state):
    """The arrays of a state between rounds: packed where it has them so, and the views of all replicas."""
    for local in state.local_states:
        trees = [tree.packed if isinstance(tree, Deferred) else tree for tree in local]
        yield from jax.tree.leaves((trees, local.views and local.views.trees))


@pytest.mark.parametrize("packs", [False, True], ids=["few arrays", "packed arrays"])
@pytest.mark.parametrize(("options", "replicas", "takes"), POLICIES.values(), ids=POLICIES)
@pytest.mark.filterwarnings("ignore:an outer optimizer")
def test_rounds_take_the_state_and_change_nothing(data, devices, monkeypatch, options, replicas, takes, packs):
    if packs:
        monkeypatch.setattr(_packing, "_FEWEST", 3)
    ended, more = [], {"fleet": fleet()} if replicas > 1 else {}
    trainer = jaxche.Trainer(loss, optax.adam(0.02), replicas=devices[:replicas], **more, **options)
    for donate in (True, False):
        given, losses = trainer.init(params(small=2 if packs else 0)), []
        for _ in range(2):  # the second state is one after a merge, with its views
            states, seen = [], []

            def look(state, info, states=states, seen=seen):
                seen.append(taken(states[-1]) if states else takes)
                states.append(state)

            after, history = trainer.fit(given, data, epochs=2, callbacks=[look], progress=False, donate=donate)
            assert seen[1:] == [takes if donate else [False, False]] * (len(history) - 1)
            assert {array.is_deleted() for array in arrays_of(given)} == {donate}
            if donate:
                with pytest.raises(ValueError, match=r"state was deleted: fit\(state, data, donate=True\) takes"):
                    trainer.round(given, data)
            given = after
            losses += [info.loss for info in history]
        ended.append((jax.device_get((trainer.params(given), trainer.opt_state(given))), losses))
    jax.tree.map(np.testing.assert_array_equal, *ended)


def test_the_update_of_exact_sync_takes_the_state_itself(data, devices, monkeypatch):
    """Not only what is freed after it."""
    monkeypatch.setattr(_merge, "free", lambda states, kept: None)
    trainer = jaxche.Trainer(loss, optax.adam(0.02), policy="sync", replicas=devices[:2], fleet=fleet())
    states = []
    trainer.fit(
        trainer.init(params()), data, callbacks=[lambda state, info: states.append(state)], progress=False, donate=True
    )
    assert taken(states[0]) == [True, True]


def test_exact_sync_and_local_steps_under_auto_take_the_state(data, devices):
    ended = []
    for donate in (False, True):
        overlap = None if donate else 0  # merges beside steps would keep the state
        trainer = jaxche.Trainer(
            loss, optax.adam(0.02), policy="auto", replicas=devices[:2], fleet=fleet(), overlap=overlap
        )
        given = trainer.init(params())
        state, history = trainer.fit(given, data, epochs=6, progress=False, donate=donate)
        assert {array.is_deleted() for array in arrays_of(given)} == {donate}
        ended.append((jax.device_get(trainer.params(state)), [info.loss for info in history]))
    jax.tree.map(np.testing.assert_array_equal, *ended)


def test_islands_take_the_state(data, devices):
    strategy = jaxche.FullShard(min_size=1)
    meshes = [strategy.mesh(devices[:2]), strategy.mesh(devices[2:4])]
    for policy in ("cadence", "sync"):
        trainer = jaxche.Trainer(
            loss, optax.adam(0.02), policy=policy, replicas=meshes, strategy=strategy, fleet=fleet()
        )
        ended = []
        for donate in (True, False):
            given, first = trainer.init(params()), []
            state, _ = trainer.fit(
                given,
                data,
                callbacks=[lambda state, info, first=first: first.append(state)],
                progress=False,
                donate=donate,
            )
            ended.append(jax.device_get(trainer.params(state)))
            assert taken(first[0]) == [donate and policy == "sync", donate]
        jax.tree.map(np.testing.assert_array_equal, *ended)


def test_stages_take_the_state(data, devices):
    def first(w, x):
        return jnp.tanh(x @ w)

    def second(w, h):
        return h @ w

    def objective(out, batch):
        return jnp.mean((out - batch["y"]) ** 2)

    w = params()["w"]
    stages = [w, np.full(w.shape[1], 1e-3, np.float32)]
    model = jaxche.Partitioned([lambda w, batch: first(w, batch["x"]), second], objective, jaxche.Direct(), devices[:2])
    for replicas in ([devices[:2]], [devices[:2], devices[2:4]]):
        trainer = jaxche.Trainer(model, optax.adam(0.02), replicas=replicas, fleet=fleet(len(replicas)))
        ended = []
        for donate in (True, False):
            states = []
            state, _ = trainer.fit(
                trainer.init(stages),
                data,
                epochs=2,
                callbacks=[lambda state, info, states=states: states.append(state)],
                progress=False,
                donate=donate,
            )
            ended.append(jax.device_get(trainer.params(state)))
            assert taken(states[0]) == [donate and len(replicas) == 1, donate]
        jax.tree.map(np.testing.assert_array_equal, *ended)


def test_a_replica_without_steps_and_groups_take_the_state(data, devices):
    speeds = jaxche.VirtualFleet(ms_per_batch=[20.0, 50.0, 20.0, 50.0], sync_ms=200.0, group_sync_ms=5.0)
    trainer = jaxche.Trainer(
        loss, optax.adam(0.02), replicas=devices[:4], fleet=speeds, groups=[[0, 1], [2, 3]], group_merges=2
    )
    ended = []
    for donate in (True, False):
        state, _ = trainer.fit(trainer.init(params()), data, epochs=4, max_steps=43, progress=False, donate=donate)
        ended.append(jax.device_get((trainer.params(state), trainer.opt_state(state))))
    jax.tree.map(np.testing.assert_array_equal, *ended)


def test_a_run_that_is_interrupted_and_continued_ends_as_one(data, devices, tmp_path):
    parts, whole = (jaxche.Trainer(loss, optax.adam(0.02), replicas=devices[:2], fleet=fleet()) for _ in range(2))
    stop = [lambda state, info: info.round == 2]
    options = {"checkpoints": tmp_path, "progress": False, "donate": True}
    parts.fit(parts.init(params()), data, epochs=4, callbacks=stop, **options)
    resumed, record = whole.fit(whole.init(params()), data, epochs=4, **options)
    state, _ = whole.fit(whole.init(params()), data, epochs=4, progress=False)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (whole.params(state), whole.params(resumed))))
    replayed, _ = whole.replay(whole.init(params()), data, record)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (whole.params(state), whole.params(replayed))))


def test_the_memory_of_a_round_has_no_copy_of_what_it_takes(data, devices):
    rows = {}
    for donate in (False, True):
        for replicas in (1, 2):
            trainer = jaxche.Trainer(loss, optax.adam(0.02), replicas=devices[:replicas], fleet=fleet(replicas))
            trainer.fit(trainer.init(params()), data, max_steps=8, progress=False, donate=donate)
            rows[donate, replicas] = trainer.memory[0]["working copy"]
    large = 4 * LARGE
    assert 3 * large < rows[False, 1] < 3.1 * large
    assert 3 * large < rows[False, 2] < 3.1 * large
    assert rows[True, 1] < 0.1 * large
    assert large < rows[True, 2] < 1.1 * large


def held():
    """The bytes of all live arrays, those that share a buffer once."""
    shards = [shard.data for array in jax.live_arrays() if not array.is_deleted() for shard in array.addressable_shards]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


def test_one_replica_makes_no_copy_before_the_first_round_either(one, data, monkeypatch):
    """The most bytes that arrays had, looked at where a round ends and where programs are compiled."""
    finish, most, before = LocalPrograms.finish, [], held()

    def measured(self, local, carry):
        most.append(held())
        return finish(self, local, carry)

    state = one.init(params())
    monkeypatch.setattr(LocalPrograms, "finish", measured)
    one.fit(state, data, epochs=3, progress=False, donate=True)
    assert len(most) >= 2
    assert max(most) - before < 3.1 * 4 * LARGE


def test_replicas_make_no_copy_before_the_first_round_either(data, devices, monkeypatch):
    """The merge of exact sync is compiled, and not tried: that would make a second state."""
    calls, merge = [], Merge.__call__

    def counted(self, *arguments):
        calls.append(arguments[-1])
        return merge(self, *arguments)

    monkeypatch.setattr(Merge, "__call__", counted)
    trainer = jaxche.Trainer(loss, optax.adam(0.02), policy="sync", replicas=devices[:2], fleet=fleet())
    _, history = trainer.fit(trainer.init(params()), data, progress=False, donate=True)
    assert calls == [True] * len(history)


class Failing(list):
    def __getitem__(self, i):
        if self.fails and i == 9:
            raise OSError("the disk is gone")
        return super().__getitem__(i)

    fails = True


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("policy", ["cadence", "sync"])
def test_an_error_within_a_round_leaves_no_state_and_says_so(data, devices, policy, replicas):
    batches = Failing(data.epoch(0))
    trainer = jaxche.Trainer(loss, optax.adam(0.02), policy=policy, replicas=devices[:replicas], fleet=fleet(replicas))
    states = [trainer.init(params())]
    arguments = {"callbacks": [lambda state, info: states.append(state)], "progress": False}
    with pytest.raises(OSError, match="the disk is gone") as caught:
        trainer.fit(states[0], batches, donate=True, **arguments)
    notes = "\n".join(caught.value.__notes__)
    assert "fit(donate=True) has taken the state before this round; continue from a checkpoint" in notes
    assert "is intact" not in notes
    assert trainer.last_good_state is None
    with pytest.raises(ValueError, match=r"state was deleted: .* after an error with a checkpoint"):
        trainer.fit(states[-1], data, progress=False)
    batches.fails = False
    state, _ = trainer.fit(trainer.init(params()), batches, progress=False, donate=True)
    assert state.epoch == 1


@pytest.mark.parametrize("policy", ["cadence", "sync"])
def test_a_number_that_is_not_finite_is_found(data, devices, policy):
    x = data.arrays["x"].copy()
    x[40:] = np.nan
    broken = [{"x": x[i : i + 4], "y": data.arrays["y"][i : i + 4]} for i in range(0, 64, 4)]
    trainer = jaxche.Trainer(loss, optax.adam(0.02), policy=policy, replicas=devices[:2], fleet=fleet())
    with pytest.raises(jaxche.NonFiniteLossError, match=r"has NaN in .* The round was not merged\n") as caught:
        trainer.fit(trainer.init(params()), broken, progress=False, donate=True)
    assert caught.value.state is None
    assert trainer.last_good_state is None


def test_an_infinite_number_of_the_optimizer_may_stay(data, devices):
    """And a number of another array that becomes infinite is found."""

    def init(params):
        return {"best": jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), params), "large": jnp.ones(LARGE)}

    def update(grads, state, params=None):
        large = jnp.where(params["b"][0] != 0, jnp.inf * state["large"], state["large"])
        return jax.tree.map(lambda g: -0.01 * g, grads), state | {"large": large}

    trainer = jaxche.Trainer(loss, optax.GradientTransformation(init, update), replicas=devices[:1])
    with pytest.raises(jaxche.NonFiniteLossError, match="a state of rank 0 became NaN or infinite"):
        trainer.fit(trainer.init(params()), data, progress=False, donate=True)
    tx = optax.GradientTransformation(init, lambda grads, state, params=None: (update(grads, state, params)[0], state))
    trainer = jaxche.Trainer(loss, tx, replicas=devices[:1])
    state, _ = trainer.fit(trainer.init(params()), data, progress=False, donate=True)
    assert state.epoch == 1


def test_what_is_refused_before_the_first_step_leaves_the_state(one, data):
    state = one.init(params())
    with pytest.raises(ValueError, match="leading axes of a batch differ"):
        one.fit(state, [{"x": np.ones((4, 4), np.float32), "y": np.ones(3, np.float32)}], progress=False, donate=True)
    assert not state.is_deleted
    one.fit(state, data, progress=False, donate=True)


def press():
    """Ctrl-C, once the main thread waits."""
    time.sleep(0.3)
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def wait_for(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_interrupts_after_the_round_and_a_second_one_within(one, data, monkeypatch, caplog, presses):
    run, calls = Replica.run, []

    def interrupted(self, local, feed, *rest):
        calls.append(self.rank)
        result = run(self, local, feed, *rest)
        if len(calls) == 2:
            press()
            wait_for(lambda: "interrupted: fit ends after this round; a second Ctrl-C ends it now" in caplog.text)
            if presses == 2:
                press()
                wait_for(lambda: feed._is_stopped)
        return result

    monkeypatch.setattr(Replica, "run", interrupted)
    start = one.init(params())
    if presses == 2:
        with pytest.raises(KeyboardInterrupt):
            one.fit(start, data, epochs=30, progress=False, donate=True)
        assert start.is_deleted
        return
    state, history = one.fit(start, data, epochs=30, progress=False, donate=True)
    assert state.round == len(history) == 2
    assert "interrupted: fit returns the state after round 1" in caplog.text
    one.fit(state, data, progress=False)
