"""The collectives of a compiled program, read from its HLO text."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

import numpy as np

_KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(_KINDS)})(-start)?\(")
_CALLED = re.compile(r"\b(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b(?:pred|[a-z]+?(\d+)\w*)\[([\d,]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=(\{\{[\d,{}]*\}\}|\{\})")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=@?mesh\w*\[([^\]]*)\][^{]*\{([^}]*)\}")
_SIZE = re.compile(r"'(\w+)'=(\d+)")
_PART = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
      kind: ``"all-gather"``, ``"all-reduce"``, ``"all-to-all"``, ``"collective-permute"`` or ``"reduce-scatter"``.
      nbytes: bytes of its result on one device.
      groups: the groups of devices that communicate, by their index in the mesh.
      times: number of executions in one call of the program: more than one in a loop.

    Example:
      >>> Collective("all-gather", nbytes=1024, groups=((0, 1, 2, 3),)).sent
      768.0
    """

    kind: str
    nbytes: int
    groups: tuple[tuple[int, ...], ...]
    times: int = 1

    @property
    def sent(self) -> float:
        """Bytes each device sends for it in one call of the program, by a ring algorithm."""
        size = max((len(group) for group in self.groups), default=1)
        share = {
            "all-gather": (size - 1) / size,
            "all-to-all": (size - 1) / size,
            "all-reduce": 2 * (size - 1) / size,
            "reduce-scatter": size - 1,
            "collective-permute": 1,
        }[self.kind]
        return self.times * self.nbytes * share


def collectives(hlo: str, devices: int) -> list[Collective]:
    """The collectives over two devices or more in ``compiled.as_text()``; in a loop of unknown length counted once."""
    bodies: dict[str, list[str]] = {}
    entry = lines = None
    for line in hlo.splitlines():
        header = None if line.startswith(" ") else _COMPUTATION.match(line)
        if header:
            lines = bodies.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif lines is not None:
            lines.append(line)
    return [] if entry is None else _in_computation(entry, bodies, 1, devices)


def _in_computation(name: str, bodies: dict[str, list[str]], times: int, devices: int) -> list[Collective]:
    found = []
    for line in bodies.get(name, ()):
        match = _COLLECTIVE.search(line)
        if match:
            groups = tuple(map(tuple, _groups(line, devices)))
            if any(len(group) > 1 for group in groups):
                found.append(Collective(match[2], _nbytes(match[1], bool(match[3]), match[2]), groups, times))
            continue
        called = _CALLED.findall(line)
        for branches in _BRANCHES.findall(line):
            called += [branch.strip().lstrip("%") for branch in branches.split(",")]
        trips = _TRIPS.search(line)
        for callee in called:
            found += _in_computation(callee, bodies, times * (int(trips[1]) if trips else 1), devices)
    return found


def _nbytes(result: str, started: bool, kind: str) -> int:
    arrays = [
        math.prod(int(n) for n in dims.split(",") if n) * int(bits or 8) // 8  # a pred has one byte
        for bits, dims in _ARRAY.findall(result)
    ]
    if started and kind == "collective-permute":
        arrays = arrays[:2]  # two counters follow
    if started and kind != "all-reduce":
        arrays = arrays[len(arrays) // 2 :]  # operands come first
    return sum(arrays)


def _groups(line: str, devices: int) -> list[list[int]]:
    named = _NAMED.search(line)
    if named:
        return _named_groups(named[1], named[2])
    iota = _IOTA.search(line)
    if iota:
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        numbers: Any = np.arange(devices).reshape(dims)
        return numbers.transpose(order).reshape(shape).tolist()
    listed = _LISTED.search(line)
    if listed is None or listed[1] == "{}":
        return [list(range(devices))]
    return json.loads(listed[1].replace("{", "[").replace("}", "]"))


def _named_groups(mesh: str, axes: str) -> list[list[int]]:
    """Groups along axes of a named mesh; ``'shard':(2)4`` is a part of an axis, its middle 4."""
    parts = {name: (int(before or 1), int(size or 0)) for name, before, size in _PART.findall(axes)}
    shape, chosen = [], []
    for name, length in ((name, int(n)) for name, n in _SIZE.findall(mesh)):
        before, size = parts.get(name, (length, 1))
        size = size or length
        if name in parts:
            chosen.append(len(shape) + 1)
        shape += [before, size, length // (before * size)]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    rest = [i for i in range(len(shape)) if i not in chosen]
    members = math.prod(shape[i] for i in chosen)
    return numbers.transpose(rest + chosen).reshape(-1, members).tolist()
