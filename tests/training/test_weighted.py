"""Losses over tokens: totals with weights count right in gradients, merges and history, however batches are padded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxche

LENGTH, BATCH = 6, 4
FLEET = jaxche.VirtualFleet([20, 20, 50], sync_ms=0.0)


def padded(examples=40):
    """Sentences of unlike lengths; those of the batches 2 and 9 are empty."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(examples, LENGTH, 3)).astype(np.float32)
    y = np.tanh(x @ np.float32([1.0, -1.0, 0.5])) + rng.normal(size=(examples, LENGTH)).astype(np.float32) / 10
    lengths = rng.integers(0, LENGTH + 1, examples) * (rng.uniform(size=examples) < 0.8)
    for empty in (2, 9):
        lengths[empty * BATCH : (empty + 1) * BATCH] = 0
    arrays = {"x": x, "y": y.astype(np.float32), "mask": np.arange(LENGTH) < lengths[:, None]}
    return jaxche.Batches(arrays, BATCH, seed=None)


DATA = padded()
PARAMS = np.float32([0.1, 0.2, -0.3])


def loss_fn(params, batch):
    error = jnp.abs(jnp.tanh(batch["x"] @ params) - batch["y"])
    mask, late = batch["mask"], batch["mask"] & (jnp.arange(LENGTH) > 1)
    metrics = {
        "close": jaxche.Weighted(((error < 0.5) * mask).sum(), mask.sum()),
        "late": jaxche.Weighted((error * late).sum(), late.sum()),
        "padding": 1 - mask.mean(),
    }
    return jaxche.Weighted((error**2 * mask).sum(), mask.sum()), metrics


def means(params, batches):
    """The slow twin: loss and metrics over all tokens of some batches, in NumPy."""
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    error = np.abs(np.tanh(whole["x"] @ np.float64(params)) - whole["y"])
    mask = whole["mask"]
    late = mask & (np.arange(LENGTH) > 1)
    found = {"close": (error < 0.5)[mask].mean(), "late": error[late].mean(), "padding": 1 - mask.mean()}
    return (error**2)[mask].mean(), found


@jax.jit
def gradient(params, batches):
    """The gradient of the mean over all tokens of some batches; zero without any."""

    def mean(params):
        parts = [loss_fn(params, batch)[0] for batch in batches]
        return sum(part.total for part in parts) / jnp.maximum(sum(part.weight for part in parts), 1)

    return jax.grad(mean)(params)


def one_device(tx, updates_of):
    """The parameters after updates on so many batches each, one after the other."""
    params, opt_state, update, first = jnp.asarray(PARAMS), tx.init(jnp.asarray(PARAMS)), jax.jit(tx.update), 0
    for joined in updates_of:
        grads = gradient(params, [DATA[i % len(DATA)] for i in range(first, first + joined)])
        first += joined
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


def make(devices, replicas=3, **options):
    return jaxche.Trainer(
        options.pop("loss", loss_fn), options.pop("tx", optax.adam(0.05)), replicas=devices[:replicas], **options
    )


def test_the_mean_loss_of_an_epoch_is_that_of_its_rounds_by_their_weights(devices):
    """At a learning rate of 0, the mean over all tokens of the data, and over all examples without a ``Weighted``."""
    one = make(devices, tx=optax.sgd(0.0), policy="sync", fleet=FLEET)
    _, history = one.fit(one.init(PARAMS), DATA, progress=False)
    rounds = [info for info in history if info.loss_weight]
    found = np.average([info.loss for info in rounds], weights=[info.loss_weight for info in rounds])
    assert found == pytest.approx(means(PARAMS, list(DATA))[0], rel=1e-5)
    assert sum(info.loss_weight for info in history) == sum(batch["mask"].sum() for batch in DATA)
    plain = make(devices, loss=lambda params, batch: jnp.mean(batch["x"] @ params), policy="sync", fleet=FLEET)
    _, history = plain.fit(plain.init(PARAMS), DATA, progress=False)
    assert [info.loss_weight for info in history] == [info.examples for info in history]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["equal", "speed"])
def test_sync_equals_one_device_on_the_tokens_of_the_joined_batch(rows, devices, close):
    one = make(devices, policy="sync", fleet=FLEET, rows=rows)
    state, history = one.fit(one.init(PARAMS), DATA, epochs=3, progress=False)
    close(one.params(state), one_device(optax.adam(0.05), [info.batches for info in history]), rtol=1e-4)
    assert {bool(info.shares) for info in history[8:]} == {rows == "speed"}
    assert sum(info.examples for info in history) == 3 * 40


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_the_history_has_means_over_tokens(policy, devices):
    one = make(devices, policy=policy, tx=optax.sgd(0.0), rows="equal" if policy == "sync" else None)
    _, info = one.round(one.init(PARAMS), DATA, counts=(3, 1, 2) if policy == "cadence" else None)
    batches = [DATA[i] for i in range(sum(info.counts))]
    loss, metrics = means(PARAMS, batches)
    assert info.loss == pytest.approx(loss, rel=1e-5)
    assert info.metrics == pytest.approx(metrics, rel=1e-5)
    assert info.examples == BATCH * len(batches)
    assert info.losses[0] == pytest.approx(means(PARAMS, batches[: info.counts[0]])[0], rel=1e-5)


def test_batches_of_padding_alone_change_nothing_and_make_no_nan(devices, close):
    one = make(devices, replicas=2, policy="sync", rows="equal", tx=optax.sgd(0.1))
    state = one.init(PARAMS)
    empty = [DATA[2], DATA[9]]
    after, info = one.round(state, empty)
    close(one.params(after), PARAMS)
    assert info.weights == (0.5, 0.5)
    assert np.isnan([info.loss, *info.losses, info.metrics["close"]]).all()
    assert info.metrics["padding"] == 1
    beside, info = one.round(state, [DATA[0], DATA[2]])
    assert info.weights == pytest.approx((1.0, 0.0))
    assert info.losses[0] == pytest.approx(info.loss)
    close(one.params(beside), PARAMS - 0.1 * gradient(PARAMS, [DATA[0]]))


@pytest.mark.parametrize("opt_state", ["average", "local"])
def test_averaged_parameters_weigh_by_tokens_where_asked(devices, close, opt_state):
    tx = optax.sgd(0.1, momentum=0.9)
    one = make(devices, replicas=2, tx=tx, merge="batch", opt_state=opt_state)
    state, info = one.round(one.init(PARAMS), DATA, counts=(1, 2))
    tokens = [float(DATA[i]["mask"].sum()) for i in range(3)]
    ends = []
    for own in ([0], [1, 2]):
        params, moments = jnp.asarray(PARAMS), tx.init(jnp.asarray(PARAMS))
        for i in own:
            updates, moments = tx.update(gradient(params, [DATA[i]]), moments)
            params = optax.apply_updates(params, updates)
        ends.append(params)
    weights = np.array([tokens[0], (tokens[1] + tokens[2]) / 2])
    close(one.params(state), np.average(ends, axis=0, weights=weights))
    assert info.weights == pytest.approx(weights / weights.sum())
    # Where all is padding, the weights are those of equal batches, and nothing is lost.
    after, _ = one.round(state, [DATA[i] for i in (0, 1, 2, 2, 9)], counts=(1, 1))
    moments = [np.asarray(s.opt_state[0].trace) for s in (state, after)]
    close(moments[1], 0.9 * (moments[0] if opt_state == "local" else np.broadcast_to(moments[0].mean(0), (2, 3))))
    close(one.params(after), one.params(state) - 0.1 * moments[1].mean(0))


def test_a_single_replica_trains_on_the_mean_of_each_batch(devices, close):
    one = make(devices, replicas=1)
    state, history = one.fit(one.init(PARAMS), DATA, progress=False)
    close(one.params(state), one_device(optax.adam(0.05), [1] * len(DATA)), rtol=1e-4)
    assert np.isfinite(history[-1].loss)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [jaxche.FullShard(), jaxche.NoShard()], ids=repr)
@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_islands_count_tokens_over_their_devices(strategy, average, devices, close):
    meshes = [strategy.mesh(devices[:2]), strategy.mesh(devices[2:4])]
    plain = make(devices, replicas=2, tx=optax.sgd(0.1), average=average)
    island = jaxche.Trainer(loss_fn, optax.sgd(0.1), replicas=meshes, strategy=strategy, average=average)
    data = [jax.tree.map(lambda x: x[:3], DATA[0])] + [DATA[i] for i in range(1, 6)]  # two devices do not divide 3 rows
    (a, told), (b, other) = (t.round(t.init(PARAMS), data, counts=(3, 2)) for t in (plain, island))
    close(plain.params(a), island.params(b))
    assert told.loss == pytest.approx(other.loss)
    assert told.metrics == pytest.approx(other.metrics)


def test_a_sharded_step_counts_tokens_over_devices_and_micro_batches(devices, close):
    strategy = jaxche.FullShard()
    step = jaxche.sharded_step(loss_fn, optax.sgd(0.1), strategy, strategy.mesh(devices[:2]), accumulate=2)
    state, metrics = step(step.init(PARAMS), DATA[0])
    loss, rest = means(PARAMS, [DATA[0]])
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(rest | {"loss": loss}, rel=1e-5)
    close(state.params, PARAMS - 0.1 * gradient(PARAMS, [DATA[0]]))
    state, metrics = step(state, DATA[2])
    assert np.isfinite(state.params).all()
    assert float(metrics["loss"]) == 0


def weighted(apply, batch):
    error = (apply(batch["x"])[..., 0] - batch["y"]) ** 2
    return jaxche.Weighted((error * batch["mask"]).sum(), batch["mask"].sum())


def test_flax_losses_may_be_weighted(devices):
    module = nn.Dense(1)
    linen = make(devices, 1, loss=jaxche.linen_loss(module, weighted))
    linen.round(linen.init(module.init(jax.random.key(0), DATA[0]["x"])["params"]), DATA)
    loss = jaxche.NNXLoss(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), weighted)
    door = make(devices, 1, loss=loss)
    _, info = door.round(door.init(loss.params, loss.model_state), DATA)
    assert np.isfinite(info.loss)


def test_what_cannot_weigh_refuses(devices):
    one = make(devices, 2, scaling=jaxche.AdaScale())
    with pytest.raises(ValueError, match=r"loss_fn returns a jaxche.Weighted.*return the mean"):
        one.round(one.init(PARAMS), DATA)
    staged = jaxche.Partitioned(
        [lambda p, b: b["x"] @ p],
        lambda y, b: jaxche.Weighted(y.sum(), b["mask"].sum()),
        jaxche.Direct(),
        devices=devices[:1],
    )
    with pytest.raises(ValueError, match=r"loss returned a jaxche.Weighted.*write return"):
        staged.value_and_grad([PARAMS], DATA[0])
    one = make(devices, 1, loss=lambda p, b: jaxche.Weighted(p.sum(), b["mask"].sum(1)))
    with pytest.raises(ValueError, match=r"weight of the loss has shape \(4,\).*mask.sum\(\)"):
        one.round(one.init(PARAMS), DATA)


def test_no_gradient_flows_through_a_weight(devices, close):
    """Otherwise the gradient of a joined batch would not follow from those of its parts."""

    def loss(params, batch):
        return jaxche.Weighted((params**2).sum(), jnp.exp(params).sum())

    one = make(devices, 1, tx=optax.sgd(1.0), loss=loss)
    state, _ = one.round(one.init(PARAMS), DATA, counts=(1,))
    close(one.params(state), PARAMS - 2 * PARAMS / np.exp(PARAMS).sum())


# Two tasks in turn: batches of different entries, each with a metric of its own.
TASKS = [{"a": np.ones((4, 2), np.float32)}, {"b": np.ones((4, 3), np.float32)}] * 4


def loss_of_a_task(params, batch):
    task = "a" if "a" in batch else "b"
    return jnp.mean((batch[task] * params - 2.0) ** 2), task


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "metrics_of",
    [
        lambda loss, task: {task: loss},
        lambda loss, task: {"a": loss} | ({"b": loss} if task == "b" else {}),  # one more
        lambda loss, task: {"a": loss} | ({"b": loss} if task == "a" else {}),  # one less
        lambda loss, task: {"a": loss if task == "a" else jaxche.Weighted(loss, 1.0)},
    ],
)
def test_metrics_of_some_batches_only_are_refused_with_the_line_to_write(metrics_of, replicas, devices):
    def loss_fn(params, batch):
        loss, task = loss_of_a_task(params, batch)
        return loss, metrics_of(loss, task)

    trainer = jaxche.Trainer(loss_fn, optax.sgd(0.1), replicas=devices[:replicas])
    with pytest.raises(ValueError, match=r"return the same for every batch: .* jaxche\.Weighted\(0\.0, 0\.0\)"):
        trainer.fit(trainer.init(jnp.zeros(())), TASKS, progress=False)


def test_a_metric_of_some_batches_is_a_mean_over_these(devices):
    def loss_fn(params, batch):
        loss, task = loss_of_a_task(params, batch)
        return loss, {"a": jaxche.Weighted(0.0, 0.0), "b": jaxche.Weighted(0.0, 0.0), task: jaxche.Weighted(3.0, 1.0)}

    trainer = jaxche.Trainer(loss_fn, optax.sgd(0.1), replicas=devices[:1])
    _, history = trainer.fit(trainer.init(jnp.zeros(())), TASKS, progress=False)
    assert history[-1].metrics == {"a": 3.0, "b": 3.0}
