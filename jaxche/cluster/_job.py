"""A job for a scheduler: its command, machines, restarts and variables."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from jaxche.messages import whole_number

# Port of process 0, or of the coordinator of an elastic run.
PORT = 61234

_GROUP = re.compile(r"([1-9]\d*)(?:x([1-9]\d*)(?::([\w.-]+))?)?")
_WRITE = "--nodes 4 (no GPUs), --nodes 2x8 or, of two kinds, --nodes 2x8:h100,4x1:l4"


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Machines of one kind: their number, GPUs of each (0: one process on the CPU), and name of the kind or None."""

    count: int
    gpus: int = 0
    kind: str | None = None

    @property
    def tasks_per_node(self) -> int:
        """Processes on each machine."""
        return max(self.gpus, 1)

    @property
    def tasks(self) -> int:
        """Processes on all machines."""
        return self.count * self.tasks_per_node


@dataclasses.dataclass(frozen=True)
class Job:
    """The parts that the files of all schedulers share."""

    command: Sequence[str]
    groups: Sequence[Nodes]
    max_restarts: int
    name: str
    made_by: str
    variables: Mapping[str, str]
    elastic: bool


def parse_nodes(text: str) -> tuple[Nodes, ...]:
    """Parse ``COUNT[xGPUS[:KIND]]``, separated by commas."""
    groups = []
    for word in str(text).split(","):  # a number of machines may be an int
        match = _GROUP.fullmatch(word.strip())
        if match is None:
            raise ValueError(f"--nodes {text!r} is invalid at {word!r}. Write: {_WRITE}")
        groups.append(Nodes(int(match[1]), int(match[2] or 0), match[3]))
    return tuple(groups)


def total_tasks(groups: Sequence[Nodes]) -> int:
    """Processes of the job."""
    return sum(group.tasks for group in groups)


def check_failures(max_restarts: int, hang_timeout_s: float | None) -> int:
    """Refuse invalid values of these arguments; returns ``max_restarts`` as a Python int."""
    if hang_timeout_s is not None and not 0 < hang_timeout_s < math.inf:
        raise ValueError(f"hang_timeout_s={hang_timeout_s!r} must be positive seconds. Write: hang_timeout_s=600")
    return whole_number("max_restarts", max_restarts, 0, "max_restarts=3")
