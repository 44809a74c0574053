"""Pace arithmetic."""

import pytest

from jaxche.cli._pace import auto_paces, check_paces, default_ratios


def test_the_base_leaves_room_above_the_slowest_step():
    assert auto_paces([3.0, 4.0], (1, 2.5)) == (20.0, 50.0)
    assert auto_paces([15.5, 16.0], (1, 2.5)) == (21.0, 52.5)
    assert auto_paces([40.0], (1,)) == (52.0,)


def test_ratios_are_relative_to_the_fastest():
    assert auto_paces([3.0, 3.0], (2, 4)) == (20.0, 40.0)
    assert auto_paces([3.0, 3.0], (2.5, 1)) == (50.0, 20.0)
    assert default_ratios(3) == (1.0, 1.75, 2.5)


def test_a_ratio_a_replica():
    with pytest.raises(ValueError, match=r"--ratios has 2 value\(s\) for 3 replicas; write --ratios 1,1\.75,2\.5"):
        auto_paces([3.0] * 3, (1, 2))


def test_paces_the_computation_keeps_are_accepted():
    check_paces((20.0, 50.0), (3.0, 49.0))


def test_paces_it_cannot_keep_are_refused_with_those_it_can():
    with pytest.raises(ValueError, match=r"rank 1 is to take 2 ms a step, but a step takes 3\.1 ms here; .* 20,5"):
        check_paces((20.0, 2.0), (3.0, 3.1))
    with pytest.raises(ValueError, match="for 3 replicas"):
        check_paces((20.0, 50.0), (3.0, 3.0, 3.0))
