"""A list of rounds that keeps all but the newest as bytes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from jaxche.messages import brief
from jaxche.reports._round_info import RoundInfo

# A round takes 2.6 KB, and its bytes 0.34. To make it again takes 2 µs, so shorter runs are not packed.
UNPACKED = 10_000
_NAMES = tuple(field.name for field in fields(RoundInfo))


class _Packed(bytes):
    """The values of a round, which compare as the round does, so that a list finds it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return unpacked(self) == unpacked(other)


def packed(info: Any) -> Any:
    """A round as bytes; anything else, and a round whose values cannot be pickled, as it is."""
    if type(info) is not RoundInfo or tuple(vars(info)) != _NAMES:
        return info
    try:
        return _Packed(pickle.dumps(tuple(vars(info).values()), pickle.HIGHEST_PROTOCOL))
    except (pickle.PicklingError, TypeError, AttributeError):
        return info


def unpacked(item: Any) -> Any:
    """The round of an item of the list."""
    if type(item) is not _Packed:
        return item
    info = RoundInfo.__new__(RoundInfo)  # without the checks and the setters of a frozen class
    vars(info).update(zip(_NAMES, pickle.loads(item), strict=True))
    return info


class RoundList(list[RoundInfo]):
    """A list of rounds; an item that was appended long ago is stored as bytes, and every read of it makes a copy."""

    def __init__(self, rounds: Iterable[RoundInfo] = ()):
        super().__init__()
        self.extend(rounds)

    def append(self, info: RoundInfo) -> None:
        if not isinstance(info, (RoundInfo, _Packed)):
            raise ValueError(
                f"a history is a list of RoundInfo, and {brief(info)} is none; to read a file write "
                "jaxche.History.from_json(Path('history.jsonl'))"
            )
        super().append(info)
        if len(self) > UNPACKED:
            place = len(self) - 1 - UNPACKED
            super().__setitem__(place, packed(super().__getitem__(place)))

    def extend(self, rounds: Iterable[RoundInfo]) -> None:
        # The items of another such list as they are stored.
        for info in list.copy(rounds) if isinstance(rounds, RoundList) else rounds:
            self.append(info)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return _of_items(found) if isinstance(key, slice) else unpacked(found)

    def __iter__(self) -> Iterator[RoundInfo]:
        return map(unpacked, super().__iter__())

    def __reversed__(self) -> Iterator[RoundInfo]:
        return map(unpacked, super().__reversed__())

    def __iadd__(self, rounds: Iterable[RoundInfo]) -> Any:
        self.extend(rounds)
        return self

    def __add__(self, other: Any) -> Any:
        return _of_items(list.copy(self) + (list.copy(other) if isinstance(other, list) else other))

    def __radd__(self, other: Any) -> Any:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __mul__(self, times: Any) -> Any:
        return [*self] * times

    __rmul__ = __mul__

    def pop(self, index: Any = -1) -> RoundInfo:
        return unpacked(super().pop(index))

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        ordered = sorted(self, key=key, reverse=reverse)
        self.clear()
        self.extend(ordered)


def _of_items(items: list[Any]) -> RoundList:
    """A list of items as they are stored."""
    made = RoundList()
    list.extend(made, items)
    return made
