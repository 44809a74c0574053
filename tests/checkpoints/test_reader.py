"""What a writer has saved a reader finds, without a trainer: the newest of the wanted trees, and nothing damaged."""

import contextlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxche.checkpoints import CheckpointReader, CheckpointWriter
from jaxche.distributed import Group

META = {"round": 3, "why": "a test"}


def trees(factor):
    params = {"a.b": jnp.arange(6.0).reshape(2, 3) * factor, "a": {"b": jnp.ones(3, jnp.bfloat16) * factor}}
    return {
        "params": params,
        "opt_state": (jnp.int32(factor), jax.random.key(factor), jnp.zeros((0, 2))),
        "model_state": {"seen": jnp.array([True, False])},
    }


def wanted(meta):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trees(1))


@pytest.fixture
def written(tmp_path):
    """A folder with the checkpoints 1, 2 and 4 of three states."""
    writer = CheckpointWriter(Group(), tmp_path, keep=9)
    writer.open()
    for step in (1, 2, 4):
        assert writer.begin(step)
        writer.save(step, META | {"round": step}, trees(step))
    assert not writer.begin(4)
    writer.close(None)
    return tmp_path


def bits(tree):
    keys = jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
    return jax.tree.map(lambda x: (x.shape, x.dtype.name, np.asarray(x).tobytes()), keys)


def test_the_newest_is_read_as_it_was_written(written):
    found = CheckpointReader(Group(), written, wanted).newest(after=0)
    assert found.step == 4
    assert bits(found.trees) == bits(trees(4))
    assert found.meta.items() >= (META | {"round": 4}).items()
    assert found.meta["leaves"]["params/a.b"] == "float32[2,3]"


def test_only_a_later_one_is_read(written):
    assert CheckpointReader(Group(), written, wanted).newest(after=4) is None
    assert CheckpointReader(Group(), written, wanted).newest(after=3).step == 4


def test_a_damaged_one_is_set_aside_and_the_one_before_it_is_read(written, caplog):
    for file in (written / "4" / "run").iterdir():
        with contextlib.suppress(ValueError):
            file.write_text(json.dumps(json.loads(file.read_text()) | {"why": "another"}))
    found = CheckpointReader(Group(), written, wanted).newest(after=0)
    assert found.step == 2
    assert bits(found.trees) == bits(trees(2))
    assert "checkpoint 4 cannot be read and is set aside as" in caplog.text
    assert (written / "unreadable-4").is_dir()


@pytest.mark.parametrize(
    "lost", [["run"], ["params"], ["state"], ["run", "params"], ["run", "params", "state"]], ids=str
)
def test_one_that_lost_a_part_is_set_aside_and_the_one_before_it_is_read(written, lost, caplog):
    (written / "history.jsonl").touch()
    for part in lost:
        shutil.rmtree(written / "4" / part)
    found = CheckpointReader(Group(), written, wanted).newest(after=0)
    assert found.step == 2
    assert bits(found.trees) == bits(trees(2))
    assert "checkpoint 4 cannot be read and is set aside as" in caplog.text
    assert (written / "unreadable-4").is_dir()


@pytest.mark.parametrize("record", [True, False])
def test_one_with_parts_of_another_program_is_refused_and_left_where_it_is(written, record):
    with ocp.CheckpointManager(written) as theirs:
        names = ("params", "theirs") if record else ("params",)
        theirs.save(7, args=ocp.args.Composite(**{one: ocp.args.StandardSave({"w": np.ones(3)}) for one in names}))
    if record:
        (written / "history.jsonl").touch()
    with pytest.raises(ValueError, match="7 there was not written by jaxche; give another folder"):
        CheckpointReader(Group(), written, wanted).newest(after=0)
    assert (written / "7" / "params").is_dir()


def test_one_that_is_not_wanted_is_refused_and_left_where_it_is(written):
    def refuse(meta):
        raise ValueError(f"round {meta['round']} is of another run")

    with pytest.raises(ValueError, match="round 4 is of another run"):
        CheckpointReader(Group(), written, refuse).newest(after=0)
    assert (written / "4").is_dir()


def test_processes_that_see_different_checkpoints_share_no_folder(written):
    group = Group()
    group.all_gather = lambda steps: [steps, steps[:-1]]
    with pytest.raises(ValueError, match=r"different checkpoints there \(\[\[1, 2, 4\], \[1, 2\]\]\); give"):
        CheckpointReader(group, written, wanted).newest(after=0)


def test_a_folder_that_cannot_be_listed_is_a_damaged_checkpoint(written):
    assert CheckpointReader(Group(), written, wanted)._is_own(5)
