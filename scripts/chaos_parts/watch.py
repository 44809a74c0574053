"""Waits for what the processes of an elastic run write about their rounds."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from chaos_parts.faults import Lines

# Seconds for all ranks to be back after a fault, or for the run to end; and for all processes to write their stacks.
LIMIT_S, STACKS_S = 240.0, 40.0


class StuckError(Exception):
    """A run has ended, or does not continue."""


class Watch:
    """Waits for what the processes of a run write about their rounds."""

    def __init__(self, run: Any, processes: int):
        self._run, self._processes, self._rounds = run, processes, Lines(run.folder / "rounds")

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        began, has_stacks = time.monotonic(), False
        while not condition():
            if self._run.code is not None:
                raise StuckError(f"exit code {self._run.code}, before {what}: {self.output()}")
            if time.monotonic() - began > LIMIT_S:
                raise StuckError(f"{LIMIT_S:g} s without {what}: {self.output()}")
            if time.monotonic() - began > STACKS_S and not has_stacks:
                has_stacks = True
                for pid in {line["pid"] for line in self._rounds.read()} & set(self._run.pids.values()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR2)
            time.sleep(0.1)

    def output(self) -> str:
        return (self._run.folder / "output").read_text()[-1500:]

    def round(self) -> int:
        """The last round, -1 before the first."""
        return max((line["round"] for line in self._rounds.read()), default=-1)

    def is_whole(self, since: float, gone: set[int]) -> bool:
        """Whether all ranks have merged a round together since then, in other processes than those that are gone."""
        pids = set(self._run.pids.values())
        lines = reversed(self._rounds.read())
        late = itertools.takewhile(lambda line: line["t"] > since, lines)
        seen = {line["pid"] for line in late if line["world"] == self._processes}
        return len(pids) == self._processes and seen >= pids and not pids & gone

    def is_smaller(self, since: float) -> bool:
        """Whether the others have merged a round without a rank since then."""
        return any(line["t"] > since and line["world"] < self._processes for line in self._rounds.read()[-100:])
