"""Hooks of ``fit``: checkpoints, progress, reports to the launcher and callbacks extend its loop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxche.distributed import RESTART
from jaxche.reports import History, RoundInfo
from jaxche.training._progress import Progress
from jaxche.training._rounds import Rounds
from jaxche.training._state import TrainerState

Callback = Callable[[TrainerState, RoundInfo], Any]


@dataclass
class Run:
    """The values that a fit carries from round to round."""

    state: TrainerState  # after the last round
    data: Any
    size: int  # batches in an epoch
    last_epoch: int  # training stops before this epoch
    history: History = field(default_factory=History)
    # In an elastic run, the state before the last round, which may have failed on another process.
    previous: TrainerState | None = None
    hooks: Sequence[Hook] = ()  # in the order of their calls

    @property
    def is_done(self) -> bool:
        """Whether training has reached its last epoch."""
        return self.state.epoch >= self.last_epoch and not self.state.pending_batches


class Hook:
    """Extends a fit; by default every method does nothing. All processes call the same hooks in the same order."""

    def on_start(self, run: Run) -> None:
        """Called before the first round."""

    def on_round(self, run: Run, info: RoundInfo) -> bool:
        """Called after each round; a true result asks to stop training."""
        return False

    def on_admission(self) -> None:
        """Called before processes are admitted to an elastic run."""

    def on_membership(self, run: Run, shrunk: bool) -> None:
        """Called after processes were lost (``shrunk``) or admitted."""

    def on_stop(self, run: Run, preempted: bool = False) -> None:
        """Called when training stops before its last epoch."""


class ProgressHook(Hook):
    """Shows the progress bar."""

    def __init__(self, trainer: Rounds, enabled: bool):
        self._trainer, self._enabled = trainer, enabled
        self._bar: Progress | None = None

    def on_start(self, run: Run) -> None:
        start = (run.state.epoch, run.state.cursor)
        self._bar = Progress(self._trainer, run.size, start, run.last_epoch, self._enabled)

    def on_round(self, run: Run, info: RoundInfo) -> bool:
        if self._bar:
            self._bar.update(info)
        return False

    def write(self, text: str) -> None:
        """Print a line, unless progress is off."""
        if self._bar:
            self._bar.write(text)

    def close(self) -> None:
        """Close the bar."""
        if self._bar:
            self._bar.close()


class LauncherHook(Hook):
    """Reports each round to the launcher: a heartbeat, and an event for each local rank."""

    def __init__(self, trainer: Rounds):
        self._trainer = trainer

    def on_round(self, run: Run, info: RoundInfo) -> bool:
        watchdog, engine = self._trainer._group.watchdog, self._trainer._engine
        watchdog.heartbeat()
        # An elastic run renumbers its ranks; the launcher keeps the numbers of the start.
        ranks = {place: engine.order[place] for place in engine.ranks}
        watchdog.write_events(
            json.dumps(event(info, place, rank, engine.merged_bytes)) for place, rank in ranks.items()
        )
        return False


class CallbackHook(Hook):
    """Calls the callbacks of the user."""

    def __init__(self, callbacks: Sequence[Callback]):
        self._callbacks = callbacks

    def on_round(self, run: Run, info: RoundInfo) -> bool:
        answers = [callback(run.state, info) for callback in self._callbacks]  # call all, even after a true result
        return any(answers)


def event(info: RoundInfo, place: int, rank: int, merged_bytes: int) -> dict[str, Any]:
    """The event of one round for a rank; ``place`` is its number among the present ranks."""
    return {
        "time": round(time.time(), 3),
        "event": "round",
        "rank": rank,
        "round": info.round,
        "epoch": info.epoch,
        "steps": info.counts[place],
        "compute_ms": round(info.wall_ms[place], 3),
        "wait_ms": round(info.wait_ms[place], 3),
        "merge_ms": round(info.sync_ms, 3),
        "merged_bytes": merged_bytes,
        "restart": int(os.environ.get(RESTART, 0)),
    }
