"""Rules as an optax transform: with schedules, accumulation, injection, clipping and groups."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxche.scaling import (
    AdamScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    SqrtScale,
    noise_scale,
    progress_schedule,
    scale_learning_rate,
)

PARAMS = {"w": jnp.ones(3), "b": jnp.ones(())}
GRADS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array(0.5)}


def noisy(params=PARAMS, groups=None, seed=0):
    rng = np.random.default_rng(seed)
    noise = noise_scale.init(params, groups=groups)
    grads = jax.tree.map(lambda x: jnp.asarray(1 + rng.normal(size=(4, *x.shape)), jnp.float32), params)
    return noise_scale.update(noise, grads, [8] * 4)


def close(a, b, rtol=1e-5):
    chex.assert_trees_all_close(a, b, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("rule", [LinearScale(), SqrtScale(), AdaScale(), AdamScale(), LEGWScale(1, 100, 10)])
@pytest.mark.parametrize("tx", [optax.sgd(0.1, momentum=0.9), optax.adamw(0.01)])
def test_it_is_a_change_of_the_learning_rate(rule, tx):
    """Each step equals the optimizer's own step with its learning rate times the factor."""
    noise, scaled = noisy(), scale_learning_rate(tx, rule)
    state, plain, progress = scaled.init(PARAMS), tx.init(PARAMS), 0.0
    for scale in (1, 4, 8):
        updates, state = scaled.update(GRADS, state, PARAMS, scale=scale, noise=noise)
        wanted, plain = tx.update(GRADS, plain, PARAMS)
        factor = rule.lr_factor(scale, noise, progress)
        close(updates, jax.tree.map(lambda x, factor=factor: factor * x, wanted))
        close(state.inner_state, plain)
        assert float(state.factor) == pytest.approx(float(factor))
        progress += float(noise.gain(scale))
        assert float(state.progress) == pytest.approx(progress, rel=1e-5)


def test_updates_that_are_not_float_are_left_alone():
    tx, updates = scale_learning_rate(optax.identity(), LinearScale()), {"w": jnp.ones(2), "n": jnp.array(3)}
    updates, _ = tx.update(updates, tx.init(updates), scale=4)
    assert jax.tree.map(lambda x: x.tolist(), updates) == {"w": [4.0, 4.0], "n": 3}


def test_no_change_recompiles():
    tx = scale_learning_rate(optax.adam(0.1), AdamScale())

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, scale, noise):
        return tx.update(GRADS, state, PARAMS, scale=scale, noise=noise)

    state = tx.init(PARAMS)
    for i, scale in enumerate((1.0, 2.0, 7.5)):
        updates, state = step(state, scale, noisy(seed=i))
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(updates))


def test_it_can_be_scanned():
    tx = scale_learning_rate(optax.sgd(0.1), AdaScale())

    def step(state, scale):
        _, state = tx.update(GRADS, state, PARAMS, scale=scale, noise=noisy())
        return state, state.factor

    state, factors = jax.lax.scan(step, tx.init(PARAMS), jnp.array([1.0, 2.0, 4.0]))
    assert bool(jnp.all(jnp.diff(factors) > 0))
    assert float(state.progress) == pytest.approx(float(factors.sum()), rel=1e-5)


def test_progress_may_be_kept_elsewhere_and_without_noise_counts_examples():
    tx = scale_learning_rate(optax.sgd(0.1), LEGWScale(1, 100, 10))
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS, scale=4, progress=20.0)
    assert float(state.factor) == pytest.approx(1.0)
    assert float(state.progress) == 24.0


def test_groups_have_a_factor_each():
    labels = {"w": "weights", "b": "biases"}
    noise = noisy(groups=labels)
    tx = scale_learning_rate(optax.sgd(1.0), AdaScale(), groups=labels)
    updates, state = jax.jit(lambda s: tx.update(GRADS, s, PARAMS, scale=8, noise=noise))(tx.init(PARAMS))
    biases, weights = AdaScale().lr_factor(8, noise)
    assert float(biases) != float(weights)
    close(updates, {"w": -weights * GRADS["w"], "b": -biases * GRADS["b"]})
    np.testing.assert_allclose(state.factor, [biases, weights], rtol=1e-6)
    _, plain = scale_learning_rate(optax.sgd(1.0), LinearScale()).update(
        GRADS, scale_learning_rate(optax.sgd(1.0), LinearScale()).init(PARAMS), PARAMS, scale=8, noise=noise
    )
    assert plain.factor.shape == ()  # a rule that tells no groups apart needs no labels


@pytest.mark.parametrize("outside", [False, True])
def test_accumulation_counts_updates_not_mini_steps(outside):
    if outside:
        tx = scale_learning_rate(optax.MultiSteps(optax.sgd(0.1), 3), LinearScale())
    else:
        tx = optax.MultiSteps(scale_learning_rate(optax.sgd(0.1), LinearScale()), 3).gradient_transformation()
    state = tx.init(PARAMS)
    seen = []
    for i in range(6):
        updates, state = tx.update(jax.tree.map(lambda g, i=i: g * (i + 1), GRADS), state, PARAMS, scale=6)
        seen.append(updates)
    mine = state if outside else state.inner_opt_state
    assert float(mine.progress) == 12.0
    assert float(mine.factor) == 6.0
    close(seen[1], jax.tree.map(jnp.zeros_like, GRADS))
    close(seen[2], jax.tree.map(lambda g: -0.1 * 6 * 2 * g, GRADS))


def test_accumulation_in_a_chain_counts_updates_too():
    steps = optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation()
    progress = {}
    for name, inner in {
        "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.chain(steps)),
        "masked": optax.masked(steps, {"w": True, "b": False}),
    }.items():
        tx = scale_learning_rate(inner, LinearScale())
        state = tx.init(PARAMS)
        for _ in range(6):
            _, state = tx.update(GRADS, state, PARAMS, scale=6)
        progress[name] = float(state.progress)
    assert progress == {"chain": 12.0, "masked": 36.0}  # each step updates b


def test_a_label_of_a_partition_may_have_no_parameters():
    scaled = scale_learning_rate(optax.sgd(0.1), LinearScale())
    tx = optax.partition({"a": scaled, "none": scaled}, {"w": "a", "b": "a"})
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS, scale=6)
    close(updates, jax.tree.map(lambda g: -0.6 * g, GRADS))


def test_clipping_comes_before():
    tx = scale_learning_rate(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), LinearScale())
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS, scale=4)
    assert float(optax.tree.norm(updates)) == pytest.approx(4.0, rel=1e-5)


def test_the_state_of_the_wrapped_optimizer_is_refused_with_the_line_that_keeps_its_moments():
    adam = optax.adam(0.1)
    tx, opt_state = scale_learning_rate(adam, LinearScale()), adam.update(GRADS, adam.init(PARAMS), PARAMS)[1]
    with pytest.raises(
        ValueError, match=r"state is .* not one of scale_learning_rate; write opt_state = tx\.init"
    ) as error:
        tx.update(GRADS, opt_state, PARAMS, scale=2)
    line = str(error.value).partition("of the wrapped optimizer ")[2]
    _, state = tx.update(GRADS, eval(line, {"tx": tx, "params": PARAMS, "opt_state": opt_state}), PARAMS, scale=2)
    assert int(state.inner_state[0].count) == 2
    with pytest.raises(ValueError, match="state is None, not one of scale_learning_rate"):
        tx.update(GRADS, None, PARAMS, scale=2)


def test_injected_hyperparams_stay_adjustable():
    tx = scale_learning_rate(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), LinearScale())
    state = tx.init(PARAMS)
    state.inner_state.hyperparams["learning_rate"] = jnp.float32(0.5)
    updates, state = tx.update(GRADS, state, PARAMS, scale=2)
    close(updates, jax.tree.map(lambda g: -0.5 * 2 * g, GRADS))
    assert float(optax.tree.get(state, "factor")) == 2.0


@pytest.mark.parametrize("wrap", ["alone", "chain", "multi_steps", "partition"])
def test_schedules_follow_progress(wrap):
    """One step at scale 10 with no signal at all is ten steps of the base batch."""
    schedule = optax.linear_schedule(1.0, 0.0, transition_steps=40)
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=progress_schedule(schedule))
    inner = {
        "alone": sgd,
        "chain": optax.chain(optax.clip_by_global_norm(1e9), sgd),
        "multi_steps": optax.MultiSteps(sgd, 1),
        "partition": optax.partition({"a": sgd}, {"w": "a", "b": "a"}),
    }[wrap]
    tx = scale_learning_rate(inner, SqrtScale())
    state = tx.init(PARAMS)
    noise = noise_scale.update(noise_scale.init(PARAMS), jax.tree.map(lambda x: jnp.stack([x, -x]), PARAMS), [1, 1])
    assert float(noise.sqr) == 0.0
    for step in range(4):
        updates, state = tx.update(GRADS, state, PARAMS, scale=10, noise=noise)
        rate = 1.0 - 10 * step / 40
        close(updates, jax.tree.map(lambda g, rate=rate: -rate * np.sqrt(10) * g, GRADS), rtol=1e-4)
        shown = optax.tree.get(state, "learning_rate", filtering=lambda _, value: isinstance(value, jax.Array))
        assert float(shown) == pytest.approx(rate, rel=1e-5)


def test_a_progress_schedule_that_gets_none_says_so():
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=progress_schedule(optax.constant_schedule(0.1)))
    with pytest.raises(ValueError, match=r"got no progress; wrap the whole optimizer"):
        sgd.update(GRADS, sgd.init(PARAMS), PARAMS)
    bare = optax.sgd(progress_schedule(optax.constant_schedule(0.1)))
    with pytest.raises(ValueError, match=r"write optax\.inject_hyperparams"):
        bare.update(GRADS, bare.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"schedule=0\.1 is not a function of a step; write e\.g\. progress_schedule"):
        progress_schedule(0.1)


def test_in_an_nnx_training_step():
    """No trainer: a model, an nnx.Optimizer, stacked gradients of two shards of a batch."""
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    tx = scale_learning_rate(optax.adam(0.05), AdamScale())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    noise = noise_scale.init(nnx.state(model, nnx.Param))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 16, 3)).astype(np.float32)
    y = x @ np.array([[1.0], [-2.0], [0.5]], np.float32)

    @nnx.jit
    def step(model, optimizer, noise):
        graph, params = nnx.split(model, nnx.Param)

        def loss(params, x, y):
            return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

        losses, grads = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(params, x, y)
        noise = noise_scale.update(noise, grads, [16, 16], opt_state=optimizer.opt_state)
        mean = jax.tree.map(lambda g: g.mean(0), grads)
        optimizer.update(model, mean, scale=2, noise=noise)
        return losses.mean(), noise

    losses = []
    for _ in range(30):
        loss, noise = step(model, optimizer, noise)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    assert bool(noise.preconditioned)


def test_refused():
    with pytest.raises(ValueError, match=r"is not an optax transformation; write e\.g\. tx="):
        scale_learning_rate(0.1, AdaScale())
    with pytest.raises(ValueError, match=r"is not a scaling rule; write e\.g\. rule=jaxche\.AdaScale\(\)"):
        scale_learning_rate(optax.sgd(0.1), AdaScale)
    tx = scale_learning_rate(optax.sgd(0.1), AdaScale())
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"scale is missing.*scale=8"):
        tx.update(GRADS, state, PARAMS)
    for bad in (0, -2.0, float("nan")):
        with pytest.raises(ValueError, match=r"scale=.*must be finite and greater than 0"):
            tx.update(GRADS, state, PARAMS, scale=bad, noise=noisy())
    with pytest.raises(
        ValueError, match=r"scale has shape \(1,\), and it is one number; write e\.g\. scale=scale\[0\]"
    ):
        tx.update(GRADS, state, PARAMS, scale=jnp.ones(1), noise=noisy())
    with pytest.raises(ValueError, match="AdaScale needs the noise scale"):
        tx.update(GRADS, state, PARAMS, scale=2)
    with pytest.raises(ValueError, match=r"write the same: noise_scale\.init"):
        tx.update(GRADS, state, PARAMS, scale=2, noise=noisy(groups={"w": "a", "b": "b"}))
