"""The merge program: what it sends, what it leaves alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.cadence import DivergenceCorrection, RoundPlan
from jaxche.data import SequenceReader
from jaxche.distributed import Group
from jaxche.replicas._merge import ToMerge, reduce_rows
from jaxche.replicas._merge_program import _fednova_step
from jaxche.replicas._table import HOST_COLUMNS, Columns
from jaxche.training import PlanMismatchError, TrainerState
from jaxche.training._plan import PlannedRound
from jaxche.training._round_end import RoundStatistics


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [None, jaxche.AdaScale(), jaxche.AdamScale()])
@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_a_merge_is_one_all_reduce(problem, devices, merge_arguments, average, scaling):
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.1), average=average, replicas=devices[:2], scaling=scaling)
    state = trainer.init(problem.params)
    trainer.round(state, problem.data, counts=(1, 1))
    text = trainer._engine._merge._program.lower(*merge_arguments(trainer, state)).as_text()
    assert text.count("stablehlo.all_reduce") == 1
    assert "all_gather" not in text


def test_a_merge_of_gradients_promotes_no_ranks_where_arrays_are_large(devices):
    with jax.numpy_rank_promotion("raise"):
        trainer = jaxche.Trainer(
            lambda w, batch: jnp.mean((batch @ w) ** 2), optax.sgd(0.1), "sync", replicas=devices[:2]
        )
        state, _ = trainer.round(trainer.init(jnp.ones((4, 1 << 13))), [np.eye(4, dtype=np.float32)] * 2)
    assert np.isfinite(trainer.params(state)).all()


def test_the_step_of_fednova_is_that_of_its_weights():
    with jax.numpy_dtype_promotion("strict"):
        assert float(_fednova_step(jnp.array([1.0, 3.0, 0.0]))) == jaxche.merge_weights("fednova", [1, 3, 0])[1]


def test_drift_is_that_of_its_definition(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.3), replicas=devices[:2])
    start = trainer.init(problem.params)
    merged, info = trainer.round(start, problem.data, counts=(1, 4))
    ends = []
    for first, n in ((0, 1), (1, 4)):
        alone = jaxche.Trainer(problem.loss, optax.sgd(0.3), replicas=devices[:1])
        share = [problem.data[i] for i in range(first, first + n)]
        ends.append(alone.params(alone.round(alone.init(problem.params), share, counts=(n,))[0]))
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (problem.params, *ends)]
    deltas = flat[0] - np.stack(flat[1:])
    mean = info.weights @ deltas
    variance = info.weights @ np.sum((deltas - mean) ** 2, axis=1)
    assert info.drift_dir == pytest.approx(variance / (mean @ mean), rel=1e-3)
    norm = float(optax.tree.norm(trainer.params(merged)))
    assert info.drift == pytest.approx(np.sqrt(variance) / norm, rel=1e-3)


def test_how_fast_replicas_move_does_not_depend_on_the_weights_of_a_merge(problem, devices):
    fleet, found = jaxche.VirtualFleet(ms_per_batch=[80.0, 20.0]), []
    for rule in ("steps", "batch", "fednova"):
        trainer = jaxche.Trainer(problem.loss, optax.sgd(0.01), merge=rule, replicas=devices[:2], fleet=fleet)
        state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(1, 4))
        norm = float(optax.tree.norm(trainer.params(state)))
        found.append((80.0 / state.che.travel_samples[0]) ** 2 * norm**2)
    ends = []
    for first, n in ((0, 1), (1, 4)):
        alone = jaxche.Trainer(problem.loss, optax.sgd(0.01), replicas=devices[:1])
        share = [problem.data[i] for i in range(first, first + n)]
        ends.append(alone.params(alone.round(alone.init(problem.params), share, counts=(n,))[0]))
    moved = [float(optax.tree.norm(jax.tree.map(lambda a, b: a - b, problem.params, end))) ** 2 for end in ends]
    assert moved[1] > 4 * moved[0]
    assert found == pytest.approx([0.2 * moved[0] + 0.8 * moved[1]] * 3, rel=1e-3)


def test_low_precision_parameters_keep_their_dtype(devices):
    for average in ("parameters", "gradients"):
        trainer = jaxche.Trainer(
            lambda w, b: jnp.mean((b @ w.astype(jnp.float32) - 1.0) ** 2),
            optax.sgd(0.1),
            average=average,
            replicas=devices[:2],
        )
        data = [np.eye(4, dtype=np.float32)] * 6
        state, info = trainer.round(trainer.init(jnp.zeros(4, jnp.bfloat16)), data, counts=(2, 4))
        assert trainer.params(state).dtype == jnp.bfloat16
        assert np.isfinite(info.loss)


@pytest.mark.filterwarnings("ignore:an outer optimizer over only")
def test_an_outer_momentum_of_low_precision_parameters_is_float32_from_the_start(devices, lockstep, tmp_path):
    def trainer():
        return jaxche.Trainer(
            lambda w, b: jnp.mean((b @ w.astype(jnp.float32) - 1.0) ** 2),
            optax.sgd(0.1),
            outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
            che=lockstep(),
            replicas=devices[:2],
        )

    data = [np.eye(4, dtype=np.float32)] * 8
    first = trainer()
    state = first.init(jnp.zeros(4, jnp.bfloat16))
    before = [x.dtype for x in jax.tree.leaves(state.outer_state)]
    state, _ = first.fit(state, data, progress=False, checkpoints=tmp_path, callbacks=[lambda *_: True])
    assert before == [x.dtype for x in jax.tree.leaves(state.outer_state)] == [jnp.float32]
    assert first.params(state).dtype == jnp.bfloat16
    second = trainer()
    after, history = second.fit(second.init(jnp.zeros(4, jnp.bfloat16)), data, progress=False, checkpoints=tmp_path)
    assert len(history) == 2
    assert second.params(after).dtype == jnp.bfloat16


def test_integers_and_keys_in_model_state_stay_each_replicas_own(devices):
    def loss(w, batch, model_state):
        state = {
            "n": model_state["n"] + 1,
            "key": jax.random.fold_in(model_state["key"], 1),
            "ema": model_state["ema"] + 1,
        }
        return jnp.mean((w - batch) ** 2), ({}, state)

    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:2])
    own = {"n": jnp.array(0), "key": jax.random.key(5), "ema": jnp.array(0.0)}
    state = trainer.init(jnp.zeros(()), own)
    state, _ = trainer.round(state, [np.ones(2, np.float32)] * 4, counts=(1, 3))
    assert state.model_state["n"].tolist() == [1, 3]
    assert state.model_state["ema"].tolist() == [2.5, 2.5]  # the mean by examples: (1 + 3 * 3) / 4
    keys = jax.random.key_data(state.model_state["key"])
    assert (keys[0] != keys[1]).any()


@pytest.mark.parametrize("wire", ["float32", "int4"])
def test_flags_of_the_optimizer_are_those_of_most_steps(problem, devices, wire):
    """Whether the first update is still to come, where moments come from other replicas too."""
    tx = optax.MultiSteps(optax.contrib.dog(init_step=("learning_rate", 0.01)), 2)
    trainer = jaxche.Trainer(problem.loss, tx, replicas=devices[:2], wire=wire)
    start = trainer.init(problem.params)
    for counts, flag in (((0, 2), False), ((1, 3), False), ((1, 1), True)):
        state, _ = trainer.round(start, problem.data, counts=counts)
        assert state.opt_state.inner_opt_state[1].is_init_step.tolist() == [flag, flag], counts


@pytest.mark.parametrize(
    "options",
    [{}, {"wire": "int4"}, {"overlap": 0.5}, {"outer": optax.sgd(0.7, 0.9)}],
    ids=["plain", "int4", "overlap", "outer"],
)
def test_parameters_that_are_infinite_stay_and_count_as_no_movement(devices, train_rounds, options):
    """As the scores of transitions that cannot be."""

    def loss(params, batch):
        return -jnp.mean(jax.nn.log_softmax(params["scores"])[batch])

    scores = jnp.log(jnp.array([0.5, 0.3, 0.2, 0.0]))
    data, rounds = [np.array([0, 1, 0, 2])] * 12, [(2, 1)] * 3
    trained = train_rounds(loss, {"scores": scores}, data, devices[:2], rounds, tx=optax.sgd(0.1, 0.9), **options)
    found = np.asarray(trained[1].params["scores"])
    assert np.isneginf(found[:, 3]).all()
    without = train_rounds(loss, {"scores": scores[:3]}, data, devices[:2], rounds, tx=optax.sgd(0.1, 0.9), **options)
    np.testing.assert_allclose(found[:, :3], without[1].params["scores"], rtol=1e-5)
    for one, other in zip(trained[2], without[2], strict=True):
        np.testing.assert_allclose((one.drift, one.drift_dir), (other.drift, other.drift_dir), rtol=1e-4)


@pytest.mark.parametrize("options", [{"opt_state": "average"}, {"opt_state": "reset"}, {"policy": "sync"}], ids=str)
def test_numbers_of_python_in_an_optimizer_state_become_arrays(problem, devices, options):
    def update(grads, state, params):
        rate = jnp.where(state["first"], 0.1, state["rate"])
        return jax.tree.map(lambda g: -rate * g, grads), {"first": False, "rate": 0.2, "steps": state["steps"] + 1}

    tx = optax.GradientTransformation(lambda params: {"first": True, "rate": 0.1, "steps": 0}, update)
    trainer = jaxche.Trainer(problem.loss, tx, replicas=devices[:2], **options)
    state = trainer.init(problem.params)
    for _ in range(2):
        state, info = trainer.round(state, problem.data)
    assert np.isfinite(info.loss)
    first, rate = (True, 0.1) if options == {"opt_state": "reset"} else (False, 0.2)
    assert state.opt_state["first"].tolist() == [first] * 2
    np.testing.assert_allclose(state.opt_state["rate"], rate)


def test_a_replica_without_a_step_adds_nothing_also_where_its_arrays_are_not_finite(problem, devices):
    """Its optimizer's state, its statistics and its parameters weigh nothing."""

    def loss(params, batch, model_state):
        return problem.loss(params, batch)[0], ({}, {"mean": batch["x"].mean(0), "var": batch["x"].var(0)})

    model_state = {"mean": np.zeros(5, np.float32), "var": np.ones(5, np.float32)}
    trainer = jaxche.Trainer(loss, optax.adam(0.1), replicas=devices[:2], opt_state="average")
    start = trainer.init(problem.params, model_state)
    wanted, _ = trainer.round(start, problem.data, counts=(2, 0))
    engine, merge = trainer._engine, trainer._engine._merge
    carries = [r.idle(local).carry for r, local in zip(engine._replicas, start.local_states, strict=True)]
    rows = np.zeros((2, len(HOST_COLUMNS)), np.float32)
    rows[0, [HOST_COLUMNS.index("count"), HOST_COLUMNS.index("batches")]] = 2
    # As the end of a round: the first replica where it is after two steps, the second nowhere.
    names = ("params", "opt_state", "model_state")
    nowhere = jax.tree.map(lambda x: x * np.nan if x.dtype == np.float32 else x, carries[1])
    ends = [wanted.local_states[0]._asdict(), nowhere._asdict()]
    carries = [carry._replace(**{name: end[name] for name in names}) for carry, end in zip(carries, ends, strict=True)]
    sums = jax.device_put(carries[0].sums.at[0, 0].set(16.0), devices[0]), jnp.zeros_like(carries[1].sums)
    carries = [carry._replace(sums=own) for carry, own in zip(carries, sums, strict=True)]
    reached = jax.tree.map(np.array, ends[0])
    merged = merge(ToMerge(start.local_states, carries, rows))
    for name in names:
        for row in merged.local_states:
            for x, y in zip(jax.tree.leaves(getattr(row, name)), jax.tree.leaves(reached[name]), strict=True):
                if x.dtype == np.float32:
                    np.testing.assert_allclose(x, y, rtol=1e-6)
    assert np.isfinite([merged.report.drift, merged.report.drift_direction]).all()


@pytest.mark.parametrize("average", ["parameters", "gradients"])
@pytest.mark.parametrize("paired", [False, True])
def test_variances_take_a_second_all_reduce_and_nothing_else_does(problem, devices, merge_arguments, average, paired):
    def loss(params, batch, model_state):
        return problem.loss(params, batch)[0], ({}, model_state)

    model_state = {"mean": np.zeros(5, np.float32), "var" if paired else "square": np.ones(5, np.float32)}
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:2], average=average)
    state = trainer.init(problem.params, model_state)
    trainer.round(state, problem.data, counts=(1, 1))
    text = trainer._engine._merge._program.lower(*merge_arguments(trainer, state)).as_text()
    assert text.count("stablehlo.all_reduce") == 1 + paired


@pytest.mark.parametrize("name", ["plan_high", "plan_low"])
def test_an_island_whose_processes_planned_differently_agrees_with_nobody(name):
    """The larger number of the two may be the one that all others have."""
    plan = RoundPlan(round=2, epoch=0, start=0, counts=(2, 1), epoch_size=9)
    table = np.zeros((2, 2, len(HOST_COLUMNS) + 3), np.float32)
    table[:, :, [HOST_COLUMNS.index("plan_high"), HOST_COLUMNS.index("plan_low")]] = plan.digest_halves()
    table[0, :, HOST_COLUMNS.index("wall_ms")] = 10, 30
    table[:, :, len(HOST_COLUMNS) + 1] = table[:, :, HOST_COLUMNS.index("rows")] = 8.0  # examples
    rows = reduce_rows(table)
    assert rows[:, HOST_COLUMNS.index("wall_ms")].tolist() == [30, 0]
    planned = PlannedRound(TrainerState((), None, DivergenceCorrection()), plan, SequenceReader([]))
    RoundStatistics(rows, Columns()).check(planned, Group(), {}, True)
    table[1, 1, HOST_COLUMNS.index(name)] -= 1
    with pytest.raises(PlanMismatchError, match=r"ranks \[1\] something else"):
        RoundStatistics(reduce_rows(table), Columns()).check(planned, Group(), {}, True)


@pytest.mark.parametrize("backend", ["device", "host"])
@pytest.mark.parametrize(("average", "kept"), [("parameters", ["params"]), ("gradients", ["params", "opt_state"])])
def test_the_views_of_a_merge_serve_the_next_one(problem, devices, merge_arguments, average, kept, backend):
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.1), average=average, replicas=devices[:2], backend=backend)
    state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(1, 2))
    trees = state.local_states[0].views.trees
    given, *_ = merge_arguments(trainer, state)
    for name in kept:
        assert all(a is b for a, b in zip(*map(jax.tree.leaves, (given[name], trees[name])), strict=True))
    for name, tree in given.items():
        rows = [getattr(local, name, None) for local in state.local_states]
        if rows[0] is not None:
            jax.tree.map(lambda x, *row: np.testing.assert_array_equal(x, np.concatenate(row)), tree, *rows)


@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_a_merge_that_does_not_keep_the_state_is_made_in_its_place(problem, devices, merge_arguments, average):
    """The merged trees take the buffers of the state if gradients are averaged, else those of the carry."""
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.1), average=average, replicas=devices[:2])
    state = trainer.init(problem.params)
    trainer.round(state, problem.data, counts=(1, 1))
    merge, arguments = trainer._engine._merge, merge_arguments(trainer, state)
    sizes = {
        name: program.lower(*arguments).compile().memory_analysis().alias_size_in_bytes
        for name, program in {"kept": merge._program, "donated": merge._donating}.items()
    }
    held = 3 * sum(x.nbytes for x in problem.params.values())  # parameters and two moments, as a shard of each device
    assert sizes["donated"] >= held
    assert sizes["kept"] == (0 if average == "gradients" else sizes["donated"])


def test_other_arrays_than_those_of_a_merge_have_views_of_their_own(problem, devices, merge_arguments):
    one, two = (jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2]) for _ in range(2))
    state, _ = one.round(one.init(problem.params), problem.data, counts=(1, 2))
    two.round(two.init(problem.params), problem.data, counts=(1, 2))
    # A row that was changed, and the mesh of another trainer.
    first, second = state.local_states
    others = [
        (one, (first._replace(params=jax.tree.map(lambda x: x + 1, first.params)), second)),
        (one, (first, second._replace(params=jax.tree.map(lambda x: x + 1, second.params)))),
        (two, (first, second)),
    ]
    for trainer, rows in others:
        given = merge_arguments(trainer, dataclasses.replace(state, local_states=rows))[0]["params"]
        assert given["w"] is not first.views.trees["params"]["w"]
        wanted = jax.tree.map(lambda *row: np.concatenate(jax.device_get(row)), *(row.params for row in rows))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(given), wanted)


def test_moments_of_other_dtypes_are_averaged_where_promotion_is_forbidden(devices, train_rounds):
    def loss(params, batch):
        return jnp.mean(jnp.abs(params["z"] - batch.astype(jnp.complex64)) ** 2)

    data = [np.full((1, 3), i, np.float32) for i in range(4)]
    with jax.numpy_dtype_promotion("strict"):
        params, tx = {"z": jnp.zeros(3, jnp.complex64)}, optax.sgd(0.1, momentum=0.9)
        _, state, _ = train_rounds(loss, params, data, devices[:2], [(2, 2)], tx=tx)
    (trace,) = jax.tree.leaves(state.opt_state)
    assert trace.dtype == jnp.complex64
    np.testing.assert_array_equal(trace[0], trace[1])


def weighted_loss(w, batch):
    error = batch["m"] * (batch["x"] @ w - 1.0) ** 2
    return jaxche.Weighted(error.sum(), batch["m"].sum()), {"plain": error.mean()}


def weighted_gradient(w, batch):
    error, weight = batch["x"] @ w - 1.0, batch["m"].sum()
    return 2 * batch["x"].T @ (batch["m"] * error) / weight, (batch["m"] * error**2).sum() / weight, weight


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "sync"},
        {"average": "gradients"},
        {},
        {"merge": "batch"},
        {"merge": "fednova"},
        {"wire": "int8"},
        {"overlap": 0.5},
    ],
    ids=str,
)
def test_losses_and_gradients_are_float64_where_it_is_on(devices, options):
    rng, w = np.random.default_rng(0), np.full(3, 0.3)
    arrays = {"x": rng.normal(size=(8, 3)), "m": rng.uniform(0.5, 2.0, 8)}
    data = [{name: x[i : i + 4] for name, x in arrays.items()} for i in (0, 4)]
    counts = {} if "policy" in options else {"counts": (1, 1)}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        trainer = jaxche.Trainer(weighted_loss, optax.sgd(0.1), replicas=devices[:2], **options)
        state, info = trainer.round(trainer.init(w), data, **counts)
        found = trainer.params(state)
    exact, loss, _ = weighted_gradient(w, arrays)
    np.testing.assert_allclose(info.loss, loss, rtol=1e-14)
    assert info.metrics["plain"] == pytest.approx((arrays["m"] * (arrays["x"] @ w - 1.0) ** 2).mean(), rel=1e-14)
    if info.average == "parameters":
        own, _, weights = zip(*(weighted_gradient(w, batch) for batch in data), strict=True)
        exact = np.average(own, axis=0, weights=weights if options.get("merge") == "batch" else None)
    if "wire" not in options:
        np.testing.assert_allclose(found, w - 0.1 * exact, rtol=1e-14)


@pytest.mark.parametrize(("w", "steps"), [(1000.0, (1.0, 2.0)), (2.0**-13, (2.0**-15, 2.0**-14))])
def test_drift_of_float16_parameters_whose_squares_float16_cannot_hold(devices, w, steps):
    trainer = jaxche.Trainer(lambda w, batch: (batch.mean() * w).sum(), optax.sgd(1.0), replicas=devices[:2])
    batches = [np.full(1, step, np.float16) for step in steps]
    _, info = trainer.round(trainer.init(jnp.full(4, w, jnp.float16)), batches, counts=(1, 1))
    assert info.drift == pytest.approx((steps[1] - steps[0]) / 2 / (w - sum(steps) / 2), rel=1e-5)
