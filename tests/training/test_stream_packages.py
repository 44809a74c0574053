"""Streams of the packages that people read data with; those that are not installed are skipped."""

import itertools
import warnings

import grain
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.data._batches import Feed
from jaxche.data._stream import as_batch

EXAMPLES, BATCH = 41, 4
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
ROWS = [{"x": x.tolist(), "id": i} for i, x in enumerate(X)]


def loss(w, batch):
    return jnp.mean((batch["x"] @ w - 1.0) ** 2)


@pytest.fixture
def trained(monkeypatch):
    """The ids of the examples that steps were taken on, in the order of feeds."""
    found, plain = [], Feed.__iter__

    def recorded(feed):
        for batch in plain(feed):
            found.extend(np.asarray(batch["id"]).tolist())
            yield batch

    monkeypatch.setattr(Feed, "__iter__", recorded)
    return found


def _imported(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def _torch_rows():
    _imported("torch")
    return [{"x": x, "id": i} for i, x in enumerate(X)]


def torch_loader():
    return _imported("torch").utils.data.DataLoader(_torch_rows(), batch_size=BATCH)


def torch_iterable():
    torch = _imported("torch")

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(_torch_rows())

    return torch.utils.data.DataLoader(Rows(), batch_size=BATCH)


def torch_stateful():
    torch, stateful = _imported("torch"), _imported("torchdata.stateful_dataloader")
    generator = torch.Generator().manual_seed(3)
    return stateful.StatefulDataLoader(_torch_rows(), batch_size=BATCH, shuffle=True, generator=generator)


def tensorflow_dataset():
    tensorflow = _imported("tensorflow")
    return tensorflow.data.Dataset.from_tensor_slices({"x": X, "id": np.arange(EXAMPLES)}).batch(BATCH)


def hugging_face():
    return _imported("datasets").Dataset.from_list(ROWS)


def hugging_face_map():
    dataset = hugging_face()
    return jaxche.Stream(lambda epoch: dataset.shuffle(seed=epoch).with_format("numpy").iter(batch_size=BATCH))


def hugging_face_in_grain():
    return grain.MapDataset.source(hugging_face().with_format("numpy")).seed(0).shuffle().batch(BATCH)


def hugging_face_iterable():
    return hugging_face().to_iterable_dataset(num_shards=3).batch(BATCH)


def grain_iterable():
    return grain.MapDataset.source(ROWS).map(_as_arrays).batch(BATCH).to_iter_dataset()


class _Rows:
    """Grain compares the text of the source with that in the checkpoint."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        return _as_arrays(ROWS[i])

    def __repr__(self):
        return "rows"


def grain_loader(workers=0):
    return grain.DataLoader(
        data_source=_Rows(),
        sampler=grain.samplers.IndexSampler(EXAMPLES, shuffle=True, seed=0, num_epochs=1),
        operations=[grain.transforms.Batch(BATCH)],
        worker_count=workers,
    )


def _as_arrays(row):
    return {name: np.asarray(value) for name, value in row.items()}


# Whether the source restores its position.
SOURCES = {
    torch_loader: False,
    torch_iterable: False,
    torch_stateful: True,
    tensorflow_dataset: False,
    hugging_face_map: False,
    hugging_face_in_grain: True,
    hugging_face_iterable: True,
    grain_iterable: True,
    grain_loader: True,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_every_example_once_in_every_epoch_and_on_from_a_checkpoint(devices, tmp_path, trained, caplog, lockstep, make):
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:2])
    state, _ = trainer.fit(trainer.init(jnp.zeros(3)), make(), epochs=2, progress=False)
    assert state.epoch == 2
    assert sorted(trained) == sorted(2 * list(range(EXAMPLES)))
    trained.clear()
    checkpoints = jaxche.Checkpoints(tmp_path, every=100)
    for callbacks in ([lambda state, info: state.round == 2], []):
        trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:2], che=lockstep())
        state = trainer.init(jnp.zeros(3))
        options = {"progress": False, "callbacks": callbacks, "checkpoints": checkpoints}
        state, _ = trainer.fit(state, make(), epochs=2, **options)
    assert sorted(trained) == sorted(2 * list(range(EXAMPLES)))
    said = [record.getMessage() for record in caplog.records if record.name == "jaxche"]
    assert any("read again and skipped" in text for text in said) is not SOURCES[make]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("replicas", [1, 2])
def test_workers_of_grain_give_every_example_once_and_go_on_from_a_checkpoint(
    devices, tmp_path, trained, caplog, replicas
):
    flags = _imported("absl.flags").FLAGS
    flags.mark_as_parsed()  # as absl.app.run does, without which Grain starts no workers
    for limit in ({"max_steps": 5}, {"epochs": 1}):
        trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:replicas])
        state = trainer.init(jnp.zeros(3))
        state, _ = trainer.fit(state, grain_loader(workers=2), progress=False, checkpoints=tmp_path, **limit)
    assert state.epoch == 1
    assert sorted(trained) == list(range(EXAMPLES))
    assert not any("read again and skipped" in record.getMessage() for record in caplog.records)


def test_examples_of_hugging_face_are_refused_with_the_line_to_write(devices):
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:1])
    state = trainer.init(jnp.zeros(3))
    for data in (hugging_face(), hugging_face().batch(BATCH)):
        with pytest.raises(
            ValueError,
            match=r"may be one example; write jaxche.Stream\(lambda epoch: .* or of a dataset.batch\(32\) gr",
        ):
            trainer.fit(state, data)
    with pytest.raises(ValueError, match=r"batch\['id'\] is a scalar: does the stream yield examples"):
        trainer.fit(state, hugging_face().to_iterable_dataset(), progress=False)


def test_batches_of_hugging_face_are_a_data_set_in_grain(devices, trained):
    data = grain.MapDataset.source(hugging_face().batch(BATCH).with_format("numpy"))
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:1])
    trainer.fit(trainer.init(jnp.zeros(3)), data, validation=data, epochs=2, progress=False)
    assert sorted(trained) == sorted(2 * list(range(EXAMPLES)))


@pytest.mark.filterwarnings("ignore")
def test_tensors_become_arrays():
    torch = _imported("torch")
    batch = as_batch(
        {"x": torch.ones(2, 3, requires_grad=True), "half": torch.ones(2, dtype=torch.bfloat16), "y": [torch.ones(2)]}
    )
    np.testing.assert_array_equal(batch["x"], np.ones((2, 3)))
    assert batch["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(batch["y"][0], [1, 1])


def test_epochs_of_a_shuffled_hugging_face_dataset_differ(devices, trained):
    dataset = hugging_face().to_iterable_dataset().shuffle(seed=0, buffer_size=EXAMPLES).batch(BATCH)
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:1])
    trainer.fit(trainer.init(jnp.zeros(3)), dataset, epochs=2, progress=False)
    first, second = (trained[i : i + EXAMPLES] for i in (0, EXAMPLES))
    assert first != second  # set_epoch was called
    assert sorted(first) == sorted(second) == list(itertools.chain(range(EXAMPLES)))
