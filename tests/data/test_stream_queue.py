"""The queue of a stream: one thread, bounded, in order, and back to any position."""

import itertools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxche
from jaxche.cadence import Piece, interleave
from jaxche.data._stream_queue import Place, StreamQueue


def batch(i):
    return np.full(2, i)


def steps(places, epoch=0):
    return [(Piece((epoch, place)),) for place in places]


def ids(batches):
    return [int(x[0]) for x in batches]


class Source:
    """Batches of every epoch; counts what was opened and read, by which threads."""

    def __init__(self, length=30):
        self.length, self.opened, self.reads, self.threads = length, [], [], set()
        self.has_read = threading.Event()

    def __call__(self, epoch):
        self.opened.append(epoch)
        for i in range(self.length):
            self.reads.append((epoch, i))
            self.has_read.set()
            self.threads.add(threading.get_ident())
            yield batch(1000 * epoch + i)


class Stateful:
    """An iterator with its position as state, like those of Grain."""

    def __init__(self, length=30):
        self.length, self.at, self.reads = length, 0, []

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        self.reads.append(self.at - 1)
        return batch(self.at - 1)

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state.pop("at")  # it may change the state that it is given


class Restorable:
    """Like a grain.IterDataset: makes iterators that have a state."""

    def __iter__(self):
        return Stateful()


class Loader:
    """An iterable with the state of its last iteration, like torchdata's StatefulDataLoader."""

    def __init__(self, length=30):
        self.length, self.at, self.start, self.reads = length, 0, 0, []

    def __iter__(self):
        self.at, self.start = self.start, 0
        while self.at < self.length:
            self.at += 1
            self.reads.append(self.at - 1)
            yield batch(self.at - 1)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


@pytest.fixture
def queue():
    made = []

    def make(source, **arguments):
        made.append(StreamQueue(jaxche.Stream(source, **arguments)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_replicas_see_their_last_batches_before_they_take_them(queue):
    """Two of each, with one batch ready for each: neither takes one before it has seen both."""
    one = queue(Source(20), prefetch=1)
    one.seek(Place(0, 0))
    feeds = one.start([steps(own) for own in interleave([2, 2])], 4, ahead=4)
    with ThreadPoolExecutor(2) as replicas:
        seen = [replicas.submit(lambda feed=feed: [feed.peek(i) for i in range(2)]) for feed in feeds]
        try:
            found = [future.result(timeout=10) for future in seen]
        finally:
            one.stop()
    assert sorted(i for own in found for i in ids(itertools.chain.from_iterable(own))) == [0, 1, 2, 3]


@settings(max_examples=60)
@given(st.integers(0, 25), st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=6), st.integers(1, 3))
def test_replicas_take_every_batch_once_in_order_within_the_bound(length, rounds, prefetch):
    source, taken, found = Source(length), 0, []
    queue = StreamQueue(jaxche.Stream(source, prefetch=prefetch))
    with ThreadPoolExecutor(3) as replicas:
        for counts in rounds:
            queue.seek(Place(0, taken))
            feeds = queue.start(
                [steps(taken + place for place in own) for own in interleave(counts)], taken + sum(counts)
            )
            results = list(replicas.map(lambda feed: ids(feed), feeds))
            assert all(len(own) <= count and own == sorted(own) for own, count in zip(results, counts, strict=True))
            now = sorted(itertools.chain.from_iterable(results))
            assert now == list(range(taken, min(taken + sum(counts), length)))
            found += now
            taken += len(now)
            assert queue.length(taken) == (length if taken == length else None)
            if taken == length:
                break
    assert found == list(range(taken))
    assert source.opened == [0] * bool(rounds)
    assert len(source.threads) <= 1
    assert len(source.reads) <= taken + 3 * prefetch
    queue.close()


def settled(queue, reads):
    """Whether the source is read so often, however late, and not read on."""
    source = queue.stream.source
    while len(source.reads) < reads:
        if not source.has_read.wait(20):
            return False
        source.has_read.clear()
    queue._pool.submit(int).result(20)  # after all that its one thread has to read
    return len(source.reads) == reads


def test_no_more_batches_wait_than_the_bound(queue):
    one = queue(Source(), prefetch=2)
    one.seek(Place(0, 0))
    slow, fast = one.start([steps([0, 2, 4, 6]), steps([1, 3, 5, 7])], 8)
    assert settled(one, 4)
    slow, fast = iter(slow), iter(fast)
    assert ids(itertools.islice(fast, 2)) == [1, 3]
    assert settled(one, 6)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(lambda: ids(fast))  # 5 is there; 7 comes once the slow one has taken some of 0, 2, 4, 6
        assert settled(one, 7)
        assert not later.done()
        assert ids(slow) == [0, 2, 4, 6]
        assert later.result() == [5, 7]


def test_a_round_that_a_replica_leaves_early_goes_on_where_it_stopped(queue):
    source = Source()
    one = queue(source)
    one.seek(Place(0, 0))
    (feed,) = one.start([steps(range(10))], 10)
    assert ids(itertools.islice(feed, 3)) == [0, 1, 2]
    assert one.length(3) is None
    one.seek(Place(0, 3))
    (feed,) = one.start([steps(range(3, 8))], 8)
    assert ids(feed) == [3, 4, 5, 6, 7]
    assert source.opened == [0]


def test_batches_of_other_processes_are_dropped(queue):
    source = Source(20)
    one = queue(source, prefetch=1)
    one.seek(Place(0, 0))
    (feed,) = one.start([steps([2, 9])], 12)
    assert ids(feed) == [2, 9]
    assert one.length(12) is None
    one.seek(Place(0, 12))
    (feed,) = one.start([steps([19])], 20)
    assert ids(feed) == [19]
    assert one.length(20) == 20
    assert source.opened == [0]


def test_pieces_share_a_batch_and_joined_batches_are_all_ready(queue):
    one = queue(Source(5), prefetch=1)
    one.seek(Place(0, 0))
    assert one.left(4) == 4
    first, second = one.start(
        [
            [(Piece((0, 0)), Piece((0, 1), 0, 1, 2))],
            [(Piece((0, 1), 1, 2, 2), Piece((0, 2)), Piece((0, 3)))],
        ],
        4,
        joined=4,
    )
    assert [x.tolist() for x in second] == [[1, 2, 2, 3, 3]]
    assert [x.tolist() for x in first] == [[0, 0, 1]]
    one.seek(Place(0, 4))
    assert one.left(4) == 1


def test_a_round_can_be_kept_and_run_again(queue):
    one = queue(Source(4)(0), prefetch=1)  # cannot be read again
    for _ in range(2):
        one.seek(Place(0, 0))
        feeds = one.start([steps([0]), steps([1])], 2, keeps=True)
        assert [ids(feed) for feed in feeds] == [[0], [1]]
        assert one.length(2) is None


def test_the_next_epoch_is_opened_after_the_end(queue):
    source = Source(3)
    one = queue(source)
    for epoch in range(3):
        one.seek(Place(epoch, 0))
        (feed,) = one.start([steps(range(5), epoch)], 5)
        assert ids(feed) == [1000 * epoch + i for i in range(3)]
        assert one.length(3) == 3
    assert source.opened == [0, 1, 2]


def take(queue, taken, count, epoch=0, state=None):
    queue.seek(Place(epoch, taken, state=state))
    (feed,) = queue.start([steps(range(taken, taken + count), epoch)], taken + count)
    return ids(feed)


@pytest.mark.parametrize("make", [Restorable, Loader, Stateful])
def test_a_source_with_a_state_goes_to_any_position_and_reads_no_batch_twice(queue, make, caplog):
    one = queue(make())
    assert take(one, 0, 7) == list(range(7))
    assert one.length(7) is None
    state = one.state(7)
    assert state == {"at": 7}  # of what was taken, not of what was read ahead
    source = make()
    other = queue(source)
    assert take(other, 7, 5, state=state) == list(range(7, 12))
    assert other.length(12) is None
    assert other.first[0] == 0
    assert state == {"at": 7}
    if hasattr(source, "reads"):
        assert source.reads[:2] == [0, 7]  # the first, as a whole batch, and the next
    # Back to the start of the last round: for another round from the same state, and after an error.
    assert take(other, 7, 2) == [7, 8]
    assert take(other, 7, 2) == [7, 8]
    other.stop()
    assert take(other, 7, 2) == [7, 8]
    # Back to that of the round before, whose merge has failed elsewhere.
    assert take(other, 9, 2) == [9, 10]
    assert take(other, 7, 2) == [7, 8]
    assert caplog.messages == []


@pytest.mark.parametrize("make", [Restorable, Loader])
def test_a_source_with_a_state_goes_back_over_the_end_of_an_epoch(queue, make, caplog):
    """The merge of the last round of an epoch has failed elsewhere."""
    one = queue(make())
    for _ in range(2):
        assert take(one, 0, 20) == list(range(20))
        for _ in range(2):
            assert take(one, 20, 15) == list(range(20, 30))
            assert one.length(30) == 30
            assert take(one, 0, 2, epoch=1) == [0, 1]
    assert take(one, 2, 2, epoch=1) == [2, 3]
    assert caplog.messages == []
    assert min(one._states)[0] == 1  # no more than the last round of an epoch stays


def test_an_iterator_with_a_state_goes_back_to_its_start(queue):
    one = queue(Stateful())
    assert take(one, 0, 3) == [0, 1, 2]
    one.stop()
    assert take(one, 0, 3) == [0, 1, 2]


def test_without_a_state_batches_are_read_again_and_skipped(queue, caplog):
    source = Source()
    with caplog.at_level(logging.WARNING, logger="jaxche"):
        assert take(queue(source), 6, 3, epoch=2) == [2006, 2007, 2008]
    assert caplog.messages == [
        "6 batches of the stream were read again and skipped, to continue with batch 6 of epoch 2"
    ]
    with pytest.raises(ValueError, match="the stream has 30 batches in epoch 0, but the state is after batch 31"):
        take(queue(source), 31, 1)


def test_an_iterator_continues_where_it_stands_if_asked_to(queue, caplog):
    source = Source()(0)
    assert ids(itertools.islice(source, 6)) == list(range(6))
    one = queue(source, resume="continue")
    assert take(one, 6, 3) == [6, 7, 8]
    assert caplog.messages == [
        "the position of the stream is not restored; its next batch is used as batch 6 of epoch 0, so batches may "
        "be repeated or lost"
    ]
    assert one.length(9) is None
    one.stop()
    lost = take(one, 9, 1)
    assert lost[0] > 9
    assert caplog.messages[1] == "batches of the stream that were read after batch 9 are lost"


def test_an_iterator_that_was_read_is_refused(queue):
    again = Source(4)(0)
    for source in (Source(4)(0), lambda epoch: again):
        one = queue(source)
        assert take(one, 0, 4) == [0, 1, 2, 3]
        assert one.length(4) == 4
        with pytest.raises(
            ValueError, match="a generator that was read already and cannot return to batch 0 of epoch 1"
        ):
            take(one, 0, 1, epoch=1)


def test_a_stream_that_had_ended_is_not_read_to_its_end_again(queue):
    source = Source(5)
    one = queue(source)
    one.seek(Place(0, 5, ended=True))
    assert one.next_batches(1) == []
    assert one.first[0] == 0
    assert one.length(5) == 5
    assert source.reads == [(0, 0)]


def test_an_error_of_the_source_is_raised_where_its_batch_is_taken_and_it_is_read_again(queue):
    errors = [OSError("disk on fire")]

    def source(epoch):
        for i in range(9):
            if i == 4 and errors:
                raise errors.pop()
            yield batch(i)

    one = queue(source)
    assert take(one, 0, 4) == [0, 1, 2, 3]
    assert one.length(4) is None  # read ahead: nothing was lost yet
    for _ in range(2):
        one.seek(Place(0, 4))  # the error was not raised yet
    (feed,) = one.start([steps([4, 5])], 6)
    with pytest.raises(OSError, match="disk on fire"):
        list(feed)
    assert take(one, 4, 2) == [4, 5]


def test_a_source_that_exits_ends_the_wait_for_its_batch(queue):
    def source(epoch):
        yield batch(0)
        raise SystemExit(3)

    one = queue(source)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(take, one, 0, 2)
        try:
            with pytest.raises(SystemExit):
                found.result(timeout=10)
        finally:
            one.stop()


def test_a_state_that_cannot_be_copied_is_an_error_of_the_source(queue):
    class Locked(Stateful):
        def get_state(self):
            return threading.Lock()

    class Locks:
        def __iter__(self):
            return Locked()

    one = queue(Locks())
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(take, one, 0, 1)
        try:
            with pytest.raises(TypeError, match="cannot pickle"):
                found.result(timeout=10)
        finally:
            one.stop()


def test_what_is_no_batch_is_an_error_of_the_source(queue):
    one = queue([{"text": ["a"]}])
    one.seek(Place(0, 0))
    with pytest.raises(ValueError, match=r"batch\['text'\] is texts"):
        one.next_batches(1)


def test_a_stop_ends_the_wait_for_batches_that_a_failed_replica_does_not_take(queue, monkeypatch):
    one, waiting = queue(Source(), prefetch=1), threading.Event()
    one.seek(Place(0, 0))
    failed, other = one.start([steps([0, 1, 2]), steps([3])], 4)
    assert settled(one, 2)
    wait_for = one._changed.wait_for
    monkeypatch.setattr(one._changed, "wait_for", lambda condition: [waiting.set(), wait_for(condition)])
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lambda: ids(other))
        assert waiting.wait(10)
        assert not waits.done()
        failed.stop()
        assert waits.result() == []
    assert one.length(4) is None


def test_a_place_that_is_left_while_it_is_read_adds_nothing(queue):
    started, go_on = threading.Event(), threading.Event()

    def source(epoch):
        started.set()
        go_on.wait(10)
        yield batch(10 * epoch)

    one = queue(source)
    one.seek(Place(0, 0))
    assert started.wait(10)
    one.seek(Place(3, 0))
    go_on.set()
    assert take(one, 0, 1, epoch=3) == [30]
    assert one.length(1) == 1
