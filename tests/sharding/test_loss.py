"""Every accepted shape of a loss function comes out in one form."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.errors import InvalidRngError

from jaxche import Weighted
from jaxche.sharding import as_loss, batch_size
from jaxche.sharding._loss import wanted_names


@pytest.mark.parametrize(
    ("loss_fn", "wanted"),
    [
        (lambda p, b: p * b, (6.0, ({}, 7))),
        (lambda p, b: (p * b, {"m": 1}), (6.0, ({"m": 1.0}, 7))),
        (lambda p, b, rng: p * b + rng, (16.0, ({}, 7))),
        (lambda p, b, model_state: (p * b, ({}, model_state + 1)), (6.0, ({}, 8))),
        (lambda p, b, *, rng, model_state: (p * rng, ({"m": 2.0}, 5)), (20.0, ({"m": 2.0}, 5))),
        (lambda *args: args[0] * args[1], (6.0, ({}, 7))),
    ],
)
def test_accepted_forms(loss_fn, wanted):
    loss, (metrics, state) = as_loss(loss_fn)(2.0, 7, 3.0, 10.0)
    assert (float(loss), ({k: float(v) for k, v in metrics.items()}, state)) == wanted
    assert loss.dtype == jnp.float32


def test_a_callable_object_is_a_loss():
    class Mean:
        def __call__(self, params, batch, rng):
            return params + rng

    assert float(as_loss(Mean())(1.0, None, None, 2.0)[0]) == 3.0


@pytest.mark.parametrize(
    "result",
    ["loss", [1.0], jnp.ones(3), jnp.ones((1,)), jnp.array(3), (jnp.float32(1), {"m": jnp.ones(2)}), (1.0, [])],
)
def test_refused_results(result):
    with pytest.raises(ValueError, match=r"return|write"):
        as_loss(lambda p, b: result)(1.0, None, None, None)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({1: 2.0}, "metric 1 has a name that is no text; write {'1': ...}"),
        ({1: 2.0, "a": 2.0}, "metric 1 has a name that is no text"),
        ({"a": Weighted(jnp.ones(3), 1.0)}, r"metric 'a' has shape \(3,\); metrics are scalars: write a\.mean\(\)"),
        ({"a": Weighted(Weighted(1.0, 1.0), 1.0)}, "metric 'a' is Weighted.*, not a number"),
        ({"z": jnp.complex64(1j)}, r"metric 'z' is complex; metrics are real: write jnp\.abs\(z\)"),
    ],
)
def test_refused_metrics(metrics, message):
    with pytest.raises(ValueError, match=message):
        as_loss(lambda params, batch: (params, metrics))(2.0, None, 3.0, None)


def test_gradients_are_refused_with_what_to_leave_out():
    params = {"w": jnp.ones((2, 3)), "b": jnp.float32(1.0)}

    def loss(params, batch):
        return (params["w"] ** 2).mean() + params["b"]

    for wrong in (jax.grad(loss), jax.value_and_grad(loss)):
        with pytest.raises(ValueError, match=r"leave jax\.grad or jax\.value_and_grad out"):
            as_loss(wrong)(params, None, None, None)
    # Metrics with the names of parameters are none, and with outputs= arrays of any shape are allowed.
    assert as_loss(lambda w, batch: (w["b"], w))({"b": jnp.float32(1.0)}, None, None, None)[1][0] == {"b": 1.0}
    as_loss(jax.value_and_grad(loss), outputs=True)(params, None, None, None)
    with pytest.raises(ValueError, match=r"loss\.mean\(\)"):
        as_loss(lambda w, batch: w**2)(jnp.ones(3), None, None, None)


def test_arguments_without_a_value_are_refused():
    with pytest.raises(ValueError, match=r"'smoothing' has no value.* functools\.partial\(loss_fn, smoothing=\.\.\.\)"):
        as_loss(lambda params, batch, smoothing: params)
    for loss_fn in (lambda params, batch, step: params, lambda params, batch, epoch: params):
        with pytest.raises(
            ValueError, match=r"'(step|epoch)' has no value.* come with the batch.* of docs/recipes\.md"
        ):
            as_loss(loss_fn)


def test_a_function_of_c_without_a_signature_gets_parameters_and_batch():
    assert wanted_names(max, "params, batch", ("rng",)) == []


def test_a_loss_of_the_arrays_of_a_batch_is_refused_with_the_line_to_write():
    line = r"""lambda params, batch: loss_fn\(params, batch\["images"\], batch\["labels"\], batch\["mask"\]\)"""
    with pytest.raises(ValueError, match=rf"'labels' has no value.*give the arrays of the batch: {line}$"):
        as_loss(lambda params, images, labels, mask, rng, scale=1.0: params)


def test_batch_size_is_the_common_leading_axis():
    assert batch_size({"x": np.ones((4, 2)), "y": np.ones(4)}) == 4
    with pytest.raises(ValueError, match=r"\['x'\]: 4, \['y'\]: 5"):
        batch_size({"x": np.ones((4, 2)), "y": np.ones(5)})
    with pytest.raises(ValueError, match="no examples"):
        batch_size(np.ones((0, 2)))


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (
            lambda params, model_state, batch: 0.0,
            "lambda params, batch, model_state: loss_fn(params, model_state, batch)",
        ),
        (lambda w, k, data: 0.0, "lambda params, batch, rng: loss_fn(params, rng, batch)"),
        (lambda w, rng, batch, smooth=0.1: 0.0, "lambda params, batch, rng: loss_fn(params, rng, batch)"),
        (lambda w, batch_stats, batch: 0.0, "lambda params, batch, model_state: loss_fn(params, model_state, batch)"),
        (
            lambda params, model_state, key, batch: 0.0,
            "lambda params, batch, model_state, key: loss_fn(params, model_state, key, batch)",
        ),
    ],
)
def test_a_batch_that_is_not_the_second_argument_is_refused_with_the_order(loss, line):
    with pytest.raises(ValueError, match=re.escape(f"the batch is the second argument; write {line}")):
        as_loss(loss)


def test_an_error_of_a_loss_that_lacks_its_state_says_how_to_give_it():
    def loss(params, batch, model_state):
        return params + model_state["n"], ({}, model_state)

    with pytest.raises(TypeError) as caught:
        as_loss(loss)(1.0, None, 2.0, None)
    assert "trainer.init(params, model_state=...)" in caught.value.__notes__[0]
    with pytest.raises(KeyError) as caught:
        as_loss(loss)(1.0, {}, 2.0, None)
    assert not hasattr(caught.value, "__notes__")


def test_a_loss_without_the_random_key_of_its_dropout_is_told_how_to_get_one():
    dropout, line = nn.Dropout(0.5, deterministic=False), "for a random key write def loss_fn(params, batch, rng), and "
    for loss, told in ((lambda p, b: dropout.apply({}, b).sum(), 1), (lambda p, b, rng: dropout.apply({}, b).sum(), 0)):
        with pytest.raises(InvalidRngError) as caught:
            as_loss(loss)(0.0, None, np.ones(3), jax.random.key(0))
        # JAX adds a note of its own.
        assert [note.startswith(line) for note in getattr(caught.value, "__notes__", [])].count(True) == told
