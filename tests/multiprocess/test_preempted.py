"""SIGTERM, as schedulers send it, before the rounds, in them, and while the last checkpoint is being written."""

import os
import re
import shutil
import signal
import subprocess

import pytest

pytestmark = pytest.mark.usefixtures("forked")

# Where a test sends its signal every rank says "now"; in the last save they send it themselves.
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax, jaxche

where, folder, told = {where!r}, {folder!r}, []
def now():
    print("now", os.getpid(), flush=True)
    time.sleep(60)

class Data:
    def __len__(self):
        return 60
    def __getitem__(self, i):
        if where == "first batch":
            now()
        return np.ones((2, 3), np.float32)

def after(state, info):
    if info.round == 2 and where == "unsaved rounds":
        now()
    if info.round == 2 and where == "last save":
        told.append(True)
        signal.raise_signal(signal.SIGTERM)

jaxche.initialize(timeout_s=60)
if where == "joined":
    now()
if where == "last save":
    import orbax.checkpoint as ocp
    finish = ocp.CheckpointManager.wait_until_finished
    def interrupted(self):
        if told:
            signal.raise_signal(signal.SIGTERM)
        finish(self)
    ocp.CheckpointManager.wait_until_finished = interrupted
che = jaxche.ElChe(world_size=2, anchor=2, max_anchor=2, max_batch_diff=0)
trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1), che=che)
saved = None if where == "unsaved rounds" else jaxche.Checkpoints(folder, every=1000)
trainer.fit(trainer.init(jnp.zeros(3)), Data(), callbacks=[after], progress=False, checkpoints=saved)
"""


@pytest.mark.parametrize(
    ("where", "to"),
    [("joined", "launcher"), ("first batch", "launcher"), ("first batch", "rank 1"), ("unsaved rounds", "rank 1")],
)
def test_where_there_is_nothing_to_save_it_ends_the_run_at_once(script, launcher, gone, tmp_path, where, to):
    run = launcher(script(PROGRAM.format(where=where, folder=str(tmp_path / "saved"))))
    said = [re.findall(r"\[(\d)\] now (\d+)", run.stdout.readline())[0] for _ in range(2)]
    pids = {f"rank {rank}": int(pid) for rank, pid in said}
    os.kill(run.pid if to == "launcher" else pids[to], signal.SIGTERM)
    _, err = run.communicate(timeout=20)  # less than the time for a checkpoint, and than they sleep
    assert run.returncode == 143, err
    assert "SIGKILL" not in err
    assert all(gone(pid) for pid in pids.values())
    assert not list((tmp_path / "saved").glob("[0-9]*"))


def test_a_second_one_does_not_end_the_checkpoint_that_the_first_one_had_written(script, launcher, tmp_path):
    run = launcher(script(PROGRAM.format(where="last save", folder=str(tmp_path / "saved"))))
    _, err = run.communicate(timeout=60)
    assert run.returncode == 143, err
    assert re.findall(r"\[(\d)\] .*preempted: saved after round 3", err) == ["0"]
    assert [path.name for path in (tmp_path / "saved").glob("[0-9]*")] == ["4"]


def test_one_to_a_rank_of_an_elastic_run_starts_all_again_from_the_checkpoint(script, launcher, tmp_path, json_lines):
    """Found by chaos.py --elastic, seed 0, number 5: each rank was replaced, and had no run to join."""
    ranks = script(f"""
        import jax, jax.numpy as jnp, numpy as np, optax, jaxche

        def after(state, info):
            if rank == 1 and info.round == 2 and not restart:
                signal.raise_signal(signal.SIGTERM)

        jaxche.initialize(timeout_s=60)
        che = jaxche.ElChe(world_size=2, anchor=2, max_anchor=2, max_batch_diff=0)
        trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1), che=che)
        saved = jaxche.Checkpoints({str(tmp_path / "saved")!r}, every=1000)
        data = [np.ones((2, 3), np.float32)] * 40
        _, history = trainer.fit(trainer.init(jnp.zeros(3)), data, callbacks=[after], progress=False, checkpoints=saved)
        print("rounds", restart, [info.round for info in history], flush=True)
    """)
    run = launcher(ranks, "elastic=True", "max_restarts=1", f"events={str(tmp_path / 'events')!r}")
    out, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] rounds 1 {list(range(10))}" for rank in range(2)]
    events = [event["event"] for event in json_lines(tmp_path / "events") if event["event"] != "round"]
    assert events == ["start", "start", "exit", "exit", "restart", "start", "start", "exit", "exit", "end"]


def test_it_also_ends_the_first_process_of_a_container(script, launcher):
    in_container = ["unshare", "--fork", "--pid"]
    if shutil.which("unshare") is None or subprocess.run([*in_container, "true"], check=False).returncode:
        pytest.skip("needs the right to a process namespace of its own")
    ranks = script(f"""
        if rank == 1 and os.getpid() != 1:
            os.execvp("unshare", {in_container!r} + [sys.executable, __file__])
        from jaxche.cluster import initialize
        initialize(timeout_s=60)
        print("now", flush=True)
        time.sleep(60)
    """)
    run = launcher(ranks)
    assert sorted(run.stdout.readline() for _ in range(2)) == ["[0] now\n", "[1] now\n"]
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=20)
    assert run.returncode == 143
    assert "SIGKILL" not in err
