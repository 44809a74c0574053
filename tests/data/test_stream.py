"""Streams: what is one, what is refused, and how batches become arrays."""

import dataclasses
import itertools
import threading

import grain
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxche
from jaxche.data._stream import EPOCH_SIZE, as_batch, check_stream, epoch_size, is_stream
from jaxche.distributed import Group


@dataclasses.dataclass
class Rows:
    x: np.ndarray


class Tensor:
    """Like a torch tensor that requires a gradient."""

    def __init__(self, array, attached=True):
        self._array, self._attached = np.asarray(array), attached

    def detach(self):
        return Tensor(self._array, False)

    def cpu(self):
        return self

    def __array__(self, dtype=None, copy=None):
        if self._attached:
            raise TypeError("call detach() first")
        return self._array


class Half:
    """Like a torch tensor of bfloat16, which NumPy cannot read."""

    dtype = "torch.bfloat16"

    def __init__(self, array):
        self._array = jnp.asarray(array, jnp.bfloat16)

    def detach(self):
        return self

    def cpu(self):
        return self

    def __array__(self, dtype=None, copy=None):
        raise TypeError("unsupported ScalarType BFloat16")

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class Loader:
    """Like a torch DataLoader: a length, and no index."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    "data",
    [
        jaxche.Stream([1]),
        (x for x in ()),
        iter([1]),
        itertools.count(),
        Loader(),
        grain.MapDataset.range(3).to_iter_dataset(),
        iter(grain.MapDataset.range(3).to_iter_dataset()),
    ],
)
def test_what_has_no_length_or_no_index_is_a_stream(data):
    assert is_stream(data)
    assert epoch_size(data) == EPOCH_SIZE


@pytest.mark.parametrize("data", [[1, 2], (1, 2), jaxche.Batches(np.ones(2), 1), grain.MapDataset.range(2)])
def test_a_sequence_is_no_stream(data):
    assert not is_stream(data)
    assert epoch_size(data) == 2


def test_random_keys_of_epochs_are_far_apart():
    starts = np.sort([epoch * EPOCH_SIZE % 2**32 for epoch in range(1000)])
    assert np.diff(starts, append=starts[0] + 2**32).min() > 2**32 / 3000


def test_one_process_reads_all():
    assert jaxche.process_shard() == (0, 1)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: jaxche.Stream(3), "source is an int; give an iterable"),
        (lambda: jaxche.Stream("data"), r"source is a str, not an iterable of batches; .*jaxche.Batches\(arrays"),
        (lambda: jaxche.Stream({"x": 1}), "source is a dict"),
        (lambda: jaxche.Stream(np.ones(3)), "source is a ndarray"),
        (lambda: jaxche.Stream(threading.active_count), "does not take the epoch; write e.g. jaxche.Stream"),
        (lambda: jaxche.Stream([1], shards="yes"), "shards='yes' must be True"),
        (lambda: jaxche.Stream([1], shards=np.ones(2)), r"shards=float64\[2\] must be True"),
        (lambda: jaxche.Stream([1], prefetch=0), "prefetch"),
        (lambda: jaxche.Stream([1], resume="go"), "resume='go' is unknown; write one of 'skip', 'continue'"),
        (lambda: jaxche.Stream([1], resume=np.ones(2)), r"resume=float64\[2\] is unknown"),
    ],
)
def test_a_wrong_argument_is_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_small_integers_of_numpy_do_not_overflow():
    assert 2 * jaxche.Stream([1], prefetch=np.int8(100)).prefetch == 200


def test_an_iterable_is_told_the_epoch():
    class Source:
        def __init__(self, **parts):
            self.epochs = []
            self.__dict__.update(parts)

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def __iter__(self):
            return iter(())

    source = Source(sampler=Source(), dataset=Source())
    assert jaxche.Stream(source).iterable(5) is source
    assert source.epochs == source.sampler.epochs == source.dataset.epochs == [5]
    assert jaxche.Stream(lambda epoch: [epoch]).iterable(5) == [5]


def test_batches_in_memory_are_a_source():
    data = jaxche.Batches(np.arange(6), batch_size=2, seed=3)
    for source in (data, data.epoch):
        assert not is_stream(source)
        for epoch in (0, 4):
            np.testing.assert_array_equal(list(jaxche.Stream(source).iterable(epoch)), list(data.epoch(epoch)))


class Processes(Group):
    def __init__(self, num_processes, elastic=False):
        self._num_processes, self.elastic = num_processes, elastic

    @property
    def num_processes(self):
        return self._num_processes


@pytest.mark.parametrize(
    ("data", "group", "epochs", "named"),
    [
        (iter([1]), Processes(1), 2, "can be read once, and epochs=2; .*jaxche.Stream\\(lambda epoch"),
        (jaxche.Stream(iter([1])), Processes(1), 2, "data is a list_iterator"),
        (iter([1]), Processes(2), 1, "jaxche.process_shard.*shards=True.*shards=False"),
        (jaxche.Stream([1]), Processes(2), 1, "in a run of 2 processes; set shards="),
        (jaxche.Stream([1], shards=True), Processes(2, elastic=True), 1, "those of a process that dies would be lost"),
        (jaxche.Stream(iter([1]), shards=False), Processes(2, elastic=True), 1, "reads the batches of a round again"),
        (jaxche.Stream([1], shards=False, resume="continue"), Processes(2, elastic=True), 1, "repeats or loses"),
        (jaxche.Stream([1], shards=True), Processes(3), 1, "the processes of one replica need the same"),
    ],
)
def test_a_stream_that_a_run_cannot_read_is_refused_at_the_start(data, group, epochs, named):
    with pytest.raises(ValueError, match=named):
        check_stream(data, group, group.num_processes == 3, epochs)


def test_a_stream_that_a_run_can_read_passes():
    source = [1]
    assert check_stream(Loader(), Processes(1), False, 5).shards is None
    for shards in (True, False):
        stream = jaxche.Stream(source, shards=shards)
        assert check_stream(stream, Processes(2), False, 5) is stream
    assert check_stream(jaxche.Stream(source, shards=False), Processes(2), True, 5)
    assert check_stream(jaxche.Stream(source, shards=False), Processes(2, elastic=True), False, 5)


def test_batches_become_arrays():
    key = jax.random.split(jax.random.key(0), 2)
    batch = as_batch(
        {
            "tensor": Tensor([[1.0], [2.0]]),
            "column": [1, 2],
            "rows": [[1.0, 2.0], [3.0, 4.0]],
            "pair": (np.ones(2), [jnp.ones(2), Tensor([True, False])]),
            "half": np.ones(2, ml_dtypes.bfloat16),
            "half_tensor": Half([1.5, 2.5]),
            "key": key,
        }
    )
    assert {type(x) for x in jax.tree.leaves(batch)} <= {np.ndarray, type(key), type(jnp.ones(1))}
    assert batch["column"].dtype == np.int64
    assert batch["rows"].shape == (2, 2)
    assert isinstance(batch["pair"], tuple)
    np.testing.assert_array_equal(batch["pair"][1][1], [True, False])
    np.testing.assert_array_equal(batch["tensor"], [[1.0], [2.0]])
    assert batch["half_tensor"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(batch["half_tensor"], np.float32), [1.5, 2.5])
    assert batch["key"] is key


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"x": np.ones(2), "text": ["a", "b"]}, r"batch\['text'\] is texts, e.g. \['a', 'b'\]; .*remove_columns"),
        ({"x": np.array([object()])}, r"batch\['x'\] is of type ndarray; batches are arrays of numbers"),
        (object(), "batch is of type object"),
        (Rows(np.ones(2)), r"batch is a Rows, .* write jax.tree_util.register_dataclass\(Rows\)"),
        ({"x": [[1, 2], [3]]}, r"batch\['x'\] is no array .*pad examples"),
        ({"x": np.ones(3), "y": 1}, r"batch\['y'\] is a scalar: does the stream yield examples"),
        ({"x": np.ones(3), "y": np.ones(2)}, "leading axes of a batch differ"),
        (None, "the stream yields None"),
        ({}, "a batch without arrays"),
    ],
)
def test_what_is_no_batch_of_arrays_is_named(batch, named):
    with pytest.raises(ValueError, match=named):
        as_batch(batch)


def test_examples_in_place_of_batches_get_the_line_to_write():
    with pytest.raises(ValueError, match="leading axes of a batch differ") as caught:
        as_batch({"x": [1.0, 2.0], "y": [3.0]})
    assert caught.value.__notes__ == ["if the stream yields examples, yield batches of them, e.g. dataset.batch(32)"]


@pytest.mark.parametrize("found", [None, 5])
def test_a_function_that_returns_no_iterable_is_named(found):
    with pytest.raises(ValueError, match=rf"source\(2\) returned {found}, not an iterable .* lack a return or a yield"):
        jaxche.Stream(lambda epoch: found).iterable(2)
