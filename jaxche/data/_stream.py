"""Streams of batches: sources without a length, the shard of a process, and the conversion of their batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.data._batches import Batches, checked_length
from jaxche.distributed import Group, process_group
from jaxche.messages import brief, one_of, type_of, whole_number
from jaxche.sharding import batch_size, check_numbers, check_range, without_axes

# Used as the number of batches in an epoch, which is unknown: 2**32 over the golden ratio, so that the random
# keys of different epochs, whose numbers are taken modulo 2**32, are far apart.
EPOCH_SIZE = 2_654_435_769


def process_shard() -> tuple[int, int]:
    """The part of the data that this process reads: its number, and the number of processes.

    Returns:
      ``(index, count)``; ``(0, 1)`` in a run of one process.

    Example:
      >>> import jaxche
      >>> index, count = jaxche.process_shard()
      >>> list(range(10))[index::count] == list(range(10))  # one process reads all
      True
    """
    group = process_group()
    return group.process_index, group.num_processes


@dataclass(frozen=True, eq=False)
class Stream:
    """Batches of a source without a length, in its order: an iterator, an iterable, or a function of the epoch.

    A batch is a pytree of arrays with a leading batch axis. Tensors of PyTorch and TensorFlow, and columns of Python
    numbers (as in Hugging Face ``datasets``), become NumPy arrays. An epoch ends when the source ends. One thread of
    each process reads the source for all its replicas, and every batch is used exactly once.

    In a run of one process ``trainer.fit(state, source)`` makes the stream of an iterable itself.

    Args:
      source: one of

        - an iterable, e.g. a ``grain.IterDataset``, a torch ``DataLoader``, a ``tf.data.Dataset`` or an iterable
          Hugging Face dataset. It is iterated again in every epoch. If it, its ``sampler`` or its ``dataset`` has a
          method ``set_epoch(epoch)``, that is called first. :class:`Batches` are shuffled in each.
        - a function ``source(epoch)`` that returns an iterable.
        - an iterator, e.g. a generator, which has one epoch. Only the first trainer that reads it can use it: batches
          that this trainer has prefetched are for its next fit.
      shards: needed in a run of several processes. True: each process reads its own part, see
        :func:`jaxche.process_shard`. False: all processes read the same batches, and each trains on some of them.
      prefetch: the largest number of batches to prefetch for each replica of the process.
      resume: how a run resumes in the middle of an epoch if the source cannot restore its position. ``"skip"`` reads
        the earlier batches again and skips them, which is exact if the source repeats its order. ``"continue"``
        continues with the next batch that the source returns, so that batches are repeated or lost.

    Notes:
      A source restores its position if its iterator has ``get_state`` and ``set_state``, as in Grain, or if it has
      ``state_dict`` and ``load_state_dict``, as a ``torchdata.StatefulDataLoader`` and iterable Hugging Face datasets.
      A checkpoint contains the position after the last batch that was used, not that of the prefetch.

    Raises:
      ValueError: a source that cannot be iterated, or another invalid argument.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> def batches(epoch):
      ...     rng = np.random.default_rng(epoch)
      ...     for _ in range(20):
      ...         yield rng.normal(size=(8, 2)).astype(np.float32)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1))
      >>> state, history = trainer.fit(trainer.init(jnp.zeros(2)), jaxche.Stream(batches), epochs=2, progress=False)
      >>> state.epoch, sum(info.examples for info in history)
      (2, 320)
    """

    source: Any
    shards: bool | None = None
    prefetch: int = 4
    resume: str = "skip"

    def __post_init__(self) -> None:
        if not (_is_iterable(self.source) or callable(self.source)):
            raise ValueError(
                f"source is {type_of(self.source)}; give an iterable of batches, or a function that returns "
                "one, e.g. jaxche.Stream(lambda epoch: batches(seed=epoch))"
            )
        if isinstance(self.source, str | bytes | dict) or hasattr(self.source, "__array__"):
            raise ValueError(
                f"source is {type_of(self.source)}, not an iterable of batches; for arrays in memory write "
                "jaxche.Batches(arrays, batch_size=32)"
            )
        if not _is_iterable(self.source):
            try:
                inspect.signature(self.source).bind(0)
            except (TypeError, ValueError):
                raise ValueError(
                    "source is a function that does not take the epoch; write e.g. jaxche.Stream(lambda epoch: "
                    "batches())"
                ) from None
        if not isinstance(self.shards, bool | np.bool_ | None):
            raise ValueError(
                f"shards={brief(self.shards)} must be True if each process reads its own part of the data, or False if "
                "all read the same batches"
            )
        object.__setattr__(self, "prefetch", whole_number("prefetch", self.prefetch, 1, "prefetch=4"))
        one_of("resume", self.resume, ("skip", "continue"))

    @property
    def has_one_epoch(self) -> bool:
        """Whether the source is an iterator, which cannot be read again."""
        return hasattr(self.source, "__next__")

    @property
    def shares_iterator(self) -> bool:
        """Whether ``iter(source)`` returns the same iterator each time, so that its batches can be read only once."""
        if not _is_iterable(self.source):
            return False
        iterator = iter(self.source)
        # Only iterators of Python: that of a loader may begin again at each call, although it is the same object.
        return type(iterator).__module__ in ("builtins", "itertools") and iter(self.source) is iterator

    def iterable(self, epoch: int) -> Any:
        """The iterable of an epoch."""
        if isinstance(self.source, Batches):
            return self.source.epoch(epoch)
        if not _is_iterable(self.source):
            if not _is_iterable(found := self.source(epoch)):
                raise ValueError(
                    f"source({epoch}) returned {brief(found)}, not an iterable of batches; does its last line lack a "
                    "return or a yield?"
                )
            return found
        for one in (self.source, *(getattr(self.source, name, None) for name in ("sampler", "dataset"))):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(epoch)
        return self.source


def _is_iterable(source: Any) -> bool:
    return isinstance(source, Iterable) or hasattr(source, "__next__")


def is_stream(data: Any) -> bool:
    """Whether data is a stream, or an iterable without ``len(data)`` and ``data[i]``."""
    is_sequence = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return isinstance(data, Stream) or (_is_iterable(data) and not is_sequence)


def as_stream(data: Any) -> Stream:
    """The stream, or that of an iterable."""
    return data if isinstance(data, Stream) else Stream(data)


def is_same(one: Any, other: Any) -> bool:
    """Whether two data are streams of one iterator, whose next batches may be read already."""
    if not (is_stream(one) and is_stream(other)):
        return False
    one, other = as_stream(one), as_stream(other)
    return one.has_one_epoch and one.source is other.source and one.shards == other.shards


def epoch_size(data: Any) -> int:
    """The number of batches in an epoch; of a stream ``EPOCH_SIZE``."""
    return EPOCH_SIZE if is_stream(data) else checked_length(data)


def check_stream(data: Any, group: Group, spans: bool, epochs: int) -> Stream:
    """The stream of this data, or ValueError if it cannot be read; ``spans``: a replica has several processes."""
    stream = as_stream(data)
    if epochs > 1 and stream.has_one_epoch:
        raise ValueError(
            f"data is {type_of(stream.source)}, which can be read once, and epochs={epochs}; give a function "
            "that makes a new one for each epoch: jaxche.Stream(lambda epoch: batches(seed=epoch)), or write epochs=1"
        )
    if group.num_processes == 1:
        return stream
    if stream.shards is None:
        raise ValueError(
            f"data is {type_of(data)} in a run of {group.num_processes} processes; set shards=. If each process "
            "reads its own part: index, count = jaxche.process_shard(), data = jaxche.Stream(batches(index, count), "
            "shards=True). If all read the same batches, and each trains on some: data = jaxche.Stream(batches(), "
            "shards=False)"
        )
    if group.elastic:
        _check_elastic(stream)
    if stream.shards and spans:
        raise ValueError(
            "shards=True gives each process its own batches, but the processes of one replica need the same ones; "
            "write jaxche.Stream(source, shards=False)"
        )
    return stream


def _check_elastic(stream: Stream) -> None:
    """Refuse a stream that cannot go back to a batch after a merge has failed, or that dies with its process."""
    if stream.shards:
        raise ValueError(
            "shards=True gives each process its own batches, and in an elastic run those of a process that dies would "
            "be lost; write jaxche.Stream(source, shards=False), or a sequence with len(data) and data[i]"
        )
    if stream.has_one_epoch and not hasattr(stream.source, "set_state"):
        raise ValueError(
            f"data is {type_of(stream.source)}, which can be read once, and an elastic run reads the batches "
            "of a round again if its merge fails; give a function: jaxche.Stream(lambda epoch: batches(seed=epoch), "
            "shards=False)"
        )
    if stream.resume == "continue":
        raise ValueError(
            "resume='continue' repeats or loses batches, and in an elastic run all processes read the same ones; write "
            "jaxche.Stream(source, shards=False), which reads the earlier batches again and skips them"
        )


def as_batch(value: Any) -> Any:
    """A batch with tensors and columns of numbers as NumPy arrays; ValueError unless it is a batch of arrays."""
    if value is None:
        raise ValueError(
            "the stream yields None; yield batches, pytrees of arrays with a leading batch axis, e.g. np.zeros(64) if "
            "loss_fn draws 64 examples by its argument rng"
        )
    batch = jax.tree.map_with_path(_array, value, is_leaf=_is_column)
    try:
        batch_size(batch)  # refuses arrays without a common leading axis
    except ValueError as error:
        if "leading axes" in str(error):
            error.add_note("if the stream yields examples, yield batches of them, e.g. dataset.batch(32)")
        raise
    check_range(batch)
    return batch


def _is_column(x: Any) -> bool:
    """Whether x is a list of numbers or texts, or of such lists."""
    is_list = isinstance(x, list)
    while isinstance(x, list) and x:
        x = x[0]
    return is_list and isinstance(x, bool | int | float | complex | str | bytes | np.generic)


def _array(path: Any, x: Any) -> Any:
    name = f"batch{jax.tree_util.keystr(path)}"
    if hasattr(x, "__dataclass_fields__"):  # of a dataclass that JAX knows, the fields are leaves
        check_numbers(x)
    if isinstance(x, jax.Array | np.ma.MaskedArray):  # np.asarray would lose the mask; the batch is refused by it
        return without_axes(x)
    x = x.detach().cpu() if hasattr(x, "detach") else x  # a torch tensor
    if str(getattr(x, "dtype", "")) == "torch.bfloat16":  # which NumPy does not have
        return jnp.from_dlpack(x)
    try:
        array = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is no array ({error}); pad examples of different lengths to one") from error
    if array.dtype.kind in "OSUTMm":
        shown = (
            f"texts, e.g. {array.ravel()[:2].tolist()}" if array.dtype.kind in "SUT" else f"of type {type(x).__name__}"
        )
        raise ValueError(
            f"{name} is {shown}; batches are arrays of numbers. Leave it out, e.g. dataset.remove_columns([...]) or "
            "jaxche.Stream(lambda epoch: ({'x': batch['x']} for batch in batches()))"
        )
    if array.ndim == 0:
        raise ValueError(
            f"{name} is a scalar: does the stream yield examples? Yield batches, e.g. dataset.batch(32), or "
            "torch.utils.data.DataLoader(dataset, batch_size=32)"
        )
    # The source may write the next batch into the same memory while this one waits.
    return array.copy() if array is x or array.base is not None else array
