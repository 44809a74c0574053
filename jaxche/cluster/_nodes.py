"""Which machines a job takes, in one word a kind: ``2x8:h100,4x1:l4``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

_GROUP = re.compile(r"([1-9]\d*)(?:x([1-9]\d*)(?::([\w.-]+))?)?")
_WRITE = "--nodes 4 (no GPUs), --nodes 2x8 or, of two kinds, --nodes 2x8:h100,4x1:l4"


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Machines of one kind: how many, the GPUs of each (0: one process on its CPU), and the kind's name or None."""

    count: int
    gpus: int = 0
    kind: str | None = None

    @property
    def tasks_per_node(self) -> int:
        """Processes on each: one a GPU."""
        return max(self.gpus, 1)

    @property
    def tasks(self) -> int:
        """Processes on all of them."""
        return self.count * self.tasks_per_node


def parse_nodes(text: str) -> tuple[Nodes, ...]:
    """Reads ``COUNT[xGPUS[:KIND]]``, with commas between kinds of machines.

    Raises:
      ValueError: shows what to write.

    Example:
      >>> parse_nodes("2x8:h100,4")
      (Nodes(count=2, gpus=8, kind='h100'), Nodes(count=4, gpus=0, kind=None))
    """
    groups = []
    for word in text.split(","):
        match = _GROUP.fullmatch(word.strip())
        if match is None:
            raise ValueError(f"--nodes {text!r} makes no sense at {word!r}. Write: {_WRITE}")
        groups.append(Nodes(int(match[1]), int(match[2] or 0), match[3]))
    return tuple(groups)


def total_tasks(groups: Sequence[Nodes]) -> int:
    """Processes of the whole job."""
    return sum(group.tasks for group in groups)


@dataclasses.dataclass(frozen=True)
class Job:
    """What the files of all schedulers say: what runs, on what, how often again, under which name and variables."""

    command: Sequence[str]
    groups: Sequence[Nodes]
    max_restarts: int
    name: str
    made_by: str
    variables: Mapping[str, str]
