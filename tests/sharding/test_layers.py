"""Parameters that a scan reads layer by layer are gathered there, with the result of one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxche
from jaxche.sharding import (
    FullShard,
    HybridShard,
    HybridShardGradOp,
    Layout,
    ShardGradOp,
    as_loss,
    sharded_step,
    value_and_grad,
)
from jaxche.sharding._layers import read_by_layer
from jaxche.sharding._loss import mean_of

LAYERS, WIDTH = 4, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, WIDTH)).astype(np.float32)


def stacked(*shape, dtype=np.float32):
    return (RNG.normal(size=(LAYERS, *shape)) / 4).astype(dtype)


PARAMS = {"a": stacked(WIDTH, 16), "b": stacked(16, WIDTH)}


def block(x, w):
    return x + jnp.tanh(x @ w["a"]) @ w["b"]


def scanned(params, x, layer=block, **how):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, params, **how)[0]


def square(params, x):
    return jnp.mean(scanned(params, x) ** 2)


def with_results(params, x):
    """The body reads a constant, the scan runs backwards, and what it returns of each layer is a part of the loss."""
    offset = jnp.arange(8.0)

    def body(x, w):
        x = block(x, w) + offset
        return x, (x.mean(), w["a"].sum())

    x, (means, sums) = jax.lax.scan(body, x, params, reverse=True, unroll=2)
    return jnp.mean(x**2) + means.sum() + sums.sum()


def nested(params, x):
    def outer(x, w):
        return jax.lax.scan(lambda x, v: (jnp.tanh(x @ v), None), x, w)[0], None

    return jnp.mean(jax.lax.scan(outer, x, params)[0] ** 2)


def weighted(params, x):
    total = jnp.sum(scanned(params, x) ** 2 * x[:, :1] ** 2)
    return jaxche.Weighted(total, jnp.sum(x[:, 0] ** 2))


def cast(params, x):
    rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), params)
    return jnp.mean(scanned(rounded, x) ** 2)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))), None


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return layers(name="layers")(x, None)[0]


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))(rngs.split(LAYERS))

    def __call__(self, x):
        return nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


NETWORK = Network()
GRAPH, STACK = nnx.split(Stack(nnx.Rngs(0)))


def of_linen(params, x):
    return jnp.mean(NETWORK.apply({"params": params}, x) ** 2)


def of_nnx(params, x):
    state = jax.tree.map(lambda x: x, STACK)
    nnx.replace_by_pure_dict(state, params)
    return jnp.mean(nnx.merge(GRAPH, state)(x) ** 2)


CASES = {
    "scan": (square, PARAMS),
    "remat": (lambda p, x: jnp.mean(scanned(p, x, jax.checkpoint(block)) ** 2), PARAMS),
    "remat of all": (jax.checkpoint(square), PARAMS),
    "jit": (jax.jit(square), PARAMS),
    "results, backwards": (with_results, PARAMS),
    "cast before": (cast, PARAMS),
    "weighted": (weighted, PARAMS),
    "two scans": (lambda p, x: jnp.mean(scanned(p, scanned(p, x)) ** 2), PARAMS),
    "nested": (nested, stacked(2, WIDTH, WIDTH)),
    "complex": (lambda w, x: jnp.mean(jnp.abs(scanned(w, x + 0j, jnp.matmul))), stacked(WIDTH, WIDTH, dtype="F")),
    "linen": (of_linen, NETWORK.init(jax.random.key(0), X)["params"]),
    "nnx": (of_nnx, nnx.to_pure_dict(STACK)),
}


@pytest.fixture
def small(monkeypatch):
    """Small arrays are gathered by layer, too."""
    monkeypatch.setattr("jaxche.sharding._gather._SMALL_BYTES", 0)


def kinds_in_loops(step, params):
    """The kinds of collectives that the compiled step has for each layer."""
    return {one.kind for one in step.explain(params, X).collectives if one.times > 1} - {"all-reduce"}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("strategy", [FullShard(), HybridShard(2), ShardGradOp(), HybridShardGradOp(2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_layers_train_as_on_one_device(case, strategy, devices, close):
    loss, params = CASES[case]
    step = sharded_step(loss, optax.sgd(0.1), strategy, strategy.mesh(devices[:4]))
    state, metrics = step(step.init(params), X)
    value, grads = jax.value_and_grad(lambda p: mean_of(loss(p, X)))(params)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g.conj(), params, grads)
    # The gradient of a cast is rounded, here for each device.
    close(state.params, expected, rtol=1e-5, atol=2e-3 if case == "cast before" else 1e-6)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    gathers = {"all-gather"} if strategy.shards_params else set()
    assert kinds_in_loops(step, params) == gathers | {"reduce-scatter"}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("strategy", [FullShard(), ShardGradOp()], ids=str)
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"compute_dtype": jnp.bfloat16}], ids=str)
def test_layers_of_micro_batches_and_of_low_precision(options, strategy, devices, close):
    step = sharded_step(square, optax.sgd(0.1), strategy, strategy.mesh(devices[:4]), **options)
    state, _ = step(step.init(PARAMS), X)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, jax.grad(square)(PARAMS, X))
    close(state.params, expected, **({"rtol": 1e-5} if "accumulate" in options else {"atol": 2e-3}))
    assert state.params["a"].dtype == jnp.float32
    assert "reduce-scatter" in kinds_in_loops(step, PARAMS)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("strategy", [FullShard(), ShardGradOp()], ids=str)
def test_gradients_of_layers_are_summed_in_float32(strategy, devices):
    layout = Layout(strategy, strategy.mesh(devices[:4]), PARAMS)
    function = value_and_grad(as_loss(square), layout, compute_dtype=jnp.bfloat16)
    sums = re.findall(
        r":(\w+)\[[\d,]*\] = reduce_scatter", str(jax.make_jaxpr(function)(PARAMS, None, X, jax.random.key(0)))
    )
    assert sums == ["f32", "f32"]


def noisy(params, x):
    def layer(x, w):
        jax.debug.callback(lambda: None)
        return block(x, w)

    return jnp.mean(scanned(params, x, layer) ** 2)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("loss", "params"),
    [
        (lambda p, x: square(p, x) + 1e-3 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p)), PARAMS),
        (noisy, PARAMS),  # jax.checkpoint refuses effects
        (lambda w, x: jnp.mean(scanned(w, x, jnp.multiply) ** 2), np.ones((16, WIDTH), np.float32)),  # cut into layers
        (lambda w, x: jnp.mean(jax.lax.scan(lambda x, _: (jnp.tanh(x @ w[0]), None), x, length=3)[0] ** 2), PARAMS["a"]
         @ PARAMS["b"]),
    ],
    ids=["also read elsewhere", "effects", "cut along the layers", "a constant of the scan"],
)  # fmt: skip
def test_what_no_scan_reads_by_layer_is_gathered_before(loss, params, devices, close):
    step = sharded_step(loss, optax.sgd(0.1), FullShard(), FullShard().mesh(devices[:4]))
    state, _ = step(step.init(params), X)
    close(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, X)), rtol=1e-5)
    assert not kinds_in_loops(step, params)


def test_what_a_function_returns_is_not_read_by_layer():
    jaxpr = jax.make_jaxpr(lambda p, x: (scanned(p, x), p["a"]))(PARAMS, X).jaxpr
    assert read_by_layer(jaxpr, [0, 1]) == {1}


@pytest.mark.usefixtures("small")
def test_a_sharded_replica_trains_layers_as_one_device(devices, close):
    def trained(**options):
        trainer = jaxche.Trainer(square, optax.adam(0.01), policy="sync", **options)
        state, _ = trainer.fit(trainer.init(PARAMS), [X] * 6, progress=False)
        return trainer.params(state)

    island = trained(replicas=[FullShard().mesh(devices[:4])], strategy=FullShard())
    close(island, trained(replicas=devices[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [block, jax.checkpoint(block)], ids=["plain", "remat"])
def test_a_device_never_holds_all_layers(layer, devices):
    layers, width = 16, 320

    def loss(params, x):
        return jnp.mean(scanned(params, x, layer) ** 2)

    params = {name: np.zeros((layers, width, width), np.float32) for name in "ab"}
    step = sharded_step(loss, optax.adam(0.1), FullShard(), FullShard().mesh(devices))
    found = step.explain(params, np.ones((8, width), np.float32))
    whole = sum(x.nbytes for x in params.values())
    # Slices of parameters, gradients and two moments are half of it, and a layer a sixteenth.
    assert found.peak < 0.75 * whole
    # Whole parameters, before and after the update.
    grad_op = sharded_step(loss, optax.adam(0.1), ShardGradOp(), ShardGradOp().mesh(devices))
    assert grad_op.explain(params, np.ones((8, width), np.float32)).peak < 2.75 * whole
    assert found.sent == pytest.approx(found.theory, rel=0.01)
