"""Measurements of links and clocks on one process."""

import jax
import numpy as np

from jaxche.cluster import clocks, measure_all_reduce
from jaxche.cluster._links import compare_clocks


def test_an_all_reduce_takes_time():
    found = measure_all_reduce([4096], jax.devices()[:2])
    assert found.keys() == {4096}
    assert found[4096] > 0


def test_the_clock_of_process_0_is_the_reference(service):
    state = service(0, 1, "clocks", {})
    [clock] = clocks(timeout_s=7.5)
    assert clock.ahead_ms == 0
    assert clock.error_ms >= 0
    assert set(state.waits) == {7500}


def test_a_clock_is_ahead_within_its_error():
    rng = np.random.default_rng(0)
    ahead = np.array([0.0, 3.0, -250.0])
    for barriers in (1, 8):
        entered = rng.uniform(0, 1, (3, barriers)) + 10 * np.arange(barriers)
        left = entered.max(0) + rng.uniform(0, 1e-3, (3, barriers))
        found = compare_clocks((np.stack([entered, left], -1) + ahead[:, None, None]).tolist())
        for clock, true in zip(found, 1e3 * ahead, strict=True):
            assert abs(clock.ahead_ms - true) <= clock.error_ms
        assert max(clock.error_ms for clock in found) < (1100 if barriers == 1 else 600)
