"""A plan of a user's model, from a function that makes it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxche.sharding import FullShard, NoShard, compare_strategies, plan

TWO = {"strategies": [NoShard(), FullShard()]}
X = np.zeros((8, 64), np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(128)(x))
        return nn.Dense(4)(nn.Dropout(0.1, deterministic=not train)(x))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(64, 128, rngs=rngs), nnx.BatchNorm(128, rngs=rngs)
        self.drop, self.last = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(128, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(self.norm(self.first(x))))


PARAMETERS = 64 * 128 + 128 + 2 * 128 + 128 * 4 + 4  # of both


def linen_parameters():
    return Net().init(jax.random.key(0), X, train=False)["params"]


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


FORMS = {
    "parameters": linen_parameters,
    "an nnx model": lambda: NNXNet(nnx.Rngs(0)),
    "linen and inputs": lambda: (Net(), X),
    "linen and static inputs": lambda: (Net(), X, True),
    "nnx and inputs": lambda: (NNXNet(nnx.Rngs(0)), jnp.zeros((8, 64))),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_model(form, devices):
    costs = plan(FORMS[form], devices=devices[:4], strategies=[FullShard()])
    [full] = costs.explanations
    assert full.whole["params"] == 4 * PARAMETERS
    assert full.per_device["params"] < 4 * PARAMETERS / 2
    assert full.whole["opt_state"] == 8 * PARAMETERS + 4  # Adam
    assert full.sent == pytest.approx(full.theory, rel=0.2)
    assert costs.batch_size == (8 if "inputs" in form else 4)
    assert ("without activations" in costs.note) == ("inputs" not in form)
    assert costs.note in str(costs)


def test_a_whole_step_is_the_one_compared(devices):
    params, batch = {"w": jnp.zeros((64, 32))}, {"x": X}
    costs = plan(lambda: (loss_fn, optax.sgd(0.1), params, batch), devices=devices[:2], **TWO)
    twin = compare_strategies(loss_fn, optax.sgd(0.1), params, batch, devices=devices[:2], **TWO)
    assert costs.rows == twin.rows
    assert costs.explanations[0].whole["opt_state"] == 0

    def with_state(params, batch, model_state):
        return loss_fn(params, batch), ({}, model_state)

    state = {"m": jnp.zeros(100)}
    stateful = plan(lambda: (with_state, optax.sgd(0.1), params, batch, state), devices=devices[:2], **TWO)
    assert stateful.explanations[0].whole["inputs"] == costs.explanations[0].whole["inputs"] + 400


def test_activations_grow_with_the_batch(devices):
    make, whole = FORMS["linen and inputs"], [NoShard()]
    small, large = (plan(make, devices=devices[:2], batch_size=n, strategies=whole) for n in (8, 4096))
    assert large.batch_size == 4096
    # 64 inputs and 128 outputs of the first layer for each of the 2048 rows of a device.
    assert large.explanations[0].peak - small.explanations[0].peak > 4 * 2040 * (64 + 128)


@pytest.mark.parametrize(("accumulate", "rows"), [(1, 8), (3, 12)])
def test_rows_of_the_example_are_rounded_up(accumulate, rows, devices):
    costs = plan(lambda: (nn.Dense(4), X[:5]), devices=devices[:4], accumulate=accumulate, strategies=[NoShard()])
    assert costs.batch_size == rows


def test_nothing_is_computed(devices):
    """A model of a terabyte; XLA of jax 0.12 ends the process at arrays of 2**33 numbers on a CPU device."""

    def large():
        return {f"w{i}": jnp.zeros((1 << 17, 1 << 17)) for i in range(16)}

    costs = plan(large, devices=devices, strategies=[FullShard()], memory="1TiB")
    assert costs.explanations[0].whole["params"] == 1 << 40


def test_complex_parameters_and_outputs(devices):
    kernel = nn.Dense(4, param_dtype=np.complex64)
    for make in (lambda: {"w": jnp.ones((8, 4), np.complex64)}, lambda: (kernel, X)):
        assert plan(make, devices=devices[:2], **TWO).explanations[0].whole["params"] >= 8 * 8 * 4


def test_rows_of_an_example_are_those_of_all_its_arrays(devices):
    """Also where ``batch_size`` replaces them: a step would refuse such a batch."""
    params = {"w": jnp.zeros((64, 32))}
    for y, message in ((np.float32(3), r"\['y'\] is a scalar"), (np.zeros(3), "axes of a batch differ")):
        with pytest.raises(ValueError, match=message):
            plan(lambda y=y: (loss_fn, optax.sgd(0.1), params, {"x": X, "y": y}), devices=devices[:2], batch_size=8)


def test_a_model_with_boxed_parameters(devices):
    boxed = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, ("in", "out")))
    plain, own = (plan(lambda model=model: (model, X), devices=devices[:2], **TWO) for model in (nn.Dense(4), boxed))
    assert own.rows == plain.rows


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (3, "make=int is not a function"),
        (lambda: None, "the function returned None, and a plan needs a model; write a function that returns param"),
        (lambda: "resnet", "the function returned 'resnet'"),
        (dict, "the function returned {}, and a plan needs"),
        (lambda: nn.Dense(3), "a linen model has no parameters without inputs; write: return model, x"),
        (lambda: (loss_fn, {"w": X}), "a step of 2 parts; write: return loss_fn, tx, params, batch"),
        (lambda: (loss_fn, 0.1, {"w": X}, {"x": X}), "tx=0.1 is not an optax transformation"),
        (lambda: {"w": np.zeros(3, np.int32)}, "not float"),
        (
            lambda: {"params": {"w": X}, "batch_stats": {"mean": X}},
            r"whole dict of variables, 'params', 'batch_stats'.* write: return variables\[\"params\"\], or with inputs",
        ),
    ],
)
def test_other_values_are_refused(make, message, devices):
    with pytest.raises(ValueError, match=message):
        plan(make, devices=devices[:2], **TWO)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": []}, r"devices=\[\] has no devices; leave it out"),
        ({"accumulate": 0}, "accumulate=0 must be at least 1; write e.g. accumulate=1"),
        ({"batch_size": -4}, "batch_size=-4 must be at least 1; write e.g. batch_size=64, the rows on all devices"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": "8"}, "batch_size='8' must be a whole number"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(FORMS["linen and inputs"], **(TWO | arguments))


def test_arguments_are_refused_by_name(devices):
    def make(width, *more, depth=3, heads, **rest):
        pass

    with pytest.raises(ValueError, match=r"^make needs width, heads, and .* def make\(\): return make\(\.\.\.\)"):
        plan(make)
    plan(lambda width=4, *more, **rest: {"w": jnp.zeros((width, 8))}, devices=devices[:1], strategies=[NoShard()])


def test_an_error_of_the_function_is_its_own(devices):
    def make():
        raise KeyError("no such checkpoint")

    with pytest.raises(KeyError, match="no such checkpoint"):
        plan(make, devices=devices[:2])
