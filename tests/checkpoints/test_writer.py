"""Saves that leave no checkpoint: what the log says of them, and what they leave."""

import errno
import re
import sys
import threading

import jax.numpy as jnp
import pytest

from jaxche.checkpoints import CheckpointWriter, _writer
from jaxche.checkpoints._orbax import end_threads
from jaxche.distributed import Group


@pytest.mark.parametrize(
    ("missing", "reason", "advice"),
    [
        ("", "a process ended before it had written its part", ""),
        ("File too large", "File too large", " Make space there, or keep fewer"),
    ],
)
def test_only_a_full_disk_asks_for_space(tmp_path, caplog, missing, reason, advice):
    writer = CheckpointWriter(Group(), tmp_path, keep=3)
    writer.open()
    writer.missing, writer._abandoned = missing, 4
    assert writer.discard_abandoned(4)
    end_threads()  # Orbax removes such folders at its start, and a save waits for that
    late, other = (tmp_path / f"{step}.orbax-checkpoint-tmp" / "late" for step in (4, 5))
    late.mkdir(parents=True)  # as TensorStore does, whose writes no error ends
    other.mkdir(parents=True)
    writer.close(None)
    assert [path.name for path in tmp_path.iterdir()] == [other.parent.name]
    text = (
        f"checkpoint 4 is missing: {reason} in {tmp_path}. Training continues, and the next save tries again.{advice}"
    )
    assert re.search(re.escape(text) + ("" if advice else "$"), caplog.text.strip())


def test_only_the_start_of_a_run_waits_in_a_barrier_of_orbax(tmp_path, monkeypatch):
    """One process that is late, or has died, would end the others' collectives, or keep them for minutes."""
    from orbax.checkpoint._src.multihost import multihost

    waits = []
    monkeypatch.setattr(multihost, "sync_global_processes", lambda name, **options: waits.append(name))
    writer = CheckpointWriter(Group(), tmp_path / "new", keep=3)
    writer.open()
    assert (tmp_path / "new").is_dir()
    assert [name.partition(":")[2] for name in waits] == ["create_directory"]
    writer._abandoned = 4
    assert writer.discard_abandoned(4)  # which opens it again
    writer.close(None)
    assert len(waits) == 1


def test_a_save_does_not_pass_the_barriers_that_a_failed_fit_has_left(tmp_path, monkeypatch):
    group, names = Group(), []
    barrier = group.thread_barrier
    for error in (RuntimeError("a round failed"), None):
        writer = CheckpointWriter(group, tmp_path / str(error), keep=3)
        writer.open()
        assert writer.begin(1)
        with monkeypatch.context() as patch:
            patch.setattr(group, "thread_barrier", lambda name: names.append(name) or barrier(name))
            writer.save(1, {}, {"params": {"w": jnp.ones(2)}})
        writer.close(error)
    assert len(set(names)) == 2


def test_a_save_that_failed_in_another_process_is_no_error_before_its_end(tmp_path, monkeypatch):
    def broken(*args, **options):
        raise threading.BrokenBarrierError

    writer = CheckpointWriter(Group(), tmp_path, keep=3)
    writer.open()
    with monkeypatch.context() as patch:
        patch.setattr(writer._manager, "save", broken)
        writer.save(1, {}, {"params": {"w": jnp.ones(2)}})
    assert writer._in_flight == 1
    writer.close(None)


@pytest.mark.parametrize(
    ("failed", "text"),
    [
        (threading.BrokenBarrierError("another process has ended the wait"), ""),
        (OSError(errno.ENOSPC, "no space"), ""),
        (OSError(errno.EACCES, "no access"), r"checkpoint 7 was not finished: \[Errno 13\] no access"),
    ],
)
def test_a_save_that_fails_at_the_end_hides_neither_an_error_nor_an_exit(tmp_path, monkeypatch, caplog, failed, text):
    """A process that was taken for dead, and comes when the run has ended, has no error."""
    writer = CheckpointWriter(Group(), tmp_path, keep=3)
    writer.open()
    writer._begun = 7
    close = writer._manager.close
    monkeypatch.setattr(_writer, "close_manager", lambda manager: close() or failed)
    writer.close(SystemExit(0))
    assert re.search(text, caplog.text) if text else not caplog.text
    with pytest.raises(type(failed)):
        writer.close(None)


def test_checkpoints_without_orbax_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxche\[checkpoints\]'"):
        CheckpointWriter(Group(), tmp_path, keep=3)
