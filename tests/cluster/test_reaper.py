"""The reaper, with a launcher that is killed."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Gives the groups in its arguments to a reaper, takes back those with a minus sign, and waits to be killed.
LAUNCHER = """
import sys, time
from jaxche.cluster._reaper import Reaper
with Reaper(float(sys.argv[1])) as home:
    home.add_folder(sys.argv[2])
    for group in sys.argv[3:]:
        home.add(int(group)) if int(group) > 0 else home.remove(-int(group))
    print("ready", flush=True)
    time.sleep(100)
"""
# Takes its time over a checkpoint.
SAVES = """
trap 'sleep 1; touch checkpoint; exit 143' TERM
echo ready
while :; do sleep 0.05; done
"""


@pytest.fixture
def start():
    """Starts processes, each the leader of a group, and ends them."""
    env, started = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}, []

    def starting(*command, **options):
        options |= {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, "env": env}
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    yield starting
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with process:
            pass


def until_ready(process):
    assert process.stdout.readline() == "ready\n"


def test_dead_ranks_do_not_shorten_the_grace_of_others(start, tmp_path):
    gone = start("true")
    gone.wait()
    saves, other = start("sh", "-c", SAVES, cwd=tmp_path), start("sleep", "100")
    until_ready(saves)
    groups = [str(process.pid) for process in (gone, saves, other)]
    launcher = start(sys.executable, "-c", LAUNCHER, "10", str(tmp_path / "none"), *groups)
    until_ready(launcher)
    launcher.kill()
    assert other.wait(timeout=20) == -signal.SIGTERM
    assert saves.wait(timeout=20) == 143
    assert (tmp_path / "checkpoint").exists()


def test_a_group_that_has_ended_and_whose_number_is_another_program_gets_no_signal(start, tmp_path):
    rank, other, third = start("sleep", "100"), start("sleep", "100"), start("sleep", "100")
    groups = [str(number) for number in (rank.pid, other.pid, third.pid, -other.pid)]
    launcher = start(sys.executable, "-c", LAUNCHER, "1", str(tmp_path / "none"), *groups)
    until_ready(launcher)
    launcher.kill()
    # In their order: the third gets its signal after the other would have got one.
    assert [one.wait(timeout=20) for one in (rank, third)] == [-signal.SIGTERM] * 2
    assert other.poll() is None


def test_kill_after_the_grace_and_no_folder_is_left(start, tmp_path, until):
    """Found by chaos.py --elastic, seed 0, number 6: the folder of heartbeats was left."""
    folder = tmp_path / "heart beats"
    folder.mkdir()
    (folder / "0").touch()
    stays = start("sh", "-c", "trap '' TERM; echo ready; sleep 100")
    until_ready(stays)
    launcher = start(sys.executable, "-c", LAUNCHER, "0.3", str(folder), str(stays.pid))
    until_ready(launcher)
    launcher.kill()
    assert stays.wait(timeout=20) == -signal.SIGKILL
    assert until(lambda: not folder.exists())
    assert tmp_path.exists()
