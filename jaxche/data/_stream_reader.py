"""The reader of a stream: which batches each replica takes in a round, and the position after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxche.cadence import Piece, RoundPlan, interleave
from jaxche.data._batches import Feed, Key, Step
from jaxche.data._reader import DataState, State, StreamPosition
from jaxche.data._stream import EPOCH_SIZE, Stream, as_stream
from jaxche.data._stream_queue import Place, StreamQueue
from jaxche.distributed import Group


class StreamReader:
    """A :class:`Reader` of the stream of this process; ``processes_of_ranks`` are the processes of each replica."""

    size = EPOCH_SIZE
    depth = 0

    def __init__(self, data: Any, stream: Stream, group: Group, processes_of_ranks: Sequence[Sequence[int]]):
        self.data = data
        self.is_sharded = bool(stream.shards) and group.num_processes > 1
        # The stream of each rank, if there are several; that of this process, and the number of streams.
        self._sharded = [processes[0] for processes in processes_of_ranks] if self.is_sharded else []
        self._own, self._count = (group.process_index, group.num_processes) if self.is_sharded else (0, 1)
        self._queue = StreamQueue(stream)
        # A replica that stops early would leave batches between those of the others.
        self.has_time_limit = self._sharded.count(self._own) == 1

    def _streams(self, plan: RoundPlan) -> Sequence[int]:
        """The stream of each rank of a plan; an elastic run, whose ranks come and go, has one."""
        return self._sharded or [0] * len(plan.counts)

    def go_on_with(self, data: Any) -> None:
        """Read the same iterator by the arguments of another stream of it."""
        self.data = data
        self._queue.stream = as_stream(data)

    def seek(self, state: DataState) -> None:
        position = self._position(state)
        states = position.states or (None,) * self._count
        taken, ended = position.taken[self._own], position.ended[self._own]
        self._queue.seek(Place(state.epoch, taken, ended, states[self._own]))

    def _position(self, state: DataState) -> StreamPosition:
        if state.stream is None and (state.cursor == 0 or self._count == 1):
            return StreamPosition((state.cursor,) * self._count, (False,) * self._count)
        if state.stream is None or len(state.stream.taken) != self._count:
            streams = "one sequence" if state.stream is None else f"{len(state.stream.taken)} streams"
            raise ValueError(
                f"data has {self._count} streams, one of each process, but the state is in the middle of epoch "
                f"{state.epoch} of {streams}; continue with the same number of processes and the same shards=, or from "
                "a state at the start of an epoch"
            )
        return state.stream

    def fitted(self, plan: RoundPlan, state: DataState) -> RoundPlan:
        """The plan without ranks whose stream has ended, and with at most the joined batches that are left."""
        if plan.shares:
            left = self._queue.left(plan.joined)
            return plan.cut(left) if left else plan
        ended = self._position(state).ended
        has_batches = [not ended[stream] for stream in self._streams(plan)]
        counts = tuple(n if has else 0 for n, has in zip(plan.counts, has_batches, strict=True))
        return replace(plan, counts=counts if any(counts) else tuple(map(int, has_batches)))

    def steps(self, plan: RoundPlan, state: DataState) -> list[tuple[Step, ...]]:
        """The steps of each rank; keys are places in its stream.

        Ranks take batches in the order in which they finish them, so that few batches wait for a slow rank.
        """
        if plan.shares:
            return [plan.steps(rank) for rank in range(len(plan.counts))]
        taken = self._position(state).taken
        steps: list[tuple[Step, ...]] = [()] * len(plan.counts)
        streams = self._streams(plan)
        for stream in set(streams):
            ranks = [rank for rank, own in enumerate(streams) if own == stream]
            for rank, places in zip(ranks, interleave([plan.counts[rank] for rank in ranks]), strict=True):
                steps[rank] = tuple((Piece((plan.epoch, taken[stream] + place)),) for place in places)
        return steps

    def begin(
        self,
        plan: RoundPlan,
        state: DataState,
        ranks: Sequence[int],
        done: Sequence[int],
        keeps: bool = False,
        ahead: int = 0,
    ) -> list[Feed]:
        steps = self.steps(plan, state)
        streams = self._streams(plan)
        total = plan.joined or sum(n for n, stream in zip(done, streams, strict=True) if stream == self._own)
        end = self._position(state).taken[self._own] + total
        return self._queue.start([steps[rank][: done[rank]] for rank in ranks], end, plan.joined, keeps, ahead)

    def share(self, plan: RoundPlan, state: DataState, rank: int) -> tuple[Key, ...]:
        """The (epoch, index in its stream) of each batch of a rank."""
        return tuple(dict.fromkeys(piece.key for step in self.steps(plan, state)[rank] for piece in step))

    def samples(self, plan: RoundPlan) -> tuple[Any, Any]:
        found = [*self._queue.next_batches(1), *([] if self._queue.first is None else [self._queue.first])]
        if not found:
            raise ValueError(
                f"the stream of this process has no batches in epoch {plan.epoch}; give each process at least one"
            )
        return found[0], found[-1]

    def some(self, count: int) -> list[Any]:
        return self._queue.next_batches(count) or [self._queue.first]

    def prefetch(self, feeds: Any, keys: Any) -> None:
        """Do nothing: the queue reads on by itself."""

    def ended(self, plan: RoundPlan, state: DataState, steps: int) -> int:
        """1 more than the number of batches in the epoch if it ends with this round, else 0."""
        total = steps if self.is_sharded else plan.total
        length = self._queue.length(self._position(state).taken[self._own] + total)
        return 0 if length is None else 1 + length % 2**23

    def advance(
        self, before: DataState, after: State, plan: RoundPlan, counts: Sequence[int], ended: Sequence[int]
    ) -> State:
        if not self.is_sharded and len(set(ended)) > 1:
            lengths = {rank: length - 1 for rank, length in enumerate(ended) if length}
            raise ValueError(
                f"the streams of the processes differ: in epoch {plan.epoch} they ended after {lengths} batches, by "
                "rank. With shards=False all processes read the same batches; if each reads its own part, write "
                "jaxche.Stream(source, shards=True)"
            )
        after = replace(after, pending_batches=())
        if all(ended):
            return replace(after, epoch=plan.epoch + 1, cursor=0, stream=None)
        taken, is_over = list(self._position(before).taken), [False] * self._count
        for stream, count, end in zip(self._streams(plan), counts, ended, strict=True):
            taken[stream] += 0 if plan.shares else count
            is_over[stream] = end > 0
        if plan.shares:
            taken[0] += plan.joined
        return replace(after, stream=StreamPosition(tuple(taken), tuple(is_over)))

    def iterator_state(self, state: DataState) -> Any:
        """The state of the iterator of this process at the position of a state, or None."""
        return self._queue.state(self._position(state).taken[self._own])

    def states_of(self, gathered: Sequence[Any]) -> tuple[Any, ...]:
        """The iterator states of the streams, from those of all processes."""
        return tuple(gathered[: self._count])

    def close(self) -> None:
        self._queue.close()
