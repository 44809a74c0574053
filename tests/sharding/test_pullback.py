"""Reverse differentiation with parameters gathered twice and gradients turned late."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxche.sharding._pullback import Turned, gather_twice, pull_back


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"].T + params["b"])
    heads = jnp.einsum("nd,dhe->nhe", hidden, params["heads"].astype(jnp.float32))
    return jnp.mean(heads.reshape(x.shape[0], -1) ** 2), {"mean": heads.mean()}


@pytest.fixture
def given():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {"w": draw(6, 4), "b": draw(6), "heads": draw(6, 2, 3).astype(jnp.bfloat16)}, draw(5, 4)


def differentiate(gather, params, x):
    def forward(p):
        return jax.vjp(lambda p: loss(p, x), p, has_aux=True)

    value, pullback, aux = gather_twice(forward, gather, params)
    return value, aux, pull_back(pullback, jnp.ones_like(value)), pullback


def test_value_and_gradient_are_those_of_jax(given):
    params, x = given
    value, aux, grads = jax.jit(lambda p, x: differentiate(lambda p: p, p, x)[:3])(params, x)
    (expected, more), theirs = jax.value_and_grad(loss, has_aux=True)(params, x)
    upright = jax.tree.map(lambda g: g.upright(), grads, is_leaf=lambda g: isinstance(g, Turned))
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert float(aux["mean"]) == pytest.approx(float(more["mean"]), rel=1e-5)
    assert jax.tree.map(lambda g: (g.shape, g.dtype), upright) == jax.tree.map(lambda g: (g.shape, g.dtype), theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-2), upright, theirs)


def test_what_is_kept_for_the_backward_pass_comes_from_the_second_gather(given):
    params, x = given
    gathers = []

    def gather(params):
        gathers.append(jax.tree.map(lambda p: p * (len(gathers) + 1), params))
        return gathers[-1]

    *_, pullback = differentiate(gather, params, x)
    assert len(gathers) == 2
    kept = [r for r in jax.tree.leaves(pullback) if r.size in (24, 36)]
    second = [np.float32(p).ravel() for p in jax.tree.leaves(gathers[1]) if p.size in (24, 36)]
    assert kept
    for residual in kept:  # in whatever shape and dtype
        assert any(sorted(np.float32(residual).ravel()) == sorted(s) for s in second)


def test_a_last_transposition_is_left_undone():
    w, x = jnp.arange(6.0).reshape(2, 3), jnp.ones((4, 2))
    _, pullback = jax.vjp(lambda w: jnp.sum((x @ w) ** 2), w)
    turned = pull_back(pullback, jnp.ones(()))
    assert turned.permutation == (1, 0)
    assert turned.array.shape == (3, 2)
    assert turned.axis(0) == 1
    np.testing.assert_allclose(turned.upright(), jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w))


def test_arrays_that_need_no_turning_keep_their_axes():
    assert Turned(jnp.zeros((2, 3))).axis(1) == 1
    assert jax.tree.map(jnp.add, Turned(jnp.ones(2), (0,)), Turned(jnp.ones(2), (0,))).array.tolist() == [2, 2]
