"""The contract of a reader: which batches each replica takes in a round, and the position after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from jaxche.cadence import RoundPlan
from jaxche.data._batches import Feed, Key


class StreamPosition(NamedTuple):
    """The position in an epoch of a stream, or of the streams of all processes if each reads its own."""

    taken: tuple[int, ...]  # batches that were trained on
    ended: tuple[bool, ...]
    states: tuple[Any, ...] = ()  # of the iterators, in a state from a checkpoint


class DataState(Protocol):
    """The position in the data, which a trainer state has: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def epoch(self) -> int: ...

    @property
    def cursor(self) -> int: ...

    @property
    def stream(self) -> StreamPosition | None: ...


State = TypeVar("State", bound=DataState)


class Reader(Protocol):
    """Reads the batches of the local replicas, of a sequence or a stream."""

    data: Any

    @property
    def size(self) -> int:
        """The number of batches in an epoch, or more if it is not known."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether each process has batches of its own."""
        ...

    @property
    def depth(self) -> int:
        """The number of batches that are read ahead for each replica; 0 if :meth:`prefetch` does nothing."""
        ...

    @property
    def has_time_limit(self) -> bool:
        """Whether a replica may end a round early, and leave batches to later rounds."""
        ...

    def seek(self, state: DataState) -> None:
        """Go to the position of a state."""
        ...

    def fitted(self, plan: RoundPlan, state: DataState) -> RoundPlan:
        """The plan with at most the batches that are left."""
        ...

    def begin(
        self,
        plan: RoundPlan,
        state: DataState,
        ranks: Sequence[int],
        done: Sequence[int],
        keeps: bool = False,
        ahead: int = 0,
    ) -> list[Feed]:
        """Start to read a round: one feed for each local rank; ``ahead`` batches are seen before they are taken."""
        ...

    def share(self, plan: RoundPlan, state: DataState, rank: int) -> tuple[Key, ...]:
        """The (epoch, index) of each batch of a rank."""
        ...

    def samples(self, plan: RoundPlan) -> tuple[Any, Any]:
        """The first batch of a plan, and a whole one."""
        ...

    def some(self, count: int) -> list[Any]:
        """Some batches to measure speeds with."""
        ...

    def prefetch(self, feeds: Sequence[Feed], keys: Sequence[Sequence[Key]]) -> None:
        """Read batches of later rounds, those of each feed, after the last ones of this round."""
        ...

    def ended(self, plan: RoundPlan, state: DataState, steps: int) -> int:
        """Not 0 if the epoch ends with this round (``steps`` of the local ranks) and the plan does not say so."""
        ...

    def advance(
        self, before: DataState, after: State, plan: RoundPlan, counts: Sequence[int], ended: Sequence[int]
    ) -> State:
        """The state after a round with its position in the data; ``ended`` is that of each rank."""
        ...

    def close(self) -> None:
        """Read no further batches."""
        ...
