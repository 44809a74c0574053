"""Merges of few bytes: what is sent, what stays, what is refused."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.averaging import WIRES, exchange
from jaxche.distributed import Group
from jaxche.replicas._coded_merge import Residual, _split, fitted, zero_residual
from jaxche.replicas._placement import DevicePlacement
from jaxche.sharding import FullShard, ShardGradOp
from jaxche.training import MergeMismatchError, NonFiniteLossError
from jaxche.training._fingerprint import refuse_differences

CODED = ("bfloat16", "int8", "int4")
ROUNDS = [(3, 1), (1, 2), (2, 2), (0, 2), (1, 3)]


def linear(params, batch):
    """Its gradients are the batch, wherever the parameters are."""
    return sum(jnp.sum(p * b.mean(0)) for p, b in zip(jax.tree.leaves(params), jax.tree.leaves(batch), strict=True))


@pytest.fixture
def slopes():
    """Parameters, and batches of the gradients of :func:`linear`."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(30, 20)).astype(np.float32), "b": np.zeros(7, np.float32)}
    data = [
        jax.tree.map(lambda x: rng.normal(size=(2, *x.shape)).astype(np.float32) * 10.0 ** rng.integers(-2, 2), params)
        for _ in range(40)
    ]
    return params, [jax.tree.map(np.float32, batch) for batch in data]


@pytest.fixture(scope="module")
def linear_trainer(devices):
    """The trainer of :func:`linear` with this wire, made once for each number of replicas."""

    @functools.cache
    def get(wire, count):
        return jaxche.Trainer(linear, optax.sgd(0.1), replicas=devices[:count], wire=wire)

    return get


@pytest.fixture(scope="module")
def adam_trainer(make_problem, devices):
    """The trainer with codes of 4 bits and Adam, made once for each number of replicas."""

    @functools.cache
    def get(count):
        return jaxche.Trainer(make_problem.loss, optax.adam(0.05), replicas=devices[:count], wire="int4")

    return get


def vector(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def test_a_merge_promotes_no_ranks(problem, devices):
    trainer = jaxche.Trainer(
        lambda w, b: jnp.mean((b["x"] @ w) ** 2), optax.sgd(0.1), replicas=devices[:2], wire="int8"
    )
    with jax.numpy_rank_promotion("raise"):
        state, _ = trainer.round(trainer.init(jnp.ones(problem.data[0]["x"].shape[1])), problem.data)
    assert np.isfinite(trainer.params(state)).all()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "collectives"), [(2, (0, 1, 1)), (3, (0, 4, 0))])
def test_codes_take_one_collective_or_three_and_one_more_compares(
    problem, adam_trainer, merge_arguments, count, collectives
):
    trainer = adam_trainer(count)
    state = trainer.init(problem.params)
    trainer.round(state, problem.data, counts=(1,) * count)
    text = trainer._engine._merge._program.lower(*merge_arguments(trainer, state)).as_text()
    names = ("all_reduce", "all_to_all", "all_gather")
    assert tuple(text.count(f"stablehlo.{name}") for name in names) == collectives


@pytest.mark.slow
@pytest.mark.parametrize("wire", CODED)
@pytest.mark.parametrize("count", [2, 3])
def test_what_is_merged_follows_the_sum_of_all_changes(slopes, linear_trainer, wire, count):
    params, data = slopes
    trainer = linear_trainer(wire, count)
    state, expected, cursor = trainer.init(params), 0.0, 0
    for counts in ROUNDS:
        counts = (*counts, 1)[:count]
        state, info = trainer.round(state, data, counts=counts)
        for rank, n in enumerate(counts):
            steps = sum((vector(jax.tree.map(lambda x: x.mean(0), data[cursor + i])) for i in range(n)), np.zeros(607))
            expected = expected + info.weights[rank] * 0.1 * steps
            cursor += n
    rows = [[x[rank] for x in jax.tree.leaves(state.params)] for rank in range(count)]
    for row in rows[1:]:
        np.testing.assert_array_equal(vector(row), vector(rows[0]))
    merged = vector(params) - vector(rows[0])
    # What is not sent yet is less than the largest change of a round in a block, by the factor of the codes.
    off = np.abs(merged - expected).max()
    assert 0 < off < {"bfloat16": 0.01, "int8": 0.02, "int4": 0.3}[wire] * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("wire", CODED)
@pytest.mark.parametrize("count", [2, 3])
def test_with_equal_weights_nothing_is_lost(slopes, linear_trainer, wire, count):
    params, data = slopes
    trainer = linear_trainer(wire, count)
    state, rounds = trainer.init(params), 4
    for _ in range(rounds):
        state, _ = trainer.round(state, data, counts=(2,) * count)
    changes = sum(vector(jax.tree.map(lambda x: x.mean(0), batch)) for batch in data[: 2 * count * rounds])
    residuals = [local.residual for local in state.local_states]
    left = sum(vector(r.own) for r in residuals) / count
    if count > 2:
        left = left + vector(_split(np.concatenate([np.ravel(r.part) for r in residuals]), jax.tree.leaves(params)))
    merged = vector(params) - vector(trainer.params(state))
    np.testing.assert_allclose(merged + left, 0.1 * changes / count, atol=2e-6 * np.abs(changes).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "count", "place"),
    [*((wire, count, 0) for wire in CODED for count in (2, 3)), ("bfloat16", 3, -1), ("int4", 3, -1)],
)
def test_a_code_that_is_damaged_on_its_way_to_one_replica_is_refused_by_all(
    slopes, devices, linear_trainer, monkeypatch, wire, count, place
):
    params, data = slopes
    trainer = linear_trainer(wire, count)
    state, _ = trainer.round(trainer.init(params), data, counts=(1,) * count)
    wanted, _ = trainer.round(state, data, counts=(1,) * count)
    name, gather = (
        ("jax.lax.all_gather", jax.lax.all_gather) if count == 2 else ("jaxche.averaging._wire.exchange", exchange)
    )

    def damaging(x, axis_name):
        rows = gather(x, axis_name)
        at = (1, place if count > 2 else 0)  # with two replicas the row ends with exact numbers
        flipped = rows.at[at].set(rows[at] ^ 0x04)
        return jax.numpy.where(jax.lax.axis_index(axis_name) == 0, flipped, rows)

    monkeypatch.setattr(name, damaging)
    damaged = jaxche.Trainer(linear, optax.sgd(0.1), replicas=devices[:count], wire=wire)
    damaged._engine._warm_up_merge = lambda local_states: None
    with pytest.raises(MergeMismatchError, match=r"state before it is intact.*wire='float32'"):
        damaged.round(state, data, counts=(1,) * count)
    monkeypatch.undo()
    after, _ = trainer.round(state, data, counts=(1,) * count)
    np.testing.assert_array_equal(vector(trainer.params(after)), vector(trainer.params(wanted)))


def test_a_replica_without_steps_keeps_what_it_has_not_sent(slopes, linear_trainer):
    params, data = slopes
    trainer = linear_trainer("int4", 2)
    state, _ = trainer.round(trainer.init(params), data, counts=(1, 1))
    after, _ = trainer.round(state, data, counts=(0, 2))
    before, later = (vector(one.local_states[0].residual.own) for one in (state, after))
    np.testing.assert_array_equal(before, later)
    assert np.abs(before).max() > 0
    assert (vector(state.local_states[1].residual.own) != vector(after.local_states[1].residual.own)).any()


RULES = {
    "plain": {},
    "outer": {"outer": optax.sgd(0.7, momentum=0.9)},
    "fednova": {"merge": "fednova"},
    "reset": {"merge": "batch", "opt_state": "reset"},
    "local": {"opt_state": "local"},
    "scaling": {"scaling": jaxche.AdaScale()},
    "host": {"backend": "host"},
    "rows": {"rows": "speed"},
}


@pytest.fixture(scope="module")
def trained(make_problem, devices, train_rounds):
    """Trains with a wire and a rule of RULES, once for each: several codes are compared with one run in float32."""
    problem = make_problem()

    @functools.cache
    def run(wire, count, rule="plain"):
        rounds = {"rows": [None], "plain": [(2, 3, 1), (1, 2, 2), (1, 0, 1)]}.get(rule, [(2, 3), (1, 2)])
        rounds = [counts and counts[:count] for counts in rounds]
        settings = {"wire": wire} | RULES[rule]
        return train_rounds(problem.loss, problem.params, problem.data, devices[:count], rounds, **settings)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("wire", "count"), [("bfloat16", 2), ("int8", 3), ("int4", 2), ("int4", 3)])
def test_moments_meet_near_their_mean_and_second_moments_stay_positive(trained, wire, count):
    found = [trained(one, count) for one in ("float32", wire)]
    (exact, coded) = [jax.tree.map(np.asarray, state.opt_state[0]) for _, state, _ in found]
    assert exact.count.tolist() == coded.count.tolist()
    for name, most in (("mu", 0.5), ("nu", 1.0)):
        wanted, rows = (
            np.stack([vector(jax.tree.map(lambda x, r=r: x[r], getattr(one, name))) for r in range(count)])
            for one in (exact, coded)
        )
        bound = {"bfloat16": 0.02, "int8": 0.05, "int4": most}[wire] * np.abs(wanted).max()
        assert np.abs(rows - wanted).max() <= bound, name
        assert (name == "mu") or (rows >= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "wire"),
    [
        *((rule, "int4") for rule in list(RULES)[1:]),
        *((rule, wire) for rule in ("outer", "scaling") for wire in CODED[:2]),
    ],
)
def test_all_rules_see_what_a_merge_in_float32_shows_them(problem, trained, rule, wire):
    tolerance = {"bfloat16": 0.02, "int8": 0.02, "int4": 0.2}[wire]
    one, other = (trained(w, 2, rule) for w in ("float32", wire))
    change = np.abs(vector(one[0].params(one[1])) - vector(problem.params)).max()
    off = np.abs(vector(one[0].params(one[1])) - vector(other[0].params(other[1]))).max()
    assert off < tolerance * change
    for a, b in zip(one[2], other[2], strict=True):
        assert (a.counts, a.weights, a.examples) == (b.counts, b.weights, b.examples)
        assert b.drift == pytest.approx(a.drift, rel=3 * tolerance, abs=1e-6)
    # The first round starts alike, and its losses are exact.
    assert one[2][0].losses == other[2][0].losses


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FullShard(), ShardGradOp()], ids=str)
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2)], ids=str)
def test_islands_send_codes_shard_by_shard(problem, devices, train_rounds, strategy, sizes):
    ends = np.cumsum(sizes)
    islands = [strategy.mesh(devices[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    one, other = (
        train_rounds(problem.loss, problem.params, problem.data, islands, [(2, 3), (1, 2)], strategy=strategy, wire=w)
        for w in ("float32", "int8")
    )
    wanted, found = (vector(trainer.params(state)) for trainer, state, _ in (one, other))
    assert 0 < np.abs(wanted - found).max() < 0.03 * np.abs(wanted - vector(problem.params)).max()
    rows = [vector(jax.tree.map(lambda x, r=r: np.asarray(x)[r], other[1].params)) for r in range(2)]
    np.testing.assert_array_equal(*rows)
    assert np.abs(vector(other[1].local_states[0].residual.own)).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_a_replay_and_a_resumed_run_repeat_bit_for_bit(problem, devices, tmp_path, same, lockstep, count):
    def trainer():
        return jaxche.Trainer(
            problem.loss, optax.adam(0.05), replicas=devices[:count], che=lockstep(count), wire="int4"
        )

    one = trainer()
    whole, history = one.fit(one.init(problem.params), problem.data, epochs=2, progress=False)
    again, _ = one.replay(one.init(problem.params), problem.data, history)
    same(whole.local_states, again.local_states)
    one.fit(one.init(problem.params), problem.data, epochs=1, progress=False, checkpoints=tmp_path)
    rest = trainer()
    resumed, _ = rest.fit(rest.init(problem.params), problem.data, epochs=2, progress=False, checkpoints=tmp_path)
    same(whole.local_states, resumed.local_states)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((2, "int4"), (3, "int4")),
        ((3, "int4"), (2, "int8")),
        ((2, "float32"), (2, "int4")),
        ((2, "int4"), (2, "float32")),
        ((3, "int4"), (3, "int8", "local")),
    ],
    ids=str,
)
def test_other_replicas_or_another_wire_go_on_with_nothing_left_unsent(
    problem, devices, tmp_path, lockstep, caplog, first, then
):
    def trainer(count, wire, opt_state="average"):
        options = {"replicas": devices[:count], "che": lockstep(count), "wire": wire, "opt_state": opt_state}
        return jaxche.Trainer(problem.loss, optax.adam(0.05), **options)

    one, other = trainer(*first), trainer(*then)
    saved, _ = one.fit(one.init(problem.params), problem.data, epochs=1, progress=False, checkpoints=tmp_path)
    seen = []
    with caplog.at_level(logging.WARNING, "jaxche"):
        _, history = other.fit(
            other.init(problem.params),
            problem.data,
            epochs=2,
            progress=False,
            checkpoints=tmp_path,
            callbacks=[lambda state, info: seen.append(state)],
        )
    assert history[-1].round >= saved.round
    assert ("had not sent" in caplog.text) == (first[1] != "float32")
    assert (seen[-1].local_states[0].residual is None) == (then[1] == "float32")


def test_the_part_of_a_replica_is_zero_where_the_number_of_replicas_is_another(devices):
    params = {"w": jax.ShapeDtypeStruct((1000,), np.float32), "z": jax.ShapeDtypeStruct((3,), np.complex64)}
    placement = DevicePlacement(devices[1])

    def rows(residual):
        return jax.tree.map(lambda x: jax.device_put(x[None] + 1, devices[1]), residual)

    moments = [jax.ShapeDtypeStruct((400,), np.float32)]
    three = rows(zero_residual(params, moments, 3, is_sharded=False))
    assert three.part.shape == (1, 384 + 256)
    assert fitted(three, moments, 3, placement) is three
    assert fitted(three, moments, 2, placement) == Residual(three.own, None)
    four = fitted(three, moments, 4, placement)
    assert four.part.shape == (1, 256 + 128)
    assert not four.part.any()
    assert four.part.devices() == {devices[1]}
    assert four.own is three.own
    assert zero_residual(params, (), 3, is_sharded=False).part.shape == (384,)
    assert zero_residual(params, moments, 3, is_sharded=True).part is None
    assert fitted(None, moments, 3, placement) is None


@pytest.mark.parametrize("count", [2, 3])
def test_numbers_that_are_not_finite_are_refused_and_the_state_stays(problem, adam_trainer, count):
    trainer = adam_trainer(count)
    state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(1,) * count)
    huge = jax.tree.map(lambda x: np.full_like(x, 1e30), [problem.data[0]])[0]
    before = jax.tree.map(np.array, state.local_states)
    with pytest.raises(NonFiniteLossError) as error:
        trainer.round(dataclasses.replace(state, cursor=0), [huge] * 12, counts=(1,) * count)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(error.value.state.local_states), strict=True):
        np.testing.assert_array_equal(a, b)
    trainer.round(error.value.state, problem.data, counts=(1,) * count)


@pytest.mark.parametrize("wire", CODED)
@pytest.mark.parametrize("count", [2, 3])
def test_moments_that_are_infinite_on_a_replica_stay_and_change_no_others(devices, train_rounds, wire, count):
    """As the least of each gradient so far, before its first one."""

    def update(grads, least, params):
        least = jax.tree.map(lambda m, g: jnp.where(g > 0, jnp.minimum(m, g), m), least, grads)
        return jax.tree.map(jnp.zeros_like, grads), least

    tx = optax.GradientTransformation(lambda params: jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), params), update)
    data = [np.full((1, 300), 2.0**i, np.float32) for i in range(2 * count)]
    for i, batch in enumerate(data):
        batch[:, 0] = 0.0  # nowhere
        batch[:, 1] = float(i == 0)  # on a replica, in the first round
    steps = [(1,) * count, (1,) * count]
    _, state, _ = train_rounds(
        linear, {"w": np.zeros(300, np.float32)}, [{"w": x} for x in data], devices[:count], steps, tx=tx, wire=wire
    )
    rows = np.asarray(state.opt_state["w"])
    assert np.isinf(rows[:, 0]).all()
    assert rows[:, 1].tolist() == [1.0, *[np.inf] * (count - 1)]
    assert np.isfinite(rows[:, 2:]).all()


def test_bytes_are_those_of_the_program(slopes, linear_trainer):
    """With two replicas, each sends all numbers once, also in an all-reduce. No block has numbers of two arrays."""
    params, data = slopes
    found = {}
    for wire in WIRES:
        trainer = linear_trainer(wire, 2)
        state, info = trainer.round(trainer.init(params), data, counts=(1, 1))
        found[wire] = info.merge_bytes
        assert f"wire={wire!r}" in trainer.explain(state)
        unsent = [row.get("unsent changes", 0) for row in trainer.memory]
        assert unsent == [0 if wire == "float32" else trainer.memory[0]["parameters"]] * 2
    exact = found["float32"] - 4 * 607  # the table, the weights and two squares
    assert 0 < exact < 4 * 100
    blocks, weight, comparison = 5 + 1, 4, 4 * 3
    assert {wire: size - exact - weight - comparison for wire, size in found.items() if wire != "float32"} == {
        "bfloat16": blocks * 256,
        "int8": blocks * (128 + 2),
        "int4": blocks * (64 + 2),
    }


@pytest.mark.parametrize("wire", ["float32", "int4"])
def test_three_replicas_send_a_vector_in_two_exchanges(slopes, linear_trainer, wire):
    params, data = slopes
    trainer = linear_trainer(wire, 3)
    _, info = trainer.round(trainer.init(params), data, counts=(1, 1, 1))
    # Parts of two blocks; and two thirds of the bytes in each exchange.
    coded = 4 * 607 if wire == "float32" else 3 * 2 * 66
    assert 0 < info.merge_bytes - 2 * 2 / 3 * coded < 4 * 200


@pytest.mark.slow
def test_complex_parameters_and_single_numbers_are_merged_exactly(devices, train_rounds):
    def loss(params, batch):
        return jnp.mean(jnp.abs(params["z"] - batch[:, :4]) ** 2) + jnp.mean((params["w"] - batch[:, 1:]) ** 2)

    rng = np.random.default_rng(0)
    data = [rng.normal(size=(4, 6)).astype(np.float32) for _ in range(12)]
    params = {"z": np.zeros(4, np.complex64), "w": np.zeros(5, np.float32)}

    def trained(wire, params, tx):
        trainer, state, _ = train_rounds(loss, params, data, devices[:2], [(2, 3)], tx=tx, wire=wire)
        return trainer.params(state), state.opt_state

    (exact, moments), (coded, others) = (trained(w, params, optax.sgd(0.1, 0.9)) for w in ("float32", "int4"))
    np.testing.assert_allclose(exact["z"], coded["z"], rtol=1e-6)
    np.testing.assert_allclose(moments[0].trace["z"], others[0].trace["z"], rtol=1e-6)
    assert (np.asarray(exact["w"]) != coded["w"]).any()
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.0, 20))
    real = params | {"z": np.zeros(4, np.float32)}
    (_, exact), (_, coded) = (trained(wire, real, tx) for wire in ("float32", "int4"))
    rate = np.asarray(exact.hyperparams["learning_rate"])
    assert rate[0] > 0
    np.testing.assert_allclose(rate, coded.hyperparams["learning_rate"], rtol=1e-6)


def test_wires_that_cannot_be_are_refused_with_the_line_to_write(problem, devices):
    def refused(text, **settings):
        with pytest.raises(ValueError, match=text):
            jaxche.Trainer(settings.pop("loss", problem.loss), optax.sgd(0.1), replicas=devices[:2], **settings)

    refused(r"wire='int3' is unknown; write one of 'float32', 'bfloat16', 'int8', 'int4'", wire="int3")
    refused("average='gradients' sums gradients in float32", wire="int4", average="gradients")
    refused("average='gradients' sums gradients in float32", wire="int4", policy="sync")
    stages = jaxche.Partitioned([lambda p, x: x * p, lambda p, x: x * p], lambda y, b: y.mean(), jaxche.Direct())
    refused("stages of a jaxche.Partitioned", loss=stages, wire="int8")
    assert "wire='int4'" in repr(jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], wire="int4"))


@pytest.mark.parametrize(("own", "other"), [("float32", "int4"), ("int8", "float32")])
def test_a_state_of_another_wire_is_refused(problem, devices, own, other):
    first, second = (jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], wire=w) for w in (other, own))
    with pytest.raises(ValueError, match=rf"here wire='{own}'; start from its own: state = trainer.init"):
        second.round(first.init(problem.params), problem.data)


def test_processes_with_unlike_wires_are_told_which(problem, devices):
    class Two(Group):
        members = (0, 1)

        def all_gather(self, value):
            return [value, value | {"wire": "int8"}]

    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], wire="int4")
    with pytest.raises(ValueError, match=r"processes differ(.|\n)*wire(.|\n)*int8"):
        refuse_differences(Two(), trainer._settings.fingerprint)


def test_a_single_replica_has_nothing_to_send(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1], wire="int4")
    state, info = trainer.round(trainer.init(problem.params), problem.data)
    assert state.local_states[0].residual is None
    assert info.merge_bytes == 0
