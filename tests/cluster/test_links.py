"""Measurements of links and clocks on one process."""

import jax

from jaxche.cluster import clocks, measure_all_reduce


def test_an_all_reduce_takes_time():
    [link] = measure_all_reduce([4096], jax.devices()[:2])
    assert link.size == 4096
    assert link.ms > 0


def test_the_clock_of_process_0_is_the_reference():
    assert clocks(process_id=0, num_processes=1, timeout_s=60) == [(0.0, 0.0)]
