"""Local replicas side by side."""

import contextlib
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.replicas import Merge, ReplicaMesh
from jaxche.replicas._replica import Replica


@pytest.fixture
def trainer(problem, devices):
    return jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:3])


def test_replicas_run_at_once_each_on_its_own_thread(trainer, problem, monkeypatch):
    """Each waits amid its round for the others: one after the other they would wait for ever."""
    run, amid, threads = Replica.run, threading.Barrier(3, timeout=20), set()

    def waits(self, *given):
        threads.add(threading.current_thread())
        amid.wait()
        return run(self, *given)

    monkeypatch.setattr(Replica, "run", waits)
    state = trainer.init(problem.params)
    _, info = trainer.round(state, problem.data, counts=(2, 2, 2))
    assert info.counts == (2, 2, 2)
    assert len(threads) == 3


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_threads_have_the_64_bits_of_the_caller(devices, overlap):
    data = [np.full((2, 1), 1 + 2**-40)] * 2
    with jax.enable_x64(True):
        trainer = jaxche.Trainer(lambda w, x: (x * w).mean(), optax.sgd(1.0), replicas=devices[:2], overlap=overlap)
        state, _ = trainer.round(trainer.init(np.float64(1)), data, counts=(1, 1))
        assert float(trainer.params(state)) == -(2**-40)
        assert trainer.evaluate(state, data) == {"loss": -(2**-40) * (1 + 2**-40)}


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("setting", [(jax.enable_x64, True), (jax.default_matmul_precision, "highest")])
def test_steps_and_evaluations_follow_a_setting_that_changes_between_two_fits(devices, setting, evaluates):
    seen = []

    def loss(w, x):
        seen.append((str(x.dtype), jax.config.jax_default_matmul_precision))
        return (x * w).mean()

    data, (context, value) = [np.ones((2, 1))] * 2, setting
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(np.float32(1))

    def run():
        if evaluates:
            trainer.evaluate(state, data)
        else:
            trainer.round(state, data, counts=(1, 1))
        return seen[-1], len(seen)

    before, _ = run()
    with context(value):
        inside, traced = run()
        assert inside != before
        assert run() == (inside, traced)  # compiled once for each setting
    assert run() == (inside, traced)  # the programs of before are there still


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_batches_of_the_next_round_are_read_while_a_round_runs(devices, monkeypatch, policy):
    read, run = [threading.Event() for _ in range(24)], Replica.run

    class Data:
        def __len__(self):
            return len(read)

        def __getitem__(self, i):
            read[i].set()
            return np.ones((2, 1), np.float32)

    def run_until_next_is_read(self, local, feed, *given):
        result = run(self, local, feed, *given)
        after = 1 + max(piece.key[1] for step in feed.steps for piece in step)
        assert all(one.wait(20) for one in read[after : after + 2])
        return result

    monkeypatch.setattr(Replica, "run", run_until_next_is_read)
    trainer = jaxche.Trainer(lambda w, x: (x * w).mean(), optax.sgd(0.1), policy=policy, replicas=devices[:2])
    trainer.fit(trainer.init(np.float32(1)), Data(), progress=False)


@pytest.mark.parametrize("kind", ["sequence", "stream"])
def test_data_is_read_with_the_64_bits_of_the_caller(devices, kind):
    dtypes = set()

    class Data:
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return jnp.full((2, 1), 1.0 + i)

    def batches(epoch):
        return (Data()[i] for i in range(4))

    def loss(w, x):
        dtypes.add(str(x.dtype))
        return (x * w).mean()

    with jax.enable_x64(True):
        data = Data() if kind == "sequence" else jaxche.Stream(batches)
        trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:2])
        trainer.fit(trainer.init(np.float64(1)), data, epochs=2, progress=False)
    assert dtypes == {"float64"}


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_threads_have_the_settings_of_the_caller(devices, overlap):
    found = set()

    def loss(w, x):
        found.add((jax.config.jax_default_matmul_precision, str(jax.random.key(0).dtype)))
        return (x @ w).mean()

    # Batches of other shapes than the first are compiled in the threads of their replicas.
    data = [np.ones((rows, 1), np.float32) for rows in (4, 4, 3, 2)]
    with jax.default_matmul_precision("highest"), jax.default_prng_impl("rbg"):
        trainer = jaxche.Trainer(loss, optax.sgd(1.0), replicas=devices[:2], overlap=overlap)
        state, _ = trainer.round(trainer.init(jnp.zeros(1)), data, counts=(1, 1))
        trainer.round(state, data, counts=(1, 1))
    assert found == {("highest", "key<rbg>")}


@pytest.mark.parametrize("where", ["thread", "process"])
@pytest.mark.parametrize("arguments", [{}, {"policy": "sync"}, {"overlap": 0.5}])
def test_a_guard_against_transfers_leaves_training_alone(devices, where, arguments):
    data, w = [np.full((2, 1), i, np.float32) for i in range(8)], np.zeros(1, np.float32)

    def train():
        given = {"replicas": devices[:2], "fleet": jaxche.VirtualFleet([10, 20])} | arguments
        trainer = jaxche.Trainer(lambda w, x: ((x - w) ** 2).mean(), optax.sgd(0.1), **given)
        state = trainer.init(w)
        state, _ = trainer.round(state, data, counts=(1, 1))
        state, history = trainer.fit(state, data, epochs=1, validation=data, progress=False)
        assert history[-1].validation == trainer.evaluate(state, data)
        return history[-1].validation["loss"], np.asarray(trainer.params(state)).tolist()

    before = jax.config.values["jax_transfer_guard"]
    with jax.transfer_guard("disallow") if where == "thread" else contextlib.nullcontext():
        try:
            jax.config.update("jax_transfer_guard", "disallow" if where == "process" else before)
            guarded = train()
            with pytest.raises(Exception, match="Disallowed"):  # of the user's own
                jnp.zeros(1)
        finally:
            jax.config.update("jax_transfer_guard", before)
    assert guarded == train()


@pytest.mark.parametrize("kind", ["sequence", "stream"])
def test_a_source_may_write_all_batches_into_one_array(devices, kind):
    buffer = np.zeros((4, 1), np.float32)

    class Data:
        def __len__(self):
            return 8

        def __getitem__(self, i):
            buffer[:] = i
            return buffer

    def batches(epoch):
        return (Data()[i] for i in range(8))

    data = Data() if kind == "sequence" else jaxche.Stream(batches)
    trainer = jaxche.Trainer(lambda w, x: 0.0 * w + x.mean(), optax.sgd(0.1), replicas=devices[:2])
    state, history = trainer.fit(trainer.init(jnp.zeros(())), data, epochs=2, progress=False)
    assert sum(info.loss * info.examples for info in history) / 64 == 3.5
    assert trainer.evaluate(state, data) == {"loss": 3.5}


def test_every_batch_of_every_epoch_draws_its_own_numbers(problem, devices):
    def loss(params, batch, rng):
        return problem.loss(params, batch)[0], {"drawn": jax.random.uniform(rng)}

    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:2], seed=5)
    data, drawn = [problem.data[i] for i in range(4)], []
    state = trainer.init(problem.params)
    for counts in [(1, 0), (0, 1), (1, 1)] * 2:
        state, info = trainer.round(state, data, counts=counts)
        drawn.append(info.metrics["drawn"])
    assert (state.epoch, state.cursor) == (2, 0)
    wanted = [float(jax.random.uniform(jax.random.fold_in(jax.random.key(5), i))) for i in range(8)]
    assert len(set(wanted)) == 8
    means = [mean for e in (0, 4) for mean in (wanted[e], wanted[e + 1], (wanted[e + 2] + wanted[e + 3]) / 2)]
    np.testing.assert_allclose(drawn, means, rtol=1e-6)


def test_a_failed_preparation_can_be_corrected(trainer, problem):
    state = trainer.init(problem.params)
    with pytest.raises(ValueError, match="leading axes"):
        trainer.round(state, [{"x": np.ones((4, 5)), "y": np.ones((3, 2))}])
    state, info = trainer.round(state, problem.data)
    assert info.round == 0
    assert trainer.compilations == 3


def test_an_odd_batch_at_the_end_of_an_epoch_that_cannot_work_fails_the_round_not_the_process(trainer, problem):
    data = [problem.data[i] for i in range(5)] + [{"x": np.ones((4, 5)), "y": np.ones((3, 2))}]
    state = trainer.init(problem.params)
    with pytest.raises(ValueError, match="leading axes") as caught:
        trainer.round(state, data, counts=(2, 2, 2))
    assert any("rank 2 in round 0" in note for note in caught.value.__notes__)
    after, _ = trainer.round(state, problem.data, counts=(1, 1, 1))
    assert after.round == 1


def test_user_data_is_never_read_from_two_threads_at_once(problem, devices):
    busy = threading.Lock()

    class Touchy:
        def __len__(self):
            return 12

        def __getitem__(self, i):
            assert busy.acquire(blocking=False), "two threads read at once"
            try:
                return problem.data[i]
            finally:
                busy.release()

    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:4])
    state, _ = trainer.fit(trainer.init(problem.params), Touchy(), epochs=3, progress=False)
    assert state.epoch == 3


def test_after_a_change_of_the_ranks_all_have_the_limits_of_all(trainer, problem, monkeypatch):
    """A process that joins later has seen no other memory, and that of a rank may be new."""
    state, _ = trainer.round(trainer.init(problem.params), problem.data)
    engine = trainer._engine
    before = engine.max_rows
    first = engine._own_resources[0]
    theirs = [[(0, first[1] | {"in all": 7}, 4.0)], engine._own_resources[1:]]
    monkeypatch.setattr(type(trainer._group), "all_gather", lambda self, value, place="": theirs)
    engine.arrange([0, 1, 2], state.local_states)
    engine.connect(state.local_states)
    assert engine.max_rows == [4.0, *before[1:]]
    assert trainer.memory[0]["in all"] == 7


@pytest.mark.parametrize("replicas", ["devices", "islands", "stages", "overlap"])
def test_ranks_are_connected_without_a_merge(replicas, problem, devices, monkeypatch):
    """A merge of a large state takes seconds, in which no process trains."""
    strategy, more = jaxche.FullShard(min_size=1), {}
    loss, params, data = problem.loss, problem.params, problem.data
    if replicas == "islands":
        more = {"replicas": [strategy.mesh(devices[:2]), strategy.mesh(devices[2:4])], "strategy": strategy}
    elif replicas == "stages":
        loss = jaxche.Partitioned([lambda w, x: x @ w], lambda y, x: jnp.mean(y**2), jaxche.Direct())
        params, data = [jnp.ones((2, 1))], [np.ones((4, 2), np.float32)] * 8
        more = {"replicas": [devices[:1], devices[1:2]]}
    else:
        more = {"replicas": devices[:2], "overlap": 0.5 if replicas == "overlap" else 0.0}
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), **more)
    state, _ = trainer.round(trainer.init(params), data)
    state = state.merged()  # a merge in flight may not have begun
    engine, sums = trainer._engine, []
    connect = ReplicaMesh.connect
    monkeypatch.setattr(ReplicaMesh, "connect", lambda self: sums.append(connect(self)))
    with monkeypatch.context() as no_merge:
        no_merge.setattr(Merge, "__call__", None)
        engine.arrange([0, 1], state.local_states)
        engine.connect(state.local_states)
    assert len(sums) == 1
    assert engine.sent_bytes > 0
    _, info = trainer.round(state, data)
    assert np.isfinite(info.loss)


@pytest.mark.parametrize(
    "options", [{}, {"policy": "sync"}, {"wire": "int8", "policy": "cadence"}, {"scaling": jaxche.AdamScale()}], ids=str
)
def test_a_trainer_that_is_not_used_any_more_leaves_no_arrays_on_devices(devices, options):
    rows, before = np.ones((8, 3), np.float32), set(threading.enumerate())

    def train():
        loss = jax.tree_util.Partial(
            lambda w, batch, frozen: jnp.mean((batch @ w + frozen.sum()) ** 2), frozen=np.ones((7, 11), np.float32)
        )
        trainer = jaxche.Trainer(loss, optax.adam(0.1), replicas=devices[:2], **options)
        trainer.fit(trainer.init(jnp.ones(3)), [rows] * 4, validation=[rows], progress=False)
        assert any(x.shape == (7, 11) for x in jax.live_arrays())

    gc.collect()
    gc.disable()  # which would find cycles at some time
    try:
        train()
        own = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("jaxche")]
        for thread in own:
            thread.join(10)  # it may hold its last task for a moment
        assert not [x for x in jax.live_arrays() if x.shape == (7, 11)]
        assert not any(thread.is_alive() for thread in own)
    finally:
        gc.enable()
