"""Deaths while a checkpoint of an elastic run is saved."""

import re

import pytest

pytestmark = pytest.mark.usefixtures("forked")

# Rank 1 dies after round 1, and its replacement in a save; then rank 0 trains three more rounds.
IN_A_BARRIER = """
import jax, jax.numpy as jnp, numpy as np, optax, orbax.checkpoint as ocp, jaxche

save, worlds = ocp.CheckpointManager.save, []
def dying(self, *args, **options):
    if restart:
        os.kill(os.getpid(), signal.SIGKILL)
    return save(self, *args, **options)
ocp.CheckpointManager.save = dying

def after(state, info):
    if rank == 1 and info.round == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    worlds.append(len(info.counts))
    return 2 in worlds[3:] and worlds[-3:] == [1, 1, 1]

jaxche.initialize(timeout_s=60)
che = jaxche.ElChe(world_size=2, anchor=2, max_anchor=2, max_batch_diff=0)
trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1), che=che)
saved, data = jaxche.Checkpoints({folder!r}, every=4), [np.ones((2, 3), np.float32)] * 40
trainer.fit(trainer.init(jnp.zeros(3)), data, 100_000, callbacks=[after], progress=False, checkpoints=saved)
"""


def test_a_death_is_detected_in_the_barriers_of_orbax(script, launcher, tmp_path):
    """Found by chaos.py --elastic, seed 1: of a group that had changed, the others waited there for five minutes."""
    run = launcher(script(IN_A_BARRIER.format(folder=str(tmp_path / "saved"))), "elastic=True", "max_restarts=1")
    _, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    lost = re.search(r"\[0\] .*checkpoint (\d+) was not begun, the loss of a process was detected: process 1 died", err)
    assert lost is not None, err
    # The next round is saved in its place.
    assert str(int(lost[1]) + 1) in {path.name for path in (tmp_path / "saved").iterdir()}
    assert len(re.findall(r"\[0\] .*process 1 died: continuing", err)) == 2


# Rank 0 dies after the last merge: before it writes the line of the record, or while others wait for its folders.
AT_THE_END = """
import jax, jax.numpy as jnp, numpy as np, optax, jaxche
from jaxche.checkpoints import MetricsLog
from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.multihost import multihost

append, set_signals, sync, moments = MetricsLog.append, future.set_signals, multihost.sync_global_processes, []
def dying_append(self, info):
    if rank == 0 and info.round == 9:
        moments.append({moment!r})
    if "record" in moments:
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, info)
def late_signals(*args, **options):
    if "folders" in moments:
        time.sleep(60)
    set_signals(*args, **options)
def dying_sync(name, **options):
    if "folders" in moments and "old_steps_to_remove" in name:
        os.kill(os.getpid(), signal.SIGKILL)
    sync(name, **options)
MetricsLog.append, future.set_signals, multihost.sync_global_processes = dying_append, late_signals, dying_sync

jaxche.initialize(timeout_s=60)
che = jaxche.ElChe(world_size=2, anchor=2, max_anchor=2, max_batch_diff=0)
trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1), che=che)
saved, data = jaxche.Checkpoints({folder!r}, every=1000), [np.ones((2, 3), np.float32)] * 40
trainer.fit(trainer.init(jnp.zeros(3)), data, progress=False, checkpoints=saved)
"""


@pytest.mark.parametrize("moment", ["record", "folders"])
def test_those_left_write_what_a_rank_that_died_at_the_end_did_not(script, launcher, tmp_path, json_lines, moment):
    """Found by chaos.py --elastic, seed 1: the last checkpoint was missing, and the last line of the record."""
    folder = tmp_path / "saved"
    run = launcher(script(AT_THE_END.format(folder=str(folder), moment=moment)), "elastic=True")
    _, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    assert "rank 0 was ended by SIGKILL" in err
    assert [path.name for path in folder.glob("[0-9]*")] == ["10"]
    assert [line["round"] for line in json_lines(folder / "history.jsonl")] == list(range(10))
