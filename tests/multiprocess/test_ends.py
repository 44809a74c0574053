"""A process that ends while others wait for it: they end too, with the line to write."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("ends.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code", "lines"),
    [
        ("one exits", 1, ["sys.exit(3) ended process 1 within fit", "return True from a callback"]),
        ("all exit", 3, []),
        ("one stage ends", 1, ["connection to the process of stage 1 is lost", "must take the same steps"]),
        ("one evaluates", 1, ["process 1 has ended its script", "make the same calls"]),
        ("one evaluates in a callback", 1, ["process 1 is in the merge of a round", "also in callbacks"]),
    ],
)
def test_processes_do_not_wait_for_one_that_has_ended(run_forked, what, code, lines):
    # JAX itself ends the wait for a process at exit after 300 s, and this one ends after 150.
    done = run_forked("-m", "jaxche", "launch", "-n", "2", PROGRAM, what)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert all(line in output for line in lines), output
    assert code == 1 or "Traceback" not in output, output
