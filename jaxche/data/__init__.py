"""Batches from arrays in memory, sequences and streams, read ahead from any position of a run."""

from jaxche.data._batches import Batches
from jaxche.data._batches import Feed as Feed
from jaxche.data._batches import Key as Key
from jaxche.data._batches import ReadyFeed as ReadyFeed
from jaxche.data._batches import SequenceReader as SequenceReader
from jaxche.data._batches import Threads as Threads
from jaxche.data._batches import called_now as called_now
from jaxche.data._batches import checked_length as checked_length
from jaxche.data._batches import join_pieces as join_pieces
from jaxche.data._batches import reading as reading
from jaxche.data._checks import line_for_two_arrays as line_for_two_arrays
from jaxche.data._checks import non_finite_leaves as non_finite_leaves
from jaxche.data._checks import on_host as on_host
from jaxche.data._checks import sequence_of as sequence_of
from jaxche.data._iterator_state import from_json as from_json
from jaxche.data._iterator_state import to_json as to_json
from jaxche.data._reader import Reader as Reader
from jaxche.data._reader import StreamPosition as StreamPosition
from jaxche.data._stream import EPOCH_SIZE as EPOCH_SIZE
from jaxche.data._stream import Stream, process_shard
from jaxche.data._stream import as_batch as as_batch
from jaxche.data._stream import as_stream as as_stream
from jaxche.data._stream import check_stream as check_stream
from jaxche.data._stream import epoch_size as epoch_size
from jaxche.data._stream import is_same as is_same
from jaxche.data._stream import is_stream as is_stream
from jaxche.data._stream_reader import StreamReader as StreamReader

# For users, on a page of the reference; what is imported "as" itself is for the other packages.
__all__ = ["Batches", "Stream", "process_shard"]
