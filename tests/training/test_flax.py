"""Flax models through the doors: batch statistics, dropout, both APIs."""

import dataclasses

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.errors import InvalidRngError, ScopeCollectionNotFound

import jaxche


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(8)(x))
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(nn.relu(x)))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.drop, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.norm(self.dense(x)))))


@pytest.fixture
def data():
    rng = np.random.default_rng(1)
    x = rng.normal(2.0, 3.0, size=(128, 3)).astype(np.float32)
    return jaxche.Batches({"x": x, "y": np.tanh(x[:, :1])}, batch_size=8)


def linen():
    net = LinenNet()

    def loss_fn(apply, batch):
        error = apply(batch["x"], train=True) - batch["y"]
        return jnp.mean(error**2), {"mae": jnp.mean(jnp.abs(error))}

    variables = net.init(jax.random.key(0), jnp.ones((1, 3)), train=False)
    params = variables.pop("params")
    return jaxche.linen_loss(net, loss_fn), params, variables


def of_nnx():
    def loss_fn(model, batch):
        error = model(batch["x"]) - batch["y"]
        return jnp.mean(error**2), {"mae": jnp.mean(jnp.abs(error))}

    loss = jaxche.NNXLoss(NNXNet(nnx.Rngs(0)), loss_fn)
    return loss, loss.params, loss.model_state


DOORS = pytest.mark.parametrize("door", [linen, of_nnx])


def statistics(model_state):
    """The batch statistics of either door."""
    return model_state["batch_stats"]["BatchNorm_0"] if "batch_stats" in model_state else model_state["norm"]


@pytest.mark.slow
@DOORS
def test_training_lowers_the_loss_and_learns_the_statistics(door, data, devices):
    loss, params, model_state = door()
    trainer = jaxche.Trainer(loss, optax.adam(1e-2), replicas=devices[:2], che=jaxche.ElChe(2, anchor=2, max_anchor=2))
    state, history = trainer.fit(trainer.init(params, model_state), data, epochs=12, progress=False)
    assert history[-1].loss < 0.7 * history[0].loss
    assert history[-1].metrics["mae"] < history[0].metrics["mae"]
    merged = statistics(trainer.model_state(state))
    assert float(jnp.abs(merged["mean"]).max()) > 0.1
    for row in jax.tree.leaves(statistics(state.model_state)):
        np.testing.assert_array_equal(row[0], row[1])  # pooled: equal on both replicas


@pytest.mark.slow
@DOORS
def test_statistics_are_pooled_with_the_law_of_total_variance(door, data, devices):
    """Each replica's own statistics come from running it alone on its share."""
    loss, params, model_state = door()
    tx, counts = optax.sgd(0.0), (1, 3)
    trainer = jaxche.Trainer(loss, tx, replicas=devices[:2])
    merged, _ = trainer.round(trainer.init(params, model_state), data, counts=counts)
    alone, own = jaxche.Trainer(loss, tx, replicas=devices[:1]), []
    for start, n in ((0, 1), (1, 3)):
        share = [data[i] for i in range(start, start + n)]
        state, _ = alone.round(alone.init(params, model_state), share, counts=(n,))
        own.append(statistics(alone.model_state(state)))
    w = np.array(counts) / 4
    mean = sum(wi * np.asarray(s["mean"]) for wi, s in zip(w, own, strict=True))
    second = sum(wi * (np.asarray(s["var"]) + np.asarray(s["mean"]) ** 2) for wi, s in zip(w, own, strict=True))
    result = statistics(trainer.model_state(merged))
    np.testing.assert_allclose(result["mean"], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result["var"], second - mean**2, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("average", ["parameters", "gradients"])
@pytest.mark.parametrize("width", [1, 2])
def test_variances_of_constant_features_stay_right_when_a_round_moves_the_mean_far(devices, close, average, width):
    """A white pixel and the pressure of the air: means move by a thousand where variances are a millionth."""
    rng = np.random.default_rng(0)
    x = np.stack([np.full(320, 255), np.full(320, 1013.25), rng.normal(size=320)], axis=1).astype(np.float32)
    data = jaxche.Batches({"x": x, "y": x[:, 2:]}, batch_size=8)
    net = Normed()
    variables = net.init(jax.random.key(0), x[:1], train=False)
    params = variables.pop("params")
    loss = jaxche.linen_loss(net, lambda apply, batch: jnp.mean((apply(batch["x"], train=True) - batch["y"]) ** 2))

    def make(replicas, **knobs):
        strategy = jaxche.FullShard()
        islands = [strategy.mesh(replicas[i : i + width]) for i in range(0, len(replicas), width)]
        where = {"replicas": replicas} if width == 1 else {"replicas": islands, "strategy": strategy}
        return jaxche.Trainer(loss, optax.sgd(1e-3), **where, **knobs)

    def one_round(trainer, counts):
        state, _ = trainer.round(trainer.init(params, variables), data, counts=counts)
        return trainer.params(state), trainer.model_state(state)["batch_stats"]["BatchNorm_0"]

    # Both replicas take as many steps, so what one has of the constant features both have.
    _, alone = one_round(make(devices[:width]), (20,))
    pair = make(devices[: 2 * width], average=average)
    reached, pooled = one_round(pair, (20, 20))
    close(pooled["mean"][:2], alone["mean"][:2], rtol=1e-6)
    assert (np.asarray(pooled["var"]) >= 0).all()
    np.testing.assert_allclose(pooled["var"][:2], alone["var"][:2], rtol=1e-5)
    out = net.apply({"params": reached, "batch_stats": {"BatchNorm_0": pooled}}, x, train=False)
    assert np.isfinite(out).all()
    # Replicas that differ: the spread of their means is most of the variance.
    _, pooled = one_round(pair, (3, 9))
    own = np.array([[1 - 0.5**n, 0.5**n] for n in (3, 9)])
    mean = own[:, 0] @ [0.25, 0.75]
    spread = [0.25, 0.75] @ (own[:, 0] - mean) ** 2
    wanted = [own[:, 1] @ [0.25, 0.75] + spread * c**2 for c in (255, 1013.25)]
    np.testing.assert_allclose(pooled["var"][:2], wanted, rtol=1e-5)


@pytest.mark.slow
@DOORS
def test_dropout_belongs_to_the_batch_not_to_the_replica(door, data, devices):
    """The same batches in one round give the same mean gradient however they are dealt out."""
    loss, params, model_state = door()
    trainer = jaxche.Trainer(
        lambda p, b, rng: loss(p, b, rng, model_state)[0],
        optax.sgd(0.5),
        average="gradients",
        replicas=devices[:2],
        seed=7,
    )
    results = []
    for counts in [(2, 2), (4, 0), (1, 3)]:
        state, _ = trainer.round(trainer.init(params), data, counts=counts)
        results.append(trainer.params(state))
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@DOORS
def test_the_seed_decides_the_dropout(door, data, devices):
    loss, params, model_state = door()

    def train(seed):
        trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:1], seed=seed)
        return trainer.params(trainer.round(trainer.init(params, model_state), data, counts=(3,))[0])

    one = train(1)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), one, train(1))
    assert jax.tree.all(same)
    differs = jax.tree.map(lambda a, b: bool((a != b).any()), one, train(2))
    assert any(jax.tree.leaves(differs))


def test_rebuilt_nnx_model_predicts_with_what_was_learnt(data, devices):
    loss, params, model_state = of_nnx()
    trainer = jaxche.Trainer(loss, optax.adam(1e-2), replicas=devices[:2])
    state, _ = trainer.fit(trainer.init(params, model_state), data, progress=False)
    model = loss.rebuild(trainer.params(state), trainer.model_state(state))
    model.eval()
    once, twice = model(data[0]["x"]), model(data[0]["x"])
    np.testing.assert_array_equal(once, twice)
    fresh = loss.rebuild(params, model_state)
    fresh.eval()
    assert not np.allclose(once, fresh(data[0]["x"]))


def test_a_linen_module_without_state_needs_none(data, devices):
    net = nn.Dense(1)
    loss = jaxche.linen_loss(net, lambda apply, b: jnp.mean((apply(b["x"]) - b["y"]) ** 2))
    trainer = jaxche.Trainer(loss, optax.sgd(0.01), replicas=devices[:2])
    state = trainer.init(net.init(jax.random.key(0), jnp.ones((1, 3)))["params"])
    state, info = trainer.round(state, data, counts=(2, 2))
    assert np.isfinite(info.loss)
    assert trainer.model_state(state) is None


def test_frozen_dicts_of_variables_stay_what_they_are(data, devices, close):
    loss, params, variables = linen()

    def fit(params, variables):
        trainer = jaxche.Trainer(loss, optax.adam(0.01), replicas=devices[:2], policy="sync", rows="equal")
        state, _ = trainer.fit(trainer.init(params, variables), data, progress=False)
        return trainer.params(state), trainer.model_state(state)

    expected, statistics = fit(params, variables)
    for frozen in (flax.core.freeze(variables), {name: flax.core.freeze(value) for name, value in variables.items()}):
        found, after = fit(flax.core.freeze(params), frozen)
        assert jax.tree.structure(after) == jax.tree.structure(frozen)
        close(flax.core.unfreeze(after["batch_stats"]), statistics["batch_stats"])
        close(flax.core.unfreeze(found), expected)


def test_one_name_of_a_random_stream_is_as_a_list_of_it():
    net, batch = LinenNet(), {"x": jnp.ones((4, 3))}

    def noise(apply, batch, rng):
        return jax.random.normal(rng)

    variables = net.init(jax.random.key(0), batch["x"], train=False)
    params = variables.pop("params")
    name, names = (
        jaxche.linen_loss(net, noise, rngs=rngs)(params, batch, jax.random.key(1), variables)[0]
        for rngs in ("dropout", ("dropout",))
    )
    assert name == names


def test_a_missing_random_stream_is_named_with_its_argument():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + jax.random.normal(self.make_rng("noise"), x.shape)

    def mean(apply, batch):
        return apply(batch).mean()

    with pytest.raises(InvalidRngError, match="noise") as caught:
        jaxche.linen_loss(Noisy(), mean)({}, jnp.ones(2), jax.random.key(0), None)
    assert any("rngs=) has ('dropout',): add the name" in note for note in caught.value.__notes__)
    for rngs in (("noise",), "noise"):
        jaxche.linen_loss(Noisy(), mean, rngs=rngs)({}, jnp.ones(2), jax.random.key(0), None)


def test_variables_that_are_not_the_model_state_are_refused_with_the_line_to_write(data, devices):
    """With ``"params"`` in the model state a module would compute with these, and no step would change them."""
    loss, params, variables = linen()
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:1])
    line = r"init\(variables.pop\(.params.\), model_state=variables\)"
    with pytest.raises(ValueError, match=f"model_state has 'batch_stats', 'params', .* write trainer.{line}"):
        trainer.fit(trainer.init(params, variables | {"params": params}), data, progress=False)
    for wrong in (None, variables["batch_stats"]):
        with pytest.raises(ScopeCollectionNotFound) as caught:
            trainer.fit(trainer.init(params, wrong), data, progress=False)
        assert any("write trainer.init(variables.pop('params'), model_state=variables)" in x for x in notes(caught))
    with_variables = jaxche.linen_loss(
        LinenNet(), lambda apply, b: apply({"params": params}, b["x"], train=True).mean()
    )
    trainer = jaxche.Trainer(with_variables, optax.sgd(0.1), replicas=devices[:1])
    with pytest.raises(ValueError, match=r"apply with variables, .* write apply\(batch\[\"x\"\]\)"):
        trainer.fit(trainer.init(params, variables), data, progress=False)


def notes(caught):
    return getattr(caught.value, "__notes__", [])


def test_an_nnx_model_state_that_is_missing_is_refused_with_the_line_to_write(data, devices):
    loss = of_nnx()[0]
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:1])
    with pytest.raises(
        ValueError, match=r"model_state is None, .* write trainer.init\(loss.params, loss.model_state\)"
    ):
        trainer.fit(trainer.init(loss.params), data, progress=False)
    with pytest.raises(ValueError, match=r"drop\.rngs.* is missing; .*trainer.init\(loss.params, loss.model_state\)"):
        trainer.fit(trainer.init(loss.params, {}), data, progress=False)


def test_an_nnx_model_of_parameters_alone_needs_no_model_state(data, devices):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    before = model.kernel[...]
    loss = jaxche.NNXLoss(model, lambda model, b: jnp.mean((model(b["x"]) - b["y"]) ** 2))
    trainer = jaxche.Trainer(loss, optax.sgd(0.01), replicas=devices[:2])
    state, history = trainer.fit(trainer.init(loss.params), data, progress=False)
    assert trainer.evaluate(state, data)["loss"] > 0
    loss.update(trainer, state, history)
    assert not (model.kernel[...] == before).all()


def test_the_wrong_door_is_named():
    with pytest.raises(ValueError, match=r"jaxche\.NNXLoss"):
        jaxche.linen_loss(NNXNet(nnx.Rngs(0)), lambda apply, batch: 0.0)
    with pytest.raises(ValueError, match=r"jaxche\.linen_loss"):
        jaxche.NNXLoss(LinenNet(), lambda model, batch: 0.0)
    with pytest.raises(ValueError, match=r"of several nnx models make one: nnx\.Dict\("):
        jaxche.NNXLoss((NNXNet(nnx.Rngs(0)), NNXNet(nnx.Rngs(1))), lambda models, batch: 0.0)
    model, tx = NNXNet(nnx.Rngs(0)), optax.sgd(0.1)
    with pytest.raises(ValueError, match=r"optimizer=.* is no nnx.Optimizer; write .* jaxche.Trainer\(loss, tx\)"):
        jaxche.NNXLoss(model, lambda model, batch: 0.0, tx)
    with pytest.raises(ValueError, match=r"loss_fn=.* is not a function; write def loss_fn\(model, batch\)"):
        jaxche.NNXLoss(model, tx)
    with pytest.raises(ValueError, match=r"loss_fn=.* is not a function; write def loss_fn\(apply, batch\)"):
        jaxche.linen_loss(LinenNet(), tx)


def test_a_model_state_that_changes_its_shape_is_refused(data, devices):
    def loss(params, batch, model_state):
        return jnp.sum(params), ({}, {"n": jnp.zeros(3)})

    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(ValueError, match="model_state unlike the one it got"):
        trainer.round(trainer.init(jnp.ones(2), model_state={"n": jnp.zeros(2)}), data)


def test_a_loss_with_model_state_must_return_it(data, devices):
    def loss(params, batch, model_state):
        return jnp.sum(params)

    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(ValueError, match="new_model_state"):
        trainer.round(trainer.init(jnp.ones(2), model_state={}), data)


class Sowing(nn.Module):
    """Batch statistics, and a term of the loss that it sows."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(4)(x))
        self.sow("losses", "size", jnp.mean(x**2))
        return nn.Dense(2)(x)


@pytest.mark.parametrize("names", ["losses", ["losses"], ("losses", "batch_stats"), True], ids=str)
def test_values_that_a_linen_module_sows_are_terms_of_the_loss(problem, devices, close, names):
    net = Sowing()
    variables = net.init(jax.random.key(0), problem.data[0]["x"])
    del variables["losses"]
    start, params = dict(variables), variables.pop("params")
    data = [problem.data[i] for i in range(3)]

    def loss_fn(apply, batch):
        y, sown = apply(batch["x"], mutable=names)
        assert set(sown) - {"params"} == ({"losses"} if names in ("losses", ["losses"]) else {"losses", "batch_stats"})
        return jnp.mean((y - batch["y"]) ** 2) + 0.1 * sum(sown["losses"]["size"])

    trainer = jaxche.Trainer(jaxche.linen_loss(net, loss_fn), optax.sgd(0.1), replicas=devices[:1])
    state, _ = trainer.fit(trainer.init(params, variables), data, progress=False)

    def alone(params, stats, batch):
        y, updated = net.apply({"params": params, "batch_stats": stats}, batch["x"], mutable=["losses", "batch_stats"])
        return jnp.mean((y - batch["y"]) ** 2) + 0.1 * updated["losses"]["size"][0], updated["batch_stats"]

    params, stats = start["params"], start["batch_stats"]
    for batch in data:
        grads, stats = jax.grad(alone, has_aux=True)(params, stats, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    close(trainer.params(state), params)
    close(trainer.model_state(state), {"batch_stats": stats})


def test_sown_values_in_the_model_state_are_refused_with_the_line_to_write(problem, devices):
    net = Sowing()
    variables = net.init(jax.random.key(0), problem.data[0]["x"])
    loss = jaxche.linen_loss(net, lambda apply, batch: jnp.mean(apply(batch["x"])))
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:1])
    state = trainer.init(variables.pop("params"), variables)
    found = r"model_state\['losses'\]\['size'\]\[1\] is float32\[\], and was missing.*mutable=\[\"losses\"\]"
    with pytest.raises(ValueError, match=found):
        trainer.fit(state, problem.data, progress=False)


def test_each_call_of_a_linen_module_draws_its_own_numbers():
    """Two views of one batch differ by their dropout alone in SimCSE."""
    net, x = nn.Dropout(0.5, deterministic=False), jnp.ones((8, 8))

    def loss_fn(apply, batch, rng):
        views = [apply(batch), apply(batch), apply(batch, rngs={"dropout": rng}), apply(batch, rngs={"dropout": rng})]
        return jnp.float32(0), {"views": jnp.stack(views)}

    key = jax.random.key(3)
    _, (metrics, _) = jaxche.linen_loss(net, loss_fn)({}, x, key, None)
    first, second, third, again = metrics["views"]
    np.testing.assert_array_equal(first, net.apply({}, x, rngs={"dropout": jax.random.fold_in(key, 0)}))
    assert (first != second).any()
    np.testing.assert_array_equal(third, net.apply({}, x, rngs={"dropout": jax.random.fold_in(key, 1)}))
    np.testing.assert_array_equal(third, again)


def nnx_parts():
    model = nnx.Linear(5, 2, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)


def nnx_mse(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def test_an_nnx_optimizer_goes_on_where_it_was(problem, devices, close):
    """Half with nnx's own loop, half with jaxche on one device, against nnx alone."""
    batches = [problem.data[i] for i in range(len(problem.data))]
    half = len(batches) // 2

    @nnx.jit
    def nnx_step(model, optimizer, batch):
        optimizer.update(model, nnx.grad(nnx_mse)(model, batch))

    alone, own = nnx_parts()
    for batch in batches:
        nnx_step(alone, own, batch)
    model, optimizer = nnx_parts()
    for batch in batches[:half]:
        nnx_step(model, optimizer, batch)
    loss = jaxche.NNXLoss(model, nnx_mse, optimizer)
    trainer = jaxche.Trainer(loss, loss.tx, replicas=devices[:1])
    state = trainer.init(loss.params, loss.model_state, loss.opt_state)
    state, history = trainer.fit(state, batches[half:], progress=False)
    loss.update(trainer, state, history)

    close(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(alone)))
    close(jax.tree.leaves(optimizer.opt_state), jax.tree.leaves(own.opt_state))
    assert int(optimizer.step[...]) == int(own.step[...]) == len(batches)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(1)), r"bias has the shape \(1,\), and the model's is \(2,\)"),
        (
            lambda: nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(1)),
            r"as it is now, are of another model: layers.0.bias is missing",
        ),
        (
            lambda: nnx.LoRALinear(3, 1, lora_rank=1, rngs=nnx.Rngs(1)),
            r"trained variables are of another model: layers.0.lora.lora_a is missing",
        ),
    ],
)
def test_a_model_whose_layer_was_replaced_is_not_updated(devices, layer, message):
    model = nnx.Sequential(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    loss = jaxche.NNXLoss(model, lambda model, x: jnp.mean(model(x) ** 2), optimizer)
    trainer = jaxche.Trainer(loss, loss.tx, replicas=devices[:1])
    state = trainer.init(loss.params, loss.model_state, loss.opt_state)
    state, history = trainer.fit(state, [np.ones((2, 3), np.float32)] * 2, progress=False)
    model.layers[0] = replaced = layer()
    before = replaced.kernel[...]
    with pytest.raises(ValueError, match=message + r"; after a change of a model write a new loss = jaxche\.NNXLoss"):
        loss.update(trainer, state, history)
    assert replaced.kernel[...] is before
    assert int(optimizer.step[...]) == 0


class Average(nnx.Variable):
    pass


class Averaged(nnx.Module):
    """A model whose loss moves a second copy of its parameters, as self-supervised ones do."""

    def __init__(self, kind):
        self.online, self.target = nnx.Param(jnp.ones((5, 2))), kind(jnp.ones((5, 2)))

    def loss(self, batch):
        self.target[...] = 0.9 * self.target[...] + 0.1 * jax.lax.stop_gradient(self.online[...])
        return jnp.mean((batch["x"] @ self.online - batch["y"]) ** 2 + (batch["x"] @ (self.online - self.target)) ** 2)


def averaged(kind, problem, devices):
    model = Averaged(kind)
    loss = jaxche.NNXLoss(model, Averaged.loss, wrt=nnx.PathContains("online"))
    trainer = jaxche.Trainer(loss, optax.sgd(0.05), replicas=devices[:1])
    state, _ = trainer.fit(trainer.init(loss.params, loss.model_state), problem.data, progress=False)
    return loss.rebuild(trainer.params(state), trainer.model_state(state))


def test_a_loss_that_writes_to_a_parameter_gives_a_warning(problem, devices):
    with pytest.warns(UserWarning, match=r"writes to parameters, \['target'\], and the trainer drops"):
        model = averaged(nnx.Param, problem, devices)
    np.testing.assert_array_equal(model.target[...], jnp.ones((5, 2)))


def test_a_loss_that_writes_to_a_variable_of_its_own_type_trains_as_a_loop_does(problem, devices, close):
    alone = Averaged(Average)
    optimizer = nnx.Optimizer(alone, optax.sgd(0.05), wrt=nnx.Param)
    step = nnx.jit(lambda model, optimizer, batch: optimizer.update(model, nnx.grad(Averaged.loss)(model, batch)))
    for i in range(len(problem.data)):
        step(alone, optimizer, problem.data[i])
    model = averaged(Average, problem, devices)
    close(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(alone)))
    assert not (model.target[...] == 1).any()


class Measured(nnx.Module):
    """A model that holds its metrics, as the first tutorials of nnx had it."""

    def __init__(self):
        self.w, self.metrics = nnx.Param(jnp.zeros((5, 2))), nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    def loss(self, batch):
        loss = jnp.mean((batch["x"] @ self.w - batch["y"]) ** 2)
        self.metrics.update(loss=loss)
        return loss, {"mean": loss}


def test_metrics_in_a_model_are_those_of_one_replica_and_give_a_warning_with_several(problem, devices):
    loss = jaxche.NNXLoss(Measured(), Measured.loss)
    assert sorted(loss.metric_names) == ["metrics.loss.count", "metrics.loss.total"]
    trainer = jaxche.Trainer(loss, optax.sgd(0.05), replicas=devices[:1])
    data = [problem.data[i] for i in range(5)]
    state, history = trainer.fit(trainer.init(loss.params, loss.model_state), data, progress=False)
    found = loss.rebuild(trainer.params(state), trainer.model_state(state)).metrics.compute()["loss"]
    means = [info.metrics["mean"] * info.batches for info in history]
    np.testing.assert_allclose(found, sum(means) / len(data), rtol=1e-5)
    several = jaxche.Trainer(loss, optax.sgd(0.05), replicas=devices[:2])
    with pytest.warns(UserWarning, match=r"the model holds nnx metrics.*Return the numbers from loss_fn"):
        several.init(loss.params, loss.model_state)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: setattr(model, "extra", nnx.Linear(2, 2, rngs=nnx.Rngs(1))), "extra.bias is missing"),
        (lambda model: setattr(model, "out", nnx.Linear(8, 5, rngs=nnx.Rngs(1))), r"out.bias has the shape \(1,\)"),
    ],
)
def test_a_state_from_before_a_change_of_the_model_is_refused(change, named, data, devices):
    model = NNXNet(nnx.Rngs(0))
    before = jaxche.NNXLoss(model, lambda model, batch: jnp.mean(model(batch["x"])))
    trainer = jaxche.Trainer(before, optax.sgd(0.1), replicas=devices[:1])
    state = trainer.init(before.params, before.model_state)
    change(model)
    after = jaxche.NNXLoss(model, lambda model, batch: jnp.mean(model(batch["x"])))
    other = jaxche.Trainer(after, optax.sgd(0.1), replicas=devices[:1])
    with pytest.raises(ValueError, match=named):
        other.fit(state, data, progress=False)
    with pytest.raises(ValueError, match=named):
        after.rebuild(trainer.params(state), trainer.model_state(state))


@pytest.mark.parametrize("wrap", [nnx.remat, nnx.jit, lambda f: nnx.jit(nnx.remat(f))])
def test_a_transformation_that_returns_the_parameters_it_gets_gives_no_warning(wrap, problem):
    call = wrap(lambda model, x: model(x))
    loss = jaxche.NNXLoss(nnx_parts()[0], lambda model, batch: jnp.mean(call(model, batch["x"])))
    jax.make_jaxpr(loss)(loss.params, problem.data[0], jax.random.key(0), loss.model_state)


def test_an_nnx_optimizer_counts_the_steps_of_a_run_that_goes_on_with_more_replicas(problem, devices, tmp_path):
    batches = [problem.data[i] for i in range(len(problem.data))]

    def fit(replicas, epochs):
        _, optimizer = parts = nnx_parts()
        loss = jaxche.NNXLoss(parts[0], nnx_mse, optimizer)
        trainer = jaxche.Trainer(loss, loss.tx, replicas=devices[:replicas])
        state = trainer.init(loss.params, loss.model_state, loss.opt_state)
        state, history = trainer.fit(state, batches, epochs, progress=False, checkpoints=tmp_path)
        loss.update(trainer, state, history)
        return int(optimizer.step[...]), [info.counts for info in history]

    assert fit(1, 1) == (len(batches), [(len(batches),)])
    steps, counts = fit(2, 2)
    assert steps == len(batches) + sum(map(max, counts[1:]))


def test_an_nnx_optimizer_counts_updates_that_other_replicas_made(problem, devices):
    """As where ``"auto"`` leaves the first replica idle: its optimizer state is the merged one."""
    model, optimizer = nnx_parts()
    loss = jaxche.NNXLoss(model, nnx_mse, optimizer)
    trainer = jaxche.Trainer(loss, loss.tx, replicas=devices[:2])
    state = trainer.init(loss.params, loss.model_state, loss.opt_state)
    state, history = trainer.fit(state, problem.data, progress=False)
    history[:] = [dataclasses.replace(info, counts=(0, 5)) for info in history]
    loss.update(trainer, state, history)
    assert int(optimizer.step[...]) == 5 * len(history)


def test_another_run_of_an_updated_loss_starts_from_the_trained_model(data, devices, same):
    model = NNXNet(nnx.Rngs(0))
    loss = jaxche.NNXLoss(model, nnx_mse, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param))
    trainer = jaxche.Trainer(loss, loss.tx, replicas=devices[:1])
    state = trainer.init(loss.params, loss.model_state, loss.opt_state)
    state, history = trainer.fit(state, data, max_steps=3, progress=False)
    loss.update(trainer, state, history)
    again = trainer.init(loss.params, loss.model_state, loss.opt_state)
    same(trainer.params(again), trainer.params(state))
    same(statistics(trainer.model_state(again)), statistics(trainer.model_state(state)))
    same(trainer.opt_state(again), trainer.opt_state(state))


def test_an_nnx_optimizer_counts_each_round_of_a_folder_once(problem, devices, tmp_path):
    model, optimizer = nnx_parts()
    loss = jaxche.NNXLoss(model, nnx_mse, optimizer)
    trainer = jaxche.Trainer(loss, loss.tx, replicas=devices[:2], policy="sync", joined_batches=1)
    state, size = trainer.init(loss.params, loss.model_state, loss.opt_state), len(problem.data)
    for folder in (tmp_path, tmp_path, None):  # the history of a folder is of the whole run
        state, history = trainer.fit(state, problem.data, progress=False, checkpoints=folder)
        loss.update(trainer, state, history)
        assert int(optimizer.step[...]) == state.steps
    assert state.steps == 3 * size
    again = trainer.init(loss.params, loss.model_state, loss.opt_state)  # another run counts as well
    loss.update(trainer, *trainer.fit(again, problem.data, progress=False))
    assert int(optimizer.step[...]) == 4 * size


def test_an_optimizer_of_a_part_of_the_model_is_refused():
    model, _ = nnx_parts()
    with pytest.raises(ValueError, match=r"wrt=nnx\.Param"):
        jaxche.NNXLoss(model, nnx_mse, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.BatchStat))


def test_a_scaled_optimizer_state_is_not_forced_into_the_optimizer(problem, devices):
    model, optimizer = nnx_parts()
    loss = jaxche.NNXLoss(model, nnx_mse, optimizer)
    trainer = jaxche.Trainer(loss, loss.tx, replicas=devices[:2], scaling=jaxche.AdaScale())
    state = trainer.init(loss.params, loss.model_state, loss.opt_state)
    state, history = trainer.fit(state, problem.data, progress=False)
    with pytest.raises(ValueError, match="take the model alone"):
        loss.update(trainer, state, history)


def test_an_optimizer_that_is_reset_starts_anew_wherever_it_was(problem, devices):
    model, optimizer = nnx_parts()
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    loss = jaxche.NNXLoss(model, nnx_mse, optimizer)
    trainer = jaxche.Trainer(loss, loss.tx, replicas=devices[:2], opt_state="reset")
    state = trainer.init(loss.params, loss.model_state, loss.opt_state)
    assert all(x.any() for x in jax.tree.leaves(state.opt_state))
    state, _ = trainer.round(state, problem.data)
    assert not any(x.any() for x in jax.tree.leaves(state.opt_state))


LAYERS = 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.drop = nnx.Linear(5, 5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(jnp.tanh(self.norm(self.linear(x))))


class Stacked(nnx.Module):
    """Flax's own way to scan over layers: each variable has a leading axis of layers, random streams too."""

    def __init__(self, rngs, shared=False):
        create = nnx.vmap(Block, in_axes=(0,))
        self.layers = create(rngs.broadcast(LAYERS)) if shared else nnx.split_rngs(splits=LAYERS)(create)(rngs)
        self.out = nnx.Linear(5, 2, rngs=rngs)

    def masks(self, x):
        """What dropout leaves of an array of ones, layer by layer."""
        return nnx.scan(lambda x, block: (x, block.drop(x) != 0), in_axes=(nnx.Carry, 0))(x, self.layers)[1]

    def __call__(self, x):
        forward = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.out(forward(x, self.layers))


def test_a_mask_of_another_structure_gets_the_line_that_fits_nnx_and_the_trainer(data):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def loss_fn(model, batch):
        return jnp.mean(model(batch["x"]) ** 2)

    def mask(params):
        return jax.tree.map(lambda p: p.ndim > 1, params)

    fixed = optax.adamw(1e-2, mask=mask(nnx.state(model, nnx.Param)))
    line = r"structure than params \(dict\); write them as functions of params, e.g. optax.adamw\("
    with pytest.raises(ValueError, match=line):
        jaxche.NNXLoss(model, loss_fn, nnx.Optimizer(model, fixed, wrt=nnx.Param))
    loss = jaxche.NNXLoss(model, loss_fn)
    with pytest.raises(ValueError, match=line):
        jaxche.Trainer(loss, fixed).init(loss.params)
    loss = jaxche.NNXLoss(model, loss_fn, nnx.Optimizer(model, optax.adamw(1e-2, mask=mask), wrt=nnx.Param))
    jaxche.Trainer(loss, loss.tx).init(loss.params, loss.model_state, loss.opt_state)


def test_labels_of_an_nnx_state_get_the_line_that_fits_plain_dicts():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    both = {"kernel": optax.sgd(0.1), "bias": optax.adam(0.1)}
    of_states = optax.partition(both, lambda params: nnx.map_state(lambda path, _: path[0], params))
    optimizer = nnx.Optimizer(model, of_states, wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"as nnx\.map_state does.*plain dicts; write jax\.tree\.map_with_path"):
        jaxche.NNXLoss(model, nnx_mse, optimizer)
    line = optax.partition(both, lambda params: jax.tree.map_with_path(lambda path, _: path[0].key, params))
    loss = jaxche.NNXLoss(model, nnx_mse, nnx.Optimizer(model, line, wrt=nnx.Param))
    jaxche.Trainer(loss, loss.tx).init(loss.params, loss.model_state, loss.opt_state)


def test_labels_by_the_type_of_a_variable_get_the_line_that_reads_paths():
    model = nnx.LoRALinear(3, 1, lora_rank=1, rngs=nnx.Rngs(0))

    def labels(params):
        def label(p):
            return "adapter" if isinstance(p, nnx.LoRAParam) else "rest"

        return jax.tree.map(label, params, is_leaf=lambda p: isinstance(p, nnx.Variable))

    tx = optax.partition({"adapter": optax.adam(0.1), "rest": optax.set_to_zero()}, labels)
    with pytest.raises(ValueError, match=r"arrays, not nnx variables: choose by path, with jax\.tree\.map_with_path"):
        jaxche.NNXLoss(model, nnx_mse, nnx.Optimizer(model, tx, wrt=nnx.Param))


def masks_of(loss, index, seed=7):
    """The masks of the batch of this number, and the state after it, as a replica asks for them."""
    rng = jax.random.fold_in(jax.random.key(seed), index)
    _, (metrics, model_state) = jax.jit(loss)(loss.params, jnp.ones((16, 5)), rng, loss.model_state)
    return np.asarray(metrics["masks"]), model_state


@pytest.mark.slow
def test_layers_of_a_scan_drop_what_they_like_in_every_batch(same):
    loss = jaxche.NNXLoss(Stacked(nnx.Rngs(0)), lambda model, x: (jnp.float32(0), {"masks": model.masks(x)}))
    seen = {}
    for index in range(3):
        masks, after = masks_of(loss, index)
        assert masks.shape == (LAYERS, 16, 5)
        seen |= {(index, layer): mask.tobytes() for layer, mask in enumerate(masks)}
        same(*(jax.tree.map(_as_numbers, tree) for tree in (after, loss.model_state)))  # keys and counts as they came
        np.testing.assert_array_equal(masks_of(loss, index)[0], masks)
    assert len(set(seen.values())) == 3 * LAYERS
    assert masks_of(loss, 0, seed=8)[0].tobytes() != masks_of(loss, 0)[0].tobytes()


def _as_numbers(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_layers_that_share_a_key_go_on_sharing_it():
    model = Stacked(nnx.Rngs(0), shared=True)
    loss = jaxche.NNXLoss(model, lambda model, x: (jnp.float32(0), {"masks": model.masks(x)}))
    (first, *others), again = masks_of(loss, 0)[0], masks_of(loss, 1)[0]
    for mask in others:
        np.testing.assert_array_equal(mask, first)
    assert (again != first).any()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_scan_over_layers_trains_as_in_a_loop_of_nnx(problem, devices, close, replicas):
    """The loop gives each stream the keys of the batch; with two replicas the mean of two such gradients is taken."""
    model = Stacked(nnx.Rngs(0))
    data = [problem.data[i] for i in range(4)]
    streams = {path: np.asarray(jax.random.key_data(key[...])) for path, key in _keys(model)}
    assert sorted(x.shape for x in streams.values()) == [(LAYERS, 2)]
    loss = jaxche.NNXLoss(Stacked(nnx.Rngs(0)), nnx_mse)
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), policy="sync", rows="equal", replicas=devices[:replicas], seed=5)
    state, _ = trainer.fit(trainer.init(loss.params, loss.model_state), data, progress=False)

    params = jax.tree.map(jnp.copy, loss.params)
    graph, _, rest = nnx.split(model, nnx.Param, ...)
    gradient = nnx.jit(nnx.grad(nnx_mse))
    for start in range(0, len(data), replicas):
        grads = []
        for index in range(start, start + replicas):
            _, own, _ = nnx.split(model, nnx.Param, ...)
            nnx.replace_by_pure_dict(own, params)
            model = nnx.merge(graph, own, rest)
            rng = jax.random.fold_in(jax.random.key(5), index)
            for i, (path, key) in enumerate(_keys(model)):
                key[...] = jnp.stack([_folded(jax.random.fold_in(rng, i), words) for words in streams[path]])
            for _, count in _counts(model):
                count[...] = jnp.zeros_like(count[...])
            grads.append(nnx.to_pure_dict(gradient(model, data[index])))
        params = jax.tree.map(lambda p, *g: p - 0.1 * sum(g) / len(g), params, *grads)
    close(trainer.params(state), params, rtol=1e-4, atol=1e-5)


def _keys(model):
    return sorted(nnx.to_flat_state(nnx.state(model, nnx.RngKey)), key=str)


def _counts(model):
    return nnx.to_flat_state(nnx.state(model, nnx.RngCount))


def _folded(key, words):
    for word in words:
        key = jax.random.fold_in(key, word)
    return key


@pytest.mark.slow
@pytest.mark.parametrize("island", [False, True])
def test_stacked_streams_go_through_checkpoints_and_islands(problem, devices, same, island, tmp_path):
    strategy = jaxche.FullShard(min_size=1) if island else None
    replicas = [strategy.mesh(devices[:2]), strategy.mesh(devices[2:4])] if strategy else devices[:2]

    def train():
        loss = jaxche.NNXLoss(Stacked(nnx.Rngs(0)), nnx_mse)
        trainer = jaxche.Trainer(
            loss, optax.adam(0.01), policy="sync", rows="equal", replicas=replicas, strategy=strategy
        )
        state = trainer.init(loss.params, loss.model_state)
        state, _ = trainer.fit(state, problem.data, progress=False, checkpoints=tmp_path)
        return trainer.params(state)

    one = train()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(one))
    same(train(), one)  # found done


def test_a_model_that_is_split_and_merged_by_hand(data, devices, close):
    model = NNXNet(nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    data = [data[i] for i in range(4)]

    def loss_with(**options):
        def loss_fn(params, batch, model_state):
            merged = nnx.merge(graphdef, params, model_state, **options)
            return nnx_mse(merged, batch), ({}, nnx.state(merged, nnx.Not(nnx.Param)))

        return loss_fn

    tx = optax.sgd(0.1)
    wrong = jaxche.Trainer(loss_with(), tx, replicas=devices[:1])
    with pytest.raises(ValueError, match=r"nnx\.merge\(graphdef, params, model_state, copy=True\)"):
        wrong.fit(wrong.init(params, rest), data, progress=False)
    trainer = jaxche.Trainer(loss_with(copy=True), tx, replicas=devices[:1])
    state, _ = trainer.fit(trainer.init(params, rest), data, progress=False)
    nnx.update(model, trainer.params(state), trainer.model_state(state))
    optimizer = nnx.Optimizer(other := NNXNet(nnx.Rngs(0)), tx, wrt=nnx.Param)
    for batch in data:
        optimizer.update(other, nnx.grad(nnx_mse)(other, batch))
    close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), nnx.to_pure_dict(nnx.state(other, nnx.Param)))


def test_a_teacher_in_training_mode_is_refused_with_the_line_to_write(devices):
    teacher, student = NNXNet(nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1))

    def distil(model, batch):
        return jnp.mean((model(batch["x"]) - teacher(batch["x"])) ** 2)

    data = [{"x": np.ones((4, 3), np.float32)}] * 2
    loss = jaxche.NNXLoss(student, distil)
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:1])
    with pytest.raises(ValueError, match=r"such as a teacher, needs model\.eval\(\) before"):
        trainer.fit(trainer.init(loss.params, loss.model_state), data, progress=False)
    teacher.eval()
    trainer = jaxche.Trainer(jaxche.NNXLoss(student, distil), optax.sgd(0.1), replicas=devices[:1])
    trainer.fit(trainer.init(loss.params, loss.model_state), data, progress=False)
