"""What docs/recipes.md promises, where a block of the page cannot show it: over uneven counts, against slow twins."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jaxche

COUNTS = [(1, 3), (2, 1), (5, 2), (0, 3), (4, 4)]


def trained(trainer, state, data, rounds, callback=None):
    infos = []
    for counts in rounds:
        state, info = trainer.round(state, data, counts=counts)
        infos.append(info)
        if callback:
            callback(state, info)
    return state, infos


# Values that an average in float32 would round, the smallest (XLA's CPU arithmetic has no subnormal ones), the largest,
# and zero of both signs.
HARD = np.array([0.1, -3.3e-5, 1.2e-38, 3.4e38, 0.0, -0.0, 1 / 3], np.float32)
FREEZE = {
    "selective_transform": lambda mask: optax.selective_transform(optax.adam(0.05), freeze_mask=mask),
    "freeze": lambda mask: optax.chain(optax.adam(0.05), optax.freeze(mask)),
    "partition": lambda mask: optax.partition(
        {True: optax.set_to_zero(), False: optax.sgd(0.05, momentum=0.9)}, jax.tree.map(bool, mask)
    ),
}
SETTINGS = {
    "cadence": {},
    "local": {"opt_state": "local"},
    "fednova": {"merge": "fednova"},
    "slowmo": {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True)},
    "outer adam": {"outer": optax.adam(0.01)},
    "gradients": {"average": "gradients"},
    "sync": {"policy": "sync", "rows": "equal"},
    "host": {"backend": "host"},
}


def frozen_loss(params, batch):
    hard = sum(jnp.sum(jnp.tanh(x.astype(jnp.float32))) for x in params["frozen"])
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2) + 1e-3 * hard


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("tx", FREEZE)
def test_frozen_parameters_keep_their_bits(problem, devices, tx, setting):
    frozen = [jnp.asarray(HARD), jnp.asarray(HARD[:3], jnp.bfloat16), jnp.asarray(HARD[:3], jnp.float16)]
    params = {"w": problem.params["w"], "frozen": frozen}
    transform = FREEZE[tx]({"w": False, "frozen": [True, True, True]})
    trainer = jaxche.Trainer(frozen_loss, transform, replicas=devices[:2], **SETTINGS[setting])
    state, _ = trained(trainer, trainer.init(params), problem.data, COUNTS)
    for own, start in zip(trainer.params(state)["frozen"], frozen, strict=True):
        assert np.asarray(own).tobytes() == np.asarray(start).tobytes()
    assert np.abs(trainer.params(state)["w"] - params["w"]).min() > 0


def ema_of(trainer, start, decay):
    average = [start]

    def ema(state, info):
        average[0] = optax.incremental_update(trainer.params(state), average[0], 1 - decay**info.batches)

    return average, ema


def test_the_moving_average_decays_by_the_steps_of_a_merge(problem, devices, close):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    average, ema = ema_of(trainer, problem.params, 0.9)
    merged = []
    trained(
        trainer,
        trainer.init(problem.params),
        problem.data,
        COUNTS,
        lambda state, info: (ema(state, info), merged.append((sum(info.counts), trainer.params(state)))),
    )
    # One step after the other, with the merged parameters in each.
    slow = {name: np.array(x, np.float64) for name, x in problem.params.items()}
    assert len({steps for steps, _ in merged}) > 2
    for steps, params in merged:
        for _ in range(steps):
            slow = {name: 0.9 * x + 0.1 * np.asarray(params[name]) for name, x in slow.items()}
    close(average[0], slow)


SNAPSHOT = optax.chain(optax.snapshot("norm", optax.tree.norm), optax.sgd(0.05))


def gradients_of(problem, params, batch):
    return jax.grad(lambda p: problem.loss(p, batch)[0])(params)


def test_the_norm_of_the_mean_gradient_is_recorded(problem, devices):
    trainer = jaxche.Trainer(problem.loss, SNAPSHOT, average="gradients", replicas=devices[:2])
    state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(1, 3))
    wanted = optax.tree.norm(gradients_of(problem, problem.params, problem.joined(0, range(4))))
    norms = [local.opt_state[0].measurement["norm"][0] for local in state.local_states]
    np.testing.assert_allclose(norms, wanted, rtol=1e-5)


@pytest.mark.parametrize("opt_state", ["average", "local"])
def test_norms_of_local_steps_are_averaged_as_the_parameters(problem, devices, opt_state):
    trainer = jaxche.Trainer(problem.loss, SNAPSHOT, opt_state=opt_state, replicas=devices[:2])
    state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(1, 3))
    own, data = [], problem.data.epoch(0)
    for first, n in ((0, 1), (1, 3)):
        params = problem.params
        for i in range(first, first + n):
            grads = gradients_of(problem, params, data[i])
            params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
        own.append(float(optax.tree.norm(grads)))  # of the last step
    wanted = [own[0] / 4 + 3 * own[1] / 4] * 2 if opt_state == "average" else own
    norms = [local.opt_state[0].measurement["norm"][0] for local in state.local_states]
    np.testing.assert_allclose(norms, wanted, rtol=1e-5)


def test_the_recorded_learning_rate_is_that_of_the_schedule(problem, devices):
    schedule = optax.linear_schedule(0.1, 0.0, 20)
    trainer = jaxche.Trainer(
        problem.loss, optax.inject_hyperparams(optax.sgd)(schedule), average="gradients", replicas=devices[:2]
    )
    state, rates = trainer.init(problem.params), []
    for counts in [(1, 3), (2, 1), (1, 1)]:
        state, _ = trainer.round(state, problem.data, counts=counts)
        rates.append([float(local.opt_state.hyperparams["learning_rate"][0]) for local in state.local_states])
    np.testing.assert_allclose(rates, [[schedule(n)] * 2 for n in (0, 4, 7)], rtol=1e-6)


def clip(tree, most):
    norm = np.sqrt(sum((np.asarray(x) ** 2).sum() for x in jax.tree.leaves(tree)))
    return jax.tree.map(lambda x: np.asarray(x) * min(1, most / norm), tree)


@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_clipping_is_of_local_gradients_or_of_their_mean(problem, devices, close, average):
    most, data = 0.02, problem.data.epoch(0)
    tx = optax.chain(optax.clip_by_global_norm(most), optax.sgd(1.0))
    trainer = jaxche.Trainer(problem.loss, tx, average=average, replicas=devices[:2])
    state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(1, 1))
    grads = [gradients_of(problem, problem.params, data[i]) for i in range(2)]
    mean = jax.tree.map(lambda a, b: (np.asarray(a) + np.asarray(b)) / 2, *grads)
    locals_ = jax.tree.map(lambda a, b: (a + b) / 2, *(clip(g, most) for g in grads))
    moved = jax.tree.map(lambda p, q: p - np.asarray(q), problem.params, trainer.params(state))
    close(moved, locals_ if average == "parameters" else clip(mean, most), atol=1e-7)
    assert np.abs(locals_["w"] - clip(mean, most)["w"]).max() > 1e-4


def bilinear(players, batch):
    fixed = jax.lax.stop_gradient(players)
    return jnp.mean(0 * batch) + players["gen"] * fixed["disc"] - fixed["gen"] * players["disc"]


ALTERNATING = optax.partition(
    {
        "disc": optax.conditionally_mask(optax.sgd(0.5, momentum=0.5), lambda step: step % 3 < 2),
        "gen": optax.conditionally_mask(optax.sgd(0.5, momentum=0.5), lambda step: step % 3 == 2),
    },
    {"disc": "disc", "gen": "gen"},
)


def alternate(players, moments, step, turns):
    """The game by hand: two steps of the discriminator, then one of the generator."""
    for turn in range(step, step + turns):
        name = "disc" if turn % 3 < 2 else "gen"
        gradient = players["disc"] if name == "gen" else -players["gen"]
        moments = moments | {name: gradient + 0.5 * moments[name]}
        players = players | {name: players[name] - 0.5 * moments[name]}
    return players, moments


@pytest.mark.parametrize("knobs", [{}, {"average": "gradients"}, {"policy": "sync", "rows": "equal"}])
@pytest.mark.parametrize("replicas", [1, 2])
def test_players_take_turns_in_their_order(devices, knobs, replicas):
    data = [np.ones(4, np.float32)] * 64
    start, still = {"gen": 1.0, "disc": 1.0}, {"gen": 0.0, "disc": 0.0}
    trainer = jaxche.Trainer(bilinear, ALTERNATING, replicas=devices[:replicas], **knobs)
    state = trainer.init(jax.tree.map(jnp.float32, start))
    for turns in range(1, 8):
        state, _ = trainer.round(state, data, counts=(1,) * replicas)
        wanted, _ = alternate(start, still, 0, turns)
        assert jax.tree.map(float, trainer.params(state)) == pytest.approx(wanted)


def test_players_of_unequal_replicas_take_turns_in_their_own_steps(devices):
    data = [np.ones(4, np.float32)] * 64
    start, still = {"gen": 1.0, "disc": 1.0}, {"gen": 0.0, "disc": 0.0}
    trainer = jaxche.Trainer(bilinear, ALTERNATING, replicas=devices[:2])
    state, _ = trainer.round(trainer.init(jax.tree.map(jnp.float32, start)), data, counts=(2, 6))
    ends = [alternate(start, still, 0, n) for n in (2, 6)]
    mean = [{k: a[k] / 4 + 3 * b[k] / 4 for k in a} for a, b in zip(*ends, strict=True)]
    assert jax.tree.map(float, trainer.params(state)) == pytest.approx(mean[0])
    # The next turn of both is that of step 5, the mean of 2 and 6.
    state, _ = trainer.round(state, data, counts=(1, 1))
    wanted, _ = alternate(*mean, 5, 1)
    assert jax.tree.map(float, trainer.params(state)) == pytest.approx(wanted)


@jax.custom_vjp
def with_gradient(params, loss, grads):
    return loss


with_gradient.defvjp(
    lambda params, loss, grads: (loss, grads),
    lambda grads, cotangent: (jax.tree.map(lambda g: cotangent * g, grads), None, None),
)


def half(params, batch):
    w, x, y = (v.astype(jnp.float16) for v in (params["w"], batch["x"], batch["y"]))
    return jnp.mean((x @ w - y) ** 2).astype(jnp.float32)


def scaled(params, batch, model_state):
    fixed = jax.lax.stop_gradient(params)
    after, finite, loss, grads = model_state.value_and_grad(half)(fixed, batch)
    return with_gradient(params, loss, grads), ({"finite": finite}, after)


SCALE = 2.0**12
HALF_DATA = [
    {"x": np.full((4, 2), s, np.float32), "y": np.full((4, 1), 0.25, np.float32)} for s in (0.5, 4.0, 0.25, 0.5)
]


def half_trainer(devices, **knobs):
    trainer = jaxche.Trainer(scaled, optax.apply_if_finite(optax.adam(0.1), 10), replicas=devices, **knobs)
    return trainer, trainer.init({"w": jnp.ones((2, 1))}, DynamicScale(scale=SCALE))


def test_float16_overflows_with_a_finite_loss():
    """The premise of the tests below: the second batch overflows at this scale, and not at a sixteenth of it."""
    w = {"w": jnp.ones((2, 1))}
    for batch, scale, wanted in [(0, SCALE, True), (1, SCALE, False), (1, SCALE / 16, True)]:
        _, finite, loss, grads = DynamicScale(scale=scale).value_and_grad(half)(w, HALF_DATA[batch])
        assert np.isfinite(loss)
        assert bool(finite) == wanted == bool(np.isfinite(grads["w"]).all())
        assert grads["w"].dtype == jnp.float32


def test_a_step_that_overflows_is_skipped_and_halves_the_scale(devices, same):
    trainer, state = half_trainer(devices[:1])
    start = state.local_states[0]
    first, _ = trainer.round(state, HALF_DATA, counts=(1,))
    after, info = trainer.round(first, HALF_DATA, counts=(1,))
    assert info.metrics == {"finite": 0.0}
    assert np.isfinite(info.loss)
    before, skipped = first.local_states[0], after.local_states[0]
    assert float(skipped.model_state.scale[0]) == SCALE / 2 == float(before.model_state.scale[0]) / 2
    same(skipped.params, before.params)
    same(skipped.opt_state.inner_state, before.opt_state.inner_state)
    assert np.abs(before.params["w"] - start.params["w"]).max() > 0
    # Training continues: each epoch the second batch overflows until the scale is small enough for it.
    found = []
    for _ in range(26):
        after, info = trainer.round(after, HALF_DATA, counts=(1,))
        found.append((info.cursor, info.metrics["finite"]))
    skips = [finite for cursor, finite in found if cursor == 1]
    assert skips[0] == 0
    assert skips[-1] == 1
    assert all(finite == 1 for cursor, finite in found if cursor != 1)
    assert float(trainer.model_state(after).scale) == SCALE * 0.5 ** (1 + skips.count(0))


def test_one_of_two_replicas_overflows(devices, close):
    trainer, state = half_trainer(devices[:2])
    state, info = trainer.round(state, HALF_DATA[:2], counts=(1, 1))
    assert info.metrics == {"finite": 0.5}
    # The other's step of Adam is 0.1, and the merge takes half of it.
    close(np.abs(trainer.params(state)["w"] - 1), np.full((2, 1), 0.05), rtol=1e-4)
    scales = [float(local.model_state.scale[0]) for local in state.local_states]
    assert scales == [SCALE * 0.75] * 2
    assert [int(local.opt_state.total_notfinite[0]) for local in state.local_states] == [0, 0]  # the mean, rounded
    for _ in range(12):
        state, info = trainer.round(state, HALF_DATA[:2], counts=(1, 1))
        scales = [float(local.model_state.scale[0]) for local in state.local_states]
        assert scales[0] == scales[1] <= SCALE
    assert info.metrics == {"finite": 1.0}


def test_an_overflow_skips_the_common_update(devices, same):
    trainer, state = half_trainer(devices[:2], average="gradients")
    after, info = trainer.round(state, HALF_DATA[:2], counts=(1, 1))
    assert info.metrics == {"finite": 0.5}
    same(trainer.params(after), trainer.params(state))
    assert [int(local.opt_state.total_notfinite[0]) for local in after.local_states] == [1, 1]
    assert [float(local.model_state.scale[0]) for local in after.local_states] == [SCALE * 0.75] * 2
    for _ in range(12):
        after, info = trainer.round(after, HALF_DATA[:2], counts=(1, 1))
    assert info.metrics == {"finite": 1.0}
    assert np.abs(trainer.params(after)["w"] - 1).min() > 0.1


def test_small_updates_reach_parameters_in_float32_alone(devices):
    """Steps of a thousandth of the spacing of bfloat16, which a parameter in bfloat16 would lose."""
    data = [np.ones((2, 4), np.float32)] * 32

    def mixed(params, batch):
        low = params.astype(jnp.bfloat16)
        return jnp.mean(batch.astype(jnp.bfloat16) @ low).astype(jnp.float32)

    moved = []
    for dtype in (jnp.float32, jnp.bfloat16):
        trainer = jaxche.Trainer(mixed, optax.sgd(1e-5), replicas=devices[:2])
        state, _ = trained(trainer, trainer.init(jnp.ones(4, dtype)), data, [(8, 8)] * 2)
        assert trainer.params(state).dtype == dtype
        moved.append(float(1 - trainer.params(state).astype(jnp.float32).max()))
    assert moved[0] == pytest.approx(16e-5, rel=0.05)
    assert moved[1] == 0


@pytest.mark.parametrize("is_object", [True, False])
def test_multi_steps_pass_the_loss_on(problem, devices, close, is_object):
    """As optax does; its gradient_transformation() is taken for one without further arguments."""

    def multi_steps():
        return optax.MultiSteps(optax.chain(optax.sgd(0.2), optax.contrib.reduce_on_plateau(0.5, 0, rtol=0.5)), 2)

    params, steps = problem.params, multi_steps()
    opt_state = steps.init(params)
    for i in range(len(problem.data)):
        (value, _), grads = jax.value_and_grad(problem.loss, has_aux=True)(params, problem.data[i])
        updates, opt_state = steps.update(grads, opt_state, params, value=value)
        params = optax.apply_updates(params, updates)
    assert float(opt_state.inner_opt_state[-1].scale) < 0.5
    tx = multi_steps() if is_object else multi_steps().gradient_transformation()
    trainer = jaxche.Trainer(problem.loss, tx, replicas=devices[:1])
    state, _ = trainer.fit(trainer.init(problem.params), problem.data, epochs=1, progress=False)
    close(trainer.params(state), params)
    strategy = jaxche.FullShard()
    step = jaxche.sharded_step(problem.loss, tx, strategy, strategy.mesh(devices[:2]))
    sharded = step.init(problem.params)
    for i in range(len(problem.data)):
        sharded, _ = step(sharded, problem.data[i])
    close(sharded.params, params)


@pytest.mark.slow
@pytest.mark.parametrize("average", ["parameters", "gradients"])
@pytest.mark.parametrize("name", ["polyak_sgd", "momo", "reduce_on_plateau"])
def test_optimizers_that_use_the_loss_train(problem, devices, average, name):
    tx = {
        "polyak_sgd": optax.polyak_sgd(0.2),
        "momo": optax.contrib.momo(0.2),
        "reduce_on_plateau": optax.chain(optax.sgd(0.2), optax.contrib.reduce_on_plateau(patience=1, rtol=0.5)),
    }[name]
    trainer = jaxche.Trainer(problem.loss, tx, average=average, replicas=devices[:2])
    state, infos = trained(trainer, trainer.init(problem.params), problem.data, [(2, 4)] * 8)
    assert infos[-1].loss < infos[0].loss
    if name == "reduce_on_plateau":
        assert float(state.local_states[0].opt_state[1].scale[0]) < 1


def test_a_float_count_in_the_model_state_follows_the_updates_where_a_replica_has_no_rows(devices):
    def loss(w, batch, model_state):
        after = jax.tree.map(lambda count: count + 1, model_state)
        return jnp.mean((batch @ w) ** 2), ({"weight": model_state["float"]}, after)

    data = [np.ones((8, 2), np.float32)] * 12
    options = {"fleet": jaxche.VirtualFleet([20, 400], sync_ms=0.0), "replicas": devices[:2]}
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), policy="sync", joined_batches=1, **options)
    state = trainer.init(jnp.ones(2), {"float": jnp.float32(0), "integer": jnp.int32(0)})
    state, history = trainer.fit(state, data, progress=False)
    assert [info.metrics["weight"] for info in history] == list(range(12))
    took = np.sum([info.counts for info in history], axis=0)
    assert took[0] == 12 > took[1]
    assert state.model_state["float"].tolist() == [12, 12]
    assert state.model_state["integer"].tolist() == took.tolist()
