"""The moving average over the last part of a run against the weighted mean that it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxche.averaging import ema_init, ema_step, ema_values, ema_weight

step = jax.jit(ema_step)


@given(
    gaps=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    age=st.floats(0.01, 0.5),
)
def test_it_is_the_mean_with_weights_that_grow_with_a_power_of_time(gaps, age):
    times = np.cumsum(gaps).tolist()
    values = np.sin(np.arange(len(times)) + 1.0)
    ema, before, taken = ema_init(np.float64(3.0)), 0, []
    for i, now in enumerate(times):
        weight = ema_weight(age, before, now)
        assert (weight is None) == (before > 0 and now < before * (1 + age / 50))
        if weight is not None:
            ema, before = step(ema, values[i], weight), now
            taken.append(i)
    powers = [(times[i] / before) ** (1 / age - 1) for i in taken]
    weights = np.diff([0.0, *powers])
    assert sum(weights) == pytest.approx(1)
    assert float(ema) == pytest.approx(weights @ values[taken], rel=1e-4, abs=1e-6)  # it is in float32


@pytest.mark.parametrize("age", [0.02, 0.05, 0.2, 0.5])
def test_the_mean_age_is_that_part_of_the_run(age):
    """The average of the time itself."""
    ema, before, end = ema_init(np.float64(0.0)), 0, 20_000
    for now in range(1, end + 1):
        if (weight := ema_weight(age, before, now)) is not None:
            ema, before = step(ema, np.float64(now), weight), now
    assert (end - ema) / end == pytest.approx(age, rel=0.05)


def test_low_precision_is_averaged_in_float32_and_what_is_no_float_is_the_newest():
    tree = {
        "low": jnp.ones(2, jnp.bfloat16),
        "complex": jnp.ones(2, jnp.complex64),
        "count": jnp.int32(3),
        "key": jax.random.key(0),
        "none": None,
    }
    ema = ema_init(tree)
    assert [x.dtype for x in jax.tree.leaves(ema)] == [jnp.complex64, jnp.float32]
    newest = tree | {"low": tree["low"] * 2, "complex": tree["complex"] * 1j, "count": jnp.int32(4)}
    for _ in range(3):
        ema = step(ema, newest, 2**-9)  # of which bfloat16 would lose each step
    found = ema_values(ema, newest)
    assert float(ema["low"][0]) == pytest.approx(1 + 3 * 2**-9, rel=1e-4)
    np.testing.assert_allclose(ema["complex"], (1 - 2**-9) ** 3 * (1 - 1j) + 1j, rtol=1e-5)
    assert (found["low"].dtype, int(found["count"]), found["none"]) == (jnp.bfloat16, 4, None)


def test_a_number_that_stays_infinite_does_and_one_that_stays_does_exactly():
    x = jnp.array([-np.inf, np.inf, 0.1, 1 / 3])
    ema = ema_init(x)
    for weight in (0.3, 0.7, 1e-3):
        ema = ema_step(ema, x, weight)
    np.testing.assert_array_equal(ema, x)
