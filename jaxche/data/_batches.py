"""Data as a sequence of batches: arrays in memory, and a reader that prefetches."""

from __future__ import annotations

import collections
import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Protocol, SupportsIndex, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.cadence import Piece, RoundPlan
from jaxche.data._checks import is_nondeterministic, refuse_other_length, sequence_of
from jaxche.messages import brief, short_traceback, type_of, whole_number
from jaxche.sharding import batch_size, check_range, without_axes


def checked_length(data: Any) -> int:
    """The number of batches in an epoch, at least one."""
    # An array of objects may hold batches.
    if hasattr(data, "__array__") and hasattr(data, "shape") and getattr(data, "dtype", None) != np.dtype(object):
        raise ValueError(
            f"data is one array of shape {tuple(data.shape)}, each row of which would be a batch; write "
            "jaxche.Batches(array, batch_size=32), or list(array) if each row is a batch"
        )
    arrays = [x for x in data[:8] if hasattr(x, "ndim")] if type(data) in (list, tuple) else []
    # Batches of one data set have one kind of number, of any width, and as many axes.
    if len({(x.ndim, str(getattr(x, "dtype", "")).rstrip("0123456789")) for x in arrays}) > 1:
        shapes = ", ".join(str(tuple(x.shape)) for x in arrays)
        raise ValueError(
            f"data is {type_of(data)} of arrays of the shapes {shapes}, each of which would be a batch; write "
            "jaxche.Batches((x, y), batch_size=32), with the arrays as (x, y)"
        )
    several = data.values() if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else ()
    if any(isinstance(one, Batches) for one in several):
        raise ValueError(
            f"data is {type_of(data)} of data sets, and one is expected; evaluate the others one by one, by "
            "trainer.evaluate(state, other), also in a callback of fit"
        )
    if isinstance(data, Mapping) and type(data).__module__.partition(".")[0] == "datasets":
        raise ValueError(
            f"data is a Hugging Face {type(data).__name__} of {', '.join(map(repr, data))}; take one, dataset = "
            f"data[{next(iter(data), '')!r}], and write jaxche.Stream(lambda epoch: dataset.shuffle(seed=epoch)"
            ".with_format('numpy').iter(batch_size=32))"
        )
    if (isinstance(data, Mapping) and 0 not in data) or (isinstance(data, tuple) and hasattr(data, "_fields")):
        names = list(getattr(data, "_fields", data))
        raise ValueError(
            f"data is {type_of(data)} of {', '.join(map(repr, names[:8]))}, not a sequence of batches; write "
            "jaxche.Batches(arrays, batch_size=32)"
        )
    if isinstance(data, type):
        raise ValueError(
            f"data={data.__name__} is a class, not a sequence of batches; write data={data.__name__}(...), with its "
            "arguments, e.g. jaxche.Batches(arrays, batch_size=32)"
        )
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        if callable(data):
            raise ValueError(
                f"data={brief(data)} is a function; if it returns the batches of an epoch, write "
                "jaxche.Stream(lambda epoch: batches(epoch)), with it as batches"
            )
        raise ValueError(
            f"data is {type_of(data)}; the trainer needs len(data) and data[i], e.g. "
            "jaxche.Batches({'x': x, 'y': y}, batch_size=32) or a grain.MapDataset; or an iterable of batches"
        )
    if type(data).__module__.partition(".")[0] == "datasets" and hasattr(data, "features"):
        raise ValueError(
            f"data is a Hugging Face {type(data).__name__}, whose data[i] may be one example; write jaxche.Stream("
            "lambda epoch: dataset.shuffle(seed=epoch).with_format('numpy').iter(batch_size=32)), or of "
            "a dataset.batch(32) grain.MapDataset.source(dataset.with_format('numpy'))"
        )
    if isinstance(data, str | bytes):
        raise ValueError(
            f"data={data!r} is a text, not a sequence of batches; load the arrays, and write "
            "jaxche.Batches(arrays, batch_size=32)"
        )
    if any(one.__module__.startswith("torch.utils.data") for one in type(data).__mro__):
        raise ValueError(
            f"data is a PyTorch {type(data).__name__}, whose data[i] is one example; write "
            "torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True), or batch_size=None if it is a batch"
        )
    if len(data) == 0:
        raise ValueError("len(data) is 0: the data set is empty; give at least one batch")
    return len(data)


def reading(sequence: Any) -> Callable[[int], Any]:
    """A function that reads a batch; it copies the arrays of sources that may read the next batch into them."""
    is_own, may_reuse = type(sequence) is Batches, type(sequence) not in (list, tuple)

    def own(x: Any) -> Any:
        # A masked array, whose mask np.array would lose, is refused as a batch.
        may_change = may_reuse and isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray)
        return np.array(x) if may_change else without_axes(x)

    def read(index: int) -> Any:
        try:
            batch = sequence[index]
        except StopIteration as error:  # it would end the loop over the batches
            raise ValueError(
                f"data[{index}] raised StopIteration; if it returns the next batch of an iterator, read all first: "
                "data = list(iterator), or pass the iterator itself"
            ) from error
        if not is_own:
            batch = jax.tree.map(own, batch)
        if any(isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.itemsize > 4 for x in jax.tree.leaves(batch)):
            try:
                check_range(batch)
            except ValueError as error:
                error.add_note(f"it is data[{index}] of its epoch")
                raise
        return batch

    return read


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@dataclass(frozen=True, repr=False, eq=False)
class Batches:
    """Arrays in memory as a sequence of shuffled batches.

    There are ``len(batches)`` batches, and ``batches[i]`` is a pytree of arrays with a leading batch axis. As in a
    list, ``batches[-1]`` is the last one, and a slice is a list of batches. The order of epoch ``e`` is the permutation
    with seed ``seed + e``, the same on every host and in every run. No example is left out: the last batch of an epoch
    is smaller if ``batch_size`` does not divide the number of examples.

    Args:
      arrays: pytree of arrays with leading axes (examples) of equal length.
      batch_size: examples per batch.
      seed: seed of the permutation of epoch 0; ``None`` keeps the order of the arrays.

    Raises:
      ValueError: no arrays, no examples, leading axes that differ, or a batch size below 1.

    Example:
      >>> import jaxche, numpy as np
      >>> data = jaxche.Batches({"x": np.arange(10)}, batch_size=4, seed=0)
      >>> len(data), [len(data[i]["x"]) for i in range(3)]
      (3, [4, 4, 2])
      >>> sorted(np.concatenate([data.epoch(5)[i]["x"] for i in range(3)]).tolist()) == list(range(10))
      True
    """

    arrays: Any
    batch_size: int
    seed: int | None = 0
    _epoch: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        sizes = {
            jax.tree_util.keystr(path) or "arrays": np.shape(leaf)[:1]
            for path, leaf in jax.tree.leaves_with_path(self.arrays)
        }
        if len(set(sizes.values())) != 1 or () in sizes.values():
            # A list is a tree of its numbers.
            line = "; write np.array(x) for a list x of numbers" if () in sizes.values() else ""
            listed = [f"{name}: {size[0] if size else 'scalar'}" for name, size in sizes.items()]
            shown = ", ".join([*listed[:8], *["..."] * (len(listed) > 8)])
            raise ValueError(f"arrays must share one leading axis of examples; got {shown or 'no arrays'}{line}")
        if self._examples == 0:
            raise ValueError("arrays hold no examples: the data set is empty")
        object.__setattr__(self, "batch_size", whole_number("batch_size", self.batch_size, 1, "batch_size=32"))
        if self.seed is not None:
            seed = whole_number("seed", self.seed, 0, "seed=0, or seed=None for the order of the arrays")
            object.__setattr__(self, "seed", seed)

    def __repr__(self) -> str:
        return f"Batches({self._examples:,} examples in {len(self):,} batches of {self.batch_size}, seed={self.seed})"

    @property
    def _examples(self) -> int:
        return len(jax.tree.leaves(self.arrays)[0])

    @cached_property
    def _order(self) -> np.ndarray:
        if self.seed is None:
            return np.arange(self._examples)
        return np.random.default_rng(self.seed + self._epoch).permutation(self._examples)

    def epoch(self, e: int) -> Batches:
        """The sequence of epoch ``e``."""
        return self if e == self._epoch else Batches(self.arrays, self.batch_size, self.seed, e)

    def __len__(self) -> int:
        return -(-self._examples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, i: SupportsIndex | slice) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(len(self))[i]]
        try:
            index = operator.index(i)
        except TypeError:
            raise TypeError(f"batches[{brief(i)}]: the index is a whole number or a slice, e.g. batches[0]") from None
        if not -len(self) <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        i = index % len(self)
        rows = self._order[i * self.batch_size : (i + 1) * self.batch_size]

        def cut(x: Any) -> Any:
            # A masked array, whose mask np.asarray would lose, is refused as a batch.
            return x[rows] if _is_key(x) or isinstance(x, np.ma.MaskedArray) else np.asarray(x)[rows]

        return jax.tree.map(cut, self.arrays)


Batches.__init__ = short_traceback(Batches.__init__)


# The settings of JAX that change or refuse numbers. Their context managers set them for one thread only.
_SETTINGS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
}
_GUARDS = [f"jax_transfer_guard_{what}" for what in ("host_to_device", "device_to_device", "device_to_host")]


class Threads(ThreadPoolExecutor):
    """Threads whose calls have the JAX settings of the thread that submits them, and copy to and from devices."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        values = [(context, getattr(jax.config, name)) for name, context in _SETTINGS.items()]

        def call() -> Any:
            with ExitStack() as stack:
                for context, value in values:
                    stack.enter_context(context(value))
                if any(getattr(jax.config, name) for name in _GUARDS):
                    stack.enter_context(jax.transfer_guard("allow"))
                return fn(*args, **kwargs)

        return super().submit(call)


def called_now(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """A call that is made now, in the form of one that :class:`Threads` make."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    return future


Key = tuple[int, int]  # (epoch, index in the epoch)
Step: TypeAlias = Sequence[Piece]  # the pieces of batches that a step joins


class BatchReader(Protocol):
    """The part of a reader that a feed uses: batches by their keys."""

    depth: int

    def request(self, key: Key) -> None: ...

    def take(self, key: Key) -> Any: ...

    def peek(self, key: Key) -> Any: ...

    def stop(self) -> None: ...


# A batch of so many bytes is copied while another thread wakes up.
_SMALL_BYTES = 1 << 20


def _is_at_hand(data: Any) -> bool:
    """Whether a batch takes no longer to read than another thread takes to wake up."""
    if type(data) is not Batches:
        return type(data) in (list, tuple)
    arrays = jax.tree.leaves(data.arrays)
    if not all(isinstance(x, np.ndarray | jax.Array) and not isinstance(x, np.memmap) for x in arrays):
        return False
    return data.batch_size * sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in arrays) <= _SMALL_BYTES


class SequenceReader:
    """A :class:`Reader` of a sequence: on one background thread, ``depth`` batches ahead for each replica.

    So devices do not wait for NumPy, and user code is not called from two threads. Batches at hand are not read ahead.
    """

    def __init__(self, data: Any, depth: int = 8):
        self.data = data
        self.depth = 0 if _is_at_hand(data) else depth
        self._pool = Threads(1, thread_name_prefix="jaxche-reader")
        self._ready: dict[Key, Future] = {}
        self._uses: collections.Counter[Key] = collections.Counter()
        self._lock = threading.RLock()  # replicas take pieces of one batch from several threads
        self._epochs: dict[int, Callable[[int], Any]] = {}  # that read the batches of an epoch
        # Whether reads of one batch differ, None before the first read. Those of these types never do.
        self.nondeterministic = False if type(data) in (Batches, list, tuple) else None

    has_time_limit = True  # a replica may leave batches to later rounds
    is_sharded = False  # any replica may train on any batch

    @property
    def size(self) -> int:
        return checked_length(self.data)

    def seek(self, state: Any) -> None:
        """Do nothing: batches are read by their index."""

    def fitted(self, plan: RoundPlan, state: Any) -> RoundPlan:
        """The plan, which ends with the epoch."""
        return plan

    def begin(
        self,
        plan: RoundPlan,
        state: Any,
        ranks: Sequence[int],
        done: Sequence[int],
        keeps: bool = False,
        ahead: int = 0,
    ) -> list[Feed]:
        return self.start([plan.steps(rank)[: done[rank]] for rank in ranks])

    def share(self, plan: RoundPlan, state: Any, rank: int) -> tuple[Key, ...]:
        return plan.share(rank)

    def samples(self, plan: RoundPlan) -> tuple[Any, Any]:
        batch = self.peek((plan.epoch, plan.start))
        # A run may continue from the last batch of an epoch, which is smaller than the others.
        return batch, batch if plan.start == 0 else self._read((plan.epoch, 0))

    def some(self, count: int) -> list[Any]:
        return [self._read((0, i % len(self.data))) for i in range(count)]

    def _read(self, key: Key) -> Any:
        return self._pool.submit(self.load, key).result()

    def ended(self, plan: RoundPlan, state: Any, steps: int) -> int:
        """0: the plan ends with the epoch."""
        return 0

    def advance(self, before: Any, after: Any, plan: RoundPlan, counts: Any, ended: Any) -> Any:
        """The state after a round, which has the position already."""
        return replace(after, stream=None) if after.stream is not None else after

    def load(self, key: Key) -> Any:
        """Read one batch now, on the calling thread."""
        epoch, index = key
        if epoch not in self._epochs:
            sequence = sequence_of(self.data, epoch)
            if hasattr(sequence, "__len__"):
                refuse_other_length(epoch, len(sequence), len(self.data))
            self._epochs = {e: s for e, s in self._epochs.items() if e >= epoch - 1} | {epoch: reading(sequence)}
        read = self._epochs[epoch]
        batch = read(index)
        if batch is None:  # which ends a stream
            raise ValueError(
                f"data[{index}] is None; return a pytree of arrays with a leading batch axis, e.g. np.zeros(64) if "
                "loss_fn draws 64 examples by its argument rng"
            )
        if self.nondeterministic is None:
            self.nondeterministic = is_nondeterministic(batch, read, index, len(self.data), self.data)
        return batch

    def start(self, steps: Iterable[Sequence[Step]]) -> list[Feed]:
        """Start to read a round: one feed per local replica, the first batches of all replicas first."""
        feeds = [Feed(self, own) for own in steps]
        self._uses = collections.Counter(piece.key for feed in feeds for step in feed.steps for piece in step)
        # Cancel prefetched batches that replicas of other processes take; keep later ones.
        for key in [k for k in self._ready if k not in self._uses and k < max(self._uses, default=k)]:
            self._ready.pop(key).cancel()
        for position in range(self.depth):
            for feed in feeds:
                feed.request(position)
        return feeds

    def prefetch(self, feeds: Sequence[Feed], keys: Sequence[Sequence[Key]]) -> None:
        for feed, own in zip(feeds, keys, strict=True):
            feed.later = own
        for position in range(self.depth):
            for feed in feeds:
                if position >= len(feed.steps):  # batches of its steps may be taken already
                    feed.request(position)

    def request(self, key: Key) -> None:
        """Start to read a batch, unless it is ready or being read; one that could not be read is read again."""
        with self._lock:
            ready = self._ready.get(key)
            if ready is None or (ready.done() and (ready.cancelled() or ready.exception() is not None)):
                self._ready[key] = self._pool.submit(self.load, key) if self.depth else called_now(self.load, key)

    def take(self, key: Key) -> Any:
        """The batch; it stays ready while other pieces of it are to be taken."""
        with self._lock:
            self.request(key)
            self._uses[key] -= 1
            future = self._ready[key] if self._uses[key] > 0 else self._ready.pop(key)
        return future.result()

    def peek(self, key: Key) -> Any:
        """The batch, which stays ready for the replica that will train on it."""
        self.request(key)
        try:
            return self._ready[key].result()
        except Exception:
            del self._ready[key]  # so that another call reads again
            raise

    def wait(self) -> None:
        """Wait until the requested batches are read; no user code runs on the background thread then."""
        wait(list(self._ready.values()))

    def stop(self) -> None:
        """Do nothing: no replica waits for batches of another."""

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Feed:
    """The batches of the steps of one replica in one round, in order; a step may join pieces of batches.

    Attributes:
      taken: the batches, and their rows, that are joined in the batch that was last taken.
      divides: whether a step on pieces of unlike shapes yields a batch for each shape, and is not refused.
      ends_step: whether the batch that was last taken is the last of its step.
      divided: steps so far that were on pieces of unlike shapes.
      position: the number of steps that were begun.
      later: the next batches of the replica, in later rounds.
    """

    def __init__(self, reader: BatchReader, steps: Sequence[Step]):
        self._reader = reader
        self.steps = list(steps)
        self._is_stopped = False
        self.taken: Sequence[tuple[Key, slice]] = ()
        self.divides, self.ends_step, self.divided, self.position = False, True, 0, 0
        self.later: Sequence[Key] = ()

    def request(self, position: int) -> None:
        """Start to read the batches of a step, or after the last one a later batch."""
        beyond = position - len(self.steps)
        keys = [piece.key for piece in self.steps[position]] if beyond < 0 else self.later[beyond : beyond + 1]
        for key in keys:
            self._reader.request(key)

    def stop(self) -> None:
        """End the round after an error, or before its end: no further batches are taken."""
        self._is_stopped = True
        self._reader.stop()

    def peek(self, position: int) -> list[Any]:
        """What a step yields, whose batches stay ready."""
        return [batch for batch, _ in join_pieces(self.steps[position], self._reader.peek, self.divides)]

    def __iter__(self) -> Iterator[Any]:
        for position, step in enumerate(self.steps):
            if self._is_stopped:
                return
            joined = join_pieces(step, self._reader.take, self.divides)
            self.divided, self.position = self.divided + (len(joined) > 1), position + 1
            # Half of them at once: to wake a thread up takes as long as to read a small batch.
            half = self._reader.depth // 2
            if half and position % half == 0:
                for later in range(position + half, position + self._reader.depth):
                    self.request(later)
            for left, (batch, self.taken) in zip(reversed(range(len(joined))), joined, strict=True):
                self.ends_step = left == 0
                yield batch


class ReadyFeed(Feed):
    """Batches that are at hand, each of them a step."""

    def __init__(self, batches: Iterable[Any]):
        super().__init__(SequenceReader(()), ())
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def join_pieces(step: Step, read: Callable[[Key], Any], divides: bool) -> list[tuple[Any, list[tuple[Key, slice]]]]:
    """One batch of the rows of all pieces, and the rows that it has of each batch; nothing without rows.

    A whole batch is not copied, and its slice has no end. ``read`` returns None for a batch after the end of a stream.
    Pieces whose rows have unlike shapes or static fields are refused, or with ``divides`` are a batch for each of them.
    """
    if len(step) == 1 and (step[0].begin, step[0].end) == (0, step[0].of):
        batch = read(step[0].key)
        return [] if batch is None else [(batch, [(step[0].key, slice(0, None))])]
    batches = [(piece, read(piece.key)) for piece in step]
    cuts = [(piece.key, piece.rows(batch_size(batch)), batch) for piece, batch in batches if batch is not None]
    cuts = [(key, rows, batch) for key, rows, batch in cuts if rows.start < rows.stop]
    parts = [(jax.tree.map(itemgetter(rows), batch), [(key, rows)]) for key, rows, batch in cuts]
    if len(parts) < 2:
        return parts
    try:
        return [_join(parts)]
    except (TypeError, ValueError):
        alike = [list(group) for _, group in itertools.groupby(parts, key=lambda part: _row_traits(part[0]))]
        if len(alike) == 1:
            raise
        if not divides:
            raise _unlike(*(_row_traits(group[0][0]) for group in alike[:2])) from None
        return [_join(group) for group in alike]


def _join(parts: Sequence[tuple[Any, list[tuple[Key, slice]]]]) -> tuple[Any, list[tuple[Key, slice]]]:
    return jax.tree.map(_concatenate, *(batch for batch, _ in parts)), [taken[0] for _, taken in parts]


def _row_traits(batch: Any) -> tuple[dict[str, tuple[int, ...]], Any]:
    """The shape of a row of each array, and the structure of the batch, which has its static fields."""
    leaves, structure = jax.tree.flatten_with_path(batch)
    return {jax.tree_util.keystr(path): np.shape(x)[1:] for path, x in leaves}, structure


def _unlike(first: tuple[dict[str, tuple[int, ...]], Any], other: tuple[dict[str, tuple[int, ...]], Any]) -> ValueError:
    """The error for parts of batches that differ in more than their number of rows."""
    (shapes, structure), (others, other_structure) = first, other
    names = (name for name in {**shapes, **others} if shapes.get(name) != others.get(name))
    what = f"different structures: {structure} and {other_structure}; make them alike"
    if (name := next(names, None)) is not None:
        what = (
            f"different shapes: a row of {name or 'a batch'} has shape {shapes.get(name, 'none')} in one and "
            f"{others.get(name, 'none')} in another; pad the batches to one shape"
        )
    return ValueError(
        f"a step joins batches of {what}, or write rows='equal', and policy='cadence' for policy='auto', so that no "
        "batches are joined"
    )


def _concatenate(*parts: Any) -> Any:
    return (jnp if any(isinstance(x, jax.Array) for x in parts) else np).concatenate(parts)
