"""`jaxche doctor` between real processes."""

import re


def test_two_processes_measure_their_link_and_clocks(run_forked):
    done = run_forked("-m", "jaxche", "doctor", "-n", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert "2 processes" in lines
    rows = {line.split()[0]: line for line in lines if line.startswith("  ")}
    # On one machine all clocks are one.
    ahead, error = map(float, re.findall(r"(-?[\d.]+) ± ([\d.]+) ms", rows["1"])[0])
    assert abs(ahead) <= error + 1
    sizes = [line.split()[:2] for line in lines if line.endswith("GB/s")]
    assert sizes == [["4", "KiB"], ["256", "KiB"], ["4", "MiB"], ["32", "MiB"]]
    assert lines[-1] == "healthy. Next: jaxche launch -n 2 train.py, or jaxche train"


def test_what_is_wrong_on_another_process_is_told_by_the_first(run_forked, tmp_path):
    # Under the launcher of the user's choice, here jaxche's own; only rank 1 sees a folder it cannot use.
    (tmp_path / "file").touch()
    program = tmp_path / "sick.py"
    program.write_text(
        "import os, sys, jax\n"
        "if os.environ['JAXCHE_PROCESS_ID'] == '1':\n"
        f"    jax.config.update('jax_compilation_cache_dir', {str(tmp_path / 'file' / 'cache')!r})\n"
        "from jaxche.cli import main\n"
        "sys.exit(main(['doctor']))\n"
    )
    done = run_forked("-m", "jaxche", "launch", "-n", "2", program)
    assert done.returncode == 1, done.stderr
    assert re.search(r"^\[0\] BAD process 1\s+cache: ", done.stdout, re.M)
    assert "[0] 1 problem(s). Next: JAX_COMPILATION_CACHE_DIR=" in done.stdout


def test_it_waits_no_longer_than_it_is_told(run_forked, tmp_path):
    # Joined with time to spare, devices started, which each does only with the others; then one stays away.
    program = tmp_path / "late.py"
    program.write_text(
        "import sys, time, jax, jaxche\n"
        "info = jaxche.initialize(timeout_s=60)\n"
        "jax.devices()\n"
        "if info.process_id == 1:\n"
        "    time.sleep(500)\n"
        "from jaxche.cli import main\n"
        "sys.exit(main(['doctor', '--timeout', '2']))\n"
    )
    done = run_forked("-m", "jaxche", "launch", "-n", "2", program)
    assert done.returncode == 1, done.stderr
    assert "process 1 joined, but sent nothing for 'doctor' within 2 s" in done.stderr
