"""A callback that prints rounds and evaluates at the end of every epoch, on a clock that stops for it."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import jax

from jaxche.cli._report import metric_text, metric_title, round_line
from jaxche.cli._tasks import Task
from jaxche.training import History, ReplicaState, RoundInfo, Trainer

_log = logging.getLogger("jaxche")

# Rounds of `sync` are single batches: their lines would say nothing, very fast.
_SYNC_GAP_S, _GAP_S = 1.0, 0.1


def barrier(name: str) -> None:
    """All processes meet here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def say(text: str) -> None:
    """Prints a line, once in a run of many processes."""
    if jax.process_index() == 0:
        print(text, flush=True)


class Watch:
    """Called by ``trainer.fit`` after every round: prints, evaluates, and on rank 0 keeps the record on file.

    Only rank 0 evaluates; the others wait for it, so that the next round starts everywhere at once.

    Args:
      trainer: whose rounds these are.
      task: evaluates.
      epochs: how many there will be.
      folder: for ``history.jsonl``, a line as soon as a round is over.
      goes_on: whether a later start may go on from here: it finds the clock in ``seconds.txt``.

    Attributes:
      seconds: training time of each round by its number, without evaluation; on rank 0 also of earlier starts.
      test: the held-out metrics of the last evaluation, on rank 0.
      curve: those at the end of each epoch since this start, with ``epoch`` and ``seconds``.
    """

    def __init__(self, trainer: Trainer, task: Task, epochs: int, folder: Path, goes_on: bool):
        self._trainer, self._task, self._epochs = trainer, task, epochs
        self._gap_s = _SYNC_GAP_S if trainer.policy == "sync" and trainer.world_size > 1 else _GAP_S
        self._record, self._clock = folder / "history.jsonl", folder / "seconds.txt" if goes_on else None
        self._epoch, self._next, self._spoke = 0, None, float("-inf")
        self._evaluated: int | None = None
        self.seconds: dict[int, float] = {}
        if self._clock and jax.process_index() == 0:
            self.seconds = _read_clock(self._clock)
        self.test: dict[str, float] = {}
        self.curve: list[dict[str, float]] = []
        barrier("start")
        self._last = time.perf_counter()

    def __call__(self, state: ReplicaState, info: RoundInfo) -> None:
        now = time.perf_counter()
        if self._next is None:
            self._epoch = info.epoch
        # Before the first round of a later start a checkpoint was read, which is no training.
        resumed = self._next is None and info.round > 0
        self.seconds[info.round] = info.period_ms / 1e3 if resumed else now - self._last
        self._last = now
        self._keep(info)
        if now - self._spoke >= self._gap_s:
            self._spoke = now
            say(round_line(info))
        if state.epoch > self._epoch:
            self._evaluate(state)

    def finish(self, state: ReplicaState) -> None:
        """Evaluates the last state, unless that was done: a run may go on from its end, or stop within an epoch."""
        if state.round != self._evaluated:
            self._evaluate(state)

    def _keep(self, info: RoundInfo) -> None:
        anew, self._next = info.round != self._next, info.round + 1
        if jax.process_index() != 0:
            return
        self._record.parent.mkdir(parents=True, exist_ok=True)
        if anew:  # rounds are made again, and what is there of them goes
            before = History.from_json(self._record, skip_damaged=True) if self._record.exists() else History()
            History(one for one in before if one.round < info.round).to_json(self._record)
            if self._clock:
                known = (self.seconds.get(number, math.nan) for number in range(info.round))
                self._clock.write_text("".join(map(_clock_line, known)), encoding="utf8")
        _append(self._record, History([info]).to_json())
        if self._clock:
            _append(self._clock, _clock_line(self.seconds[info.round]))

    def _evaluate(self, state: ReplicaState) -> None:
        self._epoch, self._evaluated = state.epoch, state.round
        began = time.perf_counter()
        if jax.process_index() == 0:
            seconds = sum(taken for number, taken in self.seconds.items() if number < state.round)
            self.test = self._task.evaluate(self._trainer.params(state), self._trainer.model_state(state))
            self.curve.append({"epoch": state.epoch, "seconds": seconds} | self.test)
            metric = self._task.metric
            shown = f"{metric_title(metric)} {metric_text(metric, self.test[metric])}"
            say(f"epoch {state.epoch} of {self._epochs}: {shown} after {seconds:.1f} s")
        barrier("evaluated")
        self._last += time.perf_counter() - began


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf8") as file:
        file.write(line)


def _clock_line(seconds: float) -> str:
    return f"{seconds!r}\n"


def _read_clock(path: Path) -> dict[int, float]:
    """Seconds by the number of the round; those behind a damaged line are unknown, for it may be of several rounds."""
    found: dict[int, float] = {}
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]  # a dying process did not finish the last
    for number, line in enumerate(lines):
        try:
            found[number] = float(line)
        except ValueError:
            _log.warning("%s: line %s is damaged; rounds from there on count with their own time", path, number + 1)
            break
    return {number: seconds for number, seconds in found.items() if math.isfinite(seconds)}
