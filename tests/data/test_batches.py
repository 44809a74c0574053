"""Sequences of batches and the reader that keeps ahead."""

import threading
from types import SimpleNamespace

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxche
from jaxche.cadence import Piece
from jaxche.data._batches import SequenceReader, checked_length, reading


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 5), st.one_of(st.none(), st.integers(0, 1000)))
def test_an_epoch_is_a_permutation_of_all_examples(examples, batch_size, epoch, seed):
    data = jaxche.Batches(np.arange(examples), batch_size, seed)
    batches = [data.epoch(epoch)[i] for i in range(len(data))]
    assert sorted(np.concatenate(batches).tolist()) == list(range(examples))
    assert all(len(b) == batch_size for b in batches[:-1])
    if seed is None:
        assert np.concatenate(batches).tolist() == list(range(examples))


def test_epochs_differ_and_repeat_and_follow_the_seed():
    data = jaxche.Batches(np.arange(50), 50, seed=4)
    first, second = data[0].tolist(), data.epoch(1)[0].tolist()
    assert first != second
    assert data.epoch(1)[0].tolist() == second
    assert jaxche.Batches(np.arange(50), 50, seed=5)[0].tolist() == second  # reshuffled by seed + e


def test_arrays_of_a_tree_stay_together():
    data = jaxche.Batches({"x": np.arange(20), "y": {"z": np.arange(20) * 3}}, 6, seed=1)
    for i in range(len(data)):
        np.testing.assert_array_equal(data[i]["x"] * 3, data[i]["y"]["z"])


def test_out_of_range_ends_iteration():
    data = jaxche.Batches(np.arange(7), 3)
    assert len(list(data)) == 3
    with pytest.raises(IndexError, match="batch 3 of 3"):
        data[3]


def test_small_integers_of_numpy_do_not_overflow():
    data = jaxche.Batches(np.arange(700), np.int8(100), np.int8(127))
    wanted = jaxche.Batches(np.arange(700), 100, 127)
    for epoch in (0, 1):
        np.testing.assert_equal(list(data.epoch(epoch)), list(wanted.epoch(epoch)))


def test_random_keys_are_arrays_of_examples(same):
    keys = jax.random.split(jax.random.key(0), 6)
    data = jaxche.Batches({"x": np.arange(6), "key": keys}, 4)
    for batch in data:
        assert batch["key"].dtype == keys.dtype
        same(jax.random.key_data(batch["key"]), jax.random.key_data(keys[batch["x"]]))


def test_indices_are_those_of_a_list():
    data = jaxche.Batches({"x": np.arange(700)}, 3)
    listed = list(data)
    for i in (-1, -len(data), np.int64(2), np.int8(100), jnp.int32(1), True):
        np.testing.assert_array_equal(data[i]["x"], listed[i]["x"])
    for part in (slice(2), slice(-2, None), slice(None, None, 100), slice(5, 5), slice(230, 1000)):
        np.testing.assert_equal(data[part], listed[part])
    with pytest.raises(IndexError, match=f"batch {-len(data) - 1} of {len(data)}"):
        data[-len(data) - 1]
    for i in ("x", 1.0, None, np.arange(2)):
        with pytest.raises(TypeError, match=r"a whole number or a slice, e\.g\. batches\[0\]"):
            data[i]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (({"x": np.ones(3), "y": np.ones(4)}, 2), r"\['x'\]: 3, \['y'\]: 4"),
        (({"x": np.float32(1)}, 2), "scalar"),
        (({"x": np.ones(20), "y": list(range(20))}, 2), r"\['y'\]\[6\]: scalar, \.\.\.; write np\.array\(x\)"),
        (({}, 2), "no arrays"),
        ((np.ones((0, 3)), 2), "data set is empty"),
        ((np.ones(3), 0), "batch_size=0"),
        ((np.ones(3), 1.5), "batch_size=1.5"),
        ((np.ones(3), 2.0), "batch_size=2.0 must be a whole number; write e.g. batch_size=32"),
        ((np.ones(3), None), "batch_size=None must be a whole number"),
        ((np.ones(3), np.inf), "batch_size=inf must be a whole number"),
    ],
)
def test_bad_arrays_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        jaxche.Batches(*arguments)


def whole(indices):
    """Steps on whole batches of epoch 0."""
    return [(Piece((0, i)),) for i in indices]


def test_pieces_of_one_batch_are_read_once_and_joined():
    reads = []

    class Data(list):
        def __getitem__(self, i):
            reads.append(i)
            return list.__getitem__(self, i)

    batches = [{"x": np.arange(10 * i, 10 * i + 4)} for i in range(3)]
    reader = SequenceReader(Data(batches))
    first, second = reader.start(
        [
            [(Piece((0, 0)), Piece((0, 1), 0, 1, 4))],
            [(Piece((0, 1), 1, 4, 4), Piece((0, 2), 0, 1, 2)), (Piece((0, 2), 1, 2, 2),)],
        ]
    )
    assert [b["x"].tolist() for b in first] == [[0, 1, 2, 3, 10]]
    assert [b["x"].tolist() for b in second] == [[11, 12, 13, 20, 21], [22, 23]]
    assert set(reads) == {0, 1, 2}
    assert len(reads) <= 4  # the first one twice: is it the same?
    assert not reader._ready
    # A part of a small batch may have no row: its step is left out.
    (none,) = reader.start([[(Piece((0, 0), 0, 1, 100),)]])
    assert list(none) == []
    reader.close()


@pytest.mark.parametrize(
    ("second", "named"),
    [
        ({"x": np.zeros((2, 5)), "y": np.zeros(2)}, r"\['x'\] has shape \(3,\) in one and \(5,\) in another"),
        ({"x": np.zeros((2, 3))}, r"\['y'\] has shape \(\) in one and none in another"),
    ],
)
def test_rows_of_unlike_batches_are_not_joined(second, named):
    batches = [{"x": np.zeros((4, 3)), "y": np.zeros(4)}, second]
    reader = SequenceReader(batches)
    (feed,) = reader.start([[(Piece((0, 0)), Piece((0, 1)))]])
    with pytest.raises(ValueError, match=named + ".*rows='equal'"):
        list(feed)
    reader.close()


def test_rows_of_batches_of_unlike_trees_are_not_joined():
    reader = SequenceReader([(np.zeros((4, 3)),), [np.zeros((4, 3))]])
    (feed,) = reader.start([[(Piece((0, 0)), Piece((0, 1)))]])
    with pytest.raises(ValueError, match=r"different structures: PyTreeDef\(\(\*,\)\) and PyTreeDef\(\[\*\]\)"):
        list(feed)
    reader.close()


def test_a_feed_that_is_stopped_ends():
    reader = SequenceReader([{"x": np.zeros(2)}] * 3)
    (feed,) = reader.start([whole(range(3))])
    batches = iter(feed)
    next(batches)
    feed.stop()
    assert list(batches) == []
    reader.close()


def test_data_without_a_batch_at_an_index_is_named():
    reader = SequenceReader([np.zeros(2), None, np.zeros(2)])
    (feed,) = reader.start([whole(range(3))])
    with pytest.raises(ValueError, match=r"data\[1\] is None; return a pytree of arrays .* if loss_fn draws"):
        list(feed)
    reader.close()


def test_a_step_on_unlike_batches_is_divided_where_it_may_be():
    arrays = [{"x": np.arange(4 * n).reshape(4, n)} for n in (3, 3, 5)]
    reader = SequenceReader(arrays)
    step = (Piece((0, 0), 1, 2, 2), Piece((0, 1)), Piece((0, 2), 0, 1, 2))
    (feed,) = reader.start([[step, (Piece((0, 2), 1, 2, 2),)]])
    feed.divides = True
    taken = [(batch["x"].shape, feed.taken, feed.ends_step) for batch in feed]
    assert taken == [
        ((6, 3), [((0, 0), slice(2, 4)), ((0, 1), slice(0, 4))], False),
        ((2, 5), [((0, 2), slice(0, 2))], True),
        ((2, 5), [((0, 2), slice(2, 4))], True),
    ]
    assert feed.divided == 1
    reader.close()


def test_a_step_on_batches_with_unlike_static_fields_is_divided_where_it_may_be():
    def batch(n, graphs):
        return jax.tree_util.Partial(graphs, x=np.arange(n))  # the function is static

    arrays, step = [batch(4, max), batch(4, max), batch(4, min)], [Piece((0, i)) for i in range(3)]
    reader = SequenceReader(arrays)
    (feed,) = reader.start([[step]])
    with pytest.raises(ValueError, match=r"structures: .*max.* and .*min.*; make them alike, or write rows='equal'"):
        feed.peek(0)
    feed.divides = True
    taken = [(batch.func, batch.keywords["x"].shape, feed.ends_step) for batch in feed]
    assert taken == [(max, (8,), False), (min, (4,), True)]
    reader.close()


def test_the_reader_reads_on_one_thread_ahead_and_each_batch_once():
    class Data:
        def __init__(self):
            self.reads, self.threads = [], set()

        def __len__(self):
            return 11

        def __getitem__(self, i):
            self.reads.append(i)
            self.threads.add(threading.current_thread().name)
            return i

    data = Data()
    reader = SequenceReader(data, depth=2)
    assert reader.peek((0, 0)) == 0
    feeds = reader.start([whole(range(5)), whole(range(5, 8))])
    assert [list(feed) for feed in feeds] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert sorted(data.reads) == [0, *range(8)]  # the first one twice: is it the same?
    assert threading.current_thread().name not in data.threads
    assert len(data.threads) == 1
    reader.prefetch(feeds, [[(0, 8), (0, 9)], [(0, 10)]])
    assert not reader._ready  # all steps of these feeds have more than two batches
    feeds = reader.start([whole([8]), whole([])])
    reader.prefetch(feeds, [[(0, 9)], [(0, 10)]])
    assert list(feeds[0]) == [8]
    assert reader.peek((0, 10)) == 10
    feeds = reader.start([whole([9])])  # the plan changed: one batch read for nothing, none twice
    assert list(feeds[0]) == [9]
    assert list(reader.start([whole([10])])[0]) == [10]
    assert len(data.reads) == len(set(data.reads)) + 1
    assert not reader._ready
    assert reader.some(2) == [0, 1]
    assert reader.samples(SimpleNamespace(epoch=0, start=3)) == (3, 0)
    assert len(data.threads) == 1
    reader.close()


class Slow(list):
    """Batches that notes which are read, in order."""

    def __init__(self, batches):
        super().__init__(batches)
        self.reads = []

    def __getitem__(self, i):
        self.reads.append(i)
        return super().__getitem__(i)


def test_the_reader_is_woken_for_half_of_what_it_reads_ahead():
    data = Slow(range(40))
    reader = SequenceReader(data)
    reader.nondeterministic = False
    (feed,) = reader.start([whole(range(40))])
    ahead, batches = [], iter(feed)
    for batch in range(14):
        assert next(batches) == batch
        reader.wait()
        ahead.append(len(data.reads) - 1 - batch)
    assert ahead == [7, 6, 5, 4, 7, 6, 5, 4, 7, 6, 5, 4, 7, 6]
    assert data.reads == sorted(set(data.reads))
    reader.close()


def test_the_reader_reads_on_into_the_next_rounds_as_far_as_in_one_round():
    data = Slow(range(40))
    reader = SequenceReader(data, depth=4)
    reader.nondeterministic = False
    feeds = reader.start([whole([0, 1]), whole([2])])
    reader.wait()
    assert data.reads == [0, 2, 1]
    reader.prefetch(feeds, [[(0, i) for i in (3, 4, 6, 7, 9)], [(0, i) for i in (5, 8, 11)]])
    reader.wait()
    assert data.reads == [0, 2, 1, 5, 3, 8, 4, 11]  # four of each, in turn
    assert [list(feed) for feed in feeds] == [[0, 1], [2]]
    reader.prefetch(feeds, [[(0, 3)], [(0, 5)]])  # after the replicas have taken all batches
    reader.wait()
    feeds = reader.start([whole([3, 4]), whole([5])])
    assert [list(feed) for feed in feeds] == [[3, 4], [5]]
    assert len(data.reads) == len(set(data.reads)) == 8  # none is read again
    reader.close()


@pytest.mark.parametrize(
    ("data", "at_hand"),
    [
        ([np.zeros((4, 1 << 20), np.uint8)] * 3, True),
        (tuple(range(3)), True),
        (jaxche.Batches({"x": np.zeros((12, 1 << 18), np.uint8)}, batch_size=4), True),
        (jaxche.Batches({"x": np.zeros((12, 1 << 18), np.uint8), "y": np.zeros(12)}, batch_size=4), False),
        (jaxche.Batches(jax.random.split(jax.random.key(0), 6), batch_size=2), True),
        (jaxche.Batches(np.zeros((6, 2)).view(np.memmap), batch_size=2), False),
        (Slow(range(3)), False),
    ],
    ids=["list", "tuple", "small", "large", "keys", "on disk", "other"],
)
def test_batches_at_hand_are_read_when_they_are_taken(data, at_hand):
    threads, reader = [], SequenceReader(data)
    load = reader.load
    reader.load = lambda key: (threads.append(threading.current_thread().name), load(key))[1]
    reader.prefetch(reader.start([[]]), [[(0, 0), (0, 1)]])
    assert bool(reader._ready) != at_hand
    first, second = iter(reader.start([whole([0, 2])])[0]), iter(reader.start([whole([1])])[0])
    assert len([next(first), next(second), next(first)]) == 3
    assert (set(threads) == {threading.current_thread().name}) == at_hand
    reader.close()


def test_a_batch_at_hand_that_two_replicas_share_is_read_once():
    reader = SequenceReader([np.arange(6)])
    load, reads = reader.load, []
    reader.load = lambda key: (reads.append(key), load(key))[1]
    feeds = reader.start([[[Piece((0, 0), 0, 2, 6)]], [[Piece((0, 0), 2, 6, 6)]]])
    assert [next(iter(feed)).tolist() for feed in feeds] == [[0, 1], [2, 3, 4, 5]]
    assert reads == [(0, 0)]
    reader.close()


def test_an_error_of_the_data_reaches_whoever_takes_the_batch():
    reader = SequenceReader([1])
    (feed,) = reader.start([whole([0, 1])])
    batches = iter(feed)
    assert next(batches) == 1
    with pytest.raises(IndexError):
        next(batches)
    reader.close()


def test_what_failed_to_read_is_read_again_when_asked_again():
    class Flaky:
        tries = 0

        def __len__(self):
            return 8

        def __getitem__(self, i):
            self.tries += 1
            if self.tries == 1:
                raise OSError("busy")
            return i

    reader = SequenceReader(Flaky())
    with pytest.raises(OSError, match="busy"):
        reader.peek((0, 7))
    assert reader.peek((0, 7)) == 7
    reader.close()


def test_what_failed_ahead_of_time_is_read_again_when_it_is_taken():
    class Down:
        is_down = True

        def __len__(self):
            return 8

        def __getitem__(self, i):
            if self.is_down and i:
                raise OSError("busy")
            return i

    data = Down()
    reader = SequenceReader(data)
    reader.prefetch(reader.start([[]]), [[(0, 5), (0, 6)]])
    reader.wait()
    data.is_down = False
    assert [reader.take((0, i)) for i in (5, 6)] == [5, 6]
    reader.close()


def test_a_mask_of_a_batch_is_not_lost():
    """The batch is refused for it: see tests/sharding/test_checks.py."""
    masked = np.ma.masked_array(np.ones((4, 3)), mask=True)
    for data in ([masked], Slow([masked])):
        assert np.ma.is_masked(reading(data)(0))


def test_a_grain_pipeline_is_data(devices):
    rng = np.random.default_rng(0)
    rows = [{"x": x, "y": np.float32(x.sum())} for x in rng.normal(size=(40, 3)).astype(np.float32)]
    data = grain.MapDataset.source(rows).seed(0).shuffle().map(lambda r: r | {"x": r["x"] * 2}).batch(4)
    trainer = jaxche.Trainer(
        lambda w, b: jnp.mean((b["x"] @ w - b["y"]) ** 2), optax.sgd(0.05), replicas=devices[:2], policy="cadence"
    )
    state, history = trainer.fit(trainer.init(jnp.zeros(3)), data, epochs=20, progress=False)
    assert sum(info.examples for info in history) == 20 * 40
    np.testing.assert_allclose(trainer.params(state), np.full(3, 0.5), atol=0.05)
    assert jax.tree.leaves(state.params)[0].shape == (2, 3)


@pytest.mark.parametrize(
    "of", [list, tuple, iter, lambda batches: dict(enumerate(batches))], ids=lambda of: of.__name__
)
def test_batches_on_a_mesh_with_explicit_axes_are_those_of_their_values(devices, of):
    on_mesh = jax.sharding.NamedSharding(
        jax.make_mesh((2,), ("data",), devices=devices[:2]), jax.sharding.PartitionSpec("data")
    )
    rows = np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32)
    trainer = jaxche.Trainer(
        lambda w, batch: jnp.mean((batch["x"] @ w - 1) ** 2),
        optax.sgd(0.1),
        replicas=devices[:2],
        policy="sync",
        rows="equal",
    )

    def end(batches):
        state, _ = trainer.fit(trainer.init(jnp.zeros(3)), of(batches), progress=False)
        return np.asarray(trainer.params(state)), trainer.evaluate(state, of(batches))

    (placed, placed_loss), (own, own_loss) = (
        end([{"x": put(x)} for x in rows]) for put in (lambda x: jax.device_put(x, on_mesh), np.array)
    )
    np.testing.assert_array_equal(placed, own)
    assert placed_loss == own_loss


def test_a_dict_of_hugging_face_data_sets_gets_the_line_to_write():
    splits = type("DatasetDict", (dict,), {"__module__": "datasets.dataset_dict"})
    with pytest.raises(ValueError, match=r"DatasetDict of 'train', 'test'; take one, dataset = data\['train'\]"):
        checked_length(splits(train=[], test=[]))
