"""Fake devices."""

import pytest

import jaxche

PROGRAM = """
import jax, jaxche
assert [d.platform for d in jaxche.fake_devices(3)] == ["cpu"] * 3
assert len(jaxche.fake_devices(3)) == 3  # once more changes nothing
"""


def test_in_a_fresh_process(run_forked):
    done = run_forked("-c", PROGRAM)
    assert done.returncode == 0, done.stderr


def test_error_after_jax_has_started(devices):
    with pytest.raises(RuntimeError, match=r"started with 8 cpu device.*restart the kernel.*fake_devices\(2\) before"):
        jaxche.fake_devices(2)


@pytest.mark.parametrize("count", [0, 1.5, True, "a", None])
def test_a_bad_count_is_refused(count):
    with pytest.raises(ValueError, match="count="):
        jaxche.fake_devices(count)
