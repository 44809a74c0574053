"""`jaxche plan`: a table that fits, and what to do next."""

import pytest

from jaxche.cli import main

SMALL = ["plan", "--task", "digits", "--devices", "4", "--batch-size", "16"]


@pytest.mark.parametrize(("memory", "code"), [("1GiB", 0), ("1KiB", 1)])
def test_it_fits_100_columns_and_says_what_to_do_next(memory, code, capsys, devices):
    assert main([*SMALL, "--memory", memory]) == code
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    following = next(line for line in lines if line.startswith("next: "))
    assert ("jaxche.sharded_step(loss_fn, tx, jaxche." in following) == (code == 0)
    assert ("--accumulate 2" in following) == (code == 1)


def test_a_memory_that_is_no_size_is_refused(capsys):
    assert main([*SMALL, "--memory", "much"]) == 2
    assert capsys.readouterr().err.startswith("jaxche plan: error: ")
