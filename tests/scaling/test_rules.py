"""The rules as functions: bounds, order, jit, and what they refuse."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxche.averaging import merge_weights
from jaxche.scaling import (
    AdamScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    SqrtScale,
    effective_replicas,
    noise_scale,
)

pytestmark = pytest.mark.usefixtures("strict_promotion")
RULES = [LinearScale(), SqrtScale(), AdaScale(), AdamScale(), LEGWScale(5, 1000, 10)]
EACH = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def noise_of(var, sqr):
    return SimpleNamespace(var=jnp.float32(var), sqr=jnp.float32(sqr))


@EACH
def test_one_contract(rule):
    """Keyword or positional, numbers or arrays, inside jit or not; equal by value, hashable."""
    noise = noise_of(2.0, 1.0)
    plain = rule.lr_factor(4, noise, 100.0)
    assert plain.dtype == jnp.float32
    assert plain == rule.lr_factor(scale=4, noise=noise, progress=100.0)
    jitted = jax.jit(lambda s, v, p: rule.lr_factor(s, noise_of(v, 1.0), p))(jnp.int32(4), 2.0, jnp.float32(100))
    np.testing.assert_allclose(jitted, plain, rtol=1e-6)
    assert rule == type(rule)(**vars(rule))
    assert hash(rule) == hash(type(rule)(**vars(rule)))


@EACH
@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "eight", jnp.float32(0)])
def test_a_scale_that_is_none_is_refused(rule, scale):
    with pytest.raises(ValueError, match=r"scale=.*write e\.g\. scale=8"):
        rule.lr_factor(scale, noise_of(1, 1), 0.0)


@pytest.mark.parametrize("rule", [AdaScale(), AdamScale()])
def test_noise_is_asked_for(rule):
    with pytest.raises(ValueError, match=r"needs the noise scale; write noise="):
        rule.lr_factor(2)
    with pytest.raises(ValueError, match=r"needs the noise scale, and noise=5 is none; write noise="):
        rule.lr_factor(2, 5)


def test_progress_is_asked_for():
    with pytest.raises(ValueError, match="needs the progress"):
        LEGWScale(1, 100, 10).lr_factor(2)


@pytest.mark.parametrize("name", ["base_warmup_epochs", "data_size", "batch_size"])
@pytest.mark.parametrize("bad", [0, -1, float("nan"), None])
def test_legw_refuses(name, bad):
    arguments = {"base_warmup_epochs": 5, "data_size": 1000, "batch_size": 10} | {name: bad}
    with pytest.raises(ValueError, match=rf"{name}=.*write e\.g\. jaxche\.LEGWScale"):
        LEGWScale(**arguments)


@settings(max_examples=60)
@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 1e4), st.floats(1, 4))
def test_adascale_lies_between_one_and_linear_and_grows(var, sqr, scale, more):
    noise = noise_of(var, sqr)
    factor, larger = (float(AdaScale().lr_factor(s, noise)) for s in (scale, scale * more))
    assert 1 - 1e-5 <= factor <= scale * (1 + 1e-5)
    assert larger >= factor * (1 - 1e-5)
    assert float(AdamScale().lr_factor(scale, noise)) == pytest.approx(factor**0.5, rel=1e-5)


def test_legw_reaches_its_full_factor_and_stays():
    rule = LEGWScale(2, 100, 10)
    factors = rule.lr_factor(4, progress=jnp.array([0.0, 40.0, 80.0, 81.0, 1e9]))
    np.testing.assert_allclose(factors, [0, 1, 2, 2, 2])


def test_the_real_noise_scale_is_read():
    noise = noise_scale.init(jnp.zeros(2))
    np.testing.assert_allclose(AdaScale().lr_factor(jnp.array([1.0, 8.0]), noise), 1.0, rtol=1e-4)


@pytest.mark.parametrize("rule", [AdaScale(), AdamScale()])
def test_noise_of_any_make_is_clipped(rule):
    """An estimate below zero is no signal, and neither signal nor noise is all noise, as before the first estimate."""
    full = rule.lr_factor(4, noise_of(1.0, 0.0))
    for var, sqr in ((1.0, -0.1), (0.0, 0.0), (-1.0, 0.0)):
        np.testing.assert_allclose(rule.lr_factor(4, noise_of(var, sqr)), full, rtol=1e-6)
    assert float(rule.lr_factor(4, noise_of(-1.0, 1.0))) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("rule", "wanted"), [("batch", 2.0), ("steps", 1.43), ("fednova", 1.6)])
def test_effective_replicas(rule, wanted):
    w, alpha = merge_weights(rule, [1, 3])
    assert effective_replicas(w, [1, 3], alpha) == pytest.approx(wanted, abs=0.005)


def test_effective_replicas_refuses():
    with pytest.raises(ValueError, match="2 entries for 1 counts"):
        effective_replicas([0.5, 0.5], [1])
    with pytest.raises(ValueError, match="make no progress"):
        effective_replicas([0.5, 0.5], [0, 0])
    with pytest.raises(ValueError, match="alpha="):
        effective_replicas([1.0], [1], alpha=0)
    with pytest.raises(ValueError, match=r"weights=1\.0 must be a list of numbers, one per replica"):
        effective_replicas(1.0, [1])
    with pytest.raises(ValueError, match=r"counts=\['a'\] must be a list of numbers, one per replica"):
        effective_replicas([1.0], ["a"])
    for weights, counts, named in (
        ([math.inf, 1.0], [1, 1], "weights="),
        ([-1.0, 2.0], [1, 1], "weights="),
        ([0.5, 0.5], [math.inf, 1], "counts="),
        ([0.5, 0.5], [-1, 4], "counts="),
    ):
        with pytest.raises(ValueError, match=f"{named}.*finite and not negative"):
            effective_replicas(weights, counts)
