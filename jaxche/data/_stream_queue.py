"""The next batches of a stream: read in order on one thread, bounded in number, from a restored position."""

from __future__ import annotations

import collections
import copy
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxche.data._batches import Feed, Key, Step, Threads
from jaxche.data._stream import Stream, as_batch
from jaxche.messages import type_of

_log = logging.getLogger("jaxche")


class Place(NamedTuple):
    """A place in the stream of one process."""

    epoch: int
    taken: int  # batches before it in the epoch
    ended: bool = False
    state: Any = None  # of the iterator, from a checkpoint


class StreamQueue:
    """The next batches of a stream, at most ``prefetch`` for each local replica or the joined batches of an update.

    A replica that needs a later batch waits until the others have taken theirs. The source is used on one thread only.
    """

    depth = 0  # a feed requests nothing: the thread reads on by itself

    def __init__(self, stream: Stream):
        self.stream = stream
        # The first batch of an epoch, if this process has read it.
        self.first: Any = None
        self._pool = Threads(1, thread_name_prefix="jaxche-stream")
        # For the thread alone: the iterable and the iterator of the epoch, and the iterable if it can be read once.
        self._iterable: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._read_once: Any = None
        # All below is guarded by this condition.
        self._changed = threading.Condition()
        self._limit = stream.prefetch
        self._epoch = -1
        self._target: Place | None = None  # to open before the next batch is read
        self._batches: dict[int, Any] = {}  # that are ready
        # The next batch to read, and the first of those that are ready or still to be read.
        self._next = self._lowest = 0
        self._length: int | None = None  # batches in the epoch, once its end is read
        self._states: dict[Key, Any] = {}  # of the iterator, by the epoch and the number of batches before it
        self._uses: collections.Counter[int] = collections.Counter()  # pieces that are taken in this round
        self._round_end, self._keeps = 0, False
        self._place: Key = (0, 0)  # of the last seek
        self._error: BaseException | None = None
        self._is_raised = self._is_running = self._is_stopped = False

    def seek(self, place: Place) -> None:
        """Go to a place; batches that were read ahead stay ready if they come after it."""
        with self._changed:
            failed = self._is_stopped or (self._error is not None and self._is_raised)
            here = (place.epoch, place.taken)
            # With those of the round before: in an elastic run the next place may be its start.
            states = {key: state for key, state in self._states.items() if key >= min(self._place, here)}
            if not failed and self._epoch == place.epoch and self._lowest <= place.taken <= self._next:
                self._batches = {i: batch for i, batch in self._batches.items() if i >= place.taken}
                self._states, self._lowest = states, place.taken
            else:
                if place.state is None:
                    place = place._replace(state=states.get(here))
                self._target, self._epoch = place, place.epoch
                self._batches, self._length = {}, None
                self._next = self._lowest = place.taken
                self._states = {key: state for key, state in states.items() if key < here}
                if place.state is not None:
                    self._states[here] = place.state
                self._error, self._is_raised, self._is_stopped = None, False, False
            self._uses.clear()
            self._round_end, self._place = place.taken, here
            self._read_on()

    def start(
        self, steps: Sequence[Sequence[Step]], end: int, joined: int = 0, keeps: bool = False, ahead: int = 0
    ) -> list[Feed]:
        """Start a round up to batch ``end``: one feed per local replica.

        Batches that no local replica takes are dropped. With ``keeps`` all of the round stay ready, and ``ahead`` more
        batches are ready, because replicas read their last ones before they take them.
        """
        feeds: list[Feed] = [Feed(self, own) for own in steps]
        with self._changed:
            self._limit = max(self.stream.prefetch * len(feeds), joined) + ahead
            self._limit += end - self._round_end if keeps else 0
            self._uses = collections.Counter(piece.key[1] for feed in feeds for step in feed.steps for piece in step)
            self._round_end, self._keeps = end, keeps
            for index in [i for i in self._batches if i < end]:
                self._drop_unused(index)
            self._read_on()
        return feeds

    def left(self, count: int) -> int:
        """How many of the next ``count`` batches the epoch still has; to be called before a round starts."""
        with self._changed:
            first, self._limit = self._round_end, max(self._limit, count)
            self._wait_for(first + count - 1)
            return count if self._length is None else max(0, min(count, self._length - first))

    def length(self, taken: int) -> int | None:
        """The batches in the epoch, if it has none after the first ``taken``; waits for the next one."""
        with self._changed:
            self._wait_for(taken)
            return self._length if self._length is not None and self._length <= taken else None

    def take(self, key: Key) -> Any:
        """The batch, or None after the end; it stays ready while other pieces of it are to be taken."""
        batch, index = self.peek(key), key[1]
        with self._changed:
            self._uses[index] -= 1
            if batch is not None:
                self._drop_unused(index)
            self._read_on()
        return batch

    def peek(self, key: Key) -> Any:
        """The batch, which stays ready, or None after the end."""
        with self._changed:
            self._wait_for(key[1])
            if key[1] not in self._batches and self._error is not None and not self._is_stopped:
                self._is_raised = True
                raise self._error
            return self._batches.get(key[1])

    def next_batches(self, count: int) -> list[Any]:
        """The next batches, which stay ready: at most ``count``, as many as fit, and fewer at the end of the epoch."""
        first = self._lowest
        found = [self.peek((self._epoch, first + i)) for i in range(min(count, self._limit))]
        return [batch for batch in found if batch is not None]

    def state(self, taken: int) -> Any:
        """The state of the iterator after the first ``taken`` batches of the epoch; None if it has no state."""
        with self._changed:
            return self._states.get((self._epoch, taken))

    def request(self, key: Key) -> None:
        """Do nothing: the thread reads on by itself."""

    def stop(self) -> None:
        """End a round in which a replica failed: the others no longer wait until it takes its batches."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _drop_unused(self, index: int) -> None:
        if self._uses[index] <= 0 and not self._keeps:
            del self._batches[index]
            self._lowest = max(self._lowest, index + 1)

    def _wait_for(self, index: int) -> None:
        """Wait until the batch is ready, or until no batch comes any more."""
        self._read_on()
        self._changed.wait_for(lambda: index in self._batches or self._is_over(index))

    def _is_over(self, index: int) -> bool:
        ended = self._length is not None and index >= self._length
        return ended or self._error is not None or self._is_stopped

    def _has_work(self) -> bool:
        is_over = self._length is not None or self._error is not None or self._is_stopped
        return not is_over and (self._target is not None or len(self._batches) < self._limit)

    def _read_on(self) -> None:
        if not self._is_running and self._has_work():
            self._is_running = True
            self._pool.submit(self._run)

    def _run(self) -> None:
        """Read until enough batches are ready; on the thread."""
        while True:
            with self._changed:
                if not self._has_work():
                    self._is_running = False
                    return
                target, self._target = self._target, None
            start = batch = state = error = None
            try:
                if target is not None:
                    start = self._open(target)
                batch = as_batch(next(self._iterator))
                state = self._iterator_state()
            except StopIteration:
                pass
            except BaseException as e:  # of sys.exit(), too: others wait for the batch
                error = e
            with self._changed:
                if self._target is None:  # else it was read at a place that was left
                    if start is not None:
                        self._states[self._epoch, 0] = start
                    self._add(batch, state, error)

    def _add(self, batch: Any, state: Any, error: BaseException | None) -> None:
        """Add what was read: a batch, the end of the epoch if it is None, or an error."""
        if error is not None:
            self._error = error
        elif batch is None:
            self._length = self._next
        else:
            index, self._next = self._next, self._next + 1
            if index == 0:
                self.first = batch
            if state is not None:
                self._states[self._epoch, self._next] = state
            self._batches[index] = batch
            if index < self._round_end:
                self._drop_unused(index)
        self._changed.notify_all()

    def _iterator_state(self) -> Any:
        iterator: Any = self._iterator
        if hasattr(iterator, "get_state"):
            return copy.deepcopy(iterator.get_state())
        if hasattr(self._iterable, "state_dict") and hasattr(self._iterable, "load_state_dict"):
            return copy.deepcopy(self._iterable.state_dict())
        return None

    def _open(self, place: Place) -> Any:
        """Open an epoch at a place in it, on the thread; returns the state of an iterator that can be read once."""
        iterable = self.stream.iterable(place.epoch)
        if iterable is self._read_once:
            self._open_again(iterable, place)
            return None
        self._iterable, self._iterator = iterable, iter(iterable)
        self._read_once = iterable if hasattr(iterable, "__next__") else None
        if place.taken:
            self._restore(place)
        return None if place.taken or self._read_once is None else self._iterator_state()

    def _restore(self, place: Place) -> None:
        """Go to a place in the epoch that was opened."""
        state, iterator = copy.deepcopy(place.state), self._iterator
        batches = map(as_batch, iterator)
        if place.ended:
            self.first, self._iterator = next(batches, None), iter(())
        elif state is not None and hasattr(iterator, "set_state"):
            self.first = next(batches, None)
            iterator.set_state(state)  # type: ignore[attr-defined]
        elif state is not None and hasattr(self._iterable, "load_state_dict"):
            self.first = next(batches, None)
            self._iterable.load_state_dict(state)
            self._iterator = iter(self._iterable)
        elif self.stream.resume == "skip":
            self._skip(place)
        else:
            _log.warning(
                "the position of the stream is not restored; its next batch is used as batch %s of epoch %s, so "
                "batches may be repeated or lost",
                place.taken,
                place.epoch,
            )

    def _open_again(self, iterator: Any, place: Place) -> None:
        """Go to another place of an iterator that has been read."""
        if place.state is not None and hasattr(iterator, "set_state"):
            iterator.set_state(copy.deepcopy(place.state))
        elif self.stream.resume == "continue" and place.taken:
            _log.warning("batches of the stream that were read after batch %s are lost", place.taken)
        else:
            line = ", or go on with its next batches: jaxche.Stream(batches, resume='continue')" if place.taken else ""
            raise ValueError(
                f"the stream is {type_of(iterator)} that was read already and cannot return to batch "
                f"{place.taken} of epoch {place.epoch}; pass a function that makes a new one: "
                f"jaxche.Stream(lambda epoch: batches(seed=epoch)){line}"
            )
        self._iterator = iterator

    def _skip(self, place: Place) -> None:
        """Read the batches before a place, and keep the first."""
        skipped = 0
        for skipped, batch in zip(range(1, place.taken + 1), self._iterator, strict=False):
            if skipped == 1:
                self.first = as_batch(batch)
        if skipped < place.taken:
            raise ValueError(
                f"the stream has {skipped} batches in epoch {place.epoch}, but the state is after batch "
                f"{place.taken}; pass the data of the first run"
            )
        _log.warning(
            "%s batches of the stream were read again and skipped, to continue with batch %s of epoch %s",
            place.taken,
            place.taken,
            place.epoch,
        )
