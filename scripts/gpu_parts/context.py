"""What a part is given: sizes, time, a folder, and the file of its lines. Imports no jax."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_parts.table import Line


@dataclass(frozen=True)
class Context:
    """The settings of a part.

    ``cpu``: CPU devices in the place of the card, with small sizes. ``until``: the time, by ``time.time()``, at which
    the part should be done; ``folder``: for its files; ``lines``: where each line is written as soon as it is known.
    """

    quick: bool
    cpu: bool
    until: float
    folder: Path
    lines: Path

    def add(self, line: Line) -> None:
        """Write a line, so that it is kept whatever happens next."""
        with self.lines.open("a", encoding="utf8") as file:
            file.write(json.dumps(line.to_dict()) + "\n")

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least one."""
        return max(1.0, self.until - time.time())

    def turns(self, most: int, seconds: float) -> Iterator[int]:
        """Numbers of turns, from 0: at least two, at most ``most``, none begun after so many seconds."""
        end = min(time.time() + seconds, self.until)
        for turn in range(most):
            if turn >= 2 and time.time() > end:
                return
            yield turn


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of JAX says that a device has too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def read_lines(path: Path) -> list[dict]:
    """The lines of a part so far; the last one may be half written."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf8").rpartition("\n")[0]
    return [json.loads(text) for text in whole.splitlines()]
