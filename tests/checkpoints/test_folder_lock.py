"""A folder in which one run at a time writes."""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys

import numpy as np
import optax
import pytest

import jaxche
from jaxche.checkpoints import FolderLock, _folder_lock

# Locks a folder, forks a process that lives longer, and at a line releases the lock or is killed. It needs no JAX.
_HOLDER = """
import os, runpy, sys
from pathlib import Path
FolderLock = runpy.run_path(sys.argv[3])["FolderLock"]
lock, lives = FolderLock(Path(sys.argv[1])), os.pipe()
assert lock.try_acquire()
if os.fork() == 0:
    os.close(lives[1])
    os.dup2(2, 1)  # closes the output
    os.read(int(sys.argv[2]), 1)
    os._exit(0)
print("locked", flush=True)
if sys.stdin.readline() == "killed\\n":
    os.kill(os.getpid(), 9)
lock.release()
"""


@contextlib.contextmanager
def holder(folder):
    """A process that holds the lock of a folder, and a function that ends it; the process that it forked lives on."""
    reader, writer = os.pipe()
    command = [sys.executable, "-c", _HOLDER, str(folder), str(reader), _folder_lock.__file__]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, pass_fds=[reader])

    def end(how):
        process.communicate(f"{how}\n")

    try:
        assert process.stdout.readline() == "locked\n"
        yield process, end
    finally:
        process.kill()
        process.communicate()
        os.close(writer)  # the forked process reads the end of it
        os.close(reader)


@pytest.mark.parametrize("how", ["released", "killed"])
def test_a_second_run_waits_until_the_first_has_ended(tmp_path, caplog, monkeypatch, how):
    with holder(tmp_path) as (first, end):
        lock, slept = FolderLock(tmp_path), []

        def sleep(seconds):
            slept.append(seconds)
            if len(slept) == 3:
                end(how)

        monkeypatch.setattr(_folder_lock.time, "sleep", sleep)
        lock.acquire()
        assert slept == [_folder_lock._POLL_S] * 3
        (warning,) = caplog.messages
        assert f"'{tmp_path}' is in use by process {first.pid} on {os.uname().nodename}; waiting up to 60 s" in warning
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
        lock.release()
        assert list(tmp_path.iterdir()) == []


def test_a_run_that_does_not_end_is_named(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(_folder_lock.time, "sleep", slept.append)
    with holder(tmp_path) as (first, _):
        with pytest.raises(ValueError, match=f"process {first.pid} on"):
            FolderLock(tmp_path).acquire()
        assert sum(slept) == 60


def test_a_fit_in_the_folder_of_another_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_folder_lock, "_WAIT_S", 0.0)
    data = jaxche.Batches(np.ones((12, 2), np.float32), batch_size=2)
    trainer = jaxche.Trainer(lambda w, x: ((x @ w - 1.0) ** 2).mean(), optax.sgd(0.1))
    state = trainer.init(np.zeros(2, np.float32))
    with holder(tmp_path) as (first, end):
        with pytest.raises(ValueError, match=rf"in use by process {first.pid} on .* checkpoints='runs/second'"):
            trainer.fit(state, data, checkpoints=tmp_path, progress=False)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        end("released")
        assert len(trainer.fit(state, data, checkpoints=tmp_path, progress=False)[1]) > 0
    assert not (tmp_path / ".lock").exists()
    assert trainer.fit(state, data, 2, checkpoints=tmp_path, progress=False)[0].epoch == 2


def test_the_file_of_a_run_that_has_just_ended_is_no_lock(tmp_path, monkeypatch):
    lock, lockf = FolderLock(tmp_path), fcntl.lockf

    def removed_meanwhile(descriptor, how):
        monkeypatch.setattr(fcntl, "lockf", lockf)
        (tmp_path / ".lock").unlink()
        lockf(descriptor, how)

    monkeypatch.setattr(fcntl, "lockf", removed_meanwhile)
    assert lock.try_acquire()
    assert (tmp_path / ".lock").exists()
    lock.release()


@pytest.mark.parametrize("name", ["lockf", "open"])
def test_a_file_system_without_locks_locks_nothing(tmp_path, monkeypatch, name):
    def refused(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl if name == "lockf" else os, name, refused)
    lock = FolderLock(tmp_path)
    lock.acquire()
    lock.release()
