"""Frozen arrays: a loss function holds them, and no round changes, merges or saves them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxche
from jaxche.replicas._placement import DevicePlacement
from jaxche.replicas._programs import FrozenArrays
from jaxche.sharding._hlo import collectives

WIDE = 48


def with_backbone(params, batch, backbone, scale):
    hidden = jnp.tanh(batch["x"] @ backbone)
    return scale * jnp.mean((hidden @ params["w"] + params["b"] - batch["y"]) ** 2)


@pytest.fixture
def backbone():
    return np.random.default_rng(1).normal(size=(5, WIDE)).astype(np.float32)


@pytest.fixture
def head():
    return {"w": np.zeros((WIDE, 2), np.float32), "b": np.zeros(2, np.float32)}


def test_arrays_of_a_partial_are_inputs_of_the_steps(problem, devices, head, backbone, close):
    """The same training as with a closure; in the closure they are constants of the program."""
    partial = jax.tree_util.Partial(with_backbone, backbone=backbone, scale=0.5)
    inputs, trained = [], []
    for loss in (partial, lambda params, batch: with_backbone(params, batch, backbone, 0.5)):
        trainer = jaxche.Trainer(loss, optax.adam(0.05), replicas=devices[:2])
        state = trainer.init(head)
        for counts in [(2, 3), (1, 1)]:
            state, _ = trainer.round(state, problem.data, counts=counts)
        trained.append(trainer.params(state))
        inputs.append(trainer.memory[0].get("frozen arrays", 0))
    close(*trained)
    assert inputs == [4 * 5 * WIDE, 0]
    assert np.abs(trained[0]["w"]).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "width"),
    [
        ({"average": "gradients"}, 1),
        ({"average": "gradients"}, 2),
        ({"policy": "sync"}, 2),
        ({"scaling": jaxche.AdaScale()}, 1),
        ({"scaling": jaxche.AdaScale()}, 2),
        ({}, 2),
    ],
    ids=str,
)
def test_they_are_on_every_replica_of_every_kind(problem, devices, head, backbone, close, setting, width):
    strategy = jaxche.FullShard(min_size=1)
    replicas = devices[:2] if width == 1 else [strategy.mesh(devices[:2]), strategy.mesh(devices[2:4])]
    knobs = setting | ({} if width == 1 else {"strategy": strategy}) | {"replicas": replicas}
    knobs |= {"rows": "equal"} if "policy" in setting else {}
    trained = []
    for loss in (
        jax.tree_util.Partial(with_backbone, backbone=jnp.asarray(backbone), scale=1.0),
        lambda params, batch: with_backbone(params, batch, backbone, 1.0),
    ):
        trainer = jaxche.Trainer(loss, optax.sgd(0.05), **knobs)
        state, _ = trainer.round(trainer.init(head), problem.data, counts=(1, 1))
        trained.append(trainer.params(state))
    close(*trained)


def test_all_programs_of_a_replica_share_them(devices, backbone):
    frozen = FrozenArrays(jax.tree_util.Partial(with_backbone, backbone=backbone, scale=1.0))
    one, other = (DevicePlacement(device) for device in devices[1:3])
    assert frozen.put(one) is frozen.put(one)
    for placement, device in ((one, devices[1]), (other, devices[2])):
        assert [x.devices() for x in frozen.put(placement)] == [{device}]


def test_other_leaves_stay_as_they_are():
    frozen = FrozenArrays(jax.tree_util.Partial(with_backbone, backbone=np.ones((1, 1)), scale=3.0))
    assert len(frozen.arrays) == 1
    batch = {"x": np.ones((2, 1)), "y": np.zeros((2, 1))}
    params = {"w": np.ones((1, 1)), "b": np.zeros(1)}
    own, (metrics, model_state) = frozen(params, "state", batch, None)
    assert (metrics, model_state) == ({}, "state")
    assert float(own) == pytest.approx(3 * np.tanh(1) ** 2, rel=1e-6)
    other, (_, model_state) = frozen.with_arrays(params, ([2 * np.ones((1, 1))], "state"), batch, None)
    assert model_state == "state"
    assert float(other) == pytest.approx(3 * np.tanh(2) ** 2, rel=1e-6)
    assert FrozenArrays(lambda params, batch: params).arrays == ()


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.LoRALinear(5, WIDE, lora_rank=2, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(WIDE, momentum=0.5, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(WIDE, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.norm(self.inner(x)))))


def mse(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def frozen_bits(model):
    return [
        np.asarray(x) for x in jax.tree.leaves(nnx.to_pure_dict(nnx.split(model, nnx.LoRAParam, nnx.Param, ...)[2]))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_adapters_alone_are_trained_and_merged(problem, devices, same, merge_arguments, average):
    model = Adapted(nnx.Rngs(0))
    start, optimizer = frozen_bits(model), nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.LoRAParam)
    loss = jaxche.NNXLoss(model, mse, optimizer)
    assert set(loss.params) == {"inner"}
    assert set(loss.params["inner"]) == {"lora"}
    adapters = 4 * (5 * 2 + 2 * WIDE)
    trainer = jaxche.Trainer(loss, loss.tx, average=average, replicas=devices[:2])
    state = trainer.init(loss.params, loss.model_state, loss.opt_state)
    for counts in [(1, 3), (3, 1), (2, 2)]:
        state, info = trainer.round(state, problem.data, counts=counts)
    assert trainer._engine.merged_bytes == adapters
    # Adam's moments and the batch statistics travel with the adapters, and the frozen weights do not.
    moments, statistics = (2 if average == "parameters" else 0), 4 * 3 * WIDE
    frozen = sum(x.nbytes for x in start)
    compiled = trainer._engine._merge._program.lower(*merge_arguments(trainer, state)).compile()
    reduced = sum(found.nbytes for found in collectives(compiled.as_text(), 2))
    table = reduced - (1 + moments) * adapters - statistics
    assert 0 < table < frozen / 4
    assert trainer.memory[0]["frozen arrays"] == frozen
    assert trainer.memory[0]["model state"] < frozen
    loss.update(trainer, state, jaxche.History([info]))
    same(frozen_bits(model), start)
    assert np.asarray(model.inner.lora.lora_b[...]).any()
    assert np.asarray(model.norm.mean[...]).any()


def test_a_filter_without_an_optimizer(problem, devices, close):
    """Against the loop of nnx on the joined batch."""
    model, own = (
        nnx.LoRALinear(5, 2, lora_rank=1, rngs=nnx.Rngs(0)),
        nnx.LoRALinear(5, 2, lora_rank=1, rngs=nnx.Rngs(0)),
    )
    for one in (model, own):
        one.lora.lora_b[...] = jnp.ones((1, 2))
    loss = jaxche.NNXLoss(model, mse, wrt=nnx.LoRAParam)
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), policy="sync", rows="equal", replicas=devices[:2])
    state, _ = trainer.round(trainer.init(loss.params, loss.model_state), problem.data)
    optimizer = nnx.Optimizer(own, optax.sgd(0.1), wrt=nnx.LoRAParam)
    grads = nnx.grad(mse, argnums=nnx.DiffState(0, nnx.LoRAParam))(own, problem.joined(0, [0, 1]))
    optimizer.update(own, grads)
    trained = loss.rebuild(trainer.params(state), trainer.model_state(state))
    close(*(nnx.to_pure_dict(nnx.state(one, nnx.Param)) for one in (trained, own)))


def test_a_filter_that_selects_what_no_optimizer_trains_is_refused():
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.1, rngs=nnx.Rngs(1)))
    wrt = nnx.Not(nnx.PathContains("kernel"))
    with pytest.raises(
        ValueError, match=r"selects .*\['rngs'\].*write wrt=nnx\.All\(nnx\.Param, Not\(PathContains\('ker"
    ):
        jaxche.NNXLoss(model, mse, wrt=wrt)
    loss = jaxche.NNXLoss(model, mse, wrt=nnx.All(nnx.Param, wrt))
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(loss.params)] == [
        "['layers'][0]['bias']"
    ]


class Tabled(nnx.Module):
    def __init__(self, rngs):
        self.out, self.table = nnx.Linear(3, 2, rngs=rngs), nnx.Param(jnp.arange(3))

    def __call__(self, x):
        return self.out(x[:, self.table[...]])


def test_parameters_that_are_no_floats_are_frozen_by_the_filter_of_the_error():
    model = Tabled(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"\['table'\], which is int32, .*; write wrt=nnx\.All") as info:
        jaxche.NNXLoss(model, mse)
    wrt = eval(str(info.value).partition("write wrt=")[2], {"nnx": nnx, "jnp": jnp})
    loss = jaxche.NNXLoss(model, mse, nnx.Optimizer(model, optax.adam(0.1), wrt=wrt))
    assert (set(loss.params), set(loss.frozen)) == ({"out"}, {"table"})


def test_filters_that_select_nothing_or_differ_are_refused():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"wrt=nnx\.LoRAParam selects no variable.*write wrt=nnx\.Param"):
        jaxche.NNXLoss(model, mse, wrt=nnx.LoRAParam)
    adapted = Adapted(nnx.Rngs(0))
    optimizer = nnx.Optimizer(adapted, optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"wrt=nnx\.LoRAParam, but the optimizer is of nnx\.Param; leave wrt= out"):
        jaxche.NNXLoss(adapted, mse, optimizer, wrt=nnx.LoRAParam)
    assert jaxche.NNXLoss(adapted, mse, optimizer, wrt=nnx.Param).frozen == {}
    with pytest.raises(ValueError, match=r"not one of the parameters of this model.*wrt=nnx\.Param"):
        jaxche.NNXLoss(model, mse, optimizer)


def test_a_checkpoint_has_the_adapters_alone(problem, devices, same, tmp_path):
    def train():
        loss = jaxche.NNXLoss(Adapted(nnx.Rngs(0)), mse, wrt=nnx.LoRAParam)
        trainer = jaxche.Trainer(loss, optax.adam(0.02), policy="sync", rows="equal", replicas=devices[:2])
        state = trainer.init(loss.params, loss.model_state)
        state, _ = trainer.fit(state, problem.data, progress=False, checkpoints=tmp_path)
        return trainer.params(state)

    first = train()
    names = "".join(path.read_text() for path in tmp_path.rglob("_METADATA"))
    assert "lora_a" in names
    assert "kernel" not in names
    same(train(), first)


def test_a_loss_without_arrays_is_called_itself():
    """Its pytree may leave out what the object has beside its leaves."""

    class Scaled:
        def __call__(self, params, batch):
            return self.scale * jnp.mean(params * batch)

    jax.tree_util.register_pytree_node(Scaled, lambda loss: ((), None), lambda _, leaves: Scaled())
    loss = Scaled()
    loss.scale = 2.0
    frozen = FrozenArrays(loss)
    assert float(frozen.with_arrays(1.0, (frozen.arrays, None), jnp.ones(3), None)[0]) == 2.0
